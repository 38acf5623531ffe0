"""Sort raw arrays, with a gradient that XLA can partition."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..distribution.mesh_axes import evenly_sharded
from ..distribution.per_device import vary_like


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sort_along(axis: int, x: jax.Array) -> jax.Array:
    """Sort, with a gradient that XLA can partition: the gradient of `jnp.sort` looks up unsigned positions.

    For these XLA ends the process if an axis of the array is sharded unevenly, as a slice of a sharded axis is.
    """
    return jnp.sort(x, axis=axis)


@sort_along.defjvp
def _(axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    result, order = _with_positions(axis, *primals)
    return result, take_in_order(*tangents, order, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_positions(axis: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    result, order = jax.lax.sort((x, positions_along(axis, x)), dimension=axis, num_keys=1)
    return result, order


@_with_positions.defjvp
def _(axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    result, order = _with_positions(axis, *primals)
    return (result, order), (take_in_order(*tangents, order, axis), np.zeros(order.shape, jax.dtypes.float0))


def positions_along(axis: int, x: jax.Array) -> jax.Array:
    """Return the position of each element along an axis."""
    return vary_like(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis), x)


def take_in_order(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """Reorder elements along an axis by their positions, which are signed, so that XLA can partition the gradient."""
    names = ["" if i != axis else "order" for i in range(x.ndim)]
    order = evenly_sharded("sort", names, order, ["order"], beside=[x])
    found = jnp.take_along_axis(x, order, axis, mode="promise_in_bounds")
    return evenly_sharded("sort", names, found, ["order"])
