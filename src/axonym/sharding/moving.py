"""Move arrays: to another sharding, to the host, and from each process to one global array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..core.tree_spec import is_key
from ..distribution.mesh_axes import padded
from ..distribution.padded_array import padded_array, with_padding
from ._copies import copy_along_route, route_of


def copied_to_host(x: jax.Array) -> np.ndarray:
    """Copy an array to host memory. With several hosts, each must call this for the same arrays in the same order."""
    if x.is_fully_addressable:
        return np.asarray(without_cache(renew_if_empty(x)))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


_COMPILED_BYTES = 2**24
"""Compiled programs move arrays of at least this many bytes. For smaller ones, copying through the host is faster."""
_PIECE_BYTES = 2**26


def move_to_sharding(x: Any, target: NamedSharding) -> jax.Array:
    """Move an array to a sharding, and leave no copy of it on the host.

    If shards get other boundaries, `jax.device_put` copies the array to the host, and the array keeps that copy.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or is_key(x):
        return jax.device_put(x, target)
    # `without_cache` returns weakly typed arrays unchanged. Empty arrays have nothing to exchange.
    if x.size and (x.nbytes >= _COMPILED_BYTES or x.weak_type) and _is_exchange(x.sharding, target, x.ndim):
        return program_to(target, x.shape)(x)
    if x.nbytes >= _COMPILED_BYTES and x.is_fully_addressable and _is_of_mesh(x.sharding, target) and not x.weak_type:
        return copy_along_route([x], route_of(x.shape, x.dtype.itemsize, x.sharding, target, _PIECE_BYTES))[0]
    return jax.device_put(without_cache(x), target)


def without_cache(x: Any) -> Any:
    """Return a new array with the same buffers, without what JAX caches in the old one, such as a copy on the host.

    Weakly typed arrays and random keys, which JAX cannot make from buffers, are returned as they are.
    """
    if not isinstance(x, jax.Array) or is_key(x) or x.weak_type or not x.is_fully_addressable:
        return x
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])


def renew_if_empty(x: Any) -> Any:
    """Replace an array of size 0 by a new one: jax 0.10 cannot copy one that a sharded computation made."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.size or is_key(x):
        return x
    empty = np.zeros(x.shape, x.dtype)
    return jnp.full(x.shape, empty.dtype.type().item()) if x.weak_type else empty


def _is_of_mesh(has: Any, target: NamedSharding) -> bool:
    """Return whether an array has a sharding on a mesh, in the same kind of memory as another sharding."""
    return isinstance(has, NamedSharding) and has.memory_kind == target.memory_kind


@functools.lru_cache(maxsize=4096)
def _is_exchange(has: Any, target: NamedSharding, ndim: int) -> bool:
    """Return whether an array stays on its mesh and gets other shards there, so that a program can exchange them.

    Between meshes with different axes, XLA may replicate the whole array on each device.
    """
    return _is_of_mesh(has, target) and has.mesh == target.mesh and not has.is_equivalent_to(target, ndim)


@functools.lru_cache(maxsize=256)
def program_to(
    target: NamedSharding, shape: tuple[int, ...], true_shape: tuple[int, ...] = ()
) -> Callable[[Any], jax.Array]:
    """Make a program that exchanges shards, and changes the padding of an array with a true shape to get a shape."""

    def move(x: Any) -> jax.Array:
        return with_padding(padded_array(x, true_shape).unpadded(), shape) if true_shape else x

    return jax.jit(move, out_shardings=target)


def from_each_process(x: Any, sharding: NamedSharding) -> jax.Array:
    """Make one global array from equal arrays of all processes.

    `jax.device_put` would gather the values of all processes to compare them, and does not accept random keys.
    """
    if is_key(x):
        spec = PartitionSpec(*padded(sharding.spec, x.ndim))
        data = from_each_process(jax.random.key_data(x), NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    values = np.asarray(without_cache(x), jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
