"""Elementwise operations: one row each.

Unary operations keep the axes, and take scalars, raw arrays and trees, too. Binary ones match axes by name: one operand
must have all the axes of the other, and the result has the layout of the first operand that has them all.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from ..axis import Names
from ..core.jax_versions import varying_axes
from ..named_array import NamedArray, NamedOrNumeric, wrap
from . import _kernels
from ._op_types import A, F, binary, is_tree, map_tree, publish, unary
from ._operands import as_float, at_least_float32, operand, require_named, scalar

# --- the two factories ---


@_kernels.shared("in_names")
def elementwise_kernel(
    fn: Callable[..., Any],
    name: str,
    in_names: tuple[Names, ...],
    constant: bool = False,
    outputs: int = 1,
    *options: Any,
) -> _kernels.Kernel:
    """Make a kernel for a positional function of elements, whose operands are matched by name.

    Arguments:
        constant: whether results can be constants, which do not get their sharding from the operands.
        outputs: the number of results.
        options: names and values of static arguments.
    """
    names, keywords = _kernels.broadcast_names(name, in_names), dict(options)

    def positional(*arrays):
        return fn(*(_kernels.align(x, own, names) for x, own in zip(arrays, in_names, strict=True)), **keywords)

    out_names = names if outputs == 1 else (names,) * outputs
    return _kernels.make_kernel(name, positional, in_names, out_names, None if constant else {})


def _broadcast_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast the operands of a function that uses them several times, so that gradients are summed once, too."""

    def once(a: Any, b: Any) -> Any:
        traced = isinstance(a, Tracer) and isinstance(b, Tracer)  # in a kernel; else `fn` checks what it is given
        return fn(*(jnp.broadcast_arrays(a, b) if traced else (a, b)))

    return functools.update_wrapper(once, fn)


def _make_unary(
    like: F, name: str, fn: Callable[..., Any], summary: str, example: str, shown: str, constant: bool = False
) -> F:
    def op(a: Any) -> Any:
        if isinstance(a, NamedArray):
            return elementwise_kernel(fn, name, (a.names,), constant).apply(a.array)
        return map_tree(op, a) if is_tree(a) else fn(a)

    doc = f"""{summary}

    Arguments:
        a: a named array, a scalar, a raw array, or a tree of them.

    >>> axn.{name}(axn.named({example}, "x"))
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


def _sinc(x: jax.Array) -> jax.Array:
    """Compute the normalized sinc function, also inside `shard_map`.

    From jax 0.12 on, `jnp.sinc` evaluates a polynomial, which JAX refuses for device-varying values.
    """
    if not varying_axes(x) or jnp.iscomplexobj(x):
        return jnp.sinc(x)
    wide = at_least_float32(as_float(x))
    near = jnp.abs(wide) < 0.5
    square, series = jnp.square(jnp.where(near, wide, 0)), jnp.zeros_like(wide)
    for k in reversed(range(12)):
        series = series * square + (-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1)
    angle = math.pi * jnp.where(near, 1, wide)
    return jnp.where(near, series, jnp.sin(angle) / angle).astype(as_float(x).dtype)


def _make_binary(like: F, name: str, fn: Callable[..., Any], summary: str, a: str, b: str, shown: str) -> F:
    def op(a, b):
        if isinstance(a, NamedArray):
            if isinstance(b, NamedArray):
                return elementwise_kernel(fn, name, (a.names, b.names)).apply(a.array, b.array)
            return elementwise_kernel(fn, name, (a.names, ())).apply(a.array, b)
        if isinstance(b, NamedArray):
            return elementwise_kernel(fn, name, ((), b.names)).apply(a, b.array)
        return fn(a, b)

    doc = f"""{summary}

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. One of the two has all the axes of the other.

    >>> axn.{name}(axn.named({a}, "x"), {b})
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


# --- unary: name, positional function, summary, example, its value ---

