"""Describe the shardings of arrays in words and pictures, by the names of axes and mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._display import describe_device, describe_devices, describe_devices_of, describe_each_of, placed_array
from ..axis import Axis
from ..core import errors
from ..core.errors import counted, describe_bytes
from ..distribution.mesh_axes import mesh_axes, padded, shard_count
from ..distribution.padded_array import stored
from ..named_array import describe_array, raw, wrap
from ..sharding.leaves import Leaf, leaves_of
from ..sharding.placement import present_sharding

__all__ = ["describe_shardings", "visualize_named_sharding", "visualize_shardings"]

_WIDTH = 100
_HEIGHT = 16
"""Pictures with longer lines or more rows are not drawn."""

Range: TypeAlias = tuple[int, int]
"""The indices of an axis that a device holds: the first, and one more than the last."""


def visualize_shardings(tree: Any) -> None:
    """Print the sharding of every array of a tree.

    A sharded axis is shown with its mesh axes and the size of a shard. Inside `jax.jit`, shardings are known when the
    program is compiled, and printed then. Arrays with the same picture share one.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> x = axn.shard(axn.zeros({"batch": 4, "embed": 3}), {"batch": "data"}, mesh)
    >>> axn.debug.visualize_shardings({"x": x})
    x: float32[batch=4, embed=3], 24 B of 48 B on each of 2 CPU devices
      batch=4 over data=2, 2 on each
        batch → 0:2   2:4
              ┌─────┬─────┐
              │  0  │  1  │
              └─────┴─────┘
    """
    known = []
    for leaf in _stored_leaves(tree):
        array = raw(leaf.value)
        if isinstance(array, Tracer):
            jax.debug.inspect_array_sharding(array, callback=functools.partial(_print_traced, leaf))
        else:
            known.append(leaf)
    if known:
        print(_describe_all(known))


def _print_traced(leaf: Leaf, sharding: Sharding) -> None:
    print("\n".join(_describe_leaf(leaf, sharding) + _draw_leaf(leaf, sharding)))


def visualize_named_sharding(axes: Sequence[Axis], sharding: Sharding) -> None:
    """Print the shards that an array with these axes has under a sharding.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    >>> axn.debug.visualize_named_sharding(axn.make_axes(batch=4, embed=3), sharding)
    (batch=4, embed=3) on 2 CPU devices
      batch=4 over data=2, 2 on each
        batch → 0:2   2:4
              ┌─────┬─────┐
              │  0  │  1  │
              └─────┴─────┘
    """
    shape = tuple(a.size for a in axes)
    names = tuple(a.name for a in axes)
    head = f"{errors.describe_axes(names, shape)} on {describe_devices_of(sharding)}"
    print("\n".join([head, *_describe_axes(names, shape, sharding), *_draw_grid(names, shape, sharding)]))


def describe_shardings(tree: Any) -> str:
    """Return the output of `visualize_shardings` as a string; tracers have no sharding yet.

    >>> axn.debug.describe_shardings({"x": axn.zeros({"embed": 3}), "y": np.zeros(3)})
    'x: float32[embed=3], 12 B on CPU 0\\ny: float64[3], 24 B on the host\\n2 arrays, 36 B; 12 B on CPU 0'
    """
    return _describe_all(_stored_leaves(tree))


# --- all arrays of a tree ---


def _stored_leaves(tree: Any) -> list[Leaf]:
    leaves = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    return [dataclasses.replace(leaf, shape=stored(raw(leaf.value)).shape) for leaf in leaves]


def _describe_all(leaves: Sequence[Leaf]) -> str:
    shardings = [present_sharding(leaf.value) for leaf in leaves]
    lines: list[str] = []
    shown: set[tuple[str, ...]] = set()
    for leaf, sharding in zip(leaves, shardings, strict=True):
        lines += _describe_leaf(leaf, sharding)
        picture = tuple(_draw_leaf(leaf, sharding))
        lines += [] if picture in shown else picture
        shown.add(picture)
    if len(leaves) > 1:
        lines.append(_describe_total(leaves, shardings))
    return "\n".join(lines) or "no arrays"


def _describe_total(leaves: Sequence[Leaf], shardings: Sequence[Sharding | None]) -> str:
    """Describe the total size of all arrays, and the size on the device that holds most."""
    on_device: dict[Any, int] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        for device, ranges in ({} if sharding is None else _ranges_of_devices(leaf.shape or (), sharding)).items():
            on_device[device] = (
                on_device.get(device, 0) + math.prod(b - a for a, b in ranges) * raw(leaf.value).dtype.itemsize
            )
    size = sum(math.prod(x.shape or ()) * raw(x.value).dtype.itemsize for x in leaves)
    text = f"{counted(len(leaves), 'array')}, {describe_bytes(size)}"
    if not on_device:
        return text
    fullest = max(on_device, key=lambda device: on_device[device])
    alike = len(set(on_device.values())) == 1
    where = describe_each_of(on_device) if alike else describe_device(fullest)
    return f"{text}; {'' if alike else 'at most '}{describe_bytes(on_device[fullest])} on {where}"


def _describe_leaf(leaf: Leaf, sharding: Sharding | None) -> list[str]:
    """Describe one array: its axes, the size of a shard, and a line for each sharded axis."""
    array, shape = raw(leaf.value), leaf.shape or ()
    head = f"{leaf.path}: {describe_array(array if leaf.names is None else wrap(array, leaf.names))}, "
    nowhere = "on the host" if isinstance(array, np.ndarray) else "not placed"
    shown = placed_array(leaf, sharding, "being traced" if isinstance(array, Tracer) else nowhere)
    if sharding is None:
        return [f"{head}{describe_bytes(shown.total)} {shown.where}"]
    return [f"{head}{shown.held()}", *_describe_axes(leaf.names, shape, sharding)]


def _draw_leaf(leaf: Leaf, sharding: Sharding | None) -> list[str]:
    return [] if sharding is None else _draw_grid(leaf.names, leaf.shape or (), sharding)


# --- one sharding ---


def _describe_axes(names: Sequence[str] | None, shape: Sequence[int], sharding: Sharding) -> list[str]:
    """Describe each sharded axis in a line."""
    lines = []
    for i, ranges in _sharded_axes(shape, sharding).items():
        how = f"in {len(ranges)} shards"
        if isinstance(sharding, NamedSharding):
            how = "over " + ", ".join(f"{a}={sharding.mesh.shape[a]}" for a in mesh_axes(sharding.spec[i]))
        sizes = " or ".join(str(n) for n in sorted({stop - start for start, stop in ranges}, reverse=True))
        lines.append(f"  {_label_of_axis(i, names, shape)}={shape[i]} {how}, {sizes} on each")
    return lines


def _sharded_axes(shape: Sequence[int], sharding: Sharding) -> dict[int, list[Range]]:
    """Return the positions of the sharded axes, and the ranges of the shards of each."""
    ranges = (sorted(set(of_axis)) for of_axis in zip(*_ranges_of_devices(shape, sharding).values(), strict=True))
    return {i: of_axis for i, of_axis in enumerate(ranges) if len(of_axis) > 1}


def _ranges_of_devices(shape: Sequence[int], sharding: Sharding) -> dict[Any, tuple[Range, ...]]:
    """Return the range of each axis that each device holds."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sizes = sharding.mesh.shape
        places = (dict(zip(sizes, place, strict=True)) for place in np.ndindex(*sizes.values()))
        return {i: _ranges_at(place, shape, sharding) for i, place in enumerate(places)}
    indices = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(s.indices(size)[:2] for s, size in zip(slices or (), shape, strict=True))
        for device, slices in indices.items()
    }


