"""Prefixes of an associative operation, strided slices and pads with gaps that XLA partitions rightly.

`jax.lax.associative_scan` selects every other element by a strided slice, and interleaves two halves by padding both
with gaps. If the axis is sharded over Auto mesh axes and the cotangent is not, XLA partitions the gradient of this
with wrong values. So prefixes are computed with reshapes here.

XLA partitions a slice or a pad that does two things at once wrongly, or not at all:

- A strided slice that starts within the array, if less than a stride is left of the shards that it takes. So here the
  part is cut out first.
- A pad with gaps and edges, if the edges are larger than a shard; or with gaps and a negative edge. So here the gaps
  are inserted first. The gradient of a strided slice is such a pad.

If several gradients of strided slices pad the same array, XLA pads it only once, which again gives wrong values or
fails. So here each gradient pads an array of its own.
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


# --- slices and pads ---


def strided_slice(x: jax.Array, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> jax.Array:
    """Take every n-th element of a part of an array, as `jax.lax.slice` does."""
    ends, steps = list(limits), list(strides)
    for i, step in enumerate(strides):
        if step > 1:
            taken = range(starts[i], limits[i], step)
            ends[i] = taken[-1] + 1 if taken else starts[i]
            steps[i] = step if len(taken) > 1 else 1
    part, steps = jax.lax.slice(x, starts, ends), tuple(steps)
    if set(steps) <= {1}:
        return part
    return _every(steps, part) if jnp.issubdtype(x.dtype, jnp.inexact) else _select(steps, part)


def _select(steps: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jax.lax.slice(x, (0,) * x.ndim, x.shape, steps)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _every(steps: tuple[int, ...], x: jax.Array) -> jax.Array:
    return _select(steps, x)


@_every.defjvp
def _(steps: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (change,) = primals, tangents
    return _every(steps, x), jax.lax.optimization_barrier(_select(steps, change))


def pad_with_gaps(x: jax.Array, widths: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Add zeros before, after and between the elements of each axis, as `jax.lax.pad` does; cut off negative edges."""
    zero = jnp.zeros((), x.dtype)
    gaps = [(0, 0, between) for _, _, between in widths]
    edges = [(max(before, 0), max(after, 0), 0) for before, after, _ in widths]
    for each in (gaps, edges):
        if any(map(any, each)):
            x = jax.lax.pad(x, zero, each)
    starts = [max(-before, 0) for before, _, _ in widths]
    ends = [size - max(-after, 0) for size, (_, after, _) in zip(x.shape, widths, strict=True)]
    return jax.lax.slice(x, starts, ends) if any(starts) or tuple(ends) != x.shape else x