# fmt: off
abs = _make_unary(unary, "abs", jnp.abs, "Compute the absolute value of each element.", "[-1., 2.]", "float32[x=2], [1. 2.]")
angle = _make_unary(unary, "angle", jnp.angle, "Compute the angle of each complex element, in radians.", "[1j, 1.]", "float32[x=2], [1.5708 0. ]")
arccos = _make_unary(unary, "arccos", jnp.arccos, "Compute the inverse cosine of each element.", "[1., 0.]", "float32[x=2], [0. 1.5708]")
arccosh = _make_unary(unary, "arccosh", jnp.arccosh, "Compute the inverse hyperbolic cosine of each element.", "[1., 2.]", "float32[x=2], [0. 1.317]")
arcsin = _make_unary(unary, "arcsin", jnp.arcsin, "Compute the inverse sine of each element.", "[0., 1.]", "float32[x=2], [0. 1.5708]")
arcsinh = _make_unary(unary, "arcsinh", jnp.arcsinh, "Compute the inverse hyperbolic sine of each element.", "[0., 1.]", "float32[x=2], [0. 0.8814]")
arctan = _make_unary(unary, "arctan", jnp.arctan, "Compute the inverse tangent of each element.", "[0., 1.]", "float32[x=2], [0. 0.7854]")
arctanh = _make_unary(unary, "arctanh", jnp.arctanh, "Compute the inverse hyperbolic tangent of each element.", "[0., 0.5]", "float32[x=2], [0. 0.5493]")
bitwise_count = _make_unary(unary, "bitwise_count", jnp.bitwise_count, "Compute the number of bits set in each element.", "[3, 8]", "uint8[x=2], [2 1]")
cbrt = _make_unary(unary, "cbrt", jnp.cbrt, "Compute the cube root of each element.", "[1., 8.]", "float32[x=2], [1. 2.]")
ceil = _make_unary(unary, "ceil", jnp.ceil, "Round each element up.", "[0.5, -0.5]", "float32[x=2], [ 1. -0.]")
conj = _make_unary(unary, "conj", jnp.conj, "Compute the complex conjugate of each element.", "[1j, 1.]", "complex64[x=2], [0.-1.j 1.-0.j]")
copy = _make_unary(unary, "copy", jnp.copy, "Copy the array.", "[1., 2.]", "float32[x=2], [1. 2.]")
cos = _make_unary(unary, "cos", jnp.cos, "Compute the cosine of each element.", "[0., 1.]", "float32[x=2], [1. 0.5403]")
cosh = _make_unary(unary, "cosh", jnp.cosh, "Compute the hyperbolic cosine of each element.", "[0., 1.]", "float32[x=2], [1. 1.5431]")
deg2rad = _make_unary(unary, "deg2rad", jnp.deg2rad, "Convert degrees to radians.", "[0., 180.]", "float32[x=2], [0. 3.1416]")
exp = _make_unary(unary, "exp", jnp.exp, "Compute the exponential of each element.", "[0., 1.]", "float32[x=2], [1. 2.7183]")
exp2 = _make_unary(unary, "exp2", jnp.exp2, "Compute two to the power of each element.", "[1., 3.]", "float32[x=2], [2. 8.]")
expm1 = _make_unary(unary, "expm1", jnp.expm1, "Compute the exponential of each element minus one, exact near zero.", "[0., 1.]", "float32[x=2], [0. 1.7183]")
fabs = _make_unary(unary, "fabs", jnp.fabs, "Compute the absolute value of each element, as a float.", "[-1, 2]", "float32[x=2], [1. 2.]")
floor = _make_unary(unary, "floor", jnp.floor, "Round each element down.", "[0.5, -0.5]", "float32[x=2], [ 0. -1.]")
i0 = _make_unary(unary, "i0", jnp.i0, "Compute the modified Bessel function of the first kind, order zero.", "[0., 1.]", "float32[x=2], [1. 1.2661]")
imag = _make_unary(unary, "imag", jnp.imag, "Return the imaginary part of each element.", "[2j, 1.]", "float32[x=2], [2. 0.]", constant=True)
invert = _make_unary(unary, "invert", jnp.invert, "Flip each bit of each element.", "[0, 1]", "int32[x=2], [-1 -2]")
iscomplex = _make_unary(unary, "iscomplex", jnp.iscomplex, "Return which elements have an imaginary part.", "[2j, 1.]", "bool[x=2], [ True False]", constant=True)
isfinite = _make_unary(unary, "isfinite", jnp.isfinite, "Return which elements are neither infinite nor NaN.", "[1., jnp.inf]", "bool[x=2], [ True False]", constant=True)
isinf = _make_unary(unary, "isinf", jnp.isinf, "Return which elements are infinite.", "[1., jnp.inf]", "bool[x=2], [False True]", constant=True)
isnan = _make_unary(unary, "isnan", jnp.isnan, "Return which elements are NaN.", "[1., jnp.nan]", "bool[x=2], [False True]")
isneginf = _make_unary(unary, "isneginf", jnp.isneginf, "Return which elements are minus infinity.", "[1., -jnp.inf]", "bool[x=2], [False True]", constant=True)
isposinf = _make_unary(unary, "isposinf", jnp.isposinf, "Return which elements are plus infinity.", "[1., jnp.inf]", "bool[x=2], [False True]", constant=True)
isreal = _make_unary(unary, "isreal", jnp.isreal, "Return which elements have no imaginary part.", "[2j, 1.]", "bool[x=2], [False True]", constant=True)
log = _make_unary(unary, "log", jnp.log, "Compute the natural logarithm of each element.", "[1., 2.]", "float32[x=2], [0. 0.6931]")
log10 = _make_unary(unary, "log10", jnp.log10, "Compute the logarithm to base ten of each element.", "[1., 2.]", "float32[x=2], [0. 0.301]")
log1p = _make_unary(unary, "log1p", jnp.log1p, "Compute the logarithm of one plus each element, exact near zero.", "[0., 1.]", "float32[x=2], [0. 0.6931]")
log2 = _make_unary(unary, "log2", jnp.log2, "Compute the logarithm to base two of each element.", "[1., 8.]", "float32[x=2], [0. 3.]")
logical_not = _make_unary(unary, "logical_not", jnp.logical_not, "Return which elements are false.", "[0, 2]", "bool[x=2], [ True False]")
negative = _make_unary(unary, "negative", jnp.negative, "Negate each element.", "[1., -2.]", "float32[x=2], [-1. 2.]")
positive = _make_unary(unary, "positive", jnp.positive, "Return each element unchanged.", "[1., -2.]", "float32[x=2], [ 1. -2.]")
rad2deg = _make_unary(unary, "rad2deg", jnp.rad2deg, "Convert radians to degrees.", "[0., 1.]", "float32[x=2], [ 0. 57.2958]")
real = _make_unary(unary, "real", jnp.real, "Return the real part of each element.", "[2j, 1.]", "float32[x=2], [0. 1.]")
reciprocal = _make_unary(unary, "reciprocal", jnp.reciprocal, "Compute one over each element.", "[2., 4.]", "float32[x=2], [0.5 0.25]")
rint = _make_unary(unary, "rint", jnp.rint, "Round each element to the nearest integer, halves to even.", "[0.5, 1.5]", "float32[x=2], [0. 2.]")
rsqrt = _make_unary(unary, "rsqrt", jax.lax.rsqrt, "Compute one over the square root of each element.", "[1., 4.]", "float32[x=2], [1. 0.5]")
sign = _make_unary(unary, "sign", jnp.sign, "Compute the sign of each element.", "[-3., 2.]", "float32[x=2], [-1. 1.]")
signbit = _make_unary(unary, "signbit", jnp.signbit, "Return which elements have their sign bit set.", "[-3., 2.]", "bool[x=2], [ True False]", constant=True)
sin = _make_unary(unary, "sin", jnp.sin, "Compute the sine of each element.", "[0., 1.]", "float32[x=2], [0. 0.8415]")
sinc = _make_unary(unary, "sinc", _sinc, "Compute the normalized sinc function, sin(pi x) / (pi x).", "[0., 0.5]", "float32[x=2], [1. 0.6366]")
sinh = _make_unary(unary, "sinh", jnp.sinh, "Compute the hyperbolic sine of each element.", "[0., 1.]", "float32[x=2], [0. 1.1752]")
sqrt = _make_unary(unary, "sqrt", jnp.sqrt, "Compute the square root of each element.", "[1., 4.]", "float32[x=2], [1. 2.]")
square = _make_unary(unary, "square", jnp.square, "Compute the square of each element.", "[1., -2.]", "float32[x=2], [1. 4.]")
tan = _make_unary(unary, "tan", jnp.tan, "Compute the tangent of each element.", "[0., 1.]", "float32[x=2], [0. 1.5574]")
tanh = _make_unary(unary, "tanh", jnp.tanh, "Compute the hyperbolic tangent of each element.", "[0., 1.]", "float32[x=2], [0. 0.7616]")
trunc = _make_unary(unary, "trunc", jnp.trunc, "Round each element towards zero.", "[1.5, -1.5]", "float32[x=2], [ 1. -1.]")

