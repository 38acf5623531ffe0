"""Linear algebra: names and checks of new axes, communication on a mesh, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import linalg

untyped: Any = linalg  # for calls that a type checker would refuse
RC = ("row", "col")
A = axn.named(4 * np.eye(3, dtype=np.float32), RC) + axn.ones({"batch": 2, "row": 3, "col": 3})
WIDE = axn.ones({"row": 2, "col": 3})
B = axn.ones({"row": 3})


def test_the_inverse_maps_back() -> None:
    x = axn.dot(linalg.inv(A, RC), B, axis="row")
    assert x.names == ("batch", "col")
    np.testing.assert_allclose(axn.dot(A, x, axis="col").array, np.ones((2, 3)), rtol=1e-5)


def test_decompositions_multiply_to_the_matrix() -> None:
    q, r = linalg.qr(A, RC, "k")
    np.testing.assert_allclose(axn.dot(q, r, axis="k").array, A.array, atol=1e-5)
    u, s, vh = linalg.svd(A, RC, "k")
    np.testing.assert_allclose(axn.dot(u, s, vh, axis="k").array, A.array, atol=1e-5)
    w, v = linalg.eigh(A, RC, "k")
    assert (w.names, v.names) == (("batch", "k"), ("batch", "row", "k"))
    turned = axn.rename(v, {"row": "col"})
    np.testing.assert_allclose(axn.dot(v, w, turned, axis="k").array, A.array, atol=1e-5)
    # The factor times itself, with the axes of the second one renamed.
    lower = linalg.cholesky(A, RC)
    np.testing.assert_allclose(np.matmul(lower.array, np.swapaxes(lower.array, 1, 2)), A.array, atol=1e-5)


def test_a_new_axis_may_be_given_with_its_size() -> None:
    assert linalg.svdvals(WIDE, RC, axn.Axis("k", 2)).shape == {"k": 2}
    assert linalg.eigh(A, list(RC), "col")[1].names == ("batch", "row", "col")  # pyright: ignore[reportArgumentType]


def test_a_turned_matrix_is_not_transposed() -> None:
    """The inverse of a matrix stored with col before row needs no transposes."""
    stored = axn.ones({"batch": 2, "col": 3, "row": 3})
    program = jax.jit(lambda a: linalg.inv(a, RC)).lower(stored).as_text()
    other = jax.jit(lambda a: linalg.inv(a, ("col", "row"))).lower(stored).as_text()
    assert program.count("transpose") == other.count("transpose")
    assert linalg.inv(stored + A, RC).names == ("batch", "row", "col")


def test_integers_are_promoted() -> None:
    assert linalg.det(A.astype(jnp.int32), RC).dtype == jnp.float32


def test_matrices_without_elements() -> None:
    none = axn.zeros({"row": 0, "col": 0})
    assert linalg.solve(none, axn.zeros({"row": 0, "x": 2}), RC).shape == {"col": 0, "x": 2}
    assert linalg.solve(A, axn.zeros({"row": 3, "x": 0}), RC).shape == {"batch": 2, "col": 3, "x": 0}


def test_batches_stay_where_they_are(explicit_mesh: jax.sharding.Mesh) -> None:
    """Matrices of a batch that is split are inverted where they are; nothing is sent."""
    sharding = jax.sharding.NamedSharding(explicit_mesh, jax.sharding.PartitionSpec(("data", "model")))

    def loss(raw):
        return axn.sum(linalg.inv(axn.named(raw, ("batch", *RC)), RC), RC).array

    shape = jax.ShapeDtypeStruct((16, 3, 3), jnp.float32, sharding=sharding)
    program = jax.jit(loss).lower(shape).compile().as_text() or ""
    assert "f32[2,3,3]" in program
    assert not any(word in program for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: linalg.inv(A, ("row", "cool")),
            ValueError,
            r"^linalg\.inv: no axis 'cool' in \(batch=2, row=3, col=3",
        ),
        (lambda: linalg.inv(A, ("row", "row")), ValueError, r"^linalg\.inv: 'row' would name more than one axis"),
        (lambda: untyped.inv(A, "row"), TypeError, r"^linalg\.inv: the axes of a matrix are a pair, .*; got 'row'"),
        (lambda: untyped.det(A, ("batch", *RC)), TypeError, r"^linalg\.det: the axes of a matrix are a pair"),
        (lambda: untyped.det(A, ("row", 2)), TypeError, r"An axis is selected by an Axis or its name, got int"),
        (lambda: untyped.det(A.array, RC), TypeError, r"^linalg\.det: expected a NamedArray, got ArrayImpl"),
        (
            lambda: linalg.det(A, (axn.Axis("row", 4), "col")),
            ValueError,
            r"^linalg\.det: axis 'row' .*: 3 .*, 4 in the",
        ),
        (lambda: linalg.inv(WIDE, RC), ValueError, r"^linalg\.inv: the matrix \(row=2, col=3\) is not square\. .*pinv"),
        (lambda: linalg.eigh(WIDE, RC, "k"), ValueError, r"^linalg\.eigh: .*\(row=2, col=3\) is not square\. .*svd"),
        (lambda: linalg.cholesky(WIDE, ("col", "row")), ValueError, r"^linalg\.cholesky: .*\(col=3, row=2\) is not sq"),
        (lambda: linalg.qr(A.astype(jnp.float16), RC, "k"), TypeError, r"^linalg\.qr: there is no float16 routine"),
        (lambda: linalg.qr(A, RC, "batch"), ValueError, r"^linalg\.qr: 'batch' would name more than one axis"),
        (lambda: linalg.svd(A, RC, "row"), ValueError, r"^linalg\.svd: 'row' would name more than one axis"),
        (
            lambda: linalg.qr(WIDE, RC, axn.Axis("k", 3)),
            ValueError,
            r"^linalg\.qr: axis 'k' .*: 3 in the argument, 2 in",
        ),
        (
            lambda: untyped.eigvals(A, RC, None),
            TypeError,
            r"^linalg\.eigvals: `new_axis` is an Axis or a name, got None",
        ),
        (lambda: untyped.qr(A, RC), TypeError, r"new_axis"),
        (lambda: linalg.solve(A, axn.ones({"col": 3}), RC), ValueError, r"^linalg\.solve: no axis 'row' in \(col=3\)"),
        (
            lambda: linalg.solve(A, axn.ones({"row": 3, "col": 2}), RC),
            ValueError,
            r"^linalg\.solve: the right-hand side \(row, col\) has axis 'col', .* Rename it",
        ),
        (lambda: linalg.solve(A, axn.ones({"row": 4}), RC), ValueError, r"^linalg\.solve: axis 'row' .*: 3 .*, 4 "),
        (lambda: linalg.solve(WIDE, axn.ones({"row": 2}), RC), ValueError, r"^linalg\.solve: .* not square\. .*lstsq"),
        (lambda: untyped.solve(WIDE, jnp.ones(2), RC), TypeError, r"^linalg\.solve: expected a NamedArray"),
        (lambda: linalg.norm(A, ("batch", *RC)), ValueError, r"^linalg\.norm: .*; got \(batch, row, col\)\. Flatten"),
        (
            lambda: linalg.norm(A.astype(jnp.bfloat16), RC, ord=2),
            TypeError,
            r"^linalg\.norm: there is no bfloat16 routine .*astype",
        ),
        (lambda: linalg.norm(A, "x"), ValueError, r"^linalg\.norm: no axis 'x'"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
