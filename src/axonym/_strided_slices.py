"""Strided slices, with gradients that are right along a sharded axis.

The gradient of a strided slice is a pad with gaps. Where several such gradients are of one array, XLA pads it once for
all, and partitions that with wrong values, or not at all. So here each pads an array of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def strided_slice(cut: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Take every n-th element of an array by `cut`, a function that slices it."""
    return _differentiable(cut, x) if jnp.issubdtype(x.dtype, jnp.inexact) else cut(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(cut: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return cut(x)


@_differentiable.defjvp
def _(cut: Callable[[jax.Array], jax.Array], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (change,) = primals, tangents
    return cut(x), jax.lax.optimization_barrier(cut(change))
