"""Errors of sorting, sets and diagonals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn

untyped: Any = axn  # for calls that a type checker would refuse
X, Y, U = axn.make_axes(x=4, y=3, u=5)
A = axn.arange((X, Y))
ROW = axn.arange(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.sort(A, "w"), ValueError, r"^sort: no axis 'w' in \(x=4, y=3\)"),
        (lambda: axn.sort(A, axn.Axis("x", 9)), ValueError, r"^sort: axis 'x' .*: 4 in the array, 9 in the argument"),
        (lambda: untyped.sort(A, ("x", "y")), ValueError, r"^sort: expected one axis, got \(x, y\)"),
        (lambda: untyped.sort(jnp.ones(3), "x"), TypeError, r"^sort: expected a NamedArray, got ArrayImpl"),
        (lambda: axn.argsort(A, None), ValueError, r"^argsort: which axis of \(x=4, y=3\)\? Name one, or flatten"),
        (lambda: axn.argsort(axn.sum(A)), ValueError, r"^argsort: which axis of \(\)\?"),
        (lambda: axn.top_k(A, "x", 5), ValueError, r"^top_k: k=5, but axis 'x' has 4 elements"),
        (lambda: axn.top_k(A, "x", 2, "y"), ValueError, r"^top_k: 'y' would name more than one axis"),
        (lambda: axn.top_k(A, "x", 2, axn.Axis("k", 3)), ValueError, r"^top_k: axis 'k' .*: 3 in the argument, 2 in"),
        (lambda: untyped.unique(A, "u"), ValueError, r"^unique needs axes with sizes, got only the name 'u'"),
        (lambda: axn.unique(A, Y, axis="x"), ValueError, r"^unique: 'y' would name more than one axis"),
        (lambda: axn.unique(A, U, axis="w"), ValueError, r"^unique: no axis 'w'"),
        (lambda: axn.unique(A, U, fill_value=ROW), ValueError, r"^unique: `fill_value` must be a scalar, .*x=4"),
        (lambda: axn.bincount(ROW * 1.0, U), TypeError, r"^bincount: expected integers, got float32"),
        (lambda: untyped.bincount(ROW, "u"), ValueError, r"^bincount needs axes with sizes"),
        (lambda: axn.bincount(ROW, U, minlength=6), ValueError, r"^bincount: `minlength` is 6, .* 'u' only has size 5"),
        (lambda: axn.bincount(ROW, U, weights=axn.ones(Y)), ValueError, r"^bincount: `weights` has axes \(y\)"),
        (lambda: axn.packbits(ROW * 1.0, "x"), TypeError, r"^packbits: expected integers or bools, got float32"),
        (lambda: axn.unpackbits(ROW, "x"), TypeError, r"^unpackbits: expected bytes, of dtype uint8, got int32"),
        (lambda: axn.packbits(ROW, "x", bitorder="up"), ValueError, r"^packbits: `bitorder` is .* got 'up'"),
        (lambda: axn.trace(A, "x", "x"), ValueError, r"^trace: the rows and the columns must be two axes, got 'x'"),
        (lambda: axn.trace(A, "w", "v"), ValueError, r"^trace: no axes 'w', 'v' in \(x=4, y=3\)"),
        (lambda: axn.tril(A, "x", axn.Axis("y", 9)), ValueError, r"^tril: axis 'y' .*: 3 in the array, 9 in"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_negative_numbers_are_not_counted() -> None:
    counts = axn.bincount(axn.named([-1, -7, 0, 2, 9], "x"), axn.Axis("value", 3))
    np.testing.assert_array_equal(counts.array, [1, 0, 1])


def test_triangles_keep_the_dtype() -> None:
    for dtype in (jnp.bfloat16, np.int8, np.bool_):
        assert axn.tril(axn.ones((X, Y), dtype), "x", "y").dtype == dtype


def test_counts_are_exact_in_half_precision() -> None:
    x = axn.named(jnp.tile(jnp.array([0, 1], jnp.bfloat16), 500), "x")
    counted = axn.bincount(x.astype(int), axn.Axis("value", 2), weights=axn.ones_like(x))
    assert counted.dtype == jnp.bfloat16 and counted.array.tolist() == [500, 500]


def test_gradient_of_top_k_in_jit_where_the_mapped_axis_is_not_the_first() -> None:
    x = axn.random.normal(jax.random.key(0), {"t": 4, "lane": 3})

    def loss(x: axn.NamedArray) -> jax.Array:
        values = jax.vmap(lambda x: axn.top_k(axn.named(x, "t"), "t", 2, "k")[0].array, in_axes=1)(x.array)
        return jnp.sum(jnp.sin(values) * jnp.arange(2.0)[None])

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x).array, jax.grad(loss)(x).array, rtol=1e-5)
