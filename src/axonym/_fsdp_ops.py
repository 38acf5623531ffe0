"""Operations on FSDP parameters: all-gathered where they are used, with gradients that are reduce-scattered at once.

Fully sharded data parallelism shards a parameter over the mesh axis that also shards the batch. Every use gathers it on
all devices; its gradient is a sum over the batch, of which every device keeps its shard. That is one all-gather and one
reduce-scatter. `run_gathering_parameters` does not rely on the partitioner to find them: it runs an operation per
device, gathers the parameter inside, and differentiation turns the all-gather into the reduce-scatter.

The operation itself must run per device. If only the all-gather did, the gradient would be summed over all devices
before it is scattered. And all mesh axes must be manual: if some are left to the partitioner, it moves more than
needed.

Products and elementwise operations run like this. A look-up in a table (`look_up_sharded_columns`) also runs per
device, but does not gather the table: each device looks up its shard of the columns for the rows that all devices need,
and an all-to-all exchanges columns for rows. The gradient takes the same way back. If the rows of the table are sharded
over other mesh axes, alike in storage and compute, each device looks up the rows in its shard, and the results are
added.

A parameter is recognized by its names: an operand with an axis that the parameter mapping shards and the active mapping
does not, and without an axis that is sharded over the same mesh axis as the batch of another operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from . import _kernels
from ._context import Entry, active_parameter_mapping
from ._mesh_axes import AnyMesh, Axes, axes_in, current_mesh, fits, mapped_axes, mesh_axes, spec_of
from ._per_device import run_per_device, varying_over
from .axis import Names


def run_gathering_parameters(
    fn: Callable[..., jax.Array], in_names: Sequence[Names], out_names: Names, *arrays: jax.Array, summed: Names = ()
) -> jax.Array | None:
    """Run an operation per device, gathering the parameters among its operands; return None if there are none.

    Arguments:
        fn: the operation on shards of the operands. Apart from `summed`, it must treat every index of an axis
            independently.
        summed: the axes that the operation sums over.
    """
    parameter_mapping, mesh = active_parameter_mapping(), _mesh_to_run_on()
    if mesh is None:
        return None
    compute = {n: mapped_axes(n) for names in in_names for n in names}
    stored = [_stored(names, compute, parameter_mapping) for names in in_names]
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


def look_up_sharded_columns(
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    indexed: str,
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array | None:
    """Look up rows of a table whose columns are stored sharded like the batch; return None for other tables.

    Arguments:
        fn: the look-up, on shards of the table and the indices.
        indexed: the axis of the table that is indexed.
    """
    parameter_mapping, mesh = active_parameter_mapping(), _mesh_to_run_on()
    if mesh is None:
        return None
    names, index_names = in_names
    compute = {n: mapped_axes(n) for n in (*names, *index_names)}
    stored = _stored(names, compute, parameter_mapping)
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
        # As in JAX, negative indices count from the end, and indices out of range have the value of the nearest row,
        # but no gradient goes back to that row.
        if indices.dtype.itemsize < 4:  # whose dtype may be too small for the size
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


def _mesh_to_run_on() -> AnyMesh | None:
    """Return the active mesh; None if there is no parameter mapping, or an axis of the mesh is manual already."""
    mesh = current_mesh() if active_parameter_mapping() else None
    return None if mesh is None or AxisType.Manual in mesh.axis_types else mesh


def _possible(specs: Sequence[PartitionSpec], out_spec: PartitionSpec, arrays: Sequence[Any], mesh: AnyMesh) -> bool:
    """Return whether the axes can be sharded; if not, the operation runs in the ordinary way."""
    used = axes_in(out_spec)
    return len(set(used)) == len(used) and all(fits(s, x.shape, mesh) for s, x in zip(specs, arrays, strict=True))


def _varying_alike(x: jax.Array, own: PartitionSpec, specs: Sequence[PartitionSpec], mesh: AnyMesh) -> jax.Array:
    """Make the shard of a parameter device-varying over all mesh axes over which any operand varies.

    This happens before the all-gather, so that the gradient is scattered before it is summed over the rest of the mesh.
    """
    others = {a for spec in specs for a in axes_in(spec)}.difference(axes_in(own))
    return varying_over(x, [a for a in mesh.axis_names if a in others])


def _stored(names: Names, compute: Mapping[str, Axes], parameter_mapping: Mapping[str, Entry]) -> dict[str, Axes]:
    """Return the storage sharding of the axes of an array, if it is a parameter."""
    return {n: mesh_axes(parameter_mapping[n]) if n in parameter_mapping else compute[n] for n in names}


def _is_parameter(
    i: int, in_names: Sequence[Names], compute: Mapping[str, Axes], stored: Sequence[Mapping[str, Axes]]
) -> bool:
    names = in_names[i]
    own = {a for n in names for a in compute[n]}
    extra = {a for n in names for a in stored[i][n] if a not in compute[n]}
    others = {a for j, other in enumerate(in_names) if j != i for n in other for a in compute[n]}
    # The storage sharding must refine the compute sharding, because parameters are only gathered.
    refines = all(stored[i][n][: len(compute[n])] == compute[n] for n in names)
    return bool(extra) and refines and not extra & own and extra <= others


def _spec(names: Names, placed: Mapping[str, Axes]) -> PartitionSpec:
    return spec_of(placed.get(n, ()) for n in names)
