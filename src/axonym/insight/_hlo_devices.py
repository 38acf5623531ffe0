"""Read the devices in the text of a program: the groups that exchange data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ._hlo import Instruction, UnknownForm, ints

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
        return _rows(_numbered(ints(grid[2]), grid[3]).reshape(ints(grid[1])))
    if text.startswith("mesh[") and (found := _ON_MESH.search(instruction.attributes)):
        return _along_axes(*found.groups())
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


def _numbered(grid: Sequence[int], order: str | None) -> np.ndarray:
    """Return the numbers of devices in a grid, transposed in an order that the text gives: `[2,4]T(1,0)`."""
    numbers = np.arange(math.prod(grid)).reshape(grid)
    return np.transpose(numbers, ints(order)) if order else numbers


def _along_axes(mesh: str, grid: str | None, order: str | None, axes: str) -> Groups:
    """Return the groups of devices that are along some axes of a mesh, such as `'data'=2,'model'=4`.

    Its devices are in order, or ordered as a transposed grid. A part of an axis is written `'model':(2)4`: of 8 or more
    devices, 4 that follow each other in each of 2 blocks.
    """
    parts = (axis.partition("=") for axis in mesh.split(","))
    sizes = {name.strip().strip("'"): int(size) for name, _, size in parts}
    numbers = _numbered(ints(grid or "") or [*sizes.values()], order)
    if numbers.size != math.prod(sizes.values()):
        raise UnknownForm(f"{numbers.size} devices on the mesh {sizes}")
    at = dict(zip(sizes, np.unravel_index(np.argsort(numbers.ravel()), [*sizes.values()]), strict=True))
    rest = {name: places.copy() for name, places in at.items()}
    inside, count = np.zeros(numbers.size, int), 1
    for quoted, bare, before, part in _AXIS.findall(axes):
        whole = sizes.get(name := quoted or bare, 0)
        size, blocks = int(part or whole), int(before or 1)
        if not whole or whole % (size * blocks):
            raise UnknownForm(f"groups over {axes!r}, which is no part of the mesh {sizes}")
        step = whole // (size * blocks)
        digit = at[name] // step % size
        rest[name] -= digit * step
        inside, count = inside * size + digit, count * size
    outside = np.ravel_multi_index([*rest.values()], [*sizes.values()])
    return _rows(np.lexsort((inside, outside)).reshape(-1, count))


def _listed(text: str) -> Groups:
    return tuple(ints(part) for part in re.findall(r"\{([\d,]+)\}", text.strip()[1:-1]))


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in numbers)
