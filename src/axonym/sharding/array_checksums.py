"""Checksums of arrays that do not depend on how they are sharded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..core.processes import from_all_processes
from ..core.tree_spec import is_key
from ..named_array import raw
from ._copies import array_of_shards, mesh_in_a_row, run_in_a_row, shards_by_device
from .leaves import leaves_of
from .shard import NO_DEVICES


def checksums(tree: Any) -> dict[str, int]:
    """Return a checksum of the values of each array of a tree, by path.

    Equal arrays have equal checksums, however they are sharded. Values in another order have another one. Each device
    adds up its shards, so this takes little memory. With several processes, all of them call it.

    >>> x, mesh = axn.arange({"embed": 16}), axn.make_mesh({"data": 8})
    >>> axn.sharding.checksums({"w": x}) == axn.sharding.checksums({"w": axn.shard(x, {"embed": "data"}, mesh)})
    True
    """
    leaves = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    arrays = [raw(leaf.value) for leaf in leaves]
    spread = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in arrays]
    return dict(zip((leaf.path for leaf in leaves), sums_of(arrays, spread), strict=True))


def sums_of(arrays: Sequence[Any], spread: Sequence[bool]) -> list[int]:
    """Return checksums of arrays, some of which have shards in several processes; abstract arrays have none."""
    sums = np.array([_sum_of_shards(x) for x in arrays], np.uint32)
    if jax.process_count() > 1 and any(spread):
        sums = np.where(spread, from_all_processes(sums).sum(0, dtype=np.uint32), sums)
    return sums.tolist()


def _sum_of_shards(x: Any) -> int:
    """Return the sum of a number for each element of this process, each counted once."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return 0
    x = jnp.asarray(x)
    with jax.set_mesh(NO_DEVICES):
        x = jax.random.key_data(x) if is_key(x) else jnp.atleast_1d(x)
    starts = {s.device: [i.start or 0 for i in s.index] for s in x.addressable_shards if s.replica_id == 0}
    if not x.size or not starts:
        return 0
    mesh = mesh_in_a_row(starts)
    with jax.set_mesh(mesh):
        parts, places = array_of_shards(shards_by_device(x), mesh), np.array([*starts.values()], np.uint32)
        sums = _sums_of_pieces(parts, places, x.shape, mesh)
    return int(np.sum(np.asarray(sums), dtype=np.uint32))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sums_of_pieces(x: jax.Array, starts: Any, shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    def local(x: jax.Array, starts: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag], -1)
        whole = x.dtype == bool or (x.dtype.itemsize <= 4 and jnp.issubdtype(x.dtype, jnp.integer))
        width = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 64  # some floats have 4 bits
        bits = x if whole else lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}"))
        at = jnp.uint32(0)  # the position in the whole array
        for i, n in enumerate(bits.shape):
            start = starts[0, i] if i < len(shape) else jnp.uint32(0)
            at = at * np.uint32(shape[i] if i < len(shape) else n) + start
            at = at[..., None] + lax.iota(jnp.uint32, n).reshape([1] * i + [n])
        mixed = bits.astype(jnp.uint32) + at * np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # as in MurmurHash3
            mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
        return jnp.sum(mixed, dtype=jnp.uint32)[None]

    return run_in_a_row(local, mesh, x, starts)
