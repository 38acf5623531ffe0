"""Elementwise operations: one row each.

Unary operations keep the axes. Binary ones match axes by name: one operand must have all the axes of the other, and the
result has the layout of the first operand that has them all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp

from .. import _fsdp_ops, _kernels
from ..array import NamedArray, NamedOrNumeric, wrap, wrap_result
from ..axis import Names
from ._op_types import Binary, Unary, is_tree, map_tree, publish
from ._operands import require_named, scalar

# --- the two factories ---


@_kernels.cached
def _unary_kernel(
    fn: Callable[..., Any], name: str, names: Names, outputs: int, constant: bool = False
) -> _kernels.Kernel:
    out_names = names if outputs == 1 else (names,) * outputs
    return _kernels.make_kernel(name, fn, (names,), out_names, native=not constant)


@_kernels.cached
def _binary_kernel(
    fn: Callable[..., Any], name: str, a_names: Names, b_names: Names, outputs: int, static: Any = None
) -> _kernels.Kernel:
    names = _kernels.broadcast_names(name, (a_names, b_names))

    def positional(a, b):
        a, b = _kernels.align(a, a_names, names), _kernels.align(b, b_names, names)
        return fn(a, b) if static is None else fn(a, b, static)

    in_names = (a_names, b_names)
    if outputs > 1:
        return _kernels.make_kernel(name, positional, in_names, (names,) * outputs)
    by_hand = functools.partial(_fsdp_ops.gathered, positional, in_names, names)
    return _kernels.make_kernel(name, positional, in_names, names, native=True, by_hand=by_hand)


def _unary(name: str, fn: Callable[..., Any], summary: str, example: str, shown: str, constant: bool = False) -> Unary:
    # `constant` are those that give a constant for some dtypes: it takes nothing of the operand's placement.
    def op(a: Any) -> Any:
        if isinstance(a, NamedArray):
            kernel = _unary_kernel(fn, name, a.names, 1, constant)
            return wrap(kernel.call(a.array), kernel.names)
        return map_tree(op, a) if is_tree(a) else fn(a)

    doc = f"""{summary}

    Arguments:
        a: a named array, a scalar, a raw array, or a tree of them.

    >>> axn.{name}(axn.named({example}, "x"))
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


