"""Operations on parameters that rest split: gathered where they are used, with gradients that are split at once.

Fully sharded data parallelism splits a parameter over the mesh axis that also splits the batch. To use it, every device
gathers it; its gradient is a sum over the batch, of which every device keeps its part. That is one all-gather and one
reduce-scatter, and no partitioner has to find it if the operation says so: `gathered` runs an operation with all mesh
axes handled by hand, gathers the parameter inside, and lets differentiation turn the gather into the reduce-scatter.

It must be the operation that is run by hand. If only the gather were, the gradient would arrive outside of it, already
summed in full. And it must be all mesh axes: with some of them left to the partitioner it moves more than it needs to.

Products and elementwise operations are run like this. A look-up in a table is run by hand too, by `looked_up`, but
gathers no table: each device finds the columns that it has of the rows that all of them need, and then they trade
columns for rows. Its gradient goes the same way back. If the rows of the table are split, too, over other mesh axes and
at work as at rest, each device finds those that it has, and what they found is added up.

A parameter is known by its names: an operand with an axis that the parameter mapping splits and the mapping in force
does not, and none that shares its mesh axis with the batch of another operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from . import _context, _kernels
from ._context import Entry
from ._mesh_axes import mesh_axes, spec_of
from .axis import Names

Axes = tuple[str, ...]


def gathered(
    fn: Callable[..., jax.Array],
    in_names: Sequence[Names],
    out_names: Names,
    *arrays: jax.Array,
    summed: Names = (),
) -> jax.Array | None:
    """Run an operation device by device, gathering the parameters among its operands; None where there are none.

    Arguments:
        fn: the operation on the local parts of the operands. Apart from `summed`, it must treat every index of an axis
            on its own.
        in_names: the axes of the operands.
        out_names: the axes of the result.
        *arrays: the operands, traced.
        summed: the axes that the operation sums over.
    """
    settings, mesh = _context.settings_in_force(), jax.sharding.get_abstract_mesh()
    if settings is None or not _applies(settings, mesh):
        return None
    compute = {n: mesh_axes(settings.mapping.get(n)) for names in in_names for n in names}
    resting = [_resting(names, compute, settings.parameters) for names in in_names]
    is_parameter = [_is_parameter(i, in_names, compute, resting) for i in range(len(in_names))]
    if not any(is_parameter):
        return None
    specs = [_spec(names, resting[i] if is_parameter[i] else compute) for i, names in enumerate(in_names)]
    out_spec = _spec(out_names, compute)
    if not all(_fits(n, s, x.shape, mesh) for n, s, x in zip(in_names, specs, arrays, strict=True)):
        return None
    if not _distinct(out_spec):
        return None
    reduced = tuple(dict.fromkeys(a for n in summed for a in compute.get(n, ())))

    def by_hand(*local):
        operands = []
        for i, x in enumerate(local):
            if is_parameter[i]:
                x = _vary_like(x, specs[i], specs, mesh)
                for position, name in enumerate(in_names[i]):
                    extra = tuple(a for a in resting[i][name] if a not in compute[name])
                    if extra:
                        x = jax.lax.all_gather(x, extra, axis=position, tiled=True)
            operands.append(x)
        result = fn(*operands)
        return jax.lax.psum(result, reduced) if reduced else result

    return _run_by_hand(by_hand, specs, out_spec, arrays, mesh)


def looked_up(
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    indexed: str,
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array | None:
    """Look up rows of a table whose columns rest split over the mesh axis of the batch; None where they do not.

    Arguments:
        fn: the look-up, on local parts of the table and the indices.
        in_names: the axes of the table and of the indices.
        out_names: the axes of the result.
        indexed: the axis of the table that is indexed.
        table: the table, traced.
        indices: the indices, traced.
    """
    settings, mesh = _context.settings_in_force(), jax.sharding.get_abstract_mesh()
    if settings is None or not _applies(settings, mesh):
        return None
    names, index_names = in_names
    compute = {n: mesh_axes(settings.mapping.get(n)) for n in (*names, *index_names)}
    resting = _resting(names, compute, settings.parameters)
    columns = [n for n in names if resting[n] != compute[n]]
    if not _is_parameter(0, in_names, compute, [resting, {}]) or len(columns) != 1 or indexed in columns:
        return None
    split = compute[indexed]
    if split and (table.dtype == jnp.bool_ or any(a in split for n in index_names for a in compute[n])):
        return None
    column = columns[0]
    extra = resting[column][len(compute[column]) :]
    rows = [n for n in index_names if set(extra) & set(compute[n])]
    if len(rows) != 1 or not set(extra) <= set(compute[rows[0]]):
        return None
    specs = [_spec(names, resting), _spec(index_names, compute)]
    out_spec = _spec(out_names, compute)
    arrays = (table, indices)
    if not all(_fits(n, s, x.shape, mesh) for n, s, x in zip(in_names, specs, arrays, strict=True)):
        return None
    if not _distinct(out_spec):
        return None
    row_of_indices = index_names.index(rows[0])
    row, column = out_names.index(rows[0]), out_names.index(column)

    def by_hand(table, indices):
        table = _vary_like(table, specs[0], specs, mesh)
        indices = jax.lax.all_gather(indices, extra, axis=row_of_indices, tiled=True)
        if not split:
            return trade(fn(table, indices))
        size = table.shape[names.index(indexed)]
        last = size * jax.lax.axis_size(split) - 1
        # As JAX has it: negative indices count from the end, and beyond the first and the last there is nothing else.
        indices = jnp.clip(jnp.where(indices < 0, indices + last + 1, indices), 0, last).astype(jnp.int32)
        indices = indices - size * jax.lax.axis_index(split)
        is_here = _kernels.align((indices >= 0) & (indices < size), index_names, out_names)
        return jax.lax.psum(trade(jnp.where(is_here, fn(table, indices), jnp.zeros((), table.dtype))), split)

    def trade(found):
        return jax.lax.all_to_all(found, extra, split_axis=row, concat_axis=column, tiled=True)

    return _run_by_hand(by_hand, specs, out_spec, arrays, mesh)


def _applies(settings: _context.Settings, mesh: AbstractMesh) -> bool:
    """Whether parameters rest otherwise than they are used, on a mesh of which no axis is handled by hand already."""
    return bool(settings.parameters) and not mesh.empty and AxisType.Manual not in mesh.axis_types


def _vary_like(x: jax.Array, own: PartitionSpec, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> jax.Array:
    """The local part of a parameter, said to vary over all that any operand varies over.

    Said before it is gathered, so that its gradient is split before it is summed over the rest of the mesh.
    """
    varies = {a for spec in specs for entry in spec for a in mesh_axes(entry)}
    others = varies - {a for entry in own for a in mesh_axes(entry)}
    return jax.lax.pcast(x, tuple(a for a in mesh.axis_names if a in others), to="varying") if others else x


def _run_by_hand(
    fn: Callable[..., jax.Array],
    specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
    arrays: Sequence[jax.Array],
    mesh: AbstractMesh,
) -> jax.Array:
    if AxisType.Explicit in mesh.axis_types:
        arrays = [_reshard(x, spec, mesh) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(fn, in_specs=tuple(specs), out_specs=out_spec)(*arrays)


def _resting(names: Names, compute: Mapping[str, Axes], parameters: Mapping[str, Entry]) -> dict[str, Axes]:
    """Where the axes of an array rest if it is a parameter."""
    return {n: mesh_axes(parameters[n]) if n in parameters else compute[n] for n in names}


def _is_parameter(
    i: int, in_names: Sequence[Names], compute: Mapping[str, Axes], resting: Sequence[Mapping[str, Axes]]
) -> bool:
    names = in_names[i]
    own = {a for n in names for a in compute[n]}
    extra = {a for n in names for a in resting[i][n] if a not in compute[n]}
    others = {a for j, other in enumerate(in_names) if j != i for n in other for a in compute[n]}
    # The split at rest must refine that in use: gathering is all that is done to a parameter.
    refines = all(resting[i][n][: len(compute[n])] == compute[n] for n in names)
    return bool(extra) and refines and not extra & own and extra <= others


def _spec(names: Names, placed: Mapping[str, Axes]) -> PartitionSpec:
    return spec_of(placed.get(n, ()) for n in names)


def _distinct(spec: PartitionSpec) -> bool:
    used = [a for entry in spec for a in mesh_axes(entry)]
    return len(set(used)) == len(used)


def _fits(names: Names, spec: PartitionSpec, shape: Sequence[int], mesh: AbstractMesh) -> bool:
    """Whether an operand can be split like that; where not, the ordinary way of doing the operation has the say."""
    known = all(a in mesh.shape for entry in spec for a in mesh_axes(entry))
    return (
        known
        and len(names) == len(shape)
        and _distinct(spec)
        and all(s % math.prod(mesh.shape[a] for a in mesh_axes(e)) == 0 for s, e in zip(shape, spec, strict=True))
    )


def _reshard(x: jax.Array, spec: PartitionSpec, mesh: AbstractMesh) -> jax.Array:
    explicit = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
    entries = [tuple(a for a in mesh_axes(e) if a in explicit) for e in spec]
    return jax.sharding.reshard(x, spec_of(entries))
