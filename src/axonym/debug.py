"""Show the shardings of a tree in words and pictures, and find common mistakes. May change before 1.0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from ._display import Shown, describe_devices, describe_where, devices_of, memory_of, placed_array, show
from .axis import Axis
from .core import errors
from .core.errors import counted, describe_bytes
from .core.tree_spec import ARRAYS
from .distribution.mesh_axes import mesh_axes, padded, shard_count
from .distribution.padded_array import stored
from .named_array import NamedArray, describe_array, is_named_array, raw, wrap
from .sharding.leaves import Leaf, leaves_of
from .sharding.placement import present_sharding

__all__ = [
    "IdentityMap", "ModuleProblems", "Shown", "describe_array", "describe_devices", "describe_shardings",
    "diagnose_common_issues", "show", "visualize_named_sharding", "visualize_shardings",
]  # fmt: skip

_WIDTH = 100
_HEIGHT = 16
"""Pictures with longer lines or more rows are not drawn."""

Range: TypeAlias = tuple[int, int]
"""The indices of an axis that a device holds: the first, and one more than the last."""
_K = TypeVar("_K")
_V = TypeVar("_V")


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
            jax.debug.inspect_array_sharding(array, callback=lambda sharding, leaf=leaf: print(_said(leaf, sharding)))
        else:
            known.append(leaf)
    if known:
        print(_describe_all(known))


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
    head = f"{errors.describe_axes(names, shape)} on {describe_where(devices_of(sharding))}{memory_of(sharding)}"
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
    """Describe arrays, their total size, and the size on the device that holds most."""
    lines, shown = list[str](), set[tuple[str, ...]]()
    on_device, size = dict[Any, int](), 0
    for leaf in leaves:
        sharding, shape = present_sharding(leaf.value), leaf.shape or ()
        own, picture = _describe_leaf(leaf, sharding)
        lines += [*own, *(() if picture in shown else picture)]
        shown.add(picture)
        itemsize = raw(leaf.value).dtype.itemsize
        size += math.prod(shape) * itemsize
        for device, ranges in ({} if sharding is None else _ranges_of_devices(shape, sharding)).items():
            on_device[device] = on_device.get(device, 0) + math.prod(b - a for a, b in ranges) * itemsize
    if len(leaves) > 1:
        total, most = f"{counted(len(leaves), 'array')}, {describe_bytes(size)}", max(on_device.values(), default=0)
        if on_device:
            alike = len(set(on_device.values())) == 1
            fullest = next(device for device, n in on_device.items() if n == most)
            where = describe_where(on_device, "each of ") if alike else describe_where([fullest])
            total += f"; {'' if alike else 'at most '}{describe_bytes(most)} on {where}"
        lines.append(total)
    return "\n".join(lines) or "no arrays"


def _describe_leaf(leaf: Leaf, sharding: Sharding | None) -> tuple[list[str], tuple[str, ...]]:
    """Describe one array: its axes, the size of a shard, and a line for each sharded axis; and draw it."""
    array, shape = raw(leaf.value), leaf.shape or ()
    head = f"{leaf.path}: {describe_array(array if leaf.names is None else wrap(array, leaf.names))}, "
    nowhere = "on the host" if isinstance(array, np.ndarray) else "not placed"
    shown = placed_array(leaf, sharding, "being traced" if isinstance(array, Tracer) else nowhere)
    if sharding is None:
        return [f"{head}{describe_bytes(shown.total)} {shown.where}"], ()
    lines = [f"{head}{shown.held()}", *_describe_axes(leaf.names, shape, sharding)]
    return lines, tuple(_draw_grid(leaf.names, shape, sharding))


def _said(leaf: Leaf, sharding: Sharding) -> str:
    lines, picture = _describe_leaf(leaf, sharding)
    return "\n".join([*lines, *picture])


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
    found: dict[Any, tuple[Range, ...]] = {}
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sizes = sharding.mesh.shape
        for device, place in enumerate(np.ndindex(*sizes.values())):  # the place has an index along each mesh axis
            at, ranges = dict(zip(sizes, place, strict=True)), list[Range]()
            for size, entry in zip(shape, padded(sharding.spec, len(shape)), strict=True):
                number, held = 0, -(-size // shard_count(sharding.mesh, entry))
                for a in mesh_axes(entry):
                    number = number * sizes[a] + at[a]
                ranges.append((min(number * held, size), min((number + 1) * held, size)))
            found[device] = tuple(ranges)
        return found
    for device, slices in sharding.devices_indices_map(tuple(shape)).items():
        found[device] = tuple(s.indices(size)[:2] for s, size in zip(slices or (), shape, strict=True))
    return found


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


def _label_of_axis(i: int, names: Sequence[str] | None, shape: Sequence[int]) -> str:
    return names[i] if names is not None and len(names) == len(shape) else f"axis {i}"


def _written_range(part: Range) -> str:
    return f"{part[0]}:{part[1]}"


# --- mistakes in models ---


class IdentityMap(MutableMapping[_K, _V], Generic[_K, _V]):
    """A mapping whose keys are compared by identity, so that arrays can be keys.

    >>> x, y = jnp.ones(2), jnp.ones(2)
    >>> found = axn.debug.IdentityMap([(x, "x")])
    >>> found[x], y in found
    ('x', False)
    """

    def __init__(self, iterable: Iterable[tuple[_K, _V]] | None = None):
        self._items: dict[int, tuple[_K, _V]] = {}  # stores the key itself too, so that its id is not reused
        for key, value in iterable or ():
            self[key] = value

    def __getitem__(self, key: _K) -> _V:
        try:
            return self._items[id(key)][1]
        except KeyError:
            raise KeyError(key) from None

    def __setitem__(self, key: _K, value: _V) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: _K) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[_K]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"IdentityMap({list(self._items.values())})"


class ModuleProblems(Exception):
    """The mistakes that `diagnose_common_issues` found.

    >>> problems = axn.debug.ModuleProblems()
    >>> problems.static_arrays.append(".table")
    >>> bool(problems), str(problems)
    (True, 'This module has problems:\\n  an array in the static field .table')
    """

    def __init__(self) -> None:
        super().__init__()
        self.reused_arrays: list[tuple[str, list[str]]] = []
        """Arrays that occur several times: a description, and the paths."""
        self.static_arrays: list[str] = []
        """The paths of static fields that contain arrays."""
        self.wrong_ranks: list[tuple[str, str]] = []
        """Named arrays with more or fewer names than axes: a description, and the path."""

    def __bool__(self) -> bool:
        return bool(self.reused_arrays or self.static_arrays or self.wrong_ranks)

    def __str__(self) -> str:
        found = [f"one array, {what}, at {' and at '.join(paths)}" for what, paths in self.reused_arrays]
        found += [f"an array in the static field {path}" for path in self.static_arrays]
        found += [f"names that do not fit the array, {what}, at {path}" for what, path in self.wrong_ranks]
        return "\n  ".join(["This module has problems:", *found])


def diagnose_common_issues(tree: Any) -> None:
    """Raise `ModuleProblems` if a module, or any other tree, has common mistakes.

    - An array occurs several times. After a training step these are different arrays, so store a tied parameter once,
      and use it from there.
    - An array is in a static field. Transforms do not see it there, it becomes part of the compiled program, and it
      cannot be hashed.
    - A named array has more or fewer names than axes, such as the result of a positional transform like `jax.vmap`.

    >>> import equinox as eqx
    >>> class Tied(eqx.Module):
    ...     embed: axn.NamedArray
    ...     unembed: axn.NamedArray
    >>> w = axn.ones({"vocab": 4})
    >>> axn.debug.diagnose_common_issues(Tied(w, w))
    Traceback (most recent call last):
    ...
    axonym.debug.ModuleProblems: This module has problems:
      one array, float32[vocab=4], at .embed and at .unembed
    """
    problems, places = ModuleProblems(), IdentityMap[Any, list[tuple[str, Any]]]()
    for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_named_array):
        array, path = raw(leaf), jax.tree_util.keystr(keys)
        if isinstance(array, ARRAYS):
            places.setdefault(array, []).append((path, leaf))
            if isinstance(leaf, NamedArray) and array.ndim != len(leaf.names):
                problems.wrong_ranks.append((describe_array(leaf), path))
    for found in places.values():
        if len(found) > 1:
            problems.reused_arrays.append((describe_array(found[0][1]), [path for path, _ in found]))
    _find_static_arrays(problems, tree, "")
    if problems:
        raise problems


def _find_static_arrays(problems: ModuleProblems, tree: Any, path: str) -> None:
    if not isinstance(tree, eqx.Module):
        children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, eqx.Module))
        for keys, child in children:
            if isinstance(child, eqx.Module):
                _find_static_arrays(problems, child, path + jax.tree_util.keystr(keys))
        return
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        if not field.metadata.get("static", False):
            _find_static_arrays(problems, value, f"{path}.{field.name}")
        elif any(isinstance(x, ARRAYS) for x in jax.tree.leaves(value)):
            problems.static_arrays.append(f"{path}.{field.name}")
