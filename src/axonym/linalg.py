"""Linear algebra by name.

A matrix is a named array and a pair of its axes, `axes=(row, col)`; all others are batch axes. A matrix maps vectors
along `col` to vectors along `row`, `dot(a, x, axis="col")`, and the axes of results follow from that: the inverse,
which maps back, has the axes (col, row), so that `dot(inv(a, axes), b, axis="row")` solves `a x = b`. If a result has
an axis that no operand has, such as the axis of eigenvalues, `new_axis` names it, and the size of an `Axis` is checked.

The axes of a result take the positions of the matrix's axes, and batch axes keep theirs. The axes of the matrix need
not be last or adjacent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from .axis import Axis, AxisSelection, AxisSelector, Names, name_of
from .core import errors
from .named_array import NamedArray
from .ops import _kernels
from .ops._blocks import blocks_of, pencils
from .ops._op_types import publish
from .ops._operands import (
    as_float,
    at_least_float32,
    check_new_axis,
    distinct,
    require_named,
    require_subset,
    static_number,
)

__all__ = [
    "cholesky",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "norm",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tridiagonal_solve",
]

MatrixAxes: TypeAlias = "tuple[AxisSelector, AxisSelector]"
_Two: TypeAlias = tuple[NamedArray, NamedArray]
T_co = TypeVar("T_co", covariant=True)


# --- kernels for operations on matrices ---


class _Form(NamedTuple):
    """How a positional function on (..., row, col) changes the axes of its matrices."""

    results: tuple[tuple[str, ...], ...]
    """The axes of each result, made of "row", "col" and "new", in the order the function returns them."""
    square: bool = False
    """Row and col must have the same size."""
    way_out: str = ""
    """Advice for a matrix that is not square."""
    transposes: bool = False
    """The result for a transposed matrix is the transposed result, so no transpose is necessary."""


def _pair_of_axes(what: str, axes: Any) -> tuple[AxisSelector, AxisSelector]:
    """Return the two axes of a matrix."""
    if isinstance(axes, (str, Axis)) or not isinstance(axes, Sequence) or len(axes) != 2:
        raise TypeError(f'{what}: the axes of a matrix are a pair, such as ("row", "col"); got {axes!r}.')
    return tuple(axes)


def _check_matrix(what: str, form: _Form, matrix: Names, x: jax.Array) -> None:
    """Raise an error if the operation is not defined for the matrices, which are on the last two axes."""
    rows, cols = x.shape[-2:]
    if form.square and rows != cols:
        raise ValueError(
            f"{what}: the matrix {errors.describe_axes(matrix, (rows, cols))} is not square.{form.way_out}"
        )
    _check_dtype(what, x)


def _check_dtype(what: str, x: jax.Array) -> None:
    """Raise for a dtype in which nothing can be decomposed."""
    if jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits < 32:
        raise TypeError(f"{what}: there is no {x.dtype} routine for it. Convert with `.astype(jnp.float32)` first.")


@_kernels.shared("names", "axes", "new_axis")
def _matrix_kernel(
    fn: Callable[..., Any],
    what: str,
    form: _Form,
    names: Names,
    axes: MatrixAxes,
    new_axis: AxisSelector | None,
    options: tuple[str, ...],
    *values: Any,
) -> _kernels.Kernel:
    """Move the axes of the matrices last, call `fn`, and move the axes of the results back to their positions."""
    row, col = _kernels.select(what, names, axes)
    if form.transposes and names.index(row) > names.index(col):
        row, col = col, row  # the layout that the array has already
    batch = tuple(n for n in names if n not in (row, col))
    new = name_of(new_axis) if isinstance(new_axis, (Axis, str)) else None
    if new is None and any("new" in result for result in form.results):
        raise TypeError(f"{what}: `new_axis` is an Axis or a name, got {new_axis!r} of type {type(new_axis).__name__}.")
    roles = {"row": row, "col": col, "new": new}
    canonical: list[Names] = []
    layouts: list[Names] = []
    for result in form.results:
        matrix = tuple(roles[r] for r in result)
        # The first axis of a result takes the position of row, the last one the position of col.
        place = {row: matrix[:-1], col: matrix[-1:]}
        canonical.append((*batch, *matrix))
        layouts.append(distinct(what, tuple(m for n in names for m in place.get(n, (n,)))))
    several = len(form.results) > 1

    def positional(x):
        x = _kernels.transpose_to(x, names, (*batch, row, col))
        _check_matrix(what, form, (row, col), x)
        found = fn(x, **dict(zip(options, values, strict=True)))
        found = tuple(found) if several else (found,)
        if new_axis is not None:
            check_new_axis(what, new_axis, found[0].shape[canonical[0].index(new)])
        found = tuple(map(_kernels.transpose_to, found, canonical, layouts))
        return found if several else found[0]

    out_names = tuple(layouts) if several else layouts[0]
    whole = dict.fromkeys((row, col), "whole")
    return _kernels.make_kernel(what, positional, (names,), out_names, whole, selection=axes)


def _apply_to_matrices(
    fn: Callable[..., Any],
    what: str,
    form: _Form,
    a: NamedArray,
    axes: MatrixAxes,
    new_axis: AxisSelector | None = None,
    **options: Any,
) -> Any:
    require_named(what, a)
    return _matrix_kernel(
        fn, what, form, a.names, _pair_of_axes(what, axes), new_axis, tuple(options), *options.values()
    ).apply(a.array)


_INVERSE = _Form(
    (("col", "row"),),
    square=True,
    way_out=" `axonym.lift` applies `jnp.linalg.pinv` and `lstsq`, which take any matrix.",
    transposes=True,
)
_MATRIX = _Form((("row", "col"),), square=True)
_SCALARS = _Form(((), ()), square=True, transposes=True)
_EIGENVALUES = _Form((("new",),), square=True, way_out=" `linalg.svd` takes a matrix of any shape.")
_EIGENVECTORS = _EIGENVALUES._replace(results=(("new",), ("row", "new")))


# --- one row each: the function of matrices, its form, its summary, a matrix, the result ---


class _MatrixFunction(Protocol[T_co]):
    def __call__(self, a: NamedArray, axes: MatrixAxes) -> T_co: ...


class _Decomposition(Protocol[T_co]):
    def __call__(self, a: NamedArray, axes: MatrixAxes, new_axis: AxisSelector) -> T_co: ...


def _make_function(fn: Callable[..., Any], form: _Form, summary: str, example: str, *shown: str) -> Any:
    what = f"linalg.{fn.__name__}"
    makes_axis = any("new" in result for result in form.results)

    def function(a: NamedArray, axes: MatrixAxes) -> Any:
        return _apply_to_matrices(fn, what, form, a, axes)

    def decomposition(a: NamedArray, axes: MatrixAxes, new_axis: AxisSelector) -> Any:
        return _apply_to_matrices(fn, what, form, a, axes, new_axis)

    results = ", ".join(f"NamedArray({result})" for result in shown)
    doc = f"""{summary}

    >>> axn.{what}(axn.named({example}, ("i", "j")), ("i", "j"){makes_axis * ', "k"'})
    {results if len(shown) == 1 else f"({results})"}
    """
    return publish(decomposition if makes_axis else function, fn.__name__, __name__, doc)


_DIAGONAL = "[[3., 0.], [0., 2.]]"

# fmt: off
inv: _MatrixFunction[NamedArray] = _make_function(jnp.linalg.inv, _INVERSE, "Compute the inverse of square matrices, with the axes (col, row).", "[[2., 0.], [1., 1.]]", "float32[j=2, i=2], [[ 0.5 0. ] [-0.5 1. ]]")
cholesky: _MatrixFunction[NamedArray] = _make_function(jnp.linalg.cholesky, _MATRIX, "Compute the lower triangular Cholesky factor of symmetric or Hermitian positive definite matrices.", "[[4., 2.], [2., 5.]]", "float32[i=2, j=2], [[2. 0.] [1. 2.]]")
det: _MatrixFunction[NamedArray] = _make_function(jnp.linalg.det, _SCALARS._replace(results=((),)), "Compute the determinant of square matrices.", "[[1., 2.], [3., 4.]]", "float32[], -2.")
slogdet: _MatrixFunction[_Two] = _make_function(jnp.linalg.slogdet, _SCALARS, "Compute the sign of the determinant of square matrices, and the logarithm of its absolute value.", "[[-1., 0.], [0., 1.]]", "float32[], -1.", "float32[], 0.")
eigh: _Decomposition[_Two] = _make_function(jnp.linalg.eigh, _EIGENVECTORS, "Compute the ascending eigenvalues of symmetric or Hermitian matrices, and the eigenvectors (row, new).", _DIAGONAL, "float32[k=2], [2. 3.]", "float32[i=2, k=2], [[0. 1.] [1. 0.]]")
eigvalsh: _Decomposition[NamedArray] = _make_function(jnp.linalg.eigvalsh, _EIGENVALUES, "Compute the ascending eigenvalues of symmetric or Hermitian matrices.", _DIAGONAL, "float32[k=2], [2. 3.]")
eig: _Decomposition[_Two] = _make_function(jnp.linalg.eig, _EIGENVECTORS, "Compute the eigenvalues of square matrices, and the eigenvectors (row, new); both are complex.", _DIAGONAL, "complex64[k=2], [3.+0.j 2.+0.j]", "complex64[i=2, k=2], [[1.+0.j 0.+0.j] [0.+0.j 1.+0.j]]")
eigvals: _Decomposition[NamedArray] = _make_function(jnp.linalg.eigvals, _EIGENVALUES, "Compute the eigenvalues of square matrices, which are complex.", _DIAGONAL, "complex64[k=2], [3.+0.j 2.+0.j]")
svdvals: _Decomposition[NamedArray] = _make_function(jnp.linalg.svdvals, _Form((("new",),), transposes=True), "Compute the descending singular values of matrices of any shape.", "[[0., 3., 0.], [2., 0., 0.]]", "float32[k=2], [3. 2.]")
# fmt: on


# --- functions of any matrix ---


@errors.say_how_to_call
def qr(a: NamedArray, axes: MatrixAxes, new_axis: AxisSelector) -> tuple[NamedArray, NamedArray]:
    """Compute the reduced QR decomposition: orthonormal columns Q (row, new) and upper triangular R (new, col).

    The size of `new_axis`, the axis of the columns of Q, is the smaller one of row and col.

    >>> q, r = axn.linalg.qr(axn.ones({"i": 3, "j": 2}), ("i", "j"), "k")
    >>> q.shape, r.shape
    ({'i': 3, 'k': 2}, {'k': 2, 'j': 2})
    """
    return _apply_to_matrices(jnp.linalg.qr, "linalg.qr", _Form((("row", "new"), ("new", "col"))), a, axes, new_axis)


@errors.say_how_to_call
def svd(a: NamedArray, axes: MatrixAxes, new_axis: AxisSelector) -> tuple[NamedArray, NamedArray, NamedArray]:
    """Compute the reduced singular value decomposition.

    Return U with the axes (row, new), the singular values along new in descending order, and the conjugate of V with
    the axes (new, col): the product of the three over `new_axis` is `a`. `svdvals` returns the singular values alone.

    Arguments:
        new_axis: the axis of the singular values, whose size is the smaller one of row and col.

    >>> a = axn.named([[0., 3., 0.], [2., 0., 0.]], ("i", "j"))
    >>> u, s, vh = axn.linalg.svd(a, ("i", "j"), "k")
    >>> u.shape, s, vh.shape
    ({'i': 2, 'k': 2}, NamedArray(float32[k=2], [3. 2.]), {'k': 2, 'j': 3})
    """
    form = _Form((("row", "new"), ("new",), ("new", "col")))
    return _apply_to_matrices(jnp.linalg.svd, "linalg.svd", form, a, axes, new_axis, full_matrices=False)


# --- systems of equations ---


@_kernels.shared("a_names", "b_names", "axes")
def _solve_kernel(a_names: Names, b_names: Names, axes: MatrixAxes) -> _kernels.Kernel:
    what = "linalg.solve"
    row, col = _kernels.select(what, a_names, axes)
    _kernels.select(what, b_names, row, operand=1)
    if col in b_names:
        raise ValueError(
            f"{what}: the right-hand side {errors.describe_axes(b_names)} has axis {col!r}, which the result has in "
            f"the place of {row!r}. Rename it there."
        )
    batch = tuple(n for n in a_names if n not in (row, col))
    sides = tuple(n for n in b_names if n != row and n not in batch)
    canonical = (*batch, col, *sides)
    # The layout of b, after the batch axes that only a has.
    out_names = tuple(n for n in batch if n not in b_names) + tuple(col if n == row else n for n in b_names)

    def positional(a, b):
        a = _kernels.transpose_to(a, a_names, (*batch, row, col))
        _check_matrix(what, _INVERSE, (row, col), a)
        b = _kernels.align(b, b_names, (*batch, row, *sides))
        many = b.shape[len(batch) + 1 :]
        # Each right-hand side is a column of one matrix.
        x = jnp.linalg.solve(a, b.reshape(*b.shape[: len(batch) + 1], math.prod(many)))
        return _kernels.transpose_to(x.reshape(*x.shape[:-1], *many), canonical, out_names)

    whole = dict.fromkeys((row, col), "whole")
    return _kernels.make_kernel(what, positional, (a_names, b_names), out_names, whole, selection=axes)


@errors.say_how_to_call
def solve(a: NamedArray, b: NamedArray, axes: MatrixAxes) -> NamedArray:
    """Solve `a x = b`, that is `dot(a, x, axis=col) = b`, for square matrices.

    Arguments:
        b: the right-hand side, with the axis row. Axes that it shares with `a` are matched; others are further
            right-hand sides. The result has the layout of `b`, with col in place of row.

    >>> a = axn.named([[2., 0.], [1., 1.]], ("i", "j"))
    >>> axn.linalg.solve(a, axn.named([4., 3.], "i"), ("i", "j"))
    NamedArray(float32[j=2], [2. 1.])
    """
    what = "linalg.solve"
    require_named(what, a), require_named(what, b)
    return _solve_kernel(a.names, b.names, _pair_of_axes(what, axes)).apply(a.array, b.array)


def tridiagonal_solve(
    lower: NamedArray, diagonal: NamedArray, upper: NamedArray, b: NamedArray, axis: AxisSelector
) -> NamedArray:
    """Solve `lower[i] x[i - 1] + diagonal[i] x[i] + upper[i] x[i + 1] = b[i]` along an axis.

    The axis may be sharded if `b` has another one with as many elements: devices then exchange shards of the one for
    shards of the other, and back.

    Arguments:
        lower, diagonal, upper: the three diagonals along `axis`; they may have other axes of `b`. The first element of
            `lower` and the last of `upper` are not used.
        b: the right-hand side. The result has its axes.

    >>> one = axn.ones({"x": 3})
    >>> axn.linalg.tridiagonal_solve(-one, 2 * one, -one, axn.named([1., 0., 1.], "x"), "x")
    NamedArray(float32[x=3], [1. 1. 1.])
    """
    what = "linalg.tridiagonal_solve"
    diagonals = [require_named(what, x) for x in (lower, diagonal, upper)]
    chosen = _kernels.one_selector(what, axis)
    name, named_diagonals = name_of(chosen), zip(("lower", "diagonal", "upper"), diagonals, strict=True)
    for label, x in named_diagonals:
        require_subset(what, label, x.names, require_named(what, b).names)
        if name in b.names and name not in x.names:
            raise ValueError(f"{what}: `{label}` has no axis {name!r}, only {errors.describe_axes(x.names)}.")
    blocks = blocks_of(what, b) if isinstance(chosen, str) or b.shape.get(name) == chosen.size else {}
    if (found := pencils(what, _tridiagonal, [b, *diagonals], name, blocks)) is not None:
        return found
    kernel = _tridiagonal_kernel(b.names, tuple(x.names for x in diagonals), chosen)
    return kernel.apply(b.array, *[x.array for x in diagonals])


@_kernels.shared("names", "of_diagonals", "axis")
def _tridiagonal_kernel(names: Names, of_diagonals: tuple[Names, ...], axis: AxisSelector) -> _kernels.Kernel:
    what = "linalg.tridiagonal_solve"
    along = _kernels.select_one(what, names, axis)

    def positional(b, *diagonals):
        aligned = [_kernels.align(x, own, names) for x, own in zip(diagonals, of_diagonals, strict=True)]
        return _tridiagonal(b, *aligned, axis=names.index(along))

    return _kernels.make_kernel(
        what, positional, (names, *of_diagonals), names, {along: "whole"}, selection=axis, on_auto="per device"
    )


def _tridiagonal(b: jax.Array, *diagonals: jax.Array, axis: int) -> jax.Array:
    kind = jnp.result_type(b, *diagonals, 0.5)
    b, *others = (jnp.moveaxis(at_least_float32(x.astype(kind)), axis, -1) for x in (b, *diagonals))
    lower, diagonal, upper = (jnp.broadcast_to(x, b.shape) for x in others)
    place = jnp.arange(b.shape[-1])  # JAX wants zeros where there is no neighbor, and some devices use them
    lower, upper = jnp.where(place == 0, 0, lower), jnp.where(place == b.shape[-1] - 1, 0, upper)
    x = jax.lax.linalg.tridiagonal_solve(lower, diagonal, upper, b[..., None])[..., 0]
    return jnp.moveaxis(x, -1, axis).astype(kind)


# --- norms ---


@_kernels.shared("names", "axis")
def _norm_kernel(names: Names, axis: Any, ord: Any) -> _kernels.Kernel:
    what = "linalg.norm"
    chosen = _kernels.select(what, names, axis)
    positions = tuple(names.index(n) for n in chosen)
    out_names = tuple(n for n in names if n not in chosen)
    if axis is None:
        # JAX flattens for other orders, which would be costly for a sharded array.
        plain = ord is None or ord == 2
        vector_norm: Any = jnp.linalg.vector_norm
        fn = jnp.linalg.norm if plain else lambda x: vector_norm(as_float(x), axis=None, ord=ord)
    elif len(chosen) in (1, 2):
        fn = functools.partial(jnp.linalg.norm, axis=positions if len(chosen) == 2 else positions[0], ord=ord)
    else:
        raise ValueError(
            f"{what}: pass one axis for vectors, or two for matrices; got {errors.describe_axes(chosen)}. Flatten "
            "them first, or leave out `axis` for the norm of all elements."
        )
    if axis is not None and len(chosen) == 2 and ord in (2, -2, "nuc"):  # these are norms of the singular values

        def of_singular_values(x):
            _check_dtype(what, x)
            return fn(x)

        whole = dict.fromkeys(chosen, "whole")
        return _kernels.make_kernel(what, of_singular_values, (names,), out_names, whole, selection=axis)
    return _kernels.make_kernel(what, fn, (names,), out_names, selection=axis)


@errors.say_how_to_call
def norm(a: NamedArray, axis: AxisSelection | None = None, ord: float | str | None = None) -> NamedArray:
    """Compute the norm of vectors or matrices.

    Arguments:
        axis: one axis for vectors, a pair (row, col) for matrices; by default the array is one vector of all elements.
        ord: for vectors a number or `jnp.inf`, 2 by default. For matrices "fro" (the default), "nuc", 1, 2, `jnp.inf`
            or their negatives, as in NumPy.

    >>> a = axn.named([[3., 4.], [0., 1.]], ("i", "j"))
    >>> axn.linalg.norm(a, "j")
    NamedArray(float32[i=2], [5. 1.])
    >>> axn.linalg.norm(a, ("i", "j"), ord=jnp.inf)
    NamedArray(float32[], 7.)
    """
    require_named("linalg.norm", a)
    if not (ord is None or isinstance(ord, str)):
        ord = static_number("linalg.norm", "ord", ord)
    return _norm_kernel(a.names, _kernels.hashable(axis), ord).apply(a.array)