# --- binary: name, positional function, summary, two operands, their value ---

add = _make_binary(binary, "add", jnp.add, "Compute the sum of the operands.", "[1, 2]", "3", "int32[x=2], [4 5]")
arctan2 = _make_binary(binary, "arctan2", jnp.arctan2, "Compute the angle of the point (b, a), in radians.", "[0., 1.]", "1.", "float32[x=2], [0. 0.7854]")
bitwise_and = _make_binary(binary, "bitwise_and", jnp.bitwise_and, "Compute the bitwise and: the bits set in both operands.", "[1, 3]", "2", "int32[x=2], [0 2]")
bitwise_or = _make_binary(binary, "bitwise_or", jnp.bitwise_or, "Compute the bitwise or: the bits set in either operand.", "[1, 3]", "2", "int32[x=2], [3 3]")
bitwise_xor = _make_binary(binary, "bitwise_xor", jnp.bitwise_xor, "Compute the bitwise exclusive or: the bits set in exactly one operand.", "[1, 3]", "2", "int32[x=2], [3 1]")
divide = _make_binary(binary, "divide", jnp.divide, "Compute the quotient of the operands.", "[1., 2.]", "2.", "float32[x=2], [0.5 1. ]")
equal = _make_binary(binary, "equal", jnp.equal, "Return whether the operands are equal, elementwise.", "[1, 2]", "2", "bool[x=2], [False True]")
float_power = _make_binary(binary, "float_power", jnp.float_power, "Raise `a` to the power of `b`, as a float.", "[1, 2]", "2", "float32[x=2], [1. 4.]")
floor_divide = _make_binary(binary, "floor_divide", jnp.floor_divide, "Compute the quotient rounded down.", "[3, 5]", "2", "int32[x=2], [1 2]")
fmax = _make_binary(binary, "fmax", jnp.fmax, "Return the larger operand; a number rather than NaN.", "[1., jnp.nan]", "0.", "float32[x=2], [1. 0.]")
fmin = _make_binary(binary, "fmin", jnp.fmin, "Return the smaller operand; a number rather than NaN.", "[1., jnp.nan]", "0.", "float32[x=2], [0. 0.]")
fmod = _make_binary(binary, "fmod", jnp.fmod, "Compute the remainder with the sign of `a`.", "[3, -3]", "2", "int32[x=2], [ 1 -1]")
greater = _make_binary(binary, "greater", jnp.greater, "Return whether `a` is greater than `b`, elementwise.", "[1, 2]", "1", "bool[x=2], [False True]")
greater_equal = _make_binary(binary, "greater_equal", jnp.greater_equal, "Return whether `a` is at least `b`, elementwise.", "[1, 2]", "2", "bool[x=2], [False True]")
hypot = _make_binary(binary, "hypot", jnp.hypot, "Compute the length of the vector (a, b).", "[3., 0.]", "4.", "float32[x=2], [5. 4.]")
left_shift = _make_binary(binary, "left_shift", jnp.left_shift, "Shift the bits of `a` up by `b` places.", "[1, 2]", "1", "int32[x=2], [2 4]")
less = _make_binary(binary, "less", jnp.less, "Return whether `a` is less than `b`, elementwise.", "[1, 2]", "2", "bool[x=2], [ True False]")
less_equal = _make_binary(binary, "less_equal", jnp.less_equal, "Return whether `a` is at most `b`, elementwise.", "[1, 2]", "1", "bool[x=2], [ True False]")
logaddexp = _make_binary(binary, "logaddexp", jnp.logaddexp, "Compute the logarithm of the sum of the exponentials.", "[0., 1.]", "0.", "float32[x=2], [0.6931 1.3133]")
logaddexp2 = _make_binary(binary, "logaddexp2", jnp.logaddexp2, "Compute the logarithm to base two of the sum of the powers of two.", "[0., 1.]", "0.", "float32[x=2], [1. 1.585]")
logical_and = _make_binary(binary, "logical_and", jnp.logical_and, "Return whether both operands are true, elementwise.", "[True, False]", "True", "bool[x=2], [ True False]")
logical_or = _make_binary(binary, "logical_or", jnp.logical_or, "Return whether either operand is true, elementwise.", "[True, False]", "False", "bool[x=2], [ True False]")
logical_xor = _make_binary(binary, "logical_xor", jnp.logical_xor, "Return whether exactly one operand is true, elementwise.", "[True, False]", "True", "bool[x=2], [False True]")
maximum = _make_binary(binary, "maximum", jnp.maximum, "Return the larger operand.", "[1, 3]", "2", "int32[x=2], [2 3]")
minimum = _make_binary(binary, "minimum", jnp.minimum, "Return the smaller operand.", "[1, 3]", "2", "int32[x=2], [1 2]")
mod = _make_binary(binary, "mod", _broadcast_once(jnp.mod), "Compute the remainder with the sign of `b`.", "[3, -3]", "2", "int32[x=2], [1 1]")
multiply = _make_binary(binary, "multiply", jnp.multiply, "Compute the product of the operands.", "[1, 2]", "3", "int32[x=2], [3 6]")
nextafter = _make_binary(binary, "nextafter", jnp.nextafter, "Return the next number after `a` towards `b`.", "[0.5]", "0.5", "float32[x=1], [0.5]")
not_equal = _make_binary(binary, "not_equal", jnp.not_equal, "Return whether the operands differ, elementwise.", "[1, 2]", "2", "bool[x=2], [ True False]")
right_shift = _make_binary(binary, "right_shift", jnp.right_shift, "Shift the bits of `a` down by `b` places.", "[2, 4]", "1", "int32[x=2], [1 2]")
subtract = _make_binary(binary, "subtract", jnp.subtract, "Compute the difference of the operands.", "[1, 2]", "3", "int32[x=2], [-2 -1]")
# fmt: on


