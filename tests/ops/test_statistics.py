"""Errors of statistics, and the dtypes of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from tests.helpers import compilations

untyped: Any = axn  # for calls that a type checker would refuse
X, Y, Z = axn.make_axes(x=4, y=3, z=2)
A = axn.arange((X, Y))
F = axn.arange((X, Y), dtype=float)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.median(A, "w"), ValueError, r"^median: no axis 'w' in \(x=4, y=3\)"),
        (lambda: untyped.median(jnp.ones(3)), TypeError, r"^median: expected a NamedArray"),
        (lambda: untyped.quantile(A, [0.1, 0.2]), TypeError, r"^quantile: an operand has no axis names .*\(2,\)"),
        (lambda: axn.quantile(A, F), ValueError, r"^quantile: `q` must be a scalar or have one axis, got \(x, y\)"),
        (lambda: axn.median(A * 1j), ValueError, r"^median: complex numbers have no order"),
        (lambda: axn.diff(A, "w"), ValueError, r"^diff: no axis 'w'"),
        (lambda: axn.diff(A, "x", n=-1), ValueError, r"^diff: `n` says how often .* got -1"),
        (lambda: axn.gradient(A, "x", spacing=axn.ones(Y)), ValueError, r"^gradient: `spacing` must be .* got \(y\)"),
        (lambda: axn.gradient(axn.ones(axn.Axis("x", 1)), "x"), ValueError, r"^gradient: axis 'x' has size 1;"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_short_floats_stay_short() -> None:
    x = axn.ones((X, Y), jnp.bfloat16)
    found = (
        axn.median(x),
        axn.quantile(x, 0.5, "x"),
        axn.quantile(x, 1, "x"),
        axn.gradient(x, "x"),
    )
    assert [f.dtype for f in found] == [jnp.bfloat16] * len(found)


def test_half_precision_statistics_do_not_overflow() -> None:
    many = axn.full({"x": 70001}, 1.5, dtype=jnp.float16)  # more than the largest number
    assert axn.nanmean(many).array == jnp.float16(1.5)
    large = axn.named(jnp.array([-3e4, 3e4], jnp.float16), "x")
    for x in (axn.std(large), axn.nanstd(large)):
        assert x.array == jnp.float16(3e4)


def test_integers_become_floats() -> None:
    found = (
        axn.median(A),
        axn.quantile(A, 1),
    )
    assert [f.dtype for f in found] == [np.float32] * len(found)


def test_another_quantile_does_not_compile_again() -> None:
    axn.quantile(A, 0.25, "x")
    with compilations() as compiled:
        axn.quantile(A, 0.75, "x")
    assert compiled == []


@pytest.mark.parametrize("method", ["linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf"])
def test_quantiles_and_their_gradients_are_as_in_jax(method: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    gaps = x.copy()
    gaps[0, 3] = gaps[1, :3] = np.nan
    q = jnp.array([0.0, 0.3, 0.5, 1.0])

    def found(fn: Callable[..., Any], x: Any) -> tuple[Any, Any]:
        value, gradients = jax.vjp(fn, x, q)
        return value, gradients(1.0 + jnp.arange(16.0).reshape(4, 4))

    def by_name(op: Any, x: Any, q: Any) -> jax.Array:
        return op(axn.named(x, ("b", "x")), axn.named(q, "q"), "x", method=method).array

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found(functools.partial(by_name, axn.quantile), x),
        found(functools.partial(jnp.quantile, axis=1, method=method), x),
    )
    assert np.isnan(by_name(axn.quantile, gaps, q)).tolist() == [[True, True, False, False]] * 4


def test_quantiles_of_infinite_numbers() -> None:
    x = axn.named([1.0, jnp.inf, -jnp.inf], "x")
    assert axn.quantile(x, axn.named([0.0, 0.5, 1.0], "q")).tolist() == [-jnp.inf, 1.0, jnp.inf]
    assert jnp.isnan(axn.quantile(x, jnp.nan).array)


def test_no_elements() -> None:
    x = axn.zeros({"a": 0, "b": 2})
    for of_none in (lambda: axn.median(x, "a"), lambda: axn.quantile(x, 0.5, ("a", "b"))):
        with pytest.raises(ValueError, match=r"no elements along \(a=0"):
            of_none()
    assert axn.median(x, "b").shape == axn.quantile(x, 0.5, "b").shape == {"a": 0}


def test_half_precision_does_not_limit_what_is_computed() -> None:
    large = axn.named(np.full(4, 60000, np.float16), "x")
    for found in (axn.median(large), axn.quantile(large, 0.5, method="midpoint")):
        assert found.dtype == jnp.float16 and found.item() == 60000
    # A share of small dtype still finds the position in a long axis.
    many = axn.arange(axn.Axis("x", 1025), dtype=float)
    assert axn.quantile(many, jnp.asarray(0.5, jnp.bfloat16)).item() == 512
    short = axn.named(jnp.arange(5, dtype=jnp.bfloat16), "x")
    assert axn.quantile(short, 0.5, method="inverted_cdf").item() == 2
