"""Polynomials in one variable. May change before 1.0.

A polynomial is a named array with one axis for its coefficients, the highest power first. This axis can have another
name in each operand; the result has the name and, if it fits, the sharding of the first operand with a name.
Raw arrays, lists and numbers are polynomials too; if no operand has a name, the axis of the result is called
`DEFAULT_POLY_AXIS_NAME`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .axis import Names
from .core import errors
from .named_array import NamedArray, NamedOrNumeric, describe_array, wrap, wrap_result
from .ops import _kernels
from .ops._op_types import publish
from .ops._operands import distinct, private
from .ops.signal import convolve_by_products

__all__ = [
    "poly",
    "polyadd",
    "polyder",
    "polydiv",
    "polyfit",
    "polyint",
    "polymul",
    "polysub",
    "polyval",
    "roots",
    "trim_zeros",
]

DEFAULT_POLY_AXIS_NAME = "degree"
"""The name of the axis of coefficients if no operand has named axes."""

PolynomialLike: TypeAlias = "NamedOrNumeric | Sequence[Any]"


def _raw_coefficients(what: str, p: PolynomialLike) -> Any:
    """Return the raw coefficients of a polynomial, in an array with one axis."""
    if isinstance(p, NamedArray):
        if len(p.names) != 1:
            raise ValueError(
                f"{what}: a polynomial has one axis, for its coefficients; got {describe_array(p)}. Map over the "
                "others by name."
            )
        return p.array
    array = jnp.atleast_1d(jnp.asarray(p))
    if array.ndim != 1:
        raise ValueError(f"{what}: a polynomial has one axis, for its coefficients; got shape {array.shape}.")
    return array


def _result_axis(*operands: PolynomialLike) -> Names:
    """Return the axis of the result, from the first operand with a name."""
    return next((p.names for p in operands if isinstance(p, NamedArray)), (DEFAULT_POLY_AXIS_NAME,))


# --- from coefficients to coefficients ---


@_kernels.shared("in_names", "out_names")
def _poly_kernel(
    fn: Callable[..., Any], name: str, in_names: tuple[Names, ...], out_names: Any, static: tuple[Any, ...] = ()
) -> _kernels.Kernel:
    positional, whole = lambda *arrays: fn(*arrays, *static), {n: "whole" for names in in_names for n in names}
    by_products = convolve_by_products if fn is jnp.polymul else None
    return _kernels.make_kernel(
        name, positional, in_names, out_names, whole, on_auto="replicated", by_products=by_products
    )


def _of_two(fn: Callable[..., Any], name: str, p1: PolynomialLike, p2: PolynomialLike, results: int) -> Any:
    """Apply a function to two polynomials."""
    names = _result_axis(p1, p2)
    # The result has the axis of the first named operand; the axis of the other operand is not matched with it.
    in_names = (names, private("p2", names)) if isinstance(p1, NamedArray) else (private("p1", names), names)
    kernel = _poly_kernel(fn, name, in_names, names if results == 1 else (names,) * results)
    return kernel.apply(_raw_coefficients(name, p1), _raw_coefficients(name, p2))


def _of_one(fn: Callable[..., Any], name: str, p: PolynomialLike, *static: Any) -> NamedArray:
    """Apply a function to one polynomial and static arguments."""
    names = _result_axis(p)
    return _poly_kernel(fn, name, (names,), names, static).apply(_raw_coefficients(name, p))


class _OfTwo(Protocol):
    def __call__(self, p1: PolynomialLike, p2: PolynomialLike) -> NamedArray: ...


def _make_operation(fn: Callable[..., Any], result: str, shown: str) -> _OfTwo:
    def op(p1: PolynomialLike, p2: PolynomialLike) -> NamedArray:
        return _of_two(fn, fn.__name__, p1, p2, 1)

    doc = f"""Compute the {result} of two polynomials.

    >>> axn.poly.{fn.__name__}(axn.named([1., 2., 3.], "x"), [1., -1.])
    NamedArray({shown})
    """
    return publish(op, fn.__name__, __name__, doc)


polyadd = _make_operation(jnp.polyadd, "sum", "float32[x=3], [1. 3. 2.]")
polysub = _make_operation(jnp.polysub, "difference", "float32[x=3], [1. 1. 4.]")
polymul = _make_operation(jnp.polymul, "product", "float32[x=4], [ 1. 1. 1. -3.]")


def polydiv(p1: PolynomialLike, p2: PolynomialLike) -> tuple[NamedArray, NamedArray]:
    """Divide polynomials, and return the quotient and the remainder.

    The leading coefficient of `p2` must not be zero. The remainder has the size of `p1`, with zeros in front.

    >>> axn.poly.polydiv(axn.named([1., 2., 3.], "x"), [1., -1.])
    (NamedArray(float32[x=2], [1. 3.]), NamedArray(float32[x=3], [0. 0. 6.]))
    """
    return _of_two(jnp.polydiv, "polydiv", p1, p2, 2)


def polyder(p: PolynomialLike, m: int = 1) -> NamedArray:
    """Compute the derivative of a polynomial, `m` times.

    >>> axn.poly.polyder(axn.named([1., 2., 3.], "x"))
    NamedArray(float32[x=2], [2. 2.])
    """
    return _of_one(jnp.polyder, "polyder", p, _checked_count("polyder", m))


def polyint(p: PolynomialLike, m: int = 1, k: PolynomialLike | None = None) -> NamedArray:
    """Compute the integral of a polynomial, `m` times.

    `k` are the constants of integration, one for each time in order or one for all; zero by default.

    >>> axn.poly.polyint(axn.named([3., 2., 1.], "x"), k=4.)
    NamedArray(float32[x=4], [1. 1. 1. 4.])
    """
    m = _checked_count("polyint", m)
    if k is None:
        return _of_one(jnp.polyint, "polyint", p, m)
    names, constants = _result_axis(p), _raw_coefficients("polyint", k)
    if constants.shape[0] not in (1, m):
        given = constants.shape[0]
        raise ValueError(f"polyint: {given} constants of integration for {m} integrations; give one, or {m}.")
    kernel = _poly_kernel(_polyint_with_constants, "polyint", (names, private("k", names)), names, (m,))
    return kernel.apply(_raw_coefficients("polyint", p), constants)


def _polyint_with_constants(p: jax.Array, k: jax.Array, m: int) -> jax.Array:
    return jnp.polyint(p, m, k)


def _checked_count(what: str, m: Any) -> int:
    count = operator.index(m)
    if count < 0:
        raise ValueError(f"{what}: the number of times cannot be negative, got {count}.")
    return count


# --- values and roots ---


def polyval(p: PolynomialLike, x: NamedOrNumeric) -> Any:
    """Evaluate a polynomial at each element of an array.

    Arguments:
        x: where to evaluate the polynomial: a named array, whose axes the result has, or a raw array or number, for
            which the result is a raw array.

    >>> axn.poly.polyval(axn.named([1., 2., 3.], "x"), axn.named([0., 10.], "at"))
    NamedArray(float32[at=2], [ 3. 123.])
    """
    coefficients = _raw_coefficients("polyval", p)
    if not isinstance(x, NamedArray):
        return jnp.polyval(coefficients, x)  # pyright: ignore[reportArgumentType]
    own = private("p", _result_axis(p))
    return _polyval_kernel(own, x.names).apply(coefficients, x.array)


@_kernels.shared("own", "names")
def _polyval_kernel(own: Names, names: Names) -> _kernels.Kernel:
    return _kernels.make_kernel("polyval", jnp.polyval, (own, names), names, dict.fromkeys(own, "whole"))


def poly(seq_of_zeros: PolynomialLike) -> NamedArray:
    """Return the polynomial that has the given roots, along one axis, and the leading coefficient 1.

    The characteristic polynomial of a matrix has its eigenvalues as roots: `poly(linalg.eigvals(a, axes, new_axis))`.

    >>> axn.poly.poly(axn.named([1., 2.], "x"))
    NamedArray(float32[x=3], [ 1. -3. 2.])
    """
    if isinstance(seq_of_zeros, NamedArray) and len(seq_of_zeros.names) != 1:
        raise ValueError(
            f"poly: the roots lie along one axis, got {describe_array(seq_of_zeros)}. For the characteristic "
            "polynomial of a matrix pass its eigenvalues, `axonym.linalg.eigvals(a, axes, new_axis)`."
        )
    return _of_one(_poly, "poly", seq_of_zeros)


def _poly(zeros: jax.Array) -> jax.Array:
    return jnp.atleast_1d(jnp.poly(zeros))  # without roots the polynomial is the constant 1


def roots(p: PolynomialLike, *, strip_zeros: bool = True) -> NamedArray:
    """Compute the roots of a polynomial.

    Arguments:
        strip_zeros: leave out leading coefficients that are zero, so that the polynomial has its true degree. The
            number of roots then depends on the values, so that this cannot be traced. If False, the leading coefficient
            must not be zero.

    >>> axn.poly.roots(axn.named([0., 1., -3., 2.], "x"))
    NamedArray(complex64[x=2], [2.+0.j 1.+0.j])
    """
    coefficients = _raw_coefficients("roots", p)
    start, stop = 0, coefficients.shape[0]
    if strip_zeros:
        start, stop = _nonzero_span("roots", coefficients, "Pass strip_zeros=False where the leading one is not zero.")
    return _of_one(_roots, "roots", p, start, stop)


def _roots(p: jax.Array, start: int, stop: int) -> jax.Array:
    """Return the roots of the coefficients from `start` to `stop`, and a zero for each coefficient after that."""
    found = jnp.roots(_inexact(p[start:stop]), strip_zeros=False)
    trailing = 0 if start == stop else p.shape[0] - stop
    return jnp.concatenate([found, jnp.zeros(trailing, found.dtype)])


def trim_zeros(p: PolynomialLike, trim: str = "fb") -> NamedArray:
    """Remove zeros in front of the coefficients (`trim` is "f"), behind them ("b") or both ("fb").

    The number of coefficients left depends on the values, so that this cannot be traced.

    >>> axn.poly.trim_zeros(axn.named([0., 1., 2., 0.], "x"))
    NamedArray(float32[x=2], [1. 2.])
    """
    ends = trim.lower()
    if not ends or set(ends) - {"f", "b"}:
        raise ValueError(f"trim_zeros: `trim` is 'f', 'b' or 'fb', got {trim!r}.")
    coefficients = _raw_coefficients("trim_zeros", p)
    start, stop = _nonzero_span("trim_zeros", coefficients, "Trim before tracing.")
    if start < stop:
        start = start if "f" in ends else 0
        stop = stop if "b" in ends else coefficients.shape[0]
    return _of_one(jax.lax.slice_in_dim, "trim_zeros", p, start, stop)


def _nonzero_span(what: str, coefficients: Any, way_out: str) -> tuple[int, int]:
    """Return the start and stop of the coefficients that are not zero; (0, 0) if there are none."""
    try:
        nonzero = np.flatnonzero(np.asarray(coefficients != 0))
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            f"{what}: the size of the result depends on which coefficients are zero, and while tracing they are not "
            f"known. {way_out}"
        ) from None
    return (int(nonzero[0]), int(nonzero[-1]) + 1) if nonzero.size else (0, 0)


# --- fitting ---


def polyfit(
    x: PolynomialLike,
    y: PolynomialLike,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: PolynomialLike | None = None,
    cov: bool | str = False,
) -> Any:
    """Fit a polynomial to points by least squares.

    The coefficients take the place of the axis of the points; further axes of `y` are fitted one by one and stay.

    Arguments:
        x: the coordinates of the points, along one axis.
        y: the values at the points, along the same axis and any others.
        rcond: singular values below this fraction of the largest count as zero.
        full: return the residuals, rank, singular values and `rcond` as well. They are raw arrays, except for residuals
            along further axes of `y`.
        w: the weight of each point.
        cov: return the covariance of the coefficients as well, whose second axis has the same name with `_cov` added;
            "unscaled" leaves out the scale of the residuals. Has no effect together with `full`.

    >>> x = axn.named([0., 1., 2., 3.], "x")
    >>> axn.round(axn.poly.polyfit(x, 2 * x + 1, 1), 3)
    NamedArray(float32[x=2], [2. 1.])
    """
    points = next((p.names for p in (x, w) if isinstance(p, NamedArray)), None)
    if points is None:  # without an axis, since y does not say which of several it is: an error of the kernel
        points = () if isinstance(y, NamedArray) and len(y.names) != 1 else _result_axis(y)
    operands = (x, y) if w is None else (x, y, w)
    in_names = tuple(p.names if isinstance(p, NamedArray) else points for p in operands)
    arrays = [p.array if isinstance(p, NamedArray) else _raw_coefficients("polyfit", p) for p in operands]
    kernel = _polyfit_kernel(in_names, operator.index(deg), None if rcond is None else float(rcond), bool(full), cov)
    result = kernel.call(*arrays)
    if not full:
        return wrap_result(result, kernel.names)
    coefficients, residuals, *rest = result
    if len(kernel.names[0]) > 1:
        residuals = wrap(residuals, kernel.names[1])
    return (wrap(coefficients, kernel.names[0]), residuals, *rest)


@_kernels.cached
def _polyfit_kernel(
    in_names: tuple[Names, ...], deg: int, rcond: float | None, full: bool, cov: bool | str
) -> _kernels.Kernel:
    x_names, y_names = in_names[:2]
    if len(x_names) != 1 or in_names[2:] not in ((), (x_names,)) or x_names[0] not in y_names:
        listed = ", ".join(f"{p} has {errors.describe_axes(n)}" for p, n in zip("xyw", in_names, strict=False))
        raise ValueError(
            "polyfit: the points lie along one axis, which x, y and the weights w share; only y may have others. "
            f"Here {listed}. Rename the axis of the points alike."
        )
    point = x_names[0]
    others = tuple(n for n in y_names if n != point)
    covariance = tuple(m for n in y_names for m in ((point, f"{point}_cov") if n == point else (n,)))
    out_names: Any = y_names
    if full:
        # Rank and `rcond` are scalars. There is a singular value for each coefficient, and without other axes one
        # residual, in an array of shape (1,).
        out_names = (y_names, others or x_names, (), x_names, ())
    elif cov:
        out_names = (y_names, distinct("polyfit", covariance))

    def positional(x, y, w=None):
        y = _kernels.transpose_to(_inexact(y), y_names, (point, *others))
        sizes = y.shape[1:]
        if len(sizes) > 1:
            y = y.reshape(y.shape[0], math.prod(sizes))
        found: Any = jnp.polyfit(_inexact(x), y, deg, rcond, full, w, cov)  # pyright: ignore[reportArgumentType]
        coefficients, *rest = found if full or cov else (found,)
        coefficients = coefficients.reshape(deg + 1, *sizes)
        coefficients = _kernels.transpose_to(coefficients, (point, *others), y_names)
        if full:
            residuals, *rest = rest
            return coefficients, residuals.reshape(sizes or (1,)), *rest
        if cov:
            # The unscaled covariance is the same for each polynomial, and JAX returns it only once.
            each = jnp.broadcast_to(rest[0], (deg + 1, deg + 1, *y.shape[1:])).reshape(deg + 1, deg + 1, *sizes)
            return coefficients, _kernels.transpose_to(each, (point, f"{point}_cov", *others), covariance)
        return coefficients

    return _kernels.make_kernel("polyfit", positional, in_names, out_names, dict.fromkeys(x_names, "whole"))


def _inexact(x: jax.Array) -> jax.Array:
    """Convert to a dtype for which JAX has a singular value decomposition."""
    return x.astype(jnp.promote_types(jnp.result_type(x, float), jnp.float32))