# --- operations that fit neither factory ---


def round(a: A, decimals: int = 0) -> A:
    """Round each element to a number of decimals, halves to even; a negative number rounds to tens, hundreds, ...

    >>> axn.round(axn.named([0.125, 2.5], "x"), 2)
    NamedArray(float32[x=2], [0.12 2.5 ])
    """
    x: Any = a
    if isinstance(x, NamedArray):
        option = ("decimals", operator.index(decimals))
        return elementwise_kernel(jnp.round, "round", (x.names,), False, 1, option).apply(x.array)
    rounded: Any = map_tree(lambda leaf: round(leaf, decimals), x) if is_tree(x) else jnp.round(x, decimals)
    return rounded


@overload
def power(a: NamedArray, b: NamedOrNumeric) -> NamedArray: ...
@overload
def power(a: NamedOrNumeric, b: NamedArray) -> NamedArray: ...
@overload
def power(a: NamedOrNumeric, b: NamedOrNumeric) -> Any: ...
def power(a: NamedOrNumeric, b: NamedOrNumeric) -> Any:
    """Raise `a` to the power of `b`, elementwise. A Python integer becomes repeated multiplication.

    >>> axn.power(axn.named([1, 2], "x"), 3)
    NamedArray(int32[x=2], [1 8])
    """
    if not isinstance(a, NamedArray) and not isinstance(b, NamedArray):
        return jnp.power(a, b)  # pyright: ignore[reportArgumentType]
    a_names = a.names if isinstance(a, NamedArray) else ()
    a = a.array if isinstance(a, NamedArray) else a
    if type(b) is int or (isinstance(b, np.integer) and b < 0):  # which JAX refuses for integers, if it knows the value
        return elementwise_kernel(_integer_power, "power", (a_names,), b == 0, 1, ("exponent", int(b))).apply(a)
    b_names = b.names if isinstance(b, NamedArray) else ()
    kernel = elementwise_kernel(jnp.power, "power", (a_names, b_names))
    return kernel.apply(a, b.array if isinstance(b, NamedArray) else b)


