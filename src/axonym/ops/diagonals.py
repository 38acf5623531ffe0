"""Diagonals and triangles of matrices, whose rows and columns are two named axes.

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
from ._operands import check_new_axis, distinct, dtype_key, only_axis, replaced, require_named


def _where(compare: Callable[..., Any], x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    """Keep `x` where the comparison of row + `k` with column holds, with zero elsewhere."""
    first, second = min(row, col), max(row, col)
    plane = (x.shape[first], x.shape[second])
    rows, cols = (jax.lax.broadcasted_iota(jnp.int32, plane, int(axis == second)) for axis in (row, col))
    mask = jax.lax.broadcast_in_dim(compare(rows + k if k else rows, cols), x.shape, (first, second))
    return jnp.where(mask, x, jax.lax.full_like(x, 0, shape=()))  # which preserves weak types


@_kernels.shared("names", "axes", "new_axis")
def _matrix_kernel(
    fn: Callable[..., jax.Array],
    what: str,
    names: Names,
    axes: tuple[AxisSelector, AxisSelector],
    new_axis: AxisSelector | None,
    *static: Any,
) -> _kernels.Kernel:
    """Make a kernel for `fn(x, row, col, *static)`, which keeps the axes, or puts the new one in their place."""
    if name_of(axes[0]) == name_of(axes[1]):
        raise ValueError(f"{what}: the rows and the columns must be two axes, got {name_of(axes[0])!r} for both.")
    row, col = (names.index(n) for n in _kernels.select(what, names, axes))
    batch = tuple(n for i, n in enumerate(names) if i not in (row, col))

    def positional(x):
        found = fn(x, row, col, *static)
        if new_axis is not None:
            check_new_axis(what, new_axis, found.shape[-1])
        return found

    out_names = names if fn in (_lower, _upper) else batch if new_axis is None else (*batch, name_of(new_axis))
    return _kernels.make_kernel(what, positional, (names,), distinct(what, out_names), selection=axes)


def _apply(
    fn: Callable[..., Any], what: str, array: Any, axis1: Any, axis2: Any, *static: Any, new_axis: Any = None
) -> NamedArray:
    require_named(what, array)
    axes = _kernels.one_selector(what, axis1), _kernels.one_selector(what, axis2)
    return _matrix_kernel(fn, what, array.names, axes, new_axis, *static).apply(array.array)


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
    """Sum a diagonal, as `diagonal` returns it; `dtype` is the dtype to compute in.

    >>> axn.trace(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col")
    NamedArray(int32[], 5)
    """
    return _apply(_trace, "trace", array, axis1, axis2, operator.index(offset), dtype_key(dtype))


def _trace(x: jax.Array, row: int, col: int, k: int, dtype: Any) -> jax.Array:
    return jnp.sum(_where(operator.eq, x, row, col, k), (row, col), dtype)


def diagonal(
    array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, *, new_axis: AxisSelector, offset: int = 0
) -> NamedArray:
    """Return the elements of a diagonal, along a new last axis.

    The axes of the matrix are as for `tril`, and `offset` says which diagonal: 0 is the main one.

    >>> axn.diagonal(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col", new_axis="row")
    NamedArray(int32[row=2], [1 4])
    """
    return _apply(_diagonal, "diagonal", array, axis1, axis2, operator.index(offset), new_axis=new_axis)


def _diagonal(x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    return jnp.diagonal(x, k, row, col)


def diag(
    vector: NamedArray, Row: AxisSelector, Col: AxisSelector, *, axis: AxisSelector | None = None, k: int = 0
) -> NamedArray:
    """Make a matrix of zeros with a vector on a diagonal.

    Arguments:
        Row: the axis of the rows. Rows and columns take the place of the vector's axis. A size is checked.
        Col: the axis of the columns.
        axis: the axis of the vector; only needed if there are several.
        k: which diagonal. The matrix is larger than the vector by its distance from the main one.

    >>> axn.diag(axn.named([1, 2], "x"), "row", "col")
    NamedArray(int32[row=2, col=2], [[1 0] [0 2]])
    """
    require_named("diag", vector)
    return _diag_kernel(vector.names, only_axis("diag", vector, axis), Row, Col, operator.index(k)).apply(vector.array)


@_kernels.shared("names", "axis", "Row", "Col")
def _diag_kernel(names: Names, axis: AxisSelector, Row: AxisSelector, Col: AxisSelector, k: int) -> _kernels.Kernel:
    along = _kernels.select_one("diag", names, axis)
    row = names.index(along)
    out_names = replaced("diag", names, along, (Row, Col))

    def positional(x):
        size = x.shape[row] + abs(k)
        check_new_axis("diag", Row, size)
        check_new_axis("diag", Col, size)
        # Along the columns, each element is in its column of every row; the mask leaves it on the diagonal only.
        widths = [(max(k, 0), max(-k, 0), 0) if i == row else (0, 0, 0) for i in range(x.ndim)]
        columns = jax.lax.expand_dims(jax.lax.pad(x, jax.lax.full_like(x, 0, shape=()), widths), (row,))
        square = jnp.broadcast_to(columns, (*columns.shape[:row], size, *columns.shape[row + 1 :]))
        return _where(operator.eq, square, row, row + 1, k)

    return _kernels.make_kernel("diag", positional, (names,), out_names, selection=axis)
