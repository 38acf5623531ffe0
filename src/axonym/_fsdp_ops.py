"""Operations on FSDP parameters: all-gathered where they are used, with gradients that are reduce-scattered at once.

Fully sharded data parallelism shards a parameter over the mesh axis that also shards the batch. Every use gathers it on
all devices; its gradient is a sum over the batch, and each device keeps its shard of it. That is one all-gather and one
reduce-scatter. `run_gathering_parameters` does not rely on the partitioner to find them: it runs an operation per
device, gathers the parameter inside, and differentiation turns the all-gather into the reduce-scatter.

The operation itself must run per device. If only the all-gather did, the gradient would be summed over all devices
before it is scattered. And all mesh axes must be manual: if some are left to the partitioner, it moves more than
necessary.

Products and elementwise operations run like this. A look-up in a table (`look_up_sharded_columns`) also runs per
device, but does not gather the table: each device looks up its shard of the columns for the rows that all devices need,
and an all-to-all exchanges columns for rows. The gradient takes the same way back. If storage and compute mapping shard
the rows of the table over the same other mesh axes, each device looks up the rows in its shard, and the results are
added. Under `vmap` over a batch, operations do not see the batch, so `vmap` gathers the parameters that its function
uses (`gathered_for_each_shard`).

A parameter is recognized by its names: an operand with an axis that the parameter mapping shards and the active mapping
does not, and without an axis that is sharded over the same mesh axis as the batch of another operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from . import _kernels
from ._context import active_parameter_mapping
from ._mesh_axes import (
    AnyMesh,
    Axes,
    axes_in,
    current_mesh,
    entries_of,
    entry_of,
    fits,
    has_explicit,
    has_manual,
    is_parameter,
    mapped_axes,
    mesh_around,
    reshard,
    spec_of,
    storage_axes,
)
from ._per_device import gather_axes, run_per_device, varying_over
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
    mesh = _mesh_to_run_on()
    parameters = [i for i in range(len(in_names)) if mesh is not None and _is_gathered(i, in_names)]
    if mesh is None or not parameters:
        return None
    specs = [spec_of(map(storage_axes if i in parameters else mapped_axes, n)) for i, n in enumerate(in_names)]
    gathered = {i: [_extra(n) for n in in_names[i]] for i in parameters}
    out_spec = spec_of(map(mapped_axes, out_names))
    if not _possible(specs, out_spec, arrays, mesh):
        return None
    reduced = tuple(dict.fromkeys(a for n in summed for a in mapped_axes(n)))

    def per_device(*shards):
        operands = []
        for i, x in enumerate(shards):
            if i in gathered:
                x = gather_axes(_varying_alike(x, specs[i], specs, mesh), gathered[i])
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
    mesh = _mesh_to_run_on()
    if mesh is None:
        return None
    names, index_names = in_names
    columns = [n for n in names if storage_axes(n) != mapped_axes(n)]
    if not _is_gathered(0, in_names) or len(columns) != 1 or indexed in columns:
        return None
    over = mapped_axes(indexed)
    if over and (table.dtype == jnp.bool_ or any(a in over for n in index_names for a in mapped_axes(n))):
        return None
    column = columns[0]
    extra = _extra(column)
    rows = [n for n in index_names if set(extra) & set(mapped_axes(n))]
    if len(rows) != 1 or not set(extra) <= set(mapped_axes(rows[0])):
        return None
    specs = [spec_of(map(storage_axes, names)), spec_of(map(mapped_axes, index_names))]
    out_spec = spec_of(map(mapped_axes, out_names))
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


def gathered_for_each_shard(names: Names, weight: jax.Array, over: Axes) -> jax.Array | None:
    """Gather a parameter once for each shard of a batch over these mesh axes; return None for other arrays.

    The result has an axis of these shards in front. Under `vmap` over the batch, each shard uses its own: the gradients
    of the shards are reduce-scattered. If all used one, the gradient would be summed over all devices.
    """
    mesh = _mesh_to_run_on()
    if mesh is None or not is_parameter(names) or not _refines(names):
        return None
    extra, spec = [*map(_extra, names)], spec_of(map(storage_axes, names))
    out_spec = PartitionSpec(entry_of(over), *spec_of(map(mapped_axes, names)))
    if not {a for axes in extra for a in axes} <= set(over) or not _possible([spec], out_spec, [weight], mesh):
        return None

    def per_device(shard):
        own = axes_in(spec)
        return gather_axes(varying_over(shard, [a for a in mesh.axis_names if a in over and a not in own]), extra)[None]

    return run_per_device(per_device, [weight], [spec], out_spec, mesh)


def _mesh_to_run_on() -> AnyMesh | None:
    """Return the active mesh; None if there is no parameter mapping, or an axis of the mesh is manual already."""
    mesh = current_mesh() if active_parameter_mapping() else None
    return None if mesh is None or has_manual(mesh) else mesh


def _possible(specs: Sequence[PartitionSpec], out_spec: PartitionSpec, arrays: Sequence[Any], mesh: AnyMesh) -> bool:
    """Return whether the axes can be sharded; if not, the operation runs as usual."""
    used = axes_in(out_spec)
    return len(set(used)) == len(used) and all(fits(s, x.shape, mesh) for s, x in zip(specs, arrays, strict=True))


def _varying_alike(x: jax.Array, own: PartitionSpec, specs: Sequence[PartitionSpec], mesh: AnyMesh) -> jax.Array:
    """Make the shard of a parameter device-varying over all mesh axes over which any operand varies.

    This happens before the all-gather, so that the gradient is scattered before it is summed over the rest of the mesh.
    """
    others = {a for spec in specs for a in axes_in(spec)}.difference(axes_in(own))
    return varying_over(x, [a for a in mesh.axis_names if a in others])


def _extra(name: str) -> Axes:
    """Return the mesh axes over which an axis of a parameter is gathered before use."""
    return tuple(a for a in storage_axes(name) if a not in mapped_axes(name))


def _is_gathered(i: int, in_names: Sequence[Names]) -> bool:
    """Return whether an operand is a parameter that is stored sharded over mesh axes of other operands."""
    extra = {a for n in in_names[i] for a in _extra(n)}
    others = {a for j, other in enumerate(in_names) if j != i for n in other for a in mapped_axes(n)}
    return is_parameter(in_names[i]) and _refines(in_names[i]) and extra <= others


def _refines(names: Names) -> bool:
    """Return whether the storage sharding refines the compute sharding, so that parameters are only gathered."""
    return all(storage_axes(n)[: len(used)] == used for n in names for used in [mapped_axes(n)])


def in_compute_sharding(names: Names, weight: jax.Array) -> jax.Array:
    """All-gather a parameter that is stored sharded over Explicit mesh axes: see `axonym.fsdp`.

    Otherwise its storage sharding would decide that of the result, as far as the batch leaves mesh axes for it.
    """
    mesh = mesh_around([weight])
    if not has_explicit(mesh) or not is_parameter(names):
        return weight
    entries = [
        e if mapped_axes(n) == storage_axes(n) else entry_of(mapped_axes(n))
        for n, e in zip(names, entries_of(weight), strict=True)
    ]
    return reshard(weight, entries, mesh)
