"""Read the devices in the text of a program: the groups that exchange data, and the shard of each device."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.differences import usual_sizes
from ._hlo import HloShape, Instruction, UnknownForm, ints, split

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that exchange data, by their position in the mesh."""

_ON_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}(?:,|$)"
)
_AXIS = re.compile(r"(?:'([^']+)'|([^',:{} ]+))(?::\((\d+)\)(\d+))?")


def groups(instruction: Instruction, devices: int) -> Groups:
    """Return the device groups of a collective; pairs, for a permutation."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs is not None:
        return _listed(pairs)
    text = instruction.attribute("replica_groups")
    if text is None:
        raise UnknownForm(f"{instruction.opcode} does not name its devices: {instruction.attributes[:80]!r}")
    if "use_global_device_ids=true" not in instruction.attributes and "channel_id" not in instruction.attributes:
        raise UnknownForm(f"{instruction.opcode} counts replicas rather than devices: {instruction.attributes[:80]!r}")
    text = text.strip()
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        return _listed(text)
    if grid := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _rows(numbered(ints(grid[2]), grid[3]).reshape(ints(grid[1])))
    if text.startswith("mesh[") and (found := _ON_MESH.search(instruction.attributes)):
        axes, dims, order, over = found.groups()
        places = Places.on_mesh(axes, dims, order)
        inside, rest, count = places.along(over)
        return _rows(np.lexsort((inside, rest)).reshape(-1, count))
    raise UnknownForm(f"groups of devices in a form that is not known here: {instruction.attributes[:200]!r}")


def along(found: Groups, mesh: Mapping[str, int], pairs: bool) -> tuple[tuple[str, ...], bool]:
    """Return the mesh axes along which the devices of a group differ, and if groups have all devices along them."""
    sizes = tuple(mesh.values())
    differ = np.zeros(len(sizes), bool)
    for group in found:
        places = np.stack(np.unravel_index(np.array(group), sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    axes = tuple(name for name, d in zip(mesh, differ, strict=True) if d)
    return axes, pairs or all(len(group) == math.prod(mesh[a] for a in axes) for group in found)


def numbered(grid: Sequence[int], order: str | None) -> np.ndarray:
    """Return the numbers of devices in a grid, transposed in an order that the text gives: `[2,4]T(1,0)`."""
    numbers = np.arange(math.prod(grid)).reshape(grid)
    return np.transpose(numbers, ints(order)) if order else numbers


class Places:
    """The places of devices along the axes of a mesh."""

    def __init__(self, sizes: Mapping[str, int], numbers: np.ndarray):
        """Arguments:
        numbers: the numbers of the devices, in the order of the mesh.
        """
        self._sizes, self.devices = sizes, numbers.size
        if numbers.size != math.prod(sizes.values()):
            raise UnknownForm(f"{numbers.size} devices on the mesh {dict(sizes)}")
        self._at = dict(zip(sizes, np.unravel_index(np.argsort(numbers.ravel()), [*sizes.values()]), strict=True))

    @classmethod
    def on_mesh(cls, axes: str, grid: str | None, order: str | None) -> Places:
        """Read a mesh, such as `'data'=2,'model'=4`: its devices are in order, or ordered as a transposed grid."""
        parts = (axis.partition("=") for axis in axes.split(","))
        sizes = {name.strip().strip("'"): int(size) for name, _, size in parts}
        return cls(sizes, numbered(ints(grid or "") or [*sizes.values()], order))

    def along(self, axes: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Return where each device is along some axes, where along the rest of the mesh, and how many are along them.

        A part of an axis is written `'model':(2)4`: of 8 or more devices, 4 that follow each other in each of 2 blocks.
        """
        left = {name: at.copy() for name, at in self._at.items()}
        place, count = np.zeros_like(next(iter(left.values()))), 1
        for quoted, bare, before, part in _AXIS.findall(axes):
            whole = self._sizes.get(name := quoted or bare, 0)
            size, blocks = int(part or whole), int(before or 1)
            if not whole or whole % (size * blocks):
                raise UnknownForm(f"groups over {axes!r}, which is no part of the mesh {dict(self._sizes)}")
            step = whole // (size * blocks)
            digit = self._at[name] // step % size
            left[name] -= digit * step
            place, count = place * size + digit, count * size
        return place, np.ravel_multi_index([*left.values()], [*self._sizes.values()]), count


def _listed(text: str) -> Groups:
    return tuple(ints(part) for part in re.findall(r"\{([\d,]+)\}", text.strip()[1:-1]))


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in numbers)


# --- shardings ---

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