def _ranges_at(place: Mapping[str, int], shape: Sequence[int], sharding: NamedSharding) -> tuple[Range, ...]:
    """Return the ranges of the device at a place of the mesh, which has an index along each mesh axis."""
    found = []
    for size, entry in zip(shape, padded(sharding.spec, len(shape)), strict=True):
        number, shards = 0, shard_count(sharding.mesh, entry)
        for a in mesh_axes(entry):
            number = number * sharding.mesh.shape[a] + place[a]
        held = -(-size // shards)
        found.append((min(number * held, size), min((number + 1) * held, size)))
    return tuple(found)


def _draw_grid(names: Sequence[str] | None, shape: Sequence[int], sharding: Sharding) -> list[str]:
    """Draw the device ids of each shard as a grid; draw nothing if it is too big or more than two axes are sharded."""
    sharded = _sharded_axes(shape, sharding)
    if len(sharded) not in (1, 2):
        return []
    # Devices that hold the same shard, of an array that is also replicated, share a cell.
    owners: dict[tuple[Range, ...], list[Any]] = {}
    for device, ranges in _ranges_of_devices(shape, sharding).items():
        owners.setdefault(tuple(ranges[i] for i in sharded), []).append(device)
    labels = [_label_of_axis(i, names, shape) for i in sharded]
    *above, columns = sharded.values()
    rows: list[tuple[Range, ...]] = [(r,) for r in above[0]] if above else [()]
    cells = [[describe_devices(owners[(*row, column)]) for column in columns] for row in rows]
    corner = f"{labels[0]} ↓ {labels[1]} →" if above else f"{labels[0]} →"
    width = max(len(text) for texts in [*cells, [_written_range(c) for c in columns]] for text in texts) + 2
    if len(rows) > _HEIGHT or len(corner) + (width + 1) * len(columns) > _WIDTH:
        return []
    lines = [f"    {corner} " + " ".join(_written_range(c).ljust(width) for c in columns).rstrip()]
    border = "─" * width
    margin = " " * (len(corner) + 5)
    lines.append(f"{margin}┌{'┬'.join([border] * len(columns))}┐")
    for i, (row, texts) in enumerate(zip(rows, cells, strict=True)):
        label = "".join(map(_written_range, row)).rjust(len(margin) - 1)
        lines.append(f"{label} │{'│'.join(t.center(width) for t in texts)}│")
        if i + 1 < len(rows):
            lines.append(f"{margin}├{'┼'.join([border] * len(columns))}┤")
    lines.append(f"{margin}└{'┴'.join([border] * len(columns))}┘")
    return lines


# --- numbers and words ---


def _label_of_axis(i: int, names: Sequence[str] | None, shape: Sequence[int]) -> str:
    return names[i] if names is not None and len(names) == len(shape) else f"axis {i}"


def _written_range(part: Range) -> str:
    return f"{part[0]}:{part[1]}"