def _integer_power(x: jax.Array, exponent: int) -> jax.Array:
    return jnp.power(x, exponent)


_DIVMOD = _broadcast_once(jnp.divmod)


def divmod(a: NamedOrNumeric, b: NamedOrNumeric) -> tuple[NamedArray, NamedArray]:
    """Compute the floored quotient and the remainder.

    >>> axn.divmod(axn.named([7, -7], "x"), 2)
    (NamedArray(int32[x=2], [ 3 -4]), NamedArray(int32[x=2], [1 1]))
    """
    return _two_results(_DIVMOD, "divmod", a, b)


def frexp(a: NamedOrNumeric) -> tuple[NamedArray, NamedArray]:
    """Split each element into mantissa and exponent: `a` is the mantissa times two to the power of the exponent.

    >>> axn.frexp(axn.named([4., 0.5], "x"))
    (NamedArray(float32[x=2], [0.5 0.5]), NamedArray(int32[x=2], [3 0]))
    """
    return _two_results(jnp.frexp, "frexp", a)


def _two_results(fn: Callable[..., Any], name: str, *operands: Any) -> Any:
    if not any(isinstance(x, NamedArray) for x in operands):
        return fn(*operands)
    arrays, names = zip(*map(operand, operands), strict=True)
    return elementwise_kernel(fn, name, names, False, 2).apply(*arrays)


