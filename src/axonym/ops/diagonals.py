"""Diagonals and triangles of matrices, whose rows and columns are two named axes.

`axis1` is the axis of the rows and `axis2` that of the columns; all others are batch axes. Offsets count from the main
diagonal: positive ones are above it, negative ones below.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _kernels
from ..array import NamedArray, wrap
from ..axis import AxisSelector, Names, name_of
from ._operands import check_new_axis, distinct, dtype_key, only_axis, replaced, require_named


def _matrix_axes(what: str, names: Names, axis1: AxisSelector, axis2: AxisSelector) -> tuple[int, int]:
    row, col = name_of(axis1), name_of(axis2)
    if row == col:
        raise ValueError(f"{what}: the rows and the columns must be two axes, got {row!r} for both.")
    row, col = _kernels.select(what, names, (axis1, axis2))
    return names.index(row), names.index(col)


def _where(compare: Callable[..., Any], x: jax.Array, row: int, col: int, k: int) -> jax.Array:
    """Return `x` where the comparison of row + `k` with column holds, and zero elsewhere."""
    first, second = min(row, col), max(row, col)
    plane = (x.shape[first], x.shape[second])
    rows, cols = (jax.lax.broadcasted_iota(jnp.int32, plane, int(axis == second)) for axis in (row, col))
    mask = jax.lax.broadcast_in_dim(compare(rows + k if k else rows, cols), x.shape, (first, second))
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def tril(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the lower triangle: zero above a diagonal.

    Arguments:
        array: a named array.
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        k: the last diagonal that is kept.

    >>> axn.tril(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 0.] [1. 1.]])
    """
    return _triangle(operator.ge, "tril", array, axis1, axis2, k)


def triu(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the upper triangle: zero below a diagonal.

    Arguments:
        array: a named array.
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        k: the first diagonal that is kept.

    >>> axn.triu(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 1.] [0. 1.]])
    """
    return _triangle(operator.le, "triu", array, axis1, axis2, k)


def _triangle(keep: Callable[..., Any], what: str, array: Any, axis1: Any, axis2: Any, k: int) -> NamedArray:
    require_named(what, array)
    axis1, axis2 = _kernels.one_selector(what, axis1), _kernels.one_selector(what, axis2)
    kernel = _triangle_kernel(keep, what, array.names, axis1, axis2, operator.index(k))
    return wrap(kernel.call(array.array), kernel.names)


@_kernels.cached
def _triangle_kernel(
    keep: Callable[..., Any], what: str, names: Names, axis1: AxisSelector, axis2: AxisSelector, k: int
) -> _kernels.Kernel:
    row, col = _matrix_axes(what, names, axis1, axis2)

    def positional(x):
        return _where(keep, x, row, col, k)

    return _kernels.make_kernel(what, positional, (names,), names, selection=(axis1, axis2))


def trace(
    array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, offset: int = 0, dtype: Any = None
) -> NamedArray:
    """Sum a diagonal.

    Arguments:
        array: a named array.
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        offset: which diagonal.
        dtype: the dtype to compute in.

    >>> axn.trace(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col")
    NamedArray(int32[], 5)
    """
    require_named("trace", array)
    axis1, axis2 = _kernels.one_selector("trace", axis1), _kernels.one_selector("trace", axis2)
    kernel = _trace_kernel(array.names, axis1, axis2, operator.index(offset), dtype_key(dtype))
    return wrap(kernel.call(array.array), kernel.names)


@_kernels.cached
def _trace_kernel(names: Names, axis1: AxisSelector, axis2: AxisSelector, offset: int, dtype: Any) -> _kernels.Kernel:
    row, col = _matrix_axes("trace", names, axis1, axis2)

    def positional(x):
        return jnp.sum(_where(operator.eq, x, row, col, offset), (row, col), dtype)

    out_names = tuple(n for i, n in enumerate(names) if i not in (row, col))
    return _kernels.make_kernel("trace", positional, (names,), out_names, selection=(axis1, axis2))


def diagonal(
    array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, *, new_axis: AxisSelector, offset: int = 0
) -> NamedArray:
    """Return the elements of a diagonal, along a new last axis.

    Arguments:
        array: a named array.
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        new_axis: the axis of the diagonal.
        offset: which diagonal.

    >>> axn.diagonal(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col", new_axis="row")
    NamedArray(int32[row=2], [1 4])
    """
    require_named("diagonal", array)
    axis1, axis2 = _kernels.one_selector("diagonal", axis1), _kernels.one_selector("diagonal", axis2)
    kernel = _diagonal_kernel(array.names, axis1, axis2, new_axis, operator.index(offset))
    return wrap(kernel.call(array.array), kernel.names)


@_kernels.cached
def _diagonal_kernel(
    names: Names, axis1: AxisSelector, axis2: AxisSelector, new_axis: AxisSelector, offset: int
) -> _kernels.Kernel:
    row, col = _matrix_axes("diagonal", names, axis1, axis2)

    def positional(x):
        found = jnp.diagonal(x, offset, row, col)
        check_new_axis("diagonal", new_axis, found.shape[-1])
        return found

    kept = tuple(n for i, n in enumerate(names) if i not in (row, col))
    out_names = distinct("diagonal", (*kept, name_of(new_axis)))
    return _kernels.make_kernel("diagonal", positional, (names,), out_names, selection=(axis1, axis2))


def diag(
    vector: NamedArray, Row: AxisSelector, Col: AxisSelector, *, axis: AxisSelector | None = None, k: int = 0
) -> NamedArray:
    """Make a matrix of zeros with a vector on a diagonal.

    Arguments:
        vector: a named array.
        Row: the axis of the rows. Rows and columns take the place of the vector's axis. A size is checked.
        Col: the axis of the columns.
        axis: the axis of the vector; only needed if there are several.
        k: which diagonal. The matrix is larger than the vector by its distance from the main one.

    >>> axn.diag(axn.named([1, 2], "x"), "row", "col")
    NamedArray(int32[row=2, col=2], [[1 0] [0 2]])
    """
    require_named("diag", vector)
    kernel = _diag_kernel(vector.names, only_axis("diag", vector, axis), Row, Col, operator.index(k))
    return wrap(kernel.call(vector.array), kernel.names)


@_kernels.cached
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
        columns = jax.lax.expand_dims(jax.lax.pad(x, jnp.zeros((), x.dtype), widths), (row,))
        square = jnp.broadcast_to(columns, (*columns.shape[:row], size, *columns.shape[row + 1 :]))
        return _where(operator.eq, square, row, row + 1, k)

    return _kernels.make_kernel("diag", positional, (names,), out_names, selection=axis)
