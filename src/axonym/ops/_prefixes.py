"""Compute all prefixes of an associative operation in parallel, with correct gradients along a sharded axis.

`jax.lax.associative_scan` selects every other element by a strided slice, and interleaves two halves by padding both
with gaps. If the axis is sharded over Auto mesh axes and the cotangent is not, XLA partitions the gradient of this
with wrong values. This module uses reshapes instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.jax_versions import set_apart

Arrays = list[jax.Array]


def associative_scan(fn: Callable[[Arrays, Arrays], Arrays], xs: Sequence[jax.Array], axis: int) -> Arrays:
    """Combine the elements along an axis, keeping every intermediate result."""
    size = xs[0].shape[axis]
    if size < 2:
        return list(xs)
    half = size // 2

    def part(x: jax.Array, start: int, stop: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, start, stop, axis=axis)

    pairs = [part(x, 0, 2 * half).reshape(*x.shape[:axis], half, 2, *x.shape[axis + 1 :]) for x in xs]
    first, second = ([jax.lax.index_in_dim(x, i, axis + 1, keepdims=False) for x in pairs] for i in (0, 1))
    odd = associative_scan(fn, fn(first, second), axis)  # up to the second element of each pair
    even = [part(x, 0, 1) for x in first]
    if half > 1:
        rest = fn([part(x, 0, half - 1) for x in odd], [part(x, 1, half) for x in first])
        even = [jax.lax.concatenate([x, y], axis) for x, y in zip(even, rest, strict=True)]
    both = [jnp.stack([x, y], axis + 1) for x, y in zip(even, odd, strict=True)]
    found = [x.reshape(*x.shape[:axis], 2 * half, *x.shape[axis + 2 :]) for x in both]
    if size % 2:
        last = fn([part(x, half - 1, half) for x in odd], [part(x, size - 1, size) for x in xs])
        found = [jax.lax.concatenate([x, y], axis) for x, y in zip(found, last, strict=True)]
    return found


def cumprod(x: jax.Array, axis: int, dtype: Any = None) -> jax.Array:
    """Compute the running product as `jax.numpy.cumprod` does, with the gradient of an associative scan."""
    x = x if dtype is None else x.astype(dtype)
    return _cumprod(axis, x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.cumprod(set_apart(x), axis)


def nancumprod(x: jax.Array, axis: int, dtype: Any = None) -> jax.Array:
    """Compute the running product, counting NaN as one."""
    x = jnp.where(jnp.isnan(x), 1, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    return cumprod(x, axis, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cumprod(axis: int, x: jax.Array) -> jax.Array:
    return jnp.cumprod(set_apart(x), axis)  # a running sum of the same array pads it with zeros, and not with ones


@_cumprod.defjvp
def _(axis: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    def products(x: jax.Array) -> jax.Array:
        return associative_scan(lambda a, b: [jnp.multiply(*a, *b)], [x], axis)[0]

    _, change = jax.jvp(products, primals, tangents)
    return _cumprod(axis, *primals), change
