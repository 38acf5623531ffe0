"""Run operations on FSDP parameters: all-gather a parameter where it is used, and reduce-scatter its gradient at once.

Fully sharded data parallelism shards a parameter over the mesh axis that also shards the batch. Every use gathers it on
all devices; its gradient is a sum over the batch, and each device keeps its shard of it. That is one all-gather and one
reduce-scatter. `run_gathering_parameters` does not rely on the partitioner to find them: it runs an operation per
device, gathers the parameter inside, and differentiation turns the all-gather into the reduce-scatter.

The operation itself must run per device. If only the all-gather did, the gradient would be summed over all devices
before it is scattered. And all mesh axes must be manual: if some are left to the partitioner, it moves more than
necessary.

Products and elementwise operations run like this. A look-up in a table does not gather the table: see
`ops/indexing`. Under `vmap` over a batch, operations do not see the batch, so `vmap` gathers the parameters that
its function uses (`gathered_for_each_shard`).

Names determine which operands are parameters, over which mesh axes they are gathered, and which sums are added up:
see `axonym.distribution.policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..axis import Names
from . import policy
from .active_settings import active_mapping, active_parameter_mapping, pads_uneven
from .mesh_axes import (
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
from .padded_array import with_padding
from .per_device import gather_axes, run_per_device, varying_over, with_auto_axes
from .policy import Mappings, PlacedAxes, Undecided


def run_gathering_parameters(
    fn: Callable[..., jax.Array], in_names: Sequence[Names], out_names: Names, *arrays: jax.Array, summed: Names = ()
) -> jax.Array | None:
    """Run an operation per device, gathering the parameters among its operands; return None if there are none.

    Arguments:
        fn: the operation on shards of the operands. Apart from `summed`, it must treat every index of an axis
            independently. Without `summed`, it may return several arrays with the axes `out_names`.
        summed: the axes that the operation sums over.
    """
    mesh = mesh_to_run_on()
    if mesh is None:
        return None
    by = active_mappings(mesh)
    operands = [PlacedAxes(names, [*map(by.used, names)]) for names in in_names]
    if not possible(operands, arrays, mesh):
        return None
    sizes = {n: size for names, x in zip(in_names, arrays, strict=True) for n, size in zip(names, x.shape, strict=True)}
    try:
        decision = policy.combine("fsdp", operands, out_names, sizes, by, summed)
    except Undecided:
        return None  # the operation runs as usual, and raises the error
    gathers = decision.gathers
    arrays = tuple([evened(x, decision.operands[i], by) if i in gathers else x for i, x in enumerate(arrays)])
    # Operands must fit as they are used, which `fn` gets, and as they are stored, which is passed in.
    if not gathers or not possible(decision.operands, arrays, mesh):
        return None
    specs = [spec_of(operand.over) for operand in decision.operands]

    def per_device(*shards):
        operands = []
        for i, x in enumerate(shards):
            if i in gathers:
                x = gather_axes(varying_alike(x, specs[i], specs, mesh), gathers[i])
                x = cut(x, [sizes[n] for n in in_names[i]])
            operands.append(x)
        result = fn(*operands)
        for part in decision.sums:
            if part.onto is None:
                result = jax.lax.psum(result, part.axes)
            else:
                at = out_names.index(part.onto)
                result = jax.lax.psum_scatter(result, part.axes, scatter_dimension=at, tiled=True)
        return result

    return run_with_auto_axes(per_device, arrays, specs, spec_of(decision.result.over), mesh)


def gathered_for_each_shard(names: Names, weight: jax.Array, over: Axes) -> jax.Array | None:
    """Gather a parameter once for each shard of a batch over these mesh axes; return None for other arrays.

    The result has an axis of these shards in front. Under `vmap` over the batch, each shard uses its own: the gradients
    of the shards are reduce-scattered. If all shards used one, the gradient would be summed over all devices.
    """
    mesh = mesh_to_run_on()
    if mesh is None:
        return None
    by = active_mappings(mesh)
    if not policy.gathered_over(names, over, by):
        return None
    used, stored = (PlacedAxes(names, [*map(lies, names)]) for lies in (by.used, by.stored))
    shape, weight = weight.shape, evened(weight, stored, by)
    if not possible([used], [weight], mesh) or not possible([stored], [weight], mesh):
        return None
    extra, spec = [*map(by.gathered, names)], spec_of(stored.over)
    if set(over) & set(axes_in(spec_of(used.over))):
        return None  # the shards of the batch and the parameter would have one mesh axis: the function runs as usual
    out_spec = PartitionSpec(entry_of(over), *spec_of(used.over))

    def per_device(shard):
        # The axis of size one becomes the axis of the shards of the batch: one gathered copy for each of them.
        own = axes_in(spec)
        shard = varying_over(shard, [a for a in mesh.axis_names if a in over and a not in own])
        return cut(gather_axes(shard, extra), shape)[None]

    return run_with_auto_axes(per_device, [weight], [spec], out_spec, mesh)


def mesh_to_run_on() -> AnyMesh | None:
    """Return the active mesh; None if there is no parameter mapping, or an axis of the mesh is manual already."""
    mesh = current_mesh() if active_parameter_mapping() else None
    return None if mesh is None or has_manual(mesh) else mesh


def run_with_auto_axes(
    fn: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
    mesh: AnyMesh,
) -> jax.Array:
    """Call a function on the shards of each device; the Explicit mesh axes are Auto around it.

    A `vmap` leaves the Explicit mesh axes of its axis Explicit inside `shard_map`. There, JAX gathers operands over
    them that it need not gather, and from 0.12 on it cannot lower a reduce-scatter.
    """

    def run(*arrays):
        return run_per_device(fn, arrays, in_specs, out_spec, mesh_around())

    return with_auto_axes(run, mesh, out_spec)(*arrays)


def active_mappings(mesh: AnyMesh) -> Mappings:
    return Mappings(mesh.shape, active_mapping(), active_parameter_mapping())


def possible(operands: Sequence[PlacedAxes], arrays: Sequence[Any], mesh: AnyMesh) -> bool:
    """Return whether the operands can be sharded; if not, the operation runs as usual."""
    return all(fits(spec_of(o.over), x.shape, mesh) for o, x in zip(operands, arrays, strict=True))


def evened(weight: jax.Array, stored: PlacedAxes, by: Mappings) -> jax.Array:
    """Pad a parameter along axes that are stored unevenly, and gathered completely; on Auto axes this moves nothing."""
    if not pads_uneven():
        return weight
    parts = [1 if n is None or by.used(n) else by.count(over) for n, over in zip(*stored, strict=True)]
    return with_padding(weight, [-(-size // n) * n for size, n in zip(weight.shape, parts, strict=True)])


def cut(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Cut the padding off a parameter that is gathered, whose complete axes have these sizes."""
    kept = [min(sizes) for sizes in zip(x.shape, shape, strict=True)]
    return x if kept == list(x.shape) else jax.lax.slice(x, (0,) * x.ndim, kept)


def varying_alike(x: jax.Array, own: PartitionSpec, specs: Sequence[PartitionSpec], mesh: AnyMesh) -> jax.Array:
    """Make the shard of a parameter device-varying over all mesh axes over which any operand varies.

    This happens before the all-gather, so that the gradient is scattered before it is summed over the rest of the mesh.
    """
    others = {a for spec in specs for a in axes_in(spec)}.difference(axes_in(own))
    return varying_over(x, [a for a in mesh.axis_names if a in others])


def in_compute_sharding(names: Names, weight: jax.Array) -> jax.Array:
    """All-gather a parameter that is stored sharded over Explicit mesh axes: see `axonym.fsdp`.

    Otherwise the result would take over its storage sharding, over the mesh axes that the batch leaves free.
    """
    mesh = mesh_around([weight])
    if not has_explicit(mesh) or not is_parameter(names):
        return weight
    entries = [
        e if mapped_axes(n) == storage_axes(n) else entry_of(mapped_axes(n))
        for n, e in zip(names, entries_of(weight), strict=True)
    ]
    return reshard(weight, entries, mesh)
