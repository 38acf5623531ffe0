"""Arguments that are easily mishandled: small dtypes, Python numbers, lists, positions."""
# pyright: reportArgumentType=false, reportCallIssue=false
# The arguments are wrong on purpose.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn

X = axn.named([3.0, 1.0, 2.0], "a")
SQUARE = axn.named(np.arange(9.0).reshape(3, 3), ("a", "b"))
LONG = axn.Axis("a", 300)


# --- small dtypes do not overflow on the way to a result that would hold the value ---


def _int8(*values: int) -> axn.NamedArray:
    return axn.named(np.array(values, np.int8), "a")


def test_arange_counts_in_the_dtype_of_the_result() -> None:
    counted = axn.arange(LONG, start=np.int8(1), dtype=jnp.int32)
    np.testing.assert_array_equal(counted.array, np.arange(1, 301))
    assert axn.arange(LONG, start=np.int8(1), dtype=jnp.float32).array[-1] == 300.0


def test_vander_keeps_the_dtype() -> None:
    powers = axn.vander(_int8(2, 3), axn.Axis("degree", 3))
    assert powers.dtype == jnp.vander(np.array([2, 3], np.int8), 3).dtype == np.int8


def test_bincount_of_small_integers_on_a_long_axis() -> None:
    counts = axn.bincount(_int8(100, 100, -1), axn.Axis("value", 300))
    assert counts["value", 100] == 2 and counts.sum() == 2


def test_bincount_adds_up_small_weights() -> None:
    counts = axn.bincount(_int8(1, 1, 1), axn.Axis("value", 2), weights=_int8(100, 100, 100))
    assert counts.dtype == jnp.int32 and counts.tolist() == [0, 300]


@pytest.mark.parametrize("order", [None, 0, 1, 3, np.inf, -np.inf])
def test_norms_of_integers_are_floats(order: Any) -> None:
    x = _int8(-128, 100)
    expected = np.linalg.norm([-128.0, 100.0], ord=order)
    for found in (axn.linalg.norm(x, ord=order), axn.linalg.norm(x, "a", ord=order)):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found.array, expected, rtol=1e-6)


def test_slopes_of_integers_have_no_weak_type() -> None:
    assert not axn.gradient(_int8(1, 2, 4), "a").array.weak_type


def test_large_unsigned_positions_are_out_of_range() -> None:
    """Not the last element, which JAX takes, since it makes them negative."""
    positions = axn.named(np.array([2**32 - 1, 1], np.uint32), "a")
    found = jax.jit(lambda i: axn.take_along_axis(X, i, "a"))(positions)
    np.testing.assert_array_equal(found.array, [np.nan, 1.0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, bool])
@pytest.mark.parametrize(
    "normalize",
    [
        lambda x: axn.nn.softmax(x, "a"),
        lambda x: axn.nn.log_softmax(x, "a"),
        lambda x: axn.nn.softmax(x, "a", where=x > 0),
        lambda x: axn.nn.standardize(x, "a"),
        lambda x: axn.nn.standardize(x, "a", where=x > 0),
        axn.nn.squareplus,
        lambda x: axn.nn.binary_cross_entropy_loss(x, x > 5, reduction=None),
        lambda x: axn.nn.attention.apply_rotary(x, "a", axn.named(1, ())),
    ],
)
def test_integers_are_normalized_as_floats(normalize: Callable[[Any], Any], dtype: Any) -> None:
    """Differences of small or unsigned integers and their squares would overflow."""
    x = axn.named(np.array([100, 127, 3, 0]).astype(dtype), "a")
    found, expected = normalize(x), normalize(x.astype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-6)


# --- dtypes and weak types ---


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("a", [1, 2.0, jnp.int32(3)])
@pytest.mark.parametrize("b", [1, 2.0, jnp.bfloat16(3)])
def test_where_with_a_python_bool_promotes_as_with_an_array(chosen: bool, a: Any, b: Any) -> None:
    def types(condition: Any) -> Any:
        result = jax.eval_shape(lambda x, y: axn.where(condition, axn.named(x, ()), y).array, a, b)
        return result.dtype, result.weak_type

    assert types(chosen) == types(jnp.bool_(chosen))


@pytest.mark.parametrize(
    "call",
    [lambda x: axn.tril(x, "a", "b"), lambda x: axn.triu(x, "a", "b")],
)
@pytest.mark.parametrize("number", [2, 2.0, True])
def test_triangles_keep_a_weak_type(call: Callable[[Any], Any], number: Any) -> None:
    x = jnp.broadcast_to(jnp.asarray(number), (2, 2))
    found = jax.eval_shape(lambda x: call(axn.named(x, ("a", "b"))).array, x)
    assert (found.dtype, found.weak_type) == (x.dtype, x.weak_type)


# --- numbers may be arrays ---


def test_scalar_arrays_are_numbers() -> None:
    two = axn.named(jnp.float32(2), ())
    ramp = axn.pad(X, {"a": 2}, mode="linear_ramp", end_values=two)
    np.testing.assert_array_equal(ramp.array, np.pad(np.asarray(X.array), 2, mode="linear_ramp", end_values=2))
    mean = axn.pad(X, {"a": 1}, mode="mean", stat_length=[2])
    np.testing.assert_array_equal(mean.array, np.pad(np.asarray(X.array), 1, mode="mean", stat_length=[2]))


