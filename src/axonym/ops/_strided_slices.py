"""Strided slices and pads with gaps, with correct values and gradients along a sharded axis.

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
from collections.abc import Sequence

import jax
import jax.numpy as jnp


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
