"""Elementwise operations, compared with the function of the same name in NumPy; gradients with `jax.numpy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import public_name
from tests.ops.case import Case, Operand, f, of

# Names by the kind of values they take. The gradient of the second group makes no sense or is zero.
UNARY = {
    "float": "abs arcsinh arctan conj copy cos cosh deg2rad exp exp2 expm1 fabs i0 negative "
    "positive rad2deg real sin sinc sinh square tan tanh",
    "positive": "cbrt log log10 log1p log2 reciprocal rsqrt sqrt",
    "unit": "arccos arcsin arctanh",
}
UNARY_WITHOUT_GRAD = {
    "float": "ceil floor imag iscomplex isreal rint sign signbit trunc round",
    "int": "abs imag invert isfinite isinf isneginf isposinf logical_not",
    "bits": "bitwise_count",
    "bool": "logical_not",
    "complex": "angle conj exp imag iscomplex isreal real",
    "special": "isfinite isinf isnan isneginf isposinf",
}
BINARY = {
    "float float": "add arctan2 divide fmax fmin hypot logaddexp logaddexp2 maximum minimum multiply subtract",
    "positive float": "float_power power",
}
BINARY_WITHOUT_GRAD = {
    "int int": "add bitwise_and bitwise_or bitwise_xor equal greater greater_equal less less_equal maximum "
    "minimum multiply not_equal subtract",
    "bits index": "left_shift right_shift",
    "bool bool": "logical_and logical_or logical_xor",
    "float positive": "divmod floor_divide fmod mod",
    "float float": "nextafter",
    "nan nan": "fmax fmin maximum",
}

# Where NumPy has no such function, or warns about it.
NUMPY: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logaddexp2": lambda a, b: np.log2(np.exp2(a) + np.exp2(b)),
}
JAX: dict[str, Callable[..., Any]] = {"rsqrt": jax.lax.rsqrt}


def _positional(name: str) -> Callable[..., Any]:
    """Return the function of that name: NumPy's for NumPy arrays, JAX's if a gradient is taken through it."""

    def reference(*arrays):
        if all(isinstance(x, np.ndarray) for x in arrays):
            return NUMPY.get(name, getattr(np, name, None))(*arrays)  # pyright: ignore[reportOptionalCall]
        return JAX.get(name, getattr(jnp, name, None))(*arrays)  # pyright: ignore[reportOptionalCall]

    return reference


def _unary(name: str, kind: str, grad: bool) -> Case:
    names = ("batch", "pos")
    return Case(name, (of(kind, *names),), public_name(name), _positional(name), kind, grad=grad, names=names)


def _binary(name: str, kind: str, other: str, grad: bool) -> Case:
    """Make a case whose second operand lacks an axis of the first, and has its axes in another order."""
    positional = _positional(name)
    names = ("batch", "pos", "embed")
    return Case(
        name,
        (of(kind, *names), of(other, "embed", "batch")),
        public_name(name),
        lambda a, b: positional(a, b.T[:, None, :]),
        f"{kind}_{other}",
        grad=grad,
        names=(names, names) if name == "divmod" else names,
    )


def _rows(table: dict[str, str], make: Callable[..., Case], grad: bool) -> list[Case]:
    return [make(name, *kinds.split(), grad) for kinds, names in table.items() for name in names.split()]


# The ways in which operands of a binary operation combine, for a commutative operation and another one. NumPy's
# positional result is in the order of the first operand that has all the axes.
def _meetings(name: str) -> list[Case]:
    op, positional = public_name(name), _positional(name)

    def case(label: str, a: Operand, b: Operand, names: tuple[str, ...], reference: Callable[..., Any]) -> Case:
        return Case(name, (a, b), op, reference, label, names=names)

    def with_number(label: str, call: Callable[..., Any], reference: Callable[..., Any]) -> Case:
        return Case(name, (f("batch", "embed"),), call, reference, label, names=("batch", "embed"))

    x, two = ("batch", "pos", "embed"), np.float32(2.5)
    return [
        case("same_axes", f(*x), f(*x), x, positional),
        case(
            "other_order", f("batch", "embed"), f("embed", "batch"), ("batch", "embed"), lambda a, b: positional(a, b.T)
        ),
        case("second_larger", f("embed"), f(*x), x, lambda a, b: positional(a[None, None, :], b)),
        case("second_middle", f(*x), f("pos"), x, lambda a, b: positional(a, b[None, :, None])),
        case("no_axes", f(*x), f(), x, lambda a, b: positional(a, b.reshape(1, 1, 1))),
        case("only_scalars", f(), f(), (), positional),
        with_number("number_right", lambda x: op(x, 2.5), lambda x: positional(x, x * 0 + two)),
        with_number("number_left", lambda x: op(2.5, x), lambda x: positional(x * 0 + two, x)),
        with_number("scalar_right", lambda x: op(x, jnp.float32(2.5)), lambda x: positional(x, x * 0 + two)),
        with_number("scalar_left", lambda x: op(np.float32(2.5), x), lambda x: positional(x * 0 + two, x)),
    ]


def _special(name: str, kind: str, call: Callable[..., Any], reference: Callable[..., Any], **options: Any) -> Case:
    op, names = public_name(name), ("batch", "pos")
    options = {"names": names, **options}
    return Case(name, (of(kind, *names),), lambda x: call(op, x), reference, **options)


def _frexp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mantissa, exponent = np.vectorize(math.frexp)(x)
    return mantissa.astype(np.float32), exponent


PAIR = (("batch", "pos"), ("batch", "pos"))

CASES: list[Case] = [
    *_rows(UNARY, _unary, grad=True),
    *_rows(UNARY_WITHOUT_GRAD, _unary, grad=False),
    *_rows(BINARY, _binary, grad=True),
    *_rows(BINARY_WITHOUT_GRAD, _binary, grad=False),
    *_meetings("add"),
    *_meetings("subtract"),
    _special("arccosh", "positive", lambda op, x: op(public_name("add")(x, 1.0)), lambda x: jnp.arccosh(x + 1)),
    _special("round", "float", lambda op, x: op(x, 1), lambda x: np.round(x, 1), label="one_decimal", grad=False),
    _special("round", "float", lambda op, x: op(x, decimals=-1), lambda x: 0 * x, label="tens", grad=False),
    _special("round", "float", lambda op, x: op(x, 2), lambda x: np.round(x, 2), label="two_decimals", grad=False),
    _special("power", "float", lambda op, x: op(x, 3), lambda x: x**3, label="integer"),
    _special("power", "int", lambda op, x: op(x, 2), lambda x: x * x, label="integers", grad=False),
    _special("power", "float", lambda op, x: op(x, 0), np.ones_like, label="zero", grad=False),
    _special("power", "float", lambda op, x: op(2.0, x), lambda x: 2**x, label="base"),
    _special("divmod", "int", lambda op, x: op(x, 3), lambda x: np.divmod(x, 3), grad=False, names=PAIR),
    _special(
        "divmod",
        "positive",
        lambda op, x: op(3.0, x),
        lambda x: np.divmod(np.float32(3), x),
        grad=False,
        names=PAIR,
        label="left",
    ),
    _special("frexp", "float", lambda op, x: op(x), _frexp, grad=False, names=PAIR),
    _special("astype", "float", lambda op, x: op(x, jnp.int32), lambda x: x.astype(np.int32), label="int", grad=False),
    _special("astype", "float", lambda op, x: op(x, "complex64"), lambda x: x.astype(np.complex64), label="complex"),
    _special(
        "exp",
        "float",
        lambda op, x: op({"a": x, "b": (x, 0.0)}),
        lambda x: {"a": np.exp(x), "b": (np.exp(x), np.float32(1))},
        label="tree",
        names=(*PAIR, None),
        grad=False,
    ),
]
