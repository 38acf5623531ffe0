"""Strided slices, with correct gradients along a sharded axis.

The gradient of a strided slice is a pad with gaps. If several such gradients pad the same array, XLA pads it only once,
and partitions this with wrong values, or not at all. So here each gradient pads an array of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def strided_slice(cut: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Take every n-th element of an array, using `cut`, a function that slices it."""
    return _differentiable(cut, x) if jnp.issubdtype(x.dtype, jnp.inexact) else cut(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(cut: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return cut(x)


@_differentiable.defjvp
def _(cut: Callable[[jax.Array], jax.Array], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (change,) = primals, tangents
    return cut(x), jax.lax.optimization_barrier(cut(change))