@pytest.mark.parametrize(
    "call",
    [
        lambda n: axn.std(X, "a", ddof=n - 1),
        lambda n: axn.linalg.norm(X, "a", ord=n),
        lambda n: axn.pad(X, {"a": 1}, mode="linear_ramp", end_values=[n, n]),
        lambda n: axn.pad(X, {"a": 1}, mode="mean", stat_length=n),
        lambda n: axn.pad(X, {"a": 1}, mode="mean", stat_length=[(n, n)]),
        lambda n: axn.isclose(X, X + 1, rtol=n),
        lambda n: axn.nonzero(X > 1, size=axn.Axis("found", 3), fill_value=n)[0],
        lambda n: X.at["a", axn.named([5], "b")].get(mode="fill", fill_value=n),
    ],
)
@pytest.mark.parametrize("two", [jnp.int32(2), np.array(2), axn.named(jnp.int32(2), ())])
def test_arrays_of_one_number_are_numbers(call: Callable[[Any], Any], two: Any) -> None:
    assert axn.array_equal(call(two), call(2))
    with pytest.raises((TypeError, ValueError), match=r": `\w+` must be a scalar, got an array of shape \(2,\)"):
        call(jnp.ones(2, jnp.int32))


def test_an_option_that_was_refused_is_not_found_again() -> None:
    """Of two numbers that are equal JAX takes one."""
    with pytest.raises(TypeError):
        axn.pad(X, {"a": 1}, mode="mean", stat_length=2.0)
    assert axn.pad(X, {"a": 1}, mode="mean", stat_length=2).tolist() == [2.0, 3.0, 1.0, 2.0, 1.5]


def test_minus_zero_fills() -> None:
    for fill in (0, 0.0, -0.0):
        found = X.at["a", axn.named([5], "b")].get(mode="fill", fill_value=fill).array[0]
        assert np.signbit(found) == np.signbit(np.float32(fill))


# --- refusals ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.repeat(X, [2, -1, 2], "a"), ValueError, r"^repeat: `repeats` cannot be negative, got -1"),
        (lambda: axn.repeat(X, jnp.array([2, -1, 2]), "a", 3), ValueError, r"^repeat: `repeats` cannot be negative"),
        (lambda: axn.tile(X, 2), TypeError, r"^tile: `reps` is a mapping by axis, such as {'batch': 2}, got int"),
        (lambda: axn.pad(X, 1), TypeError, r"^pad: `pad_width` is a mapping by axis, .* got int"),
        (lambda: axn.rename(X, ["b"]), TypeError, r"^rename: `renames` is a mapping by axis, .* got list"),
        (lambda: axn.rearrange(X, 0), TypeError, r"^An axis is selected by an Axis or its name, got int"),
        (lambda: axn.index(X.array, {"a": 0}), TypeError, r"^index: expected a NamedArray"),
        (lambda: axn.sort(SQUARE, ["a", "b"]), ValueError, r"^sort: expected one axis, got \(a, b\)"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


BY_POSITION: dict[str, Callable[[], Any]] = {
    "sum": lambda: axn.sum(X, 0),
    "max": lambda: X.max(0),
    "argmax": lambda: axn.argmax(X, 0),
    "cumsum": lambda: axn.cumsum(X, 0),
    "dot": lambda: axn.dot(X, X, axis=0),
    "trace": lambda: axn.trace(SQUARE, 0, 1),
    "tril": lambda: axn.tril(SQUARE, 0, 1),
    "rename": lambda: axn.rename(X, {0: "b"}),
    "tile": lambda: axn.tile(X, {0: 2}),
    "vander": lambda: axn.vander(X, 3),
    "roll": lambda: axn.roll(X, 1, 0),
    "repeat": lambda: axn.repeat(X, 2, 0),
    "flatten_axes": lambda: axn.flatten_axes(SQUARE, (0, 1), "c"),
}


@pytest.mark.parametrize("call", BY_POSITION.values(), ids=BY_POSITION)
def test_positions_are_refused_with_what_to_write(call: Callable[[], Any]) -> None:
    given = r"^An axis is selected by an Axis or its name, got int. Write ('[ab]' for position 0|a name such)"
    with pytest.raises(TypeError, match=given):
        call()


WITH_A_LIST: dict[str, Callable[[Any], Any]] = {
    "sort": lambda axis: axn.sort(X, axis),
    "cumsum": lambda axis: axn.cumsum(X, axis),
    "argmax": lambda axis: axn.argmax(X, axis),
    "diff": lambda axis: axn.diff(X, axis),
    "repeat": lambda axis: axn.repeat(X, 2, axis),
    "take_along_axis": lambda axis: axn.take_along_axis(X, 0, axis),
}


@pytest.mark.parametrize("call", WITH_A_LIST.values(), ids=WITH_A_LIST)
def test_a_list_of_one_selects_like_its_element(call: Callable[[Any], Any]) -> None:
    assert axn.array_equal(call(["a"]), call("a"))
