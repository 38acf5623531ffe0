"""The operators of named arrays: each is the operation of its name, whatever the other operand is."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from tests.helpers import assert_named, compilations

FLOATS = np.array([[0.5, 1.5, -2.0], [3.0, -0.25, 1.0]], np.float32)
OTHER = np.array([[2.0, 0.5], [1.0, -1.5], [3.0, 2.5]], np.float32)
INTS, OTHER_INTS = np.array([[5, -3, 7], [2, 9, -8]], np.int32), np.array([[1, 2], [3, 1], [2, 3]], np.int32)
BOOLS = np.array([[True, False, True], [False, False, True]])

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
COMPARISON: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
BITS: dict[str, Callable[[Any, Any], Any]] = {
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
ON_FLOATS = ARITHMETIC | COMPARISON
ON_INTS = ARITHMETIC | COMPARISON | BITS


def rows(x: np.ndarray) -> axn.NamedArray:
    return axn.named(jnp.asarray(x), ("row", "col"))


def columns(x: np.ndarray) -> axn.NamedArray:
    return axn.named(jnp.asarray(x), ("col", "row"))


def assert_values(found: Any, expected: Any, names: tuple[str, ...] = ("row", "col")) -> None:
    """Check the names, and the values and dtype against `jax.numpy`."""
    assert_named(found, axn.named(jnp.asarray(expected), names), rtol=1e-6)


@pytest.mark.parametrize("sign", ON_FLOATS)
def test_two_named_arrays(sign: str) -> None:
    op = ON_FLOATS[sign]
    assert_values(op(rows(FLOATS), columns(OTHER)), op(jnp.asarray(FLOATS), OTHER.T))


@pytest.mark.parametrize("sign", ["-", "<="])
def test_layouts(sign: str) -> None:
    """Axes are matched by name, and the result is laid out as the first operand that has them all is."""
    op = ON_FLOATS[sign]
    x, y = rows(FLOATS), columns(OTHER)
    assert_values(op(y, x), op(jnp.asarray(OTHER), FLOATS.T), ("col", "row"))
    assert_values(op(x, y["row", 0]), op(jnp.asarray(FLOATS), OTHER[None, :, 0]))
    assert_values(op(y["row", 0], x), op(jnp.asarray(OTHER[None, :, 0]), FLOATS))
    assert_values(jax.jit(op)(x, y), op(jnp.asarray(FLOATS), OTHER.T))


@pytest.mark.parametrize("sign", ON_INTS)
def test_two_named_arrays_of_integers(sign: str) -> None:
    op = ON_INTS[sign]
    assert_values(op(rows(INTS), columns(OTHER_INTS)), op(jnp.asarray(INTS), OTHER_INTS.T))


SCALARS = {
    "int": 3,
    "float": 1.5,
    "bool": True,
    "numpy int": np.int32(3),
    "numpy float": np.float32(1.5),
    "numpy array": np.array(1.5, np.float32),
    "jax int": jnp.int32(3),
    "jax float": jnp.float32(1.5),
    "jax narrow": jnp.bfloat16(1.5),
}


def _assert_as_raw(op: Callable[[Any, Any], Any], scalar: Any, x: np.ndarray) -> None:
    """Check that a scalar on either side gives the same as with a raw JAX array."""
    with jax.numpy_rank_promotion("allow"):
        right, left = op(jnp.asarray(x), scalar), op(scalar, jnp.asarray(x))
    assert_values(op(rows(x), scalar), right)
    assert_values(op(scalar, rows(x)), left)


@pytest.mark.parametrize("kind", ["float", "numpy float", "jax float"])
@pytest.mark.parametrize("sign", ON_FLOATS)
def test_scalars_on_both_sides(sign: str, kind: str) -> None:
    _assert_as_raw(ON_FLOATS[sign], SCALARS[kind], FLOATS)


@pytest.mark.parametrize("kind", SCALARS)
def test_kinds_of_scalars(kind: str) -> None:
    """Python's numbers do not widen anything, others do as in JAX."""
    _assert_as_raw(operator.sub, SCALARS[kind], FLOATS)
    _assert_as_raw(operator.lt, SCALARS[kind], INTS)


