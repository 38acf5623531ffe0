"""Look up rows of a table whose columns are stored sharded like the batch.

The table is not gathered: each device looks up its shard of the columns for the rows that all devices need, and an
all-to-all exchanges columns for rows. The gradient takes the same way back. If storage and compute mapping shard the
rows of the table over the same other mesh axes, each device looks up the rows in its shard, and the results are added.
`axonym.distribution.policy.exchange_columns` decides where this is done.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..axis import Names
from ..distribution import policy
from ..distribution.fsdp_ops import active_mappings, mesh_to_run_on, possible, run_with_auto_axes, varying_alike
from ..distribution.mesh_axes import axes_in, spec_of
from ..distribution.policy import PlacedAxes
from . import _kernels
from ._operands import extreme


def look_up_sharded_columns(
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    indexed: str,
    fills: bool,
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array | None:
    """Look up rows of a table whose columns are stored sharded like the batch; return None for other tables.

    Arguments:
        fn: the look-up, on shards of the table and the indices.
        indexed: the axis of the table that is indexed.
        fills: whether what is out of range is NaN, or the extreme of its dtype, and not the nearest row.
    """
    mesh = mesh_to_run_on()
    if mesh is None:
        return None
    names, index_names = in_names
    by = active_mappings(mesh)
    exchange, over = policy.exchange_columns(names, index_names, indexed, by), by.used(indexed)
    if exchange is None:
        return None
    if over and (table.dtype == jnp.bool_ or any(a in over for n in index_names for a in by.used(n))):
        return None
    operands = [PlacedAxes(names, [*map(by.stored, names)]), PlacedAxes(index_names, [*map(by.used, index_names)])]
    out_spec = spec_of(map(by.used, out_names))
    used = axes_in(out_spec)
    if len(set(used)) < len(used) or not possible(operands, (table, indices), mesh):
        return None
    specs = [spec_of(operand.over) for operand in operands]
    extra, row_of_indices = exchange.axes, index_names.index(exchange.row)
    row, column = out_names.index(exchange.row), out_names.index(exchange.column)

    def per_device(table, indices):
        table = varying_alike(table, specs[0], specs, mesh)
        own, indices = indices, jax.lax.all_gather(indices, extra, axis=row_of_indices, tiled=True)
        if not over:
            return trade(fn(table, indices))
        size = table.shape[names.index(indexed)]
        last = size * jax.lax.axis_size(over) - 1
        # As in JAX, negative indices count from the end, and indices out of range have the value of the nearest row,
        # but no gradient goes back to that row.
        indices, exists = from_start(indices, last)
        indices = jnp.clip(indices, 0, last).astype(jnp.int32) - size * jax.lax.axis_index(over)
        is_here = _kernels.align((indices >= 0) & (indices < size), index_names, out_names)
        found = jnp.where(is_here, fn(table, indices), jnp.zeros((), table.dtype))
        if not fills:
            return jax.lax.psum(trade(jnp.where(exists, found, jax.lax.stop_gradient(found))), over)
        inexact, unsigned = (jnp.issubdtype(table.dtype, kind) for kind in (jnp.inexact, jnp.unsignedinteger))
        filled = jnp.nan if inexact else extreme(table.dtype, largest=unsigned)
        return jnp.where(from_start(own, last)[1], jax.lax.psum(trade(found), over), filled)

    def from_start(indices, last):
        if indices.dtype.itemsize < 4:  # the dtype may not hold the size of the table
            indices = indices.astype(jnp.int32)
        indices = jnp.where(indices < 0, indices + (last + 1), indices)
        return indices, _kernels.align((indices >= 0) & (indices <= last), index_names, out_names)

    def trade(found):
        return jax.lax.all_to_all(found, extra, split_axis=row, concat_axis=column, tiled=True)

    return run_with_auto_axes(per_device, (table, indices), specs, out_spec, mesh)