def astype(a: NamedArray, dtype: DTypeLike) -> NamedArray:
    """Convert the array to another dtype.

    >>> axn.astype(axn.ones({"x": 2}), jnp.int32)
    NamedArray(int32[x=2], [1 1])
    """
    return wrap(require_named("astype", a).array.astype(dtype), a.names)


# --- exactly or nearly equal: a single truth value is a Python bool, or a traced one inside a JAX transform ---


def isclose(
    a: NamedOrNumeric,
    b: NamedOrNumeric,
    rtol: NamedOrNumeric = 1e-05,
    atol: NamedOrNumeric = 1e-08,
    equal_nan: bool = False,
) -> NamedArray:
    """Return whether the operands differ by at most `atol + rtol * abs(b)`, elementwise; they broadcast by name.

    With `equal_nan`, NaN is close to NaN.

    >>> axn.isclose(axn.named([1., 2.], "x"), 1.000001)
    NamedArray(bool[x=2], [ True False])
    """
    return _compare_arrays(jnp.isclose, "isclose", a, b, ("equal_nan", bool(equal_nan)), rtol=rtol, atol=atol)


def allclose(
    a: NamedOrNumeric,
    b: NamedOrNumeric,
    rtol: NamedOrNumeric = 1e-05,
    atol: NamedOrNumeric = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Return whether the operands are nearly equal everywhere. The arguments are as for `isclose`.

    >>> axn.allclose(axn.named([1., 2.], "x"), axn.named([1., 2.000001], "x"))
    True
    """
    option = ("equal_nan", bool(equal_nan))
    return _are_all_true(_compare_arrays(jnp.isclose, "allclose", a, b, option, rtol=rtol, atol=atol))


def array_equal(a: NamedOrNumeric, b: NamedOrNumeric, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same axes, in any order, and equal elements; `equal_nan` counts NaN as equal.

    >>> x = axn.named([[1, 2], [3, 4]], ("x", "y"))
    >>> axn.array_equal(x, axn.named([[1, 3], [2, 4]], ("y", "x")))
    True
    >>> axn.array_equal(x, axn.named([[1, 2], [3, 4]], ("x", "z")))
    False
    """
    return _shape_of("array_equal", a) == _shape_of("array_equal", b) and _all_equal("array_equal", a, b, equal_nan)


def array_equiv(a: NamedOrNumeric, b: NamedOrNumeric) -> bool:
    """Return whether two arrays have the same elements once they are broadcast by name; False if they cannot be.

    >>> axn.array_equiv(axn.ones({"x": 2, "y": 3}), axn.ones({"y": 3}))
    True
    """
    inner, outer = sorted((_shape_of("array_equiv", a), _shape_of("array_equiv", b)), key=len)
    return inner.items() <= outer.items() and _all_equal("array_equiv", a, b, False)


def _shape_of(what: str, x: Any) -> dict[str, int]:
    if isinstance(x, NamedArray):
        return x.shape
    return {} if np.ndim(x) == 0 else require_named(what, x).shape


def _all_equal(what: str, a: Any, b: Any, equal_nan: bool) -> bool:
    return _are_all_true(_compare_arrays(_equal_or_nan if equal_nan else jnp.equal, what, a, b))


def _equal_or_nan(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a == b) | (jnp.isnan(a) & jnp.isnan(b))


def _are_all_true(x: NamedArray) -> bool:
    found = jnp.all(x.array)
    return found if isinstance(found, Tracer) else bool(found)  # pyright: ignore[reportReturnType]  # traced, as promised


def _compare_arrays(fn: Callable[..., Any], what: str, a: Any, b: Any, *options: Any, **tolerances: Any) -> NamedArray:
    (a, a_names), (b, b_names) = operand(a), operand(b)
    numbers = [scalar(what, name, x) for name, x in tolerances.items()]
    in_names = (a_names, b_names, *[()] * len(numbers))
    return elementwise_kernel(fn, what, in_names, False, 1, *options).apply(a, b, *numbers)
