"""Slice, choose and move the arrays that the stages of a pipeline work on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.tree_spec import is_key
from ..named_array import is_named_array

Arrays = list[jax.Array]


def at(xs: Arrays, i: Any) -> Arrays:
    return [x[i] for x in xs]


def slice_of(x: jax.Array, position: int, count: int, i: jax.Array) -> jax.Array:
    """Return the `i`-th of `count` slices of an array."""
    size = x.shape[position] // count
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, position)


def which_are_keys(xs: Arrays, old: Any = None) -> list[bool]:
    """Return which arrays are random keys, by their dtype; `old` may also have keys of `jax.random.PRNGKey`."""
    old = old.array if is_named_array(old) else old
    return [is_key(x) or (x is old and x.dtype == np.uint32) for x in xs]


def folded_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Fold a number into each key of an array."""
    if keys.ndim == (0 if is_key(keys) else 1):
        return jax.random.fold_in(keys, number)
    return jax.vmap(lambda key: folded_in(key, number))(keys)


def added(x: jax.Array, y: jax.Array, place: tuple[int, int, jax.Array] | None) -> jax.Array:
    """Add to an array, or to a slice of it, given by arguments of `slice_of`."""
    if place is None or place[1] == 1:
        return x + y
    position, _, i = place
    return jax.lax.dynamic_update_slice_in_dim(x, slice_of(x, *place) + y, i * y.shape[position], position)


def chosen(condition: Any, xs: Arrays, others: Arrays) -> Arrays:
    return [jnp.where(condition, x, y) for x, y in zip(xs, others, strict=True)]


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype of a sum over microbatches."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def floating_parts(xs: Arrays) -> tuple[Arrays, Callable[..., list[Any]]]:
    """Return the arrays that can be differentiated, and a function that restores all arrays from these."""
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in xs]

    def with_others(own: Sequence[Any], others: Sequence[Any] = tuple(xs)) -> list[Any]:
        left = iter(own)
        return [next(left) if is_float else x for x, is_float in zip(others, floats, strict=True)]

    return [x for x, is_float in zip(xs, floats, strict=True) if is_float], with_others


def with_none(xs: Arrays, gradients: Arrays) -> list[Any]:
    """Return gradients for all arrays, in their dtypes; None for arrays that cannot be differentiated."""
    floats, with_others = floating_parts(xs)
    return with_others([g.astype(x.dtype) for g, x in zip(gradients, floats, strict=True)], [None] * len(xs))


# --- sums over devices ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved_widely(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a linear function whose transpose is a sum over devices; compute this sum in a wide dtype."""
    return move(x)


def _moved_backward(move: Callable[[jax.Array], jax.Array], x: jax.Array, given: jax.Array) -> tuple[jax.Array]:
    wide = wide_dtype(x.dtype)
    return (jax.vjp(move, x.astype(wide))[1](given.astype(wide))[0].astype(x.dtype),)


def summed_wide(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return move(x) if wide_dtype(x.dtype) == x.dtype else _moved_widely(move, x)


_moved_widely.defvjp(lambda move, x: (move(x), x), _moved_backward)
