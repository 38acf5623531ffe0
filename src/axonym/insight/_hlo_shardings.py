"""Read the shardings in the text of a program: which shard of an array each device has."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._hlo import HloShape, Instruction, UnknownForm

CLOSE = 1e-10
"""How far values may be off, of the largest in their array: orders of summation differ by less in float64."""

NOTHING = 1e-13
"""How far values may be off that should be 0."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of an array, by device."""

    index: np.ndarray
    """Which tile a device has along each axis: (device, axis)."""
    counts: tuple[int, ...]
    """The number of tiles along each axis."""
    manual: np.ndarray
    """A number for each device, equal for devices that are together along all manual mesh axes."""

    def piece(self, device: int, sizes: Sequence[int], shard: Sequence[int], inner: Tiling | None = None) -> Any:
        """Return the part of an array that a device has, as slices.

        `inner` is the tiling of the shard, if the shard itself has tiles on several devices.
        """
        within = inner.counts if inner else (1,) * len(sizes)
        found = []
        for tile, count, w, n, k in zip(self.index[device], self.counts, within, sizes, shard, strict=True):
            at = tile // w * k if count > 1 else 0
            found.append(slice(min(at, n), min(at + k, n)))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Placed:
    """An array of the program before it is partitioned, and its tiles."""

    shape: HloShape
    tiling: Tiling

    def shard(self) -> tuple[int, ...]:
        return tuple(-(-n // count) for n, count in zip(self.shape.sizes, self.tiling.counts, strict=True))

    def on_devices(self, x: np.ndarray) -> np.ndarray:
        """Return what each device has. Where a shard reaches beyond the array, it is filled with zeros."""
        found = np.zeros((len(self.tiling.index), *self.shard()), x.dtype)
        for p in range(len(found)):
            piece = x[p % len(x)][self._piece(p)]
            found[(p, *(slice(n) for n in piece.shape))] = piece
        return found

    def agree(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Return whether each device has its shard of an array."""
        if y.shape[1:] != self.shard():
            raise UnknownForm(f"a result of the sizes {y.shape[1:]}, which should be {self.shard()}")
        far = far_from(x)
        for p in range(len(self.tiling.index)):
            piece = x[p % len(x)][self._piece(p)]
            if not close(piece, y[p % len(y)][tuple(slice(n) for n in piece.shape)], far):
                return False
        return True

    def _piece(self, device: int) -> Any:
        return self.tiling.piece(device, self.shape.sizes, self.shard())


def far_from(x: np.ndarray) -> float:
    """Return how far a value may be from one in an array."""
    if x.dtype.kind not in "fc" or not x.size:
        return 0.0
    return NOTHING + CLOSE * float(np.abs(x[np.isfinite(x)]).max(initial=0))


def close(x: np.ndarray, y: np.ndarray, far: float) -> bool:
    if x.dtype.kind not in "fc":
        return bool((x == y).all())
    with np.errstate(invalid="ignore"):
        return bool(((x == y) | (np.abs(x - y) <= far)).all())


def placed(i: Instruction, devices: int) -> list[Placed]:
    texts = parts(i.attribute("sharding") or "{replicated}")
    texts = texts if len(texts) == len(i.shapes) else texts[:1] * len(i.shapes)
    return [Placed(s, tiling(t, len(s.sizes), devices)) for s, t in zip(i.shapes, texts, strict=True)]


def parts(text: str) -> list[str]:
    """Split the shardings of a tuple."""
    inner, depth, start, found = text.strip()[1:-1], 0, 0, []
    if not inner.startswith("{"):
        return [text]
    for at, c in enumerate(inner):
        depth += (c in "{[(") - (c in "}])")
        if c == "}" and depth == 0:
            found.append(inner[start : at + 1].strip(", "))
            start = at + 1
    return found


def tiling(text: str, rank: int, devices: int) -> Tiling:
    """Read the sharding of an array."""
    nothing = np.zeros((devices, rank), int)
    none, all_ = np.zeros(devices, int), np.arange(devices)
    text = re.sub(r"/\*[^*]*\*/", "", text).strip()
    if text in ("", "{replicated}"):
        return Tiling(nothing, (1,) * rank, none)
    if text == "{manual}":
        return Tiling(nothing, (1,) * rank, all_)
    if text == "{mesh[], replicated}":
        return Tiling(nothing, (1,) * rank, none)
    if text.startswith("{mesh["):
        return _on_mesh(text, rank, devices)
    ids = r"(?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))"
    found = re.fullmatch(rf"\{{devices=\[([\d,]+)\]{ids}(?: (last_tile_dim\w+)(?:=\{{([^}}]*)\}})?)?\}}", text)
    if found is None:
        raise UnknownForm(f"the sharding {text[:100]}")
    dims, grid, order, listed, last, kinds = found.groups()
    tiles = _ints(dims)
    if listed:
        ids = np.array(_ints(listed))
    else:
        ids = np.arange(math.prod(_ints(grid))).reshape(_ints(grid))
        ids = np.transpose(ids, _ints(order) if order else range(ids.ndim)).ravel()
    names = [k.strip() for k in kinds.split(",")] if kinds else ["replicated"] * (last is not None)
    if len(tiles) != rank + len(names) or {*names} - {"replicated", "manual"} or ids.size != devices:
        raise UnknownForm(f"the sharding {text[:100]}")
    places = np.array(np.unravel_index(np.argsort(ids), tiles))  # (dimension, device)
    manual = none
    for name, place, size in zip(names, places[rank:], tiles[rank:], strict=True):
        if name == "manual":
            manual = manual * size + place
    return Tiling(places[:rank].T, tuple(tiles[:rank]), manual)


_MESH = re.compile(r"\{mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?(?:, (.*))?\}")
_AXIS = re.compile(r"'?([^',:{} ]+)'?(?::\((\d+)\)(\d+))?")


def _on_mesh(text: str, rank: int, devices: int) -> Tiling:
    """Read a sharding by the axes of a mesh."""
    found = _MESH.fullmatch(text)
    rest = found[4] or "" if found else ""
    if found is None or (words := re.sub(r"\[.*\]|(manual|replicated)(=\{[^}]*\})?", "", rest)).strip(", "):
        raise UnknownForm(f"the sharding {text[:100]}")
    del words
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", found[1])}
    grid = _ints(found[2]) if found[2] else [*sizes.values()]
    ids = np.transpose(np.arange(math.prod(grid)).reshape(grid), _ints(found[3]) if found[3] else range(len(grid)))
    places = np.array(np.unravel_index(np.argsort(ids.ravel()), [*sizes.values()]))
    where = dict(zip(sizes, places, strict=True))

    def along(axes: str) -> tuple[Any, int]:
        """Return where devices are along some axes, and the number of places."""
        at, count = np.zeros(devices, int), 1
        for name, before, size in _AXIS.findall(axes):
            full = sizes[name]
            part, place = int(size or full), where[name]
            place = place // (full // (int(before or 1) * part)) % part
            at, count = at * part + place, count * part
        return at, count

    if rest == "manual":
        return Tiling(np.zeros((devices, rank), int), (1,) * rank, np.arange(devices))
    listed = re.search(r"\[(.*)\]", rest)
    dims = re.findall(r"\{([^}]*)\}", listed[1]) if listed else []
    dims = [along(d) for d in dims] or [along("")] * rank
    if len(dims) != rank:
        raise UnknownForm(f"the sharding {text[:100]}")
    manual = re.search(r"manual=\{([^}]*)\}", rest)
    index = np.stack([at for at, _ in dims], 1) if dims else np.zeros((devices, 0), int)
    return Tiling(index, tuple(count for _, count in dims), along(manual[1] if manual else "")[0])


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
