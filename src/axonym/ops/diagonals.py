"""Traces and triangles of matrices, whose rows and columns are two named axes.

`axis1` is the axis of the rows and `axis2` the axis of the columns; all others are batch axes. Offsets count from the
main diagonal: positive ones are above it, negative ones below.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import AxisSelector, Names, name_of
from ..named_array import NamedArray
from . import _kernels
from ._operands import dtype_key, require_named


def _where(compare: Callable[..., Any], x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    """Keep `x` where the comparison of row + `k` with column holds, with zero elsewhere."""
    first, second = min(row, col), max(row, col)
    plane = (x.shape[first], x.shape[second])
    rows, cols = (jax.lax.broadcasted_iota(jnp.int32, plane, int(axis == second)) for axis in (row, col))
    mask = jax.lax.broadcast_in_dim(compare(rows + k if k else rows, cols), x.shape, (first, second))
    return jnp.where(mask, x, jax.lax.full_like(x, 0, shape=()))  # which preserves weak types


@_kernels.shared("names", "axes")
def _matrix_kernel(
    fn: Callable[..., jax.Array],
    what: str,
    names: Names,
    axes: tuple[AxisSelector, AxisSelector],
    *static: Any,
) -> _kernels.Kernel:
    """Make a kernel for `fn(x, row, col, *static)`, which keeps the axes, or adds up over them."""
    if name_of(axes[0]) == name_of(axes[1]):
        raise ValueError(f"{what}: the rows and the columns must be two axes, got {name_of(axes[0])!r} for both.")
    row, col = (names.index(n) for n in _kernels.select(what, names, axes))
    batch = tuple(n for i, n in enumerate(names) if i not in (row, col))
    out_names = batch if fn is _trace else names
    return _kernels.make_kernel(what, lambda x: fn(x, row, col, *static), (names,), out_names, selection=axes)


def _apply(fn: Callable[..., Any], what: str, array: Any, axis1: Any, axis2: Any, *static: Any) -> NamedArray:
    require_named(what, array)
    axes = _kernels.one_selector(what, axis1), _kernels.one_selector(what, axis2)
    return _matrix_kernel(fn, what, array.names, axes, *static).apply(array.array)


def tril(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the lower triangle: zero above a diagonal.

    Arguments:
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        k: the last diagonal that is kept.

    >>> axn.tril(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 0.] [1. 1.]])
    """
    return _apply(_lower, "tril", array, axis1, axis2, operator.index(k))


def _lower(x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    return _where(operator.ge, x, row, col, k)


def triu(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the upper triangle: zero below diagonal `k`. The other arguments are as for `tril`.

    >>> axn.triu(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 1.] [0. 1.]])
    """
    return _apply(_upper, "triu", array, axis1, axis2, operator.index(k))


def _upper(x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    return _where(operator.le, x, row, col, k)


def trace(
    array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, offset: int = 0, dtype: DTypeLike | None = None
) -> NamedArray:
    """Sum a diagonal.

    The axes of the matrix are as for `tril`, and `offset` says which diagonal: 0 is the main one. `dtype` is the dtype
    to compute in.

    >>> axn.trace(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col")
    NamedArray(int32[], 5)
    """
    return _apply(_trace, "trace", array, axis1, axis2, operator.index(offset), dtype_key(dtype))


def _trace(x: jax.Array, row: int, col: int, k: int, dtype: Any) -> jax.Array:
    return jnp.sum(_where(operator.eq, x, row, col, k), (row, col), dtype)
