"""Errors of selection and comparison, and their results on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from tests.helpers import compilations

untyped: Any = axn  # for calls that a type checker would refuse
X, Y, Z, U = axn.make_axes(x=4, y=3, z=2, u=5)
A = axn.arange((X, Y))
ROW = axn.arange(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: axn.where(ROW > 1, axn.ones(X), axn.ones(Y)),
            ValueError,
            r"^where: cannot broadcast \(x\) and .*\(y\)",
        ),
        (lambda: axn.where(True, axn.ones(X), axn.ones(Y)), ValueError, r"^where: cannot broadcast \(x\) and \(y\)"),
        (lambda: axn.where(jnp.ones(4, bool), A, 1), TypeError, r"^where: an operand has no axis names .*\(4,\)"),
        (lambda: axn.nonzero(axn.sum(A), size=U), ValueError, r"^nonzero: an array without axes has no positions"),
        (lambda: untyped.nonzero(A, size="u"), ValueError, r"^nonzero needs axes with sizes, got only the name 'u'"),
        (lambda: untyped.nonzero(A, size=5), TypeError, r"^nonzero: `size` must be an Axis, got int"),
        (lambda: axn.nonzero(A, size=U, fill_value=(1,)), ValueError, r"^nonzero: 1 fill value for .*\(x=4, y=3\)"),
        (lambda: axn.clip(axn.ones(X), axn.ones(Y), 2), ValueError, r"^clip: cannot broadcast \(x\) and \(y\)"),
        (
            lambda: axn.clip(ROW, axn.ones(axn.Axis("x", 3))),
            ValueError,
            r"^clip: axis 'x' has conflicting sizes: 4 .* 3",
        ),
        (lambda: axn.take_along_axis(A, 0, "w"), ValueError, r"^take_along_axis: no axis 'w' in \(x=4, y=3\)"),
        (
            lambda: axn.take_along_axis(A, 0, axn.Axis("x", 9)),
            ValueError,
            r"^take_along_axis: .*: 4 in the array, 9 in",
        ),
        (
            lambda: axn.take_along_axis(A, axn.arange(Z), "x"),
            ValueError,
            r"`indices` has axes \(z\) .* array\[{'x': ind",
        ),
        (
            lambda: axn.take_along_axis(A, axn.arange(axn.Axis("y", 2)), "x"),
            ValueError,
            r"axis 'y' has conflicting .* 3",
        ),
        (lambda: untyped.take_along_axis(jnp.ones(3), 0, "x"), TypeError, r"^take_along_axis: expected a NamedArray"),
        (
            lambda: axn.searchsorted(A, 2),
            ValueError,
            r"^searchsorted: `a` must have exactly one axis, got \(x=4, y=3\)",
        ),
        (lambda: axn.searchsorted(ROW, 2, sorter=axn.arange(Y)), ValueError, r"`a` has 'x' and `sorter` has 'y'"),
        (lambda: axn.searchsorted(ROW, jnp.arange(2)), TypeError, r"^searchsorted: an operand has no axis names"),
        (lambda: axn.interp(A, ROW, axn.arange(Y)), ValueError, r"^interp: .* `xp` has 'x' and `fp` has 'y'"),
        (lambda: axn.interp(A, ROW, [1, 2, 3]), ValueError, r"^interp: axis 'x' .*: 4 in `xp`, 3 in `fp`"),
        (lambda: axn.interp(A, A, A), ValueError, r"^interp: which axis of `xp` \(x=4, y=3\) .* Pass it as `axis`"),
        (
            lambda: axn.interp(A, axn.arange(Y), ROW + A["y", 0].broadcast_axis(Z)),
            ValueError,
            r"`fp` has no axis 'y': ",
        ),
        (
            lambda: axn.interp(A, A, axn.ones((X, Z)), axis="x"),
            ValueError,
            r"^interp: `xp` has axes \(y\) that the arr",
        ),
        (lambda: axn.interp(0.5, ROW, ROW, axis="y"), ValueError, r"^interp: `xp` has no axis 'y': \(x=4\)"),
        (lambda: axn.interp(0.5, ROW, A, axis=axn.Axis("x", 5)), ValueError, r"'x' has conflicting sizes: 4 .* 5 in"),
        (lambda: axn.interp(0.5, A, ROW, axis="y"), ValueError, r"^interp: `fp` has no axis 'y': \(x=4\)"),
        (
            lambda: axn.interp(0.5, jnp.ones(3), jnp.ones((3, 2))),
            TypeError,
            r"^interp: expected a NamedArray, got Array",
        ),
        (lambda: axn.interp(A, ROW, ROW, left=ROW), ValueError, r"^interp: `left` must be a scalar, .*x=4"),
        (lambda: axn.isclose(axn.ones(X), axn.ones(Y)), ValueError, r"^isclose: cannot broadcast \(x\) and \(y\)"),
        (lambda: axn.allclose(ROW, axn.ones(axn.Axis("x", 2))), ValueError, r"^allclose: axis 'x' .* sizes: 4 .* 2"),
        (lambda: axn.array_equal(A, jnp.ones((4, 3))), TypeError, r"^array_equal: expected a NamedArray"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_constant_condition_leaves_nothing_of_the_other_operand() -> None:
    x = axn.named([1.0, 4.0], "x")
    gradient = jax.grad(lambda x: axn.sum(axn.where(True, x, axn.sqrt(x - 1.0))).array)(x)
    np.testing.assert_array_equal(gradient.array, [1.0, 1.0])


def test_without_named_arrays_where_is_that_of_jax() -> None:
    assert isinstance(axn.where(True, 1, 2), jax.Array)
    np.testing.assert_array_equal(axn.where(jnp.array([True, False]), 1, 2), [1, 2])


def test_scalars_keep_weak_types() -> None:
    x = axn.ones(X, jnp.bfloat16)
    assert axn.where(x > 0, x, 0.0).dtype == jnp.bfloat16
    assert axn.where(True, x, 0.0).dtype == jnp.bfloat16
    assert axn.clip(x, 0.0, 1).dtype == jnp.bfloat16


def test_other_bounds_and_fill_values_do_not_compile_again() -> None:
    x = axn.arange(X)
    axn.clip(x, 0, 2), axn.nonzero(x, size=U, fill_value=3), axn.interp(x, ROW, ROW, left=0.0)
    with compilations() as compiled:
        axn.clip(x, 1, 3), axn.nonzero(x, size=U, fill_value=4), axn.interp(x, ROW, ROW, left=1.0)
    assert compiled == []


def test_truth_values_on_the_host_and_traced() -> None:
    assert axn.allclose(A, A) is True
    assert axn.array_equal(A, A + 1) is False
    assert axn.array_equiv(A, A) is True
    assert axn.array_equal(A, axn.ones(Y)) is False
    for compare in (axn.allclose, axn.array_equal, axn.array_equiv):
        traced = jax.jit(lambda a, compare=compare: jnp.where(compare(a, a), 1, 2))(A)
        assert int(traced) == 1
