"""Polynomials: the names of results, raw operands, the other forms of the fit, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import poly
from axonym.poly import DEFAULT_POLY_AXIS_NAME

untyped: Any = poly  # for calls that a type checker would refuse
E = axn.named([1.0, 2.0, 3.0, 4.0], "e")
V = axn.named([1.0, -3.0, 2.0, 0.0, 5.0], "v")
M = axn.ones({"b": 2, "v": 3})
RAW = jnp.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("found", "shape"),
    [
        (poly.polyadd(E, V), {"e": 5}),
        (poly.polyadd(V, E), {"v": 5}),
        (poly.polyadd(E, RAW), {"e": 4}),
        (poly.polyadd(RAW, E), {"e": 4}),
        (poly.polyadd(RAW, RAW), {DEFAULT_POLY_AXIS_NAME: 3}),
        (poly.polysub([1, 2], 3), {DEFAULT_POLY_AXIS_NAME: 2}),
        (poly.polymul(E, V), {"e": 8}),
        (poly.polydiv(V, E)[0], {"v": 2}),
        (poly.polydiv(V, E)[1], {"v": 5}),
        (poly.polydiv(E, V)[0], {"e": 1}),
        (poly.polyder(E, 0), {"e": 4}),
        (poly.polyder(E, 5), {"e": 0}),
        (poly.polyint(E, 2, [1.0, 2.0]), {"e": 6}),
        (poly.polyint(RAW), {DEFAULT_POLY_AXIS_NAME: 4}),
        (poly.poly(RAW), {DEFAULT_POLY_AXIS_NAME: 4}),
        (poly.poly(axn.zeros({"x": 0})), {"x": 1}),
        (poly.polyval(E, M), {"b": 2, "v": 3}),
        (poly.polyval(E, E), {"e": 4}),
        (poly.roots(RAW), {DEFAULT_POLY_AXIS_NAME: 2}),
        (poly.roots(axn.named([0.0, 0.0], "v")), {"v": 0}),
        (poly.trim_zeros([0, 1]), {DEFAULT_POLY_AXIS_NAME: 1}),
    ],
)
def test_the_axis_is_that_of_the_first_named_operand(found: axn.NamedArray, shape: dict[str, int]) -> None:
    assert found.shape == shape


def test_the_order_of_operands_stays() -> None:
    np.testing.assert_array_equal(poly.polysub(RAW, E).array, [-1, -1, -1, -1])
    np.testing.assert_array_equal(poly.polysub(E, RAW).array, [1, 1, 1, 1])


def test_integers_stay_integers_where_they_can() -> None:
    assert poly.polyadd(axn.named([1, 2], "x"), [1]).dtype == jnp.int32


def test_a_raw_argument_gives_a_raw_value() -> None:
    assert not axn.is_named_array(poly.polyval(E, 2.0))
    np.testing.assert_array_equal(poly.polyval(E, RAW), np.polyval(E.array, RAW))


def test_roots_leaves_out_leading_zeros_only() -> None:
    found = poly.roots(axn.named([0.0, 1.0, -1.0, 0.0], "v"))
    np.testing.assert_allclose(sorted(found.array.real), [0.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("trim", ["f", "b", "fb", "FB"])
@pytest.mark.parametrize("values", [[0, 0, 1, 0, 2, 0], [1, 2], [0, 0], []])
def test_trim_zeros(values: list[int], trim: str) -> None:
    found = poly.trim_zeros(axn.named(jnp.array(values, jnp.int32), "x"), trim)
    expected = np.trim_zeros(np.array(values, np.int32), trim)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(found.array, expected)


X = axn.named([0.0, 1.0, 2.0, 3.0], "x")
Y = axn.named(np.array([[1.0, 2.0], [3.0, 2.5], [5.0, 2.0], [8.0, 1.0]], np.float32), ("x", "y"))


def test_fit_of_integers_and_raw_points() -> None:
    expected = np.polyfit([0, 1, 2], [1, 2, 5], 1)
    found = poly.polyfit([0, 1, 2], axn.named([1, 2, 5], "x"), 1)
    assert found.shape == {"x": 2}
    np.testing.assert_allclose(found.array, expected, rtol=1e-4)
    assert poly.polyfit([0, 1, 2], [1, 2, 5], 1).names == (DEFAULT_POLY_AXIS_NAME,)


def test_fit_with_diagnostics() -> None:
    expected = np.polyfit(X.array, Y.array, 1, full=True)
    coefficients, residuals, rank, singular, rcond = poly.polyfit(X, Y, 1, full=True)
    assert coefficients.names == ("x", "y")
    assert residuals.names == ("y",)
    np.testing.assert_allclose(coefficients.array, expected[0], rtol=1e-4)
    np.testing.assert_allclose(residuals.array, expected[1], rtol=1e-4, atol=1e-5)
    assert rank == expected[2]
    np.testing.assert_allclose(singular, expected[3], rtol=1e-4)
    assert rcond.shape == ()
    assert poly.polyfit(X, axn.sum(Y, "y"), 1, full=True)[1].shape == (1,)


@pytest.mark.parametrize("cov", [True, "unscaled"])
def test_fit_with_covariance(cov: bool | str) -> None:
    turned = axn.named(Y.array.T, ("y", "x"))
    coefficients, covariance = poly.polyfit(X, turned, 1, cov=cov)
    assert coefficients.shape == {"y": 2, "x": 2}
    assert covariance.shape == {"y": 2, "x": 2, "x_cov": 2}
    for i in range(2):
        expected = np.polyfit(X.array, Y.array[:, i], 1, cov=cov)[1]  # pyright: ignore[reportArgumentType, reportCallIssue]
        np.testing.assert_allclose(covariance.array[i], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: poly.polyadd(M, E),
            ValueError,
            r"^polyadd: a polynomial has one axis, .*; got float32\[b=2, v=3\]",
        ),
        (
            lambda: poly.polymul(E, M.array),
            ValueError,
            r"^polymul: a polynomial has one axis, .*; got shape \(2, 3\)",
        ),
        (lambda: poly.polyval(axn.sum(E), 1.0), ValueError, r"^polyval: a polynomial has one axis"),
        (lambda: poly.poly(M), ValueError, r"^poly: the roots lie along one axis, .*axonym\.linalg\.eigvals"),
        (lambda: poly.polyder(E, -1), ValueError, r"^polyder: the number of times cannot be negative, got -1"),
        (lambda: untyped.polyint(E, 1.5), TypeError, r"cannot be interpreted as an integer"),
        (
            lambda: poly.polyint(E, 3, [1, 2]),
            ValueError,
            r"^polyint: 2 constants of integration for 3 integrations",
        ),
        (lambda: poly.trim_zeros(E, "x"), ValueError, r"^trim_zeros: `trim` is 'f', 'b' or 'fb', got 'x'"),
        (
            lambda: jax.jit(poly.roots)(E),
            TypeError,
            r"^roots: the size of the result depends .* Pass strip_zeros=False",
        ),
        (lambda: jax.jit(poly.trim_zeros)(E), TypeError, r"^trim_zeros: the size of the result depends"),
        (
            lambda: poly.polyfit(X, E, 1),
            ValueError,
            r"^polyfit: the points lie along one axis, .* x has \(x\), y has \(e",
        ),
        (lambda: poly.polyfit(X, Y, 1, w=E), ValueError, r"^polyfit: .* x has \(x\), y has \(x, y\), w has \(e\)"),
        (lambda: poly.polyfit(RAW, Y, 1), ValueError, r"^polyfit: .* x has \(\), y has \(x, y\)"),
        (lambda: poly.polyfit(X, RAW, 1), ValueError, r"^polyfit: axis 'x' has conflicting sizes: 4 .*, 3 "),
        (
            lambda: poly.polyfit(X, axn.ones({"x": 4, "x_cov": 2}), 1, cov=True),
            ValueError,
            r"^polyfit: 'x_cov' would name more than one axis",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_roots_and_fit_of_half_precision_and_of_nothing() -> None:
    found = poly.roots(axn.named(jnp.array([1, -3, 2], jnp.bfloat16), "v"))
    np.testing.assert_allclose(np.sort(np.abs(found.array)), [1, 2], rtol=1e-5)
    assert poly.polyfit(E, axn.zeros({"b": 0, "e": 4}), 1).shape == {"b": 0, "e": 2}
