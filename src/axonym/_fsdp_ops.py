"""Operations on FSDP parameters: all-gathered where they are used, with gradients that are reduce-scattered at once.

Fully sharded data parallelism shards a parameter over the mesh axis that also shards the batch. To use it, every device
gathers it; its gradient is a sum over the batch, of which every device keeps its shard. That is one all-gather and one
reduce-scatter, and no partitioner has to find it if the operation says so: `gathered` runs an operation device by
device, gathers the parameter inside, and lets differentiation turn the all-gather into the reduce-scatter.

It must be the operation that is run device by device. If only the all-gather were, the gradient would arrive outside of
it, already summed in full. And it must be over all mesh axes: with some of them left to the partitioner it moves more
than it needs to.

Products and elementwise operations are run like this. A look-up in a table is run device by device too, by `looked_up`,
but gathers no table: each device finds the columns that it has of the rows that all of them need, and then they trade
columns for rows. Its gradient goes the same way back. If the rows of the table are sharded, too, over other mesh axes
and alike in storage and in compute, each device finds those that it has, and what they found is added up.

A parameter is known by its names: an operand with an axis that the storage mapping shards and the active mapping does
not, and none that shares its mesh axis with the batch of another operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from . import _kernels
from ._context import Entry
from ._mesh_axes import Axes, axes_in, fits, mapped_axes, mesh_axes, spec_of, storage_mapping
from ._per_device import run_per_device, varying_over
from .axis import Names


def gathered(
    fn: Callable[..., jax.Array],
    in_names: Sequence[Names],
    out_names: Names,
    *arrays: jax.Array,
    summed: Names = (),
) -> jax.Array | None:
    """Run an operation device by device, gathering the parameters among its operands; None where there are none.

    Arguments:
        fn: the operation on shards of the operands. Apart from `summed`, it must treat every index of an axis on its
            own.
        in_names: the axes of the operands.
        out_names: the axes of the result.
        *arrays: the operands, traced.
        summed: the axes that the operation sums over.
    """
    storage, mesh = storage_mapping(), jax.sharding.get_abstract_mesh()
    if not _applies(storage, mesh):
        return None
    compute = {n: mapped_axes(n) for names in in_names for n in names}
    stored = [_stored(names, compute, storage) for names in in_names]
    is_parameter = [_is_parameter(i, in_names, compute, stored) for i in range(len(in_names))]
    if not any(is_parameter):
        return None
    specs = [_spec(names, stored[i] if is_parameter[i] else compute) for i, names in enumerate(in_names)]
    out_spec = _spec(out_names, compute)
    if not _possible(specs, out_spec, arrays, mesh):
        return None
    reduced = tuple(dict.fromkeys(a for n in summed for a in compute.get(n, ())))

    def per_device(*shards):
        operands = []
        for i, x in enumerate(shards):
            if is_parameter[i]:
                x = _varying_alike(x, specs[i], specs, mesh)
                for position, name in enumerate(in_names[i]):
                    extra = tuple(a for a in stored[i][name] if a not in compute[name])
                    if extra:
                        x = jax.lax.all_gather(x, extra, axis=position, tiled=True)
            operands.append(x)
        result = fn(*operands)
        return jax.lax.psum(result, reduced) if reduced else result

    return run_per_device(per_device, arrays, specs, out_spec, mesh)


def looked_up(
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    indexed: str,
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array | None:
    """Look up rows of a table whose columns are stored sharded over the mesh axis of the batch; None for other tables.

    Arguments:
        fn: the look-up, on shards of the table and the indices.
        in_names: the axes of the table and of the indices.
        out_names: the axes of the result.
        indexed: the axis of the table that is indexed.
        table: the table, traced.
        indices: the indices, traced.
    """
    storage, mesh = storage_mapping(), jax.sharding.get_abstract_mesh()
    if not _applies(storage, mesh):
        return None
    names, index_names = in_names
    compute = {n: mapped_axes(n) for n in (*names, *index_names)}
    stored = _stored(names, compute, storage)
    columns = [n for n in names if stored[n] != compute[n]]
    if not _is_parameter(0, in_names, compute, [stored, {}]) or len(columns) != 1 or indexed in columns:
        return None
    over = compute[indexed]
    if over and (table.dtype == jnp.bool_ or any(a in over for n in index_names for a in compute[n])):
        return None
    column = columns[0]
    extra = stored[column][len(compute[column]) :]
    rows = [n for n in index_names if set(extra) & set(compute[n])]
    if len(rows) != 1 or not set(extra) <= set(compute[rows[0]]):
        return None
    specs = [_spec(names, stored), _spec(index_names, compute)]
    out_spec = _spec(out_names, compute)
    if not _possible(specs, out_spec, (table, indices), mesh):
        return None
    row_of_indices = index_names.index(rows[0])
    row, column = out_names.index(rows[0]), out_names.index(column)

    def per_device(table, indices):
        table = _varying_alike(table, specs[0], specs, mesh)
        indices = jax.lax.all_gather(indices, extra, axis=row_of_indices, tiled=True)
        if not over:
            return trade(fn(table, indices))
        size = table.shape[names.index(indexed)]
        last = size * jax.lax.axis_size(over) - 1
        # As JAX has it: negative indices count from the end, and beyond the first and the last there is nothing else,
        # though only the value of these is found there, and no gradient goes back to them.
        if indices.dtype.itemsize < 4:  # which may not count far enough
            indices = indices.astype(jnp.int32)
        indices = jnp.where(indices < 0, indices + (last + 1), indices)
        exists = _kernels.align((indices >= 0) & (indices <= last), index_names, out_names)
        indices = jnp.clip(indices, 0, last).astype(jnp.int32) - size * jax.lax.axis_index(over)
        is_here = _kernels.align((indices >= 0) & (indices < size), index_names, out_names)
        found = jnp.where(is_here, fn(table, indices), jnp.zeros((), table.dtype))
        return jax.lax.psum(trade(jnp.where(exists, found, jax.lax.stop_gradient(found))), over)

    def trade(found):
        return jax.lax.all_to_all(found, extra, split_axis=row, concat_axis=column, tiled=True)

    return run_per_device(per_device, (table, indices), specs, out_spec, mesh)


def _applies(storage: Mapping[str, Entry], mesh: AbstractMesh) -> bool:
    """Whether parameters are stored otherwise than they are used, on a mesh of which no axis is manual already."""
    return bool(storage) and not mesh.empty and AxisType.Manual not in mesh.axis_types


def _possible(
    specs: Sequence[PartitionSpec], out_spec: PartitionSpec, arrays: Sequence[Any], mesh: AbstractMesh
) -> bool:
    """Whether shards fit; where not, the ordinary way of doing the operation has the say."""
    used = axes_in(out_spec)
    return len(set(used)) == len(used) and all(fits(s, x.shape, mesh) for s, x in zip(specs, arrays, strict=True))


def _varying_alike(x: jax.Array, own: PartitionSpec, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> jax.Array:
    """The shard of a parameter, made device-varying over all that any operand varies over.

    That is before it is gathered, so that its gradient is scattered before it is summed over the rest of the mesh.
    """
    others = {a for spec in specs for a in axes_in(spec)}.difference(axes_in(own))
    return varying_over(x, [a for a in mesh.axis_names if a in others])


def _stored(names: Names, compute: Mapping[str, Axes], storage: Mapping[str, Entry]) -> dict[str, Axes]:
    """Where the axes of an array are stored if it is a parameter."""
    return {n: mesh_axes(storage[n]) if n in storage else compute[n] for n in names}


def _is_parameter(
    i: int, in_names: Sequence[Names], compute: Mapping[str, Axes], stored: Sequence[Mapping[str, Axes]]
) -> bool:
    names = in_names[i]
    own = {a for n in names for a in compute[n]}
    extra = {a for n in names for a in stored[i][n] if a not in compute[n]}
    others = {a for j, other in enumerate(in_names) if j != i for n in other for a in compute[n]}
    # The storage sharding must refine the compute sharding: gathering is all that is done to a parameter.
    refines = all(stored[i][n][: len(compute[n])] == compute[n] for n in names)
    return bool(extra) and refines and not extra & own and extra <= others


def _spec(names: Names, placed: Mapping[str, Axes]) -> PartitionSpec:
    return spec_of(placed.get(n, ()) for n in names)
