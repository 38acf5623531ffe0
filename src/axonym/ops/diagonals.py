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


@_kernels.shared("names", "axes")
def _matrix_kernel(
    what: str, compare: Callable[..., Any], names: Names, axes: tuple[AxisSelector, AxisSelector], k: int, dtype: Any
) -> _kernels.Kernel:
    """Make a kernel that keeps or adds up the elements where the comparison of row + `k` with column holds."""
    if name_of(axes[0]) == name_of(axes[1]):
        raise ValueError(f"{what}: the rows and the columns must be two axes, got {name_of(axes[0])!r} for both.")
    row, col = (names.index(n) for n in _kernels.select(what, names, axes))

    def positional(x):
        first, second = min(row, col), max(row, col)
        plane = (x.shape[first], x.shape[second])
        rows, cols = (jax.lax.broadcasted_iota(jnp.int32, plane, int(axis == second)) for axis in (row, col))
        mask = jax.lax.broadcast_in_dim(compare(rows + k if k else rows, cols), x.shape, (first, second))
        kept = jnp.where(mask, x, jax.lax.full_like(x, 0, shape=()))  # which preserves weak types
        return jnp.sum(kept, (row, col), dtype) if what == "trace" else kept

    out_names = names if what != "trace" else tuple(n for i, n in enumerate(names) if i not in (row, col))
    return _kernels.make_kernel(what, positional, (names,), out_names, selection=axes)


def _apply(
    what: str, compare: Callable[..., Any], array: Any, axis1: Any, axis2: Any, k: int, dtype: Any = None
) -> NamedArray:
    require_named(what, array)
    axes = _kernels.one_selector(what, axis1), _kernels.one_selector(what, axis2)
    return _matrix_kernel(what, compare, array.names, axes, operator.index(k), dtype_key(dtype)).apply(array.array)


def tril(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the lower triangle: zero above a diagonal.

    Arguments:
        axis1: the axis of the rows.
        axis2: the axis of the columns.
        k: the last diagonal that is kept.

    >>> axn.tril(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 0.] [1. 1.]])
    """
    return _apply("tril", operator.ge, array, axis1, axis2, k)


def triu(array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, k: int = 0) -> NamedArray:
    """Return the upper triangle: zero below diagonal `k`. The other arguments are as for `tril`.

    >>> axn.triu(axn.ones({"row": 2, "col": 2}), "row", "col")
    NamedArray(float32[row=2, col=2], [[1. 1.] [0. 1.]])
    """
    return _apply("triu", operator.le, array, axis1, axis2, k)


def trace(
    array: NamedArray, axis1: AxisSelector, axis2: AxisSelector, offset: int = 0, dtype: DTypeLike | None = None
) -> NamedArray:
    """Sum a diagonal.

    The axes of the matrix are as for `tril`, and `offset` says which diagonal: 0 is the main one. `dtype` is the dtype
    to compute in.

    >>> axn.trace(axn.named([[1, 2], [3, 4]], ("row", "col")), "row", "col")
    NamedArray(int32[], 5)
    """
    return _apply("trace", operator.eq, array, axis1, axis2, offset, dtype)
