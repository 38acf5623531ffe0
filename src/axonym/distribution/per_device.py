"""Run operations per device with `jax.shard_map`, where the partitioner does worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.jax_versions import INLINE, varying_axes
from .active_settings import is_mapped
from .mesh_axes import AnyMesh, Axes, axes_of_type, entries_of, mesh_axes, padded, reshard, restricted, spec_of


def run_per_device(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    mesh: AnyMesh,
    *,
    axis_names: Collection[str] = (),
    check_vma: bool = True,
) -> Any:
    """Call a function on the shards of each device; works under `jit`, eagerly, and inside another `shard_map`.

    Arguments:
        fn: the function for one device, of shards.
        arrays: the operands. On Explicit mesh axes they are resharded to `in_specs` first, as JAX requires.
        in_specs: the sharding of each operand; `axonym.distribution.mesh_axes.fits` checks whether it is possible.
        out_specs: the shardings of the results, in their structure. Read after `fn` has run.
        axis_names: the mesh axes that become manual in `fn`; by default all that are not manual yet.
        check_vma: whether JAX tracks which values are device-varying.
    """
    around = set(axes_of_type(mesh, AxisType.Manual))
    manual = set(axis_names) or set(mesh.axis_names) - around
    mapped = jax.shard_map(
        fn,
        # Created on each call, because JAX keeps the mesh that is active on the first call.
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        # The empty set means all mesh axes. A `vmap` over an axis that is sharded over an Explicit mesh axis allows
        # only that.
        axis_names=set() if manual == set(mesh.axis_names) else manual,
        check_vma=check_vma,
    )
    if around or is_mapped():
        # Eagerly, JAX fails inside another `shard_map` on values that are invariant over the outer mesh axes, and,
        # without `check_vma`, inside a `vmap` over an axis that is sharded over Explicit mesh axes.
        mapped = jax.jit(mapped, inline=INLINE)
    return mapped(*reshard_operands(arrays, in_specs, mesh, manual))


def with_auto_axes(fn: Callable[..., Any], mesh: AnyMesh, out_specs: Any) -> Callable[..., Any]:
    """Return a function in which the Explicit axes of a mesh are Auto; over them, its results have the given specs."""
    explicit = axes_of_type(mesh, AxisType.Explicit)
    if not explicit:
        return fn

    def sharding_of(spec: Any) -> Any:
        return NamedSharding(mesh, restricted(spec, explicit))

    shardings = sharding_of(out_specs) if isinstance(out_specs, PartitionSpec) else tuple(map(sharding_of, out_specs))
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=shardings)


def reshard_operands(
    arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh: AnyMesh, manual: Collection[str]
) -> Sequence[Any]:
    """Reshard the operands to their specs over the Explicit mesh axes that become manual; keep other shardings."""
    explicit = set(axes_of_type(mesh, AxisType.Explicit))
    if not explicit.intersection(manual):
        return arrays
    resharded = []
    for x, spec in zip(arrays, specs, strict=True):
        kept = [[a for a in mesh_axes(e) if a in explicit.difference(manual)] for e in entries_of(x)]
        own = map(mesh_axes, padded(spec, len(kept)))
        resharded.append(reshard(x, spec_of((*o, *k) for o, k in zip(own, kept, strict=True)), mesh))
    return resharded


def gather_axes(x: jax.Array, over: Iterable[Axes]) -> jax.Array:
    """All-gather a local shard: each axis over the mesh axes given for it, if any."""
    for position, axes in enumerate(over):
        if axes:
            x = jax.lax.all_gather(x, axes, axis=position, tiled=True)
    return x


def permute(x: jax.Array, axes: Axes, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Send an array from the first to the second device of each pair, numbered along mesh axes in the given order.

    `jax.lax.axis_index` and shardings number devices like this. `jax.lax.ppermute` uses the order of the mesh, and from
    jax 0.12 on refuses other orders.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    ordered = sorted(axes, key=tuple(sizes).index)
    by_mesh = np.arange(math.prod(sizes[a] for a in axes)).reshape([sizes[a] for a in ordered])
    place = by_mesh.transpose([ordered.index(a) for a in axes]).ravel().tolist()
    return jax.lax.ppermute(x, tuple(ordered), [(place[i], place[j]) for i, j in pairs])


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """Make an array device-varying over all mesh axes over which one of the other arrays is."""
    over = frozenset[str]().union(*map(varying_axes, others))
    return varying_over(x, sorted(over - varying_axes(x)))


def varying_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Make an array device-varying over some mesh axes, over which it is invariant."""
    over: Axes = tuple(axes)
    return jax.lax.pcast(x, over, to="varying") if over else x
