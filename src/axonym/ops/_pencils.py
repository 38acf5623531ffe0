"""Run an operation along a sharded axis on pencils: each device exchanges its shard of the axis for whole rows of it.

An all-to-all makes the axis complete on each device, which gets a shard of another axis instead; after the operation, a
second one goes back. A device sends its shard twice, where an all-gather would deliver the shards of all others to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..axis import Names
from ..distribution.active_settings import is_mapped
from ..distribution.axis_marks import exchanged
from ..distribution.mesh_axes import entry_of, has_manual, mesh_around, types_of
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray
from . import _kernels
from ._blocks import Blocks, make_kernel

Shardings = tuple[tuple[str, Blocks], ...]


def pencils(
    what: str,
    fn: Callable[..., jax.Array],
    arrays: Sequence[NamedArray],
    axis: str,
    over: Mapping[str, Blocks],
    *options: tuple[str, object],
) -> NamedArray | None:
    """Apply a function along a sharded axis, which its result keeps, on pencils; return None if there can be none.

    Arguments:
        fn: a positional function of arrays in the layout of the first one, and of `axis=`, a position. The others may
            lack axes of the first, which then have size one.
        arrays: the operands; the first has all axes, and all of them have the axis.
        over: the blocks of each sharded axis of the first array.
        *options: further keywords of the function.
    """
    if axis not in over:
        return None
    names, in_names, pivot = arrays[0].names, tuple(x.names for x in arrays), None
    if over[axis].shards == 1:  # a trace that follows names
        return _pencils_kernel(what, in_names, fn, axis, pivot, (), options).apply(*[x.array for x in arrays])
    if not can_run_per_device([x.array for x in arrays], over):
        return None
    shards, sizes = over[axis].shards, arrays[0].shape
    pivot = pivot_of({n: sizes[n] // (over[n].shards if n in over else 1) for n in names if n != axis}, shards)
    if pivot is None:
        return None
    shardings = tuple((n, over[n]) for n in names if n in over)
    kernel = _pencils_kernel(what, in_names, fn, axis, pivot, shardings, options)
    return kernel.apply(*[x.array for x in arrays])


def can_run_per_device(arrays: Sequence[Any], over: Mapping[str, Blocks]) -> bool:
    """Return whether devices can exchange shards of these blocks in code of their own."""
    mesh = mesh_around(arrays)
    # A full `shard_map` is needed, over axes of one type, and not under `jax.vmap`, which would add axes to it.
    if mesh.empty or has_manual(mesh) or is_mapped() or len({*types_of(mesh).values()}) > 1:
        return False
    # `all_to_all` orders devices as the mesh does, so blocks in another order would be put together wrongly.
    return all(blocks.axes == tuple(a for a in mesh.axis_names if a in blocks.axes) for blocks in over.values())


def pivot_of(local: Mapping[str, int], shards: int) -> str | None:
    """Return the axis that is sharded instead of another, given the sizes of all others in a shard.

    One that needs no padding, if there is one.
    """
    found = sorted((n for n in local if local[n] >= shards), key=lambda n: (local[n] % shards > 0, -local[n]))
    return found[0] if found else None


@_kernels.cached
def _pencils_kernel(
    what: str,
    in_names: tuple[Names, ...],
    fn: Callable[..., jax.Array],
    axis: str,
    pivot: str | None,
    shardings: Shardings,
    options: tuple[tuple[str, object], ...],
) -> _kernels.Kernel:
    names, over = in_names[0], dict(shardings)
    position, other = names.index(axis), 0 if pivot is None else names.index(pivot)
    along = over[axis].axes if over else ()
    specs = [PartitionSpec(*(entry_of(over[n].axes) if n in over else None for n in own)) for own in in_names]
    apply = functools.partial(fn, axis=position, **dict(options))

    def moved(x: jax.Array, own: Names) -> jax.Array:
        x = _kernels.align(x, own, names)
        if pivot not in own:
            return jax.lax.all_gather(x, along, axis=position, tiled=True)
        # Padded by copies of the edge, for which any function is defined; they are cut off again.
        missing = -x.shape[other] % over[axis].shards
        x = jnp.pad(x, [(0, missing if i == other else 0) for i in range(x.ndim)], mode="edge")
        return jax.lax.all_to_all(x, along, other, position, tiled=True)

    def per_device(*shards: jax.Array) -> jax.Array:
        found = apply(*[moved(x, own) for x, own in zip(shards, in_names, strict=True)])
        found = jax.lax.all_to_all(found, along, position, other, tiled=True)
        return jax.lax.slice_in_dim(found, 0, shards[0].shape[other], axis=other)

    def positional(*arrays):
        if not over:
            shown = [exchanged(x, "shards", axis) for x in arrays]
            found = apply(*[_kernels.align(x, own, names) for x, own in zip(shown, in_names, strict=True)])
            return exchanged(found, "shards", axis)
        return run_per_device(per_device, arrays, specs, specs[0], mesh_around(arrays))

    return make_kernel(what, positional, in_names, names, mesh_aware=True)
