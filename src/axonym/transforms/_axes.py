"""Taking a named axis out of the leaves of a tree, and giving it back.

A transform over a named axis hands JAX the arrays and the position at which each of them is sliced. The body sees
arrays without the axis, so its name is taken out of theirs first. What comes back has the axis in front, and so its
name is put there.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .. import _context, _errors
from .._mesh import Names, entries_of, mesh_axes
from ..array import NamedArray, is_named_array, wrap
from ..sharding.meshes import current_mesh


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, a named array counting as one, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_named_array)


def is_array(x: Any) -> bool:
    """Whether something is a raw array, which has axes to map over, rather than a number or anything else."""
    return isinstance(x, (jax.Array, np.ndarray))


def without(names: Names, *removed: str) -> Names:
    """The names that are left when some are taken out."""
    return tuple(n for n in names if n not in removed)


def stacked(what: str, x: NamedArray, *names: str) -> NamedArray:
    """The array with names put in front of those it has, for what comes out of a transform, or is about to."""
    twice = [n for n in names if n in x.names]
    if twice:
        raise ValueError(
            f"{what}: a result of the function has axis {', '.join(map(repr, twice))} of its own, "
            f"{_errors.describe_axes(x.names)}, so it cannot be given back. Rename that axis in the function."
        )
    return wrap(x.array, (*names, *x.names))


def check_rank(x: NamedArray) -> None:
    """Names and array agree on the number of axes; where they do not, a positional transform was at work."""
    if is_array(x.array) and x.array.ndim != len(x.names):
        raise ValueError(_errors.wrong_rank(x.names, x.array.shape))


def argument_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Where each leaf of the arguments of a call stands, as in `args[0].weight`. Slow: for messages."""
    found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_named_array)
    return [("args", "kwargs")[keys[0].idx] + jax.tree_util.keystr(keys[1:]) for keys, _ in found]


def spmd_axes(name: str, size: int) -> tuple[str, ...] | None:
    """The Auto mesh axes to which the mapping in force sends an axis, for `jax.vmap(spmd_axis_name=...)`.

    Inside of `jax.vmap`, a constraint or a `shard_map` knows nothing of the axis that is mapped over, and leaves it to
    the partitioner, or gathers it. Told where it lies, they keep it there. On Explicit mesh axes JAX knows by itself.
    """
    mapping = _context.mapping_in_force()
    wanted = mesh_axes(mapping.get(name)) if mapping else ()
    mesh = current_mesh() if wanted else None
    if mesh is None:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found = tuple(a for a in wanted if types.get(a) == AxisType.Auto)
    explicit = any(types.get(a) == AxisType.Explicit for a in wanted)
    divisible = size % math.prod(mesh.shape[a] for a in found) == 0
    return found if found and divisible and not explicit else None


def whole_along(x: jax.Array, position: int) -> jax.Array:
    """The array gathered along one axis, where it is split over Explicit mesh axes."""
    entries = list(entries_of(x))
    if entries[position] is None:
        return x
    entries[position] = None
    return jax.sharding.reshard(x, PartitionSpec(*entries))
