"""Sort along one axis.

Elements are ordered as in NumPy: NaN comes last. The axis can be left out for arrays with only one.
`axonym.top_k` brings its own partitioning, so it is in `axonym.custom_partitioning`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelector
from ..core import errors
from ..distribution.per_device import vary_like
from ..named_array import NamedArray
from ._operands import apply_along, only_axis, require_named
from ._sort_gradient import sort_along


@errors.say_how_to_call
def sort(a: NamedArray, axis: AxisSelector | None = None, *, descending: bool = False) -> NamedArray:
    """Sort elements along an axis, the largest first if `descending`.

    >>> axn.sort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 3])
    """
    axis = only_axis("sort", require_named("sort", a), axis)
    return apply_along(_sort, "sort", a, axis, descending=bool(descending))


def _sort(x: jax.Array, axis: int, descending: bool) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.sort(x, axis=axis, descending=descending)
    return jnp.flip(sort_along(axis, x), axis) if descending else sort_along(axis, x)


def argsort(
    a: NamedArray, axis: AxisSelector | None = None, *, stable: bool = True, descending: bool = False
) -> NamedArray:
    """Return the positions that sort the elements along an axis, as `sort` does.

    Equal elements keep their order. With `stable=False` they need not, which can be faster.

    >>> axn.argsort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 0])
    """
    axis = only_axis("argsort", require_named("argsort", a), axis)
    return apply_along(_positions, "argsort", a, axis, stable=bool(stable), descending=bool(descending))


def _positions(x: jax.Array, **options: Any) -> jax.Array:
    # Inside `shard_map`, JAX sorts positions together with values, and assumes that they are the same on all devices.
    return vary_like(jnp.argsort(x, **options), x)


# JAX's partition takes the largest and the smallest elements, and on GPUs not each NaN is among the largest.
