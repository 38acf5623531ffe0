"""Remove a named axis from the leaves of a tree, and add it again.

A transform over a named axis passes JAX the arrays and the position at which to slice each of them. The body sees
arrays without the axis, so its name is removed from theirs first. Results have the axis in front, so its name is added
there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from ..axis import Axis, AxisSelector, Names, name_of
from ..core import errors
from ..core.tree_spec import ARRAYS
from ..distribution.active_settings import activate_here
from ..distribution.mesh_axes import (
    Axes,
    current_mesh,
    entries_of,
    mapped_axes,
    mapped_on,
    mesh_around,
    mesh_axes,
    reshard,
    shard_count,
)
from ..named_array import NamedArray, is_named_array, wrap


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, counting a named array as one, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_named_array)


def is_array(x: Any) -> bool:
    """Return whether a value is a raw array, which has axes to map over, rather than a number or anything else."""
    return isinstance(x, ARRAYS)


def stacked(what: str, x: NamedArray, *names: str) -> NamedArray:
    """Add names in front of an array's, for results of a transform."""
    twice = [n for n in names if n in x.names]
    if twice:
        raise ValueError(
            f"{what}: a result of the function has axis {errors.quoted(twice)} of its own, "
            f"{errors.describe_axes(x.names)}, so it cannot be given back. Rename that axis in the function."
        )
    return wrap(x.array, (*names, *x.names))


def one_name(what: str, axis: AxisSelector) -> str:
    """Return the name of the only axis that is looped over."""
    if not isinstance(axis, (str, Axis)):
        raise TypeError(f"{what}: expected one axis, an Axis or a name, got {axis!r}.")
    return name_of(axis)


def argument_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the path of each leaf of the arguments of a call, as in `args[0].weight`. Slow: for messages."""
    found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_named_array)
    return [("args", "kwargs")[keys[0].idx] + jax.tree_util.keystr(keys[1:]) for keys, _ in found]


def spmd_axes(what: str, name: str, size: int) -> Axes | None:
    """Return the Auto mesh axes that the active mapping shards an axis over, for `jax.vmap(spmd_axis_name=...)`.

    Inside `jax.vmap`, constraints and `shard_map` do not know the axis that is mapped over, and leave it to the
    partitioner, or gather it. With these mesh axes they keep it sharded. On Explicit ones JAX does this by itself.
    """
    return mapped_to(what, name, size, AxisType.Auto) or None


def mapped_to(what: str, name: str, size: int, kind: AxisType) -> Axes:
    """Return the mesh axes of one type that shard an axis; empty if it is also sharded over another type."""
    mesh = current_mesh() if mapped_axes(name) else None
    if mesh is None:
        return ()
    found, others = (mapped_on(what, name, mesh, t) for t in (kind, *{AxisType.Auto, AxisType.Explicit} - {kind}))
    return found if size % shard_count(mesh, found) == 0 and not others else ()


@contextlib.contextmanager
def announced(names: Names, arrays: Sequence[Any]) -> Iterator[None]:
    """Let operations know that they are mapped over axes, if there is a mesh.

    XLA partitions some operations rightly, but not what `jax.vmap` makes of them: see `axonym.nn._convolution`.
    """
    with activate_here(mapped=True) if names and not mesh_around(arrays).empty else contextlib.nullcontext():
        yield


def check_placed_elsewhere(what: str, sizes: Mapping[str, int], before: Sequence[Any], after: Sequence[Any]) -> None:
    """Check that a mapped function shards no axis over the Explicit mesh axes of the axes that it is mapped over.

    On Auto mesh axes JAX raises this error. Arrays that are sharded over them from the start may stay so. `before` has
    the arguments of the function, arrays of all kinds, and `after` its results.
    """
    taken = {a for name, size in sizes.items() for a in mapped_to(what, name, size, AxisType.Explicit)}
    if taken and any(axis in taken for _, axis in _sharded_pairs(after) - _sharded_pairs(before)):
        raise ValueError(collision(what, tuple(sizes)))


def _sharded_pairs(leaves: Sequence[Any]) -> set[tuple[str, str]]:
    """Return all pairs of an axis of a named array and a mesh axis that it is sharded over."""
    arrays = [x for x in leaves if isinstance(x, NamedArray) and is_array(x.array)]
    pairs = [pair for x in arrays for pair in zip(x.names, entries_of(x.array), strict=True)]
    return {(name, axis) for name, entry in pairs for axis in mesh_axes(entry)}


@contextlib.contextmanager
def collisions_named(what: str, names: Names) -> Iterator[None]:
    """Explain JAX's error for a function under `vmap` that uses a mesh axis that is taken, by name."""
    try:
        yield
    except Exception as e:
        if "spmd_axis_name" in str(e) or "duplicate entries" in str(e):  # about a sharding: JAX's text names no axis
            raise ValueError(collision(what, names)) from e
        raise


def collision(what: str, names: Names) -> str:
    """Return the message for a function that shards an axis like the one it is mapped over."""
    noun = "axis" if len(names) == 1 else "one of the axes"
    return (
        f"{what}: the function shards an axis of an array over a mesh axis that already shards {noun} "
        f"{errors.quoted(names)}, over which the function is mapped. Map one of the two elsewhere, or to None."
    )


def gathered_along(x: jax.Array, position: int) -> jax.Array:
    """Gather an array along one axis, if it is sharded over Explicit mesh axes."""
    entries = list(entries_of(x))
    if entries[position] is None:
        return x
    entries[position] = None
    return reshard(x, entries, jax.typeof(x).sharding.mesh)