def _binary(name: str, fn: Callable[..., Any], summary: str, a: str, b: str, shown: str) -> Binary:
    def op(a, b):
        if isinstance(a, NamedArray):
            if isinstance(b, NamedArray):
                kernel = _binary_kernel(fn, name, a.names, b.names, 1)
                return wrap(kernel.call(a.array, b.array), kernel.names)
            kernel = _binary_kernel(fn, name, a.names, (), 1)
            return wrap(kernel.call(a.array, b), kernel.names)
        if isinstance(b, NamedArray):
            kernel = _binary_kernel(fn, name, (), b.names, 1)
            return wrap(kernel.call(a, b.array), kernel.names)
        return fn(a, b)

    doc = f"""{summary}

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. One of the two has all the axes of the other.

    >>> axn.{name}(axn.named({a}, "x"), {b})
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


# --- unary: name, positional function, summary, example, what it gives ---

# fmt: off
abs = _unary("abs", jnp.abs, "The absolute value of each element.", "[-1., 2.]", "float32[x=2], [1. 2.]")
angle = _unary("angle", jnp.angle, "The angle of each complex element, in radians.", "[1j, 1.]", "float32[x=2], [1.5708 0. ]")
arccos = _unary("arccos", jnp.arccos, "The inverse cosine of each element.", "[1., 0.]", "float32[x=2], [0. 1.5708]")
arccosh = _unary("arccosh", jnp.arccosh, "The inverse hyperbolic cosine of each element.", "[1., 2.]", "float32[x=2], [0. 1.317]")
arcsin = _unary("arcsin", jnp.arcsin, "The inverse sine of each element.", "[0., 1.]", "float32[x=2], [0. 1.5708]")
arcsinh = _unary("arcsinh", jnp.arcsinh, "The inverse hyperbolic sine of each element.", "[0., 1.]", "float32[x=2], [0. 0.8814]")
arctan = _unary("arctan", jnp.arctan, "The inverse tangent of each element.", "[0., 1.]", "float32[x=2], [0. 0.7854]")
arctanh = _unary("arctanh", jnp.arctanh, "The inverse hyperbolic tangent of each element.", "[0., 0.5]", "float32[x=2], [0. 0.5493]")
bitwise_count = _unary("bitwise_count", jnp.bitwise_count, "The number of bits set in each element.", "[3, 8]", "uint8[x=2], [2 1]")
cbrt = _unary("cbrt", jnp.cbrt, "The cube root of each element.", "[1., 8.]", "float32[x=2], [1. 2.]")
ceil = _unary("ceil", jnp.ceil, "Each element rounded up.", "[0.5, -0.5]", "float32[x=2], [ 1. -0.]")
conj = _unary("conj", jnp.conj, "The complex conjugate of each element.", "[1j, 1.]", "complex64[x=2], [0.-1.j 1.-0.j]")
copy = _unary("copy", jnp.copy, "A copy of the array.", "[1., 2.]", "float32[x=2], [1. 2.]")
cos = _unary("cos", jnp.cos, "The cosine of each element.", "[0., 1.]", "float32[x=2], [1. 0.5403]")
cosh = _unary("cosh", jnp.cosh, "The hyperbolic cosine of each element.", "[0., 1.]", "float32[x=2], [1. 1.5431]")
deg2rad = _unary("deg2rad", jnp.deg2rad, "Degrees to radians.", "[0., 180.]", "float32[x=2], [0. 3.1416]")
exp = _unary("exp", jnp.exp, "The exponential of each element.", "[0., 1.]", "float32[x=2], [1. 2.7183]")
exp2 = _unary("exp2", jnp.exp2, "Two to the power of each element.", "[1., 3.]", "float32[x=2], [2. 8.]")
expm1 = _unary("expm1", jnp.expm1, "The exponential of each element, less one, exact near zero.", "[0., 1.]", "float32[x=2], [0. 1.7183]")
fabs = _unary("fabs", jnp.fabs, "The absolute value of each element, as a float.", "[-1, 2]", "float32[x=2], [1. 2.]")
floor = _unary("floor", jnp.floor, "Each element rounded down.", "[0.5, -0.5]", "float32[x=2], [ 0. -1.]")
i0 = _unary("i0", jnp.i0, "The modified Bessel function of the first kind, order zero.", "[0., 1.]", "float32[x=2], [1. 1.2661]")
imag = _unary("imag", jnp.imag, "The imaginary part of each element.", "[2j, 1.]", "float32[x=2], [2. 0.]", constant=True)
invert = _unary("invert", jnp.invert, "Each bit of each element flipped.", "[0, 1]", "int32[x=2], [-1 -2]")
iscomplex = _unary("iscomplex", jnp.iscomplex, "Which elements have an imaginary part.", "[2j, 1.]", "bool[x=2], [ True False]", constant=True)
isfinite = _unary("isfinite", jnp.isfinite, "Which elements are neither infinite nor NaN.", "[1., jnp.inf]", "bool[x=2], [ True False]", constant=True)
isinf = _unary("isinf", jnp.isinf, "Which elements are infinite.", "[1., jnp.inf]", "bool[x=2], [False True]", constant=True)
isnan = _unary("isnan", jnp.isnan, "Which elements are NaN.", "[1., jnp.nan]", "bool[x=2], [False True]")
isneginf = _unary("isneginf", jnp.isneginf, "Which elements are minus infinity.", "[1., -jnp.inf]", "bool[x=2], [False True]", constant=True)
isposinf = _unary("isposinf", jnp.isposinf, "Which elements are plus infinity.", "[1., jnp.inf]", "bool[x=2], [False True]", constant=True)
isreal = _unary("isreal", jnp.isreal, "Which elements have no imaginary part.", "[2j, 1.]", "bool[x=2], [False True]", constant=True)
log = _unary("log", jnp.log, "The natural logarithm of each element.", "[1., 2.]", "float32[x=2], [0. 0.6931]")
log10 = _unary("log10", jnp.log10, "The logarithm to base ten of each element.", "[1., 2.]", "float32[x=2], [0. 0.301]")
log1p = _unary("log1p", jnp.log1p, "The logarithm of one plus each element, exact near zero.", "[0., 1.]", "float32[x=2], [0. 0.6931]")
log2 = _unary("log2", jnp.log2, "The logarithm to base two of each element.", "[1., 8.]", "float32[x=2], [0. 3.]")
logical_not = _unary("logical_not", jnp.logical_not, "Whether each element is false.", "[0, 2]", "bool[x=2], [ True False]")
negative = _unary("negative", jnp.negative, "Each element negated.", "[1., -2.]", "float32[x=2], [-1. 2.]")
positive = _unary("positive", jnp.positive, "Each element as it is.", "[1., -2.]", "float32[x=2], [ 1. -2.]")
rad2deg = _unary("rad2deg", jnp.rad2deg, "Radians to degrees.", "[0., 1.]", "float32[x=2], [ 0. 57.2958]")
real = _unary("real", jnp.real, "The real part of each element.", "[2j, 1.]", "float32[x=2], [0. 1.]")
reciprocal = _unary("reciprocal", jnp.reciprocal, "One over each element.", "[2., 4.]", "float32[x=2], [0.5 0.25]")
rint = _unary("rint", jnp.rint, "Each element rounded to the nearest integer, halves to even.", "[0.5, 1.5]", "float32[x=2], [0. 2.]")
rsqrt = _unary("rsqrt", jax.lax.rsqrt, "One over the square root of each element.", "[1., 4.]", "float32[x=2], [1. 0.5]")
sign = _unary("sign", jnp.sign, "The sign of each element.", "[-3., 2.]", "float32[x=2], [-1. 1.]")
signbit = _unary("signbit", jnp.signbit, "Whether the sign bit of each element is set.", "[-3., 2.]", "bool[x=2], [ True False]", constant=True)
sin = _unary("sin", jnp.sin, "The sine of each element.", "[0., 1.]", "float32[x=2], [0. 0.8415]")
sinc = _unary("sinc", jnp.sinc, "The normalised sinc function, sin(pi x) / (pi x).", "[0., 0.5]", "float32[x=2], [1. 0.6366]")
sinh = _unary("sinh", jnp.sinh, "The hyperbolic sine of each element.", "[0., 1.]", "float32[x=2], [0. 1.1752]")
sqrt = _unary("sqrt", jnp.sqrt, "The square root of each element.", "[1., 4.]", "float32[x=2], [1. 2.]")
square = _unary("square", jnp.square, "The square of each element.", "[1., -2.]", "float32[x=2], [1. 4.]")
tan = _unary("tan", jnp.tan, "The tangent of each element.", "[0., 1.]", "float32[x=2], [0. 1.5574]")
tanh = _unary("tanh", jnp.tanh, "The hyperbolic tangent of each element.", "[0., 1.]", "float32[x=2], [0. 0.7616]")
trunc = _unary("trunc", jnp.trunc, "Each element rounded towards zero.", "[1.5, -1.5]", "float32[x=2], [ 1. -1.]")

# --- binary: name, positional function, summary, two operands, what they give ---

add = _binary("add", jnp.add, "The sum of the operands.", "[1, 2]", "3", "int32[x=2], [4 5]")
arctan2 = _binary("arctan2", jnp.arctan2, "The angle of the point (b, a), in radians.", "[0., 1.]", "1.", "float32[x=2], [0. 0.7854]")
bitwise_and = _binary("bitwise_and", jnp.bitwise_and, "The bits set in both operands.", "[1, 3]", "2", "int32[x=2], [0 2]")
bitwise_or = _binary("bitwise_or", jnp.bitwise_or, "The bits set in either operand.", "[1, 3]", "2", "int32[x=2], [3 3]")
bitwise_xor = _binary("bitwise_xor", jnp.bitwise_xor, "The bits set in exactly one operand.", "[1, 3]", "2", "int32[x=2], [3 1]")
copysign = _binary("copysign", jnp.copysign, "The size of `a` with the sign of `b`.", "[1., 2.]", "-1.", "float32[x=2], [-1. -2.]")
divide = _binary("divide", jnp.divide, "The quotient of the operands.", "[1., 2.]", "2.", "float32[x=2], [0.5 1. ]")
equal = _binary("equal", jnp.equal, "Where the operands are equal.", "[1, 2]", "2", "bool[x=2], [False True]")
float_power = _binary("float_power", jnp.float_power, "`a` to the power of `b`, as a float.", "[1, 2]", "2", "float32[x=2], [1. 4.]")
floor_divide = _binary("floor_divide", jnp.floor_divide, "The quotient rounded down.", "[3, 5]", "2", "int32[x=2], [1 2]")
fmax = _binary("fmax", jnp.fmax, "The larger operand; a number rather than NaN.", "[1., jnp.nan]", "0.", "float32[x=2], [1. 0.]")
fmin = _binary("fmin", jnp.fmin, "The smaller operand; a number rather than NaN.", "[1., jnp.nan]", "0.", "float32[x=2], [0. 0.]")
fmod = _binary("fmod", jnp.fmod, "The remainder with the sign of `a`.", "[3, -3]", "2", "int32[x=2], [ 1 -1]")
gcd = _binary("gcd", jnp.gcd, "The greatest common divisor.", "[4, 6]", "6", "int32[x=2], [2 6]")
greater = _binary("greater", jnp.greater, "Where `a` is greater than `b`.", "[1, 2]", "1", "bool[x=2], [False True]")
greater_equal = _binary("greater_equal", jnp.greater_equal, "Where `a` is at least `b`.", "[1, 2]", "2", "bool[x=2], [False True]")
heaviside = _binary("heaviside", jnp.heaviside, "0 below zero, 1 above it, and `b` at zero.", "[-1., 0.]", "0.5", "float32[x=2], [0. 0.5]")
hypot = _binary("hypot", jnp.hypot, "The length of the vector (a, b).", "[3., 0.]", "4.", "float32[x=2], [5. 4.]")
lcm = _binary("lcm", jnp.lcm, "The least common multiple.", "[4, 6]", "6", "int32[x=2], [12 6]")
ldexp = _binary("ldexp", jnp.ldexp, "`a` times two to the power of `b`.", "[1., 2.]", "3", "float32[x=2], [ 8. 16.]")
left_shift = _binary("left_shift", jnp.left_shift, "The bits of `a` moved up by `b` places.", "[1, 2]", "1", "int32[x=2], [2 4]")
less = _binary("less", jnp.less, "Where `a` is less than `b`.", "[1, 2]", "2", "bool[x=2], [ True False]")
less_equal = _binary("less_equal", jnp.less_equal, "Where `a` is at most `b`.", "[1, 2]", "1", "bool[x=2], [ True False]")
logaddexp = _binary("logaddexp", jnp.logaddexp, "The logarithm of the sum of the exponentials.", "[0., 1.]", "0.", "float32[x=2], [0.6931 1.3133]")
logaddexp2 = _binary("logaddexp2", jnp.logaddexp2, "`logaddexp` to base two.", "[0., 1.]", "0.", "float32[x=2], [1. 1.585]")
logical_and = _binary("logical_and", jnp.logical_and, "Where both operands are true.", "[True, False]", "True", "bool[x=2], [ True False]")
logical_or = _binary("logical_or", jnp.logical_or, "Where either operand is true.", "[True, False]", "False", "bool[x=2], [ True False]")
logical_xor = _binary("logical_xor", jnp.logical_xor, "Where exactly one operand is true.", "[True, False]", "True", "bool[x=2], [False True]")
maximum = _binary("maximum", jnp.maximum, "The larger operand.", "[1, 3]", "2", "int32[x=2], [2 3]")
minimum = _binary("minimum", jnp.minimum, "The smaller operand.", "[1, 3]", "2", "int32[x=2], [1 2]")
mod = _binary("mod", jnp.mod, "The remainder with the sign of `b`.", "[3, -3]", "2", "int32[x=2], [1 1]")
multiply = _binary("multiply", jnp.multiply, "The product of the operands.", "[1, 2]", "3", "int32[x=2], [3 6]")
nextafter = _binary("nextafter", jnp.nextafter, "The next number after `a` towards `b`.", "[0.5]", "0.5", "float32[x=1], [0.5]")
not_equal = _binary("not_equal", jnp.not_equal, "Where the operands differ.", "[1, 2]", "2", "bool[x=2], [ True False]")
right_shift = _binary("right_shift", jnp.right_shift, "The bits of `a` moved down by `b` places.", "[2, 4]", "1", "int32[x=2], [1 2]")
subtract = _binary("subtract", jnp.subtract, "The difference of the operands.", "[1, 2]", "3", "int32[x=2], [-2 -1]")
# fmt: on


# --- those that fit neither factory ---


@overload
def round(a: NamedArray, decimals: int = 0) -> NamedArray: ...
@overload
def round(a: Any, decimals: int = 0) -> Any: ...
def round(a: Any, decimals: int = 0) -> Any:
    """Each element rounded to a number of decimals, halves to even.

    Arguments:
        a: a named array, a scalar, a raw array, or a tree of them.
        decimals: how many decimals to keep; negative ones round to tens, hundreds, ...

    >>> axn.round(axn.named([0.125, 2.5], "x"), 2)
    NamedArray(float32[x=2], [0.12 2.5 ])
    """
    if isinstance(a, NamedArray):
        kernel = _round_kernel(a.names, operator.index(decimals))
        return wrap(kernel.call(a.array), kernel.names)
    return map_tree(lambda leaf: round(leaf, decimals), a) if is_tree(a) else jnp.round(a, decimals)


@_kernels.cached
def _round_kernel(names: Names, decimals: int) -> _kernels.Kernel:
    return _kernels.make_kernel("round", lambda x: jnp.round(x, decimals), (names,), names, native=True)


@overload
def power(a: NamedArray, b: NamedOrNumeric) -> NamedArray: ...
@overload
def power(a: NamedOrNumeric, b: NamedArray) -> NamedArray: ...
@overload
def power(a: NamedOrNumeric, b: NamedOrNumeric) -> Any: ...
def power(a: NamedOrNumeric, b: NamedOrNumeric) -> Any:
    """`a` to the power of `b`, elementwise.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar. A Python integer becomes repeated multiplication.

    >>> axn.power(axn.named([1, 2], "x"), 3)
    NamedArray(int32[x=2], [1 8])
    """
    if not isinstance(a, NamedArray) and not isinstance(b, NamedArray):
        return jnp.power(a, b)  # pyright: ignore[reportArgumentType]
    a_names = a.names if isinstance(a, NamedArray) else ()
    a = a.array if isinstance(a, NamedArray) else a
    if type(b) is int:
        kernel = _integer_power_kernel(a_names, b)
        return wrap(kernel.call(a), kernel.names)
    b_names = b.names if isinstance(b, NamedArray) else ()
    kernel = _binary_kernel(jnp.power, "power", a_names, b_names, 1)
    return wrap(kernel.call(a, b.array if isinstance(b, NamedArray) else b), kernel.names)


@_kernels.cached
def _integer_power_kernel(names: Names, exponent: int) -> _kernels.Kernel:
    return _kernels.make_kernel("power", lambda x: jnp.power(x, exponent), (names,), names, native=exponent != 0)


def divmod(a: NamedOrNumeric, b: NamedOrNumeric) -> tuple[NamedArray, NamedArray]:
    """The floored quotient and the remainder.

    Arguments:
        a: a named array or a scalar.
        b: a named array or a scalar.

    >>> axn.divmod(axn.named([7, -7], "x"), 2)
    (NamedArray(int32[x=2], [ 3 -4]), NamedArray(int32[x=2], [1 1]))
    """
    return _two_results(jnp.divmod, "divmod", a, b)


def frexp(a: NamedOrNumeric) -> tuple[NamedArray, NamedArray]:
    """Mantissa and exponent: `a` is the first times two to the power of the second.

    Arguments:
        a: a named array or a scalar.

    >>> axn.frexp(axn.named([4., 0.5], "x"))
    (NamedArray(float32[x=2], [0.5 0.5]), NamedArray(int32[x=2], [3 0]))
    """
    return _two_results(jnp.frexp, "frexp", a)


def modf(a: NamedOrNumeric) -> tuple[NamedArray, NamedArray]:
    """The fractional and the whole part of each element.

    Arguments:
        a: a named array or a scalar.

    >>> axn.modf(axn.named([1.5, -0.25], "x"))
    (NamedArray(float32[x=2], [ 0.5 -0.25]), NamedArray(float32[x=2], [ 1. -0.]))
    """
    return _two_results(jnp.modf, "modf", a)


def _two_results(fn: Callable[..., Any], name: str, *operands: Any) -> Any:
    if not any(isinstance(x, NamedArray) for x in operands):
        return fn(*operands)
    names = [x.names if isinstance(x, NamedArray) else () for x in operands]
    kernel = _unary_kernel(fn, name, *names, 2) if len(names) == 1 else _binary_kernel(fn, name, *names, 2)
    arrays = [x.array if isinstance(x, NamedArray) else x for x in operands]
    return wrap_result(kernel.call(*arrays), kernel.names)


@overload
def nan_to_num(
    a: NamedArray, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> NamedArray: ...
@overload
def nan_to_num(a: Any, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any: ...
def nan_to_num(a: Any, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    """Each NaN and infinity replaced by a number.

    Arguments:
        a: a named array, a scalar, a raw array, or a tree of them.
        nan: what replaces NaN.
        posinf: what replaces infinity; the largest number of the dtype by default.
        neginf: what replaces minus infinity; the smallest number of the dtype by default.

    >>> axn.nan_to_num(axn.named([jnp.nan, 1.], "x"))
    NamedArray(float32[x=2], [0. 1.])
    """
    if isinstance(a, NamedArray):
        given = {"nan": nan, "posinf": posinf, "neginf": neginf}
        values = {name: scalar("nan_to_num", name, x) for name, x in given.items() if x is not None}
        kernel = _nan_to_num_kernel(a.names, tuple(values))
        return wrap(kernel.call(a.array, *values.values()), kernel.names)
    if is_tree(a):
        return map_tree(lambda leaf: nan_to_num(leaf, nan=nan, posinf=posinf, neginf=neginf), a)
    return jnp.nan_to_num(a, nan=nan, posinf=posinf, neginf=neginf)


@_kernels.cached
def _nan_to_num_kernel(names: Names, given: tuple[str, ...]) -> _kernels.Kernel:
    def positional(x, *values):
        return jnp.nan_to_num(x, **dict(zip(given, values, strict=True)))

    return _kernels.make_kernel("nan_to_num", positional, (names, *[()] * len(given)), names, native=True)


def astype(a: NamedArray, dtype: Any) -> NamedArray:
    """The array in another dtype.

    Arguments:
        a: a named array.
        dtype: the dtype to convert to.

    >>> axn.astype(axn.ones({"x": 2}), jnp.int32)
    NamedArray(int32[x=2], [1 1])
    """
    return wrap(require_named("astype", a).array.astype(dtype), a.names)
