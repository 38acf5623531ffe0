"""Read the shardings in the text of a program: which shard of an array each device has."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.differences import usual_sizes
from ._hlo import HloShape, Instruction, UnknownForm, ints, split
from ._hlo_devices import Places, numbered

CLOSE = 1e-10
"""The relative tolerance of values: in float64, another order of summation makes less of a difference."""

NOTHING = 1e-13
"""The tolerance of values that should be 0."""


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
class PlacedArray:
    """An array of the program before it is partitioned, and its tiles."""

    shape: HloShape
    tiling: Tiling

    def shard(self) -> tuple[int, ...]:
        return tuple(-(-n // count) for n, count in zip(self.shape.sizes, self.tiling.counts, strict=True))

    def on_devices(self, x: np.ndarray) -> np.ndarray:
        """Return the shard of an array on each device, filled with zeros where it reaches beyond the array."""
        found = np.zeros((len(self.tiling.index), *self.shard()), x.dtype)
        for p in range(len(found)):
            piece = x[p % len(x)][self._piece(p)]
            found[(p, *(slice(n) for n in piece.shape))] = piece
        return found

    def agree(self, x: np.ndarray, y: np.ndarray, moved: np.ndarray | None = None) -> bool:
        """Return whether each device has its shard of an array, whose elements may be moved so far."""
        if y.shape[1:] != self.shard():
            raise UnknownForm(f"a result of the sizes {y.shape[1:]}, which should be {self.shard()}")
        far = far_from(x)
        for p in range(len(self.tiling.index)):
            piece = x[p % len(x)][self._piece(p)]
            more = 0.0 if moved is None else moved[p % len(x)][self._piece(p)]
            if not close(piece, y[p % len(y)][tuple(slice(n) for n in piece.shape)], far + more):
                return False
        return True

    def _piece(self, device: int) -> Any:
        return self.tiling.piece(device, self.shape.sizes, self.shard())


def far_from(x: np.ndarray) -> float:
    """Return how far another value may be from the values of an array."""
    return NOTHING + CLOSE * float(usual_sizes(x).max(initial=0))


def close(x: np.ndarray, y: np.ndarray, far: Any) -> bool:
    """Return whether values are equal, or not too far from each other. NaN is equal to nothing."""
    if x.dtype.kind not in "fc":
        return bool(((x == y) | (far == np.inf)).all())
    with np.errstate(invalid="ignore"):
        return bool(((x == y) | (np.abs(x - y) <= far + CLOSE * np.minimum(np.abs(x), 1e300))).all())


def placed(i: Instruction, devices: int) -> list[PlacedArray]:
    """Return the results of an instruction with their shardings."""
    text = i.attribute("sharding") or "{replicated}"
    texts = [*split(text[1:-1])] if text.startswith("{{") else [text] * len(i.shapes)
    return [PlacedArray(s, tiling(t, len(s.sizes), devices)) for s, t in zip(i.shapes, texts, strict=True)]


_TILES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(?: last_tile_dim(.*))?\}")
_MESH = re.compile(r"\{mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?, \[(.*)\](.*)\}")


@functools.lru_cache(1024)
def tiling(text: str, rank: int, devices: int) -> Tiling:
    """Read the sharding of an array, which has one of two forms.

    `{devices=[2,1,4]<=[2,4] last_tile_dim_replicate}` gives the tiles along each axis, and then the devices in order.
    `{mesh['data'=2,'model'=4], [{'data'}, {}], manual={'model'}}` gives the mesh axes that each axis is sharded over.
    """
    text = re.sub(r"/\*[^*]*\*/", "", text).strip()
    if text in ("", "{replicated}", "{mesh[], replicated}"):
        return _untiled(rank, np.zeros(devices, int))
    if re.fullmatch(r"\{(mesh\[[^\]]*\], )?manual\}", text):
        return _untiled(rank, np.arange(devices))
    tiles, mesh = _TILES.fullmatch(text), _MESH.fullmatch(text)
    if tiles:
        sizes = {str(n): size for n, size in enumerate(ints(tiles[1]))}
        places = Places(sizes, np.array(ints(tiles[4])) if tiles[4] else numbered(ints(tiles[2]), tiles[3]))
        kinds = re.findall(r"manual|replicate|unreduced", tiles[5] or "")
        dims = [*sizes][:rank]
        manual = " ".join(name for name, kind in zip([*sizes][rank:], kinds, strict=False) if kind == "manual")
        known = len(sizes) == rank + len(kinds) and "unreduced" not in kinds
    elif mesh:
        places = Places.on_mesh(*mesh.groups()[:3])
        dims = re.findall(r"\{([^}]*)\}", mesh[4])
        further = dict(re.findall(r", (\w+)=\{([^}]*)\}", mesh[5]))
        manual = further.get("manual", "")
        known = len(dims) == rank and further.keys() <= {"manual", "replicated"}
    else:
        raise UnknownForm(f"the sharding {text[:100]}")
    if not known or places.devices != devices:
        raise UnknownForm(f"the sharding {text[:100]}")
    found = [places.along(d) for d in dims]
    index = np.array([at for at, _, _ in found], int).reshape(rank, devices).T
    return Tiling(index, tuple(count for _, _, count in found), places.along(manual)[0])


def _untiled(rank: int, manual: np.ndarray) -> Tiling:
    return Tiling(np.zeros((len(manual), rank), int), (1,) * rank, manual)
