"""Run an operation along a sharded axis on pencils: each device exchanges its shard of the axis for whole rows of it.

An all-to-all makes the axis complete on each device, which gets a shard of another axis instead; after the operation, a
second one goes back. A device sends its shard twice, where an all-gather would deliver the shards of all others to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..axis import Names
from ..distribution.active_settings import is_mapped
from ..distribution.mesh_axes import entry_of, has_manual, mesh_around, types_of
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray
from . import _kernels
from ._blocks import Blocks

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
    mesh, names = mesh_around([x.array for x in arrays]), arrays[0].names
    if mesh.empty or has_manual(mesh) or is_mapped() or len({*types_of(mesh).values()}) > 1:
        return None
    if any(blocks.axes != tuple(a for a in mesh.axis_names if a in blocks.axes) for blocks in over.values()):
        return None
    shards, sizes = over[axis].shards, arrays[0].shape
    local = {n: sizes[n] // (over[n].shards if n in over else 1) for n in names if n != axis}
    # The axis that is sharded instead: one that needs no padding, if there is one.
    pivots = sorted((n for n in local if local[n] >= shards), key=lambda n: (local[n] % shards > 0, -local[n]))
    if not pivots:
        return None
    shardings = tuple((n, over[n]) for n in names if n in over)
    kernel = _pencils_kernel(what, tuple(x.names for x in arrays), fn, axis, pivots[0], shardings, options)
    return kernel.apply(*[x.array for x in arrays])


@_kernels.cached
def _pencils_kernel(
    what: str,
    in_names: tuple[Names, ...],
    fn: Callable[..., jax.Array],
    axis: str,
    pivot: str,
    shardings: Shardings,
    options: tuple[tuple[str, object], ...],
) -> _kernels.Kernel:
    names, over = in_names[0], dict(shardings)
    along, (position, other) = over[axis].axes, (names.index(axis), names.index(pivot))
    specs = [PartitionSpec(*(entry_of(over[n].axes) if n in over else None for n in own)) for own in in_names]
    apply = functools.partial(fn, axis=position, **dict(options))

    def moved(x: jax.Array, own: Names) -> jax.Array:
        x = _kernels.align(x, own, names)
        if pivot not in own:
            return jax.lax.all_gather(x, along, axis=position, tiled=True)
        missing = -x.shape[other] % over[axis].shards
        x = jnp.pad(x, [(0, missing if i == other else 0) for i in range(x.ndim)], mode="edge")
        return jax.lax.all_to_all(x, along, other, position, tiled=True)

    def per_device(*shards: jax.Array) -> jax.Array:
        found = apply(*[moved(x, own) for x, own in zip(shards, in_names, strict=True)])
        found = jax.lax.all_to_all(found, along, position, other, tiled=True)
        return jax.lax.slice_in_dim(found, 0, shards[0].shape[other], axis=other)

    def positional(*arrays):
        return run_per_device(per_device, arrays, specs, specs[0], mesh_around(arrays))

    return _kernels.make_kernel(what, positional, in_names, names, mesh_aware=True)