@pytest.mark.parametrize("kind", ["int", "numpy int", "jax int"])
@pytest.mark.parametrize("sign", BITS)
def test_bits_of_scalars_on_both_sides(sign: str, kind: str) -> None:
    _assert_as_raw(BITS[sign], SCALARS[kind], np.abs(INTS))


@pytest.mark.parametrize("sign", ["&", "|", "^"])
def test_bits_of_booleans(sign: str) -> None:
    op = BITS[sign]
    assert_values(op(rows(BOOLS), rows(~BOOLS)), op(BOOLS, ~BOOLS))
    assert_values(op(rows(BOOLS), True), op(BOOLS, True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_python_numbers_keep_the_dtype(dtype: str) -> None:
    x = rows(np.abs(INTS)).astype(dtype)
    for result in (x + 1, 1 + x, x * 2, 2 - x, x // 2, 7 % x, x**2, -x, abs(x)):
        assert result.dtype == dtype
    wide = (x / 2, 2 / x, x + 1.5, 1.5 * x, x**0.5)
    expected = dtype if "float" in dtype else "float32"
    assert {str(r.dtype) for r in wide} == {expected}


def test_no_axes() -> None:
    x = axn.named(jnp.float32(3.0), ())
    for result in (x + 1, 1 + x, x + jnp.float32(1), np.float32(1) + x):
        assert_named(result, axn.named(jnp.float32(4.0), ()))
    assert_values(x * rows(FLOATS), 3 * FLOATS)
    assert bool(x > 2) and not bool(x == 2)


# --- powers ---


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -1.5, 2.0])
def test_powers_of_floats(exponent: float) -> None:
    base = np.abs(FLOATS)
    assert_values(rows(base) ** exponent, jnp.asarray(base) ** exponent)
    assert_values(axn.power(rows(base), exponent), jnp.power(base, exponent))
    assert_values(rows(base) ** jnp.float32(exponent), jnp.asarray(base) ** jnp.full_like(base, exponent))
    if isinstance(exponent, int):  # as repeated multiplication, so signs are right and gradients finite
        assert_values(rows(FLOATS) ** exponent, jnp.asarray(FLOATS) ** exponent)
        gradient = jax.grad(lambda x: (x**exponent).sum().scalar())(axn.named(jnp.array([0.0, 2.0]), "x"))
        if exponent >= 0:
            assert gradient.tolist() == [float(exponent == 1), exponent * 2.0 ** (exponent - 1)]


def test_powers_of_integers() -> None:
    assert_values(rows(INTS) ** 2, INTS * INTS)
    assert_values(rows(INTS) ** rows(np.abs(INTS) % 3), np.power(INTS, np.abs(INTS) % 3))
    assert_values(2 ** rows(OTHER_INTS.T), 2**OTHER_INTS.T)
    assert_values(rows(INTS) ** 0.5, jnp.asarray(INTS) ** 0.5)


def test_negative_powers_of_integers() -> None:
    with pytest.raises(TypeError, match="Integers cannot be raised to negative powers"):
        rows(INTS) ** -1


@pytest.mark.parametrize("base", [2, 2.0, np.float32(2), jnp.float32(2)])
def test_powers_of_scalars(base: Any) -> None:
    assert_values(base ** rows(FLOATS), 2.0**FLOATS)


def test_power_with_a_modulus() -> None:
    with pytest.raises(TypeError):
        pow(rows(INTS), 2, 3)  # pyright: ignore


def test_different_exponents_of_one_kind_share_a_program() -> None:
    x = rows(np.abs(FLOATS))
    x**0.5, x + 1, 1 - x
    with compilations() as compiled:
        x**1.5, x + 2, 2 - x
    assert compiled == []


# --- the others ---


@pytest.mark.parametrize("divisor", [2, -3, 2.5, np.float32(2), jnp.float32(-2)])
def test_divmod(divisor: Any) -> None:
    x = rows(FLOATS)
    for found, expected in (
        (divmod(x, divisor), np.divmod(FLOATS, np.float32(divisor))),
        (divmod(divisor, x), np.divmod(np.float32(divisor), FLOATS)),
    ):
        assert type(found) is tuple and len(found) == 2
        for part, value in zip(found, expected, strict=True):
            assert_values(part, value)
    quotient, remainder = divmod(x, columns(OTHER))
    assert_values(quotient, np.floor_divide(FLOATS, OTHER.T))
    assert_values(remainder, np.mod(FLOATS, OTHER.T))


def test_signs() -> None:
    assert_values(-rows(FLOATS), -FLOATS)
    assert_values(+rows(FLOATS), FLOATS)
    assert_values(abs(rows(FLOATS)), np.abs(FLOATS))
    assert_values(~rows(INTS), ~INTS)
    assert_values(~rows(BOOLS), ~BOOLS)


def test_in_place_forms_make_a_new_array() -> None:
    x = before = rows(FLOATS)
    x += 1
    x *= 2
    x -= columns(OTHER)
    x /= 4
    assert_values(x, ((FLOATS + 1) * 2 - OTHER.T) / 4)
    assert_values(before, FLOATS)


def test_gradients_through_operators() -> None:
    def f(x, y):
        return (x * y - 2 / x + (1 - y) ** 2 - x % 3.0).sum().scalar()

    found = jax.grad(f, (0, 1))(rows(np.abs(FLOATS)), columns(OTHER))
    x, y = np.abs(FLOATS), OTHER.T
    assert_values(found[0], y + 2 / x**2 - 1)
    assert_values(found[1], (x - 2 * (1 - y)).T, ("col", "row"))


# --- what is refused ---


class Stranger:
    """A class whose operators accept anything."""

    def __radd__(self, other: Any) -> str:
        return "radd"

    def __add__(self, other: Any) -> str:
        return "add"


def test_an_operand_of_another_library_has_its_turn() -> None:
    assert rows(FLOATS) + Stranger() == "radd"
    assert Stranger() + rows(FLOATS) == "add"


@pytest.mark.parametrize(
    "other", ["text", None, [1.0, 2.0], (1, 2), {"a": 1}, object()], ids=lambda o: type(o).__name__
)
@pytest.mark.parametrize("sign", ["+", "/", "<", "&", "**", "divmod"])
def test_unsupported_operands(sign: str, other: Any) -> None:
    op = (ON_INTS | {"**": operator.pow, "divmod": divmod})[sign]
    for left, right in ((rows(INTS), other), (other, rows(INTS))):
        with pytest.raises(TypeError, match=r"unsupported operand type|not supported between|concatenate"):
            op(left, right)


def test_equality_with_something_else_is_no_array() -> None:
    assert (rows(FLOATS) == "text") is False
    assert (rows(FLOATS) != None) is True


def test_matmul_names_the_axis_that_both_have() -> None:
    x, w = axn.ones({"batch": 2, "embed": 3}), axn.ones({"embed": 3, "mlp": 4})
    for other, axis in ((w, "'embed'"), (x, "..."), (2.0, "...")):
        with pytest.raises(TypeError, match=re.escape(f"Use axonym.dot(x, y, axis={axis}).")):
            x @ other  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("other", [rows(FLOATS), FLOATS, jnp.asarray(FLOATS), 2.0])
def test_matmul(other: Any) -> None:
    with pytest.raises(TypeError, match=r"`@` does not say which axes to sum over\. Use axonym\.dot\(x, y, axis="):
        rows(FLOATS) @ other
    if not isinstance(other, (np.ndarray, float)):
        with pytest.raises(TypeError, match=re.escape("`@` does not say which axes to sum over.")):
            other @ rows(FLOATS)


@pytest.mark.parametrize("raw", [FLOATS, jnp.asarray(FLOATS), FLOATS[0]], ids=["numpy", "jax", "numpy row"])
def test_raw_arrays(raw: Any) -> None:
    message = re.escape(f"an operand has no axis names but shape {raw.shape}. Only scalars go without names")
    with pytest.raises(TypeError, match=message):
        rows(FLOATS) + raw
    reflected = (
        message if isinstance(raw, jax.Array) else "numpy.add works by position and does not take a NamedArray: use"
    )
    with pytest.raises(TypeError, match=reflected):
        raw + rows(FLOATS)


def test_axes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"multiply: cannot broadcast \(row, col\) and \(key\)"):
        rows(FLOATS) * axn.ones({"key": 2})
    with pytest.raises(ValueError, match=r"subtract: axis 'col' has conflicting sizes: 3 in operand 0, 2 in operand 1"):
        rows(FLOATS) - axn.ones({"col": 2})


def test_hashing_is_refused() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(rows(FLOATS))
