"""Linear algebra. Matrices are made well-conditioned by adding to their diagonal, in the call as in the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.ops.case import Case, f, of

la = axn.linalg
RC = ("row", "col")
BATCHED = f("batch", "row", "col")
PLAIN = f("row", "col")
APART = f("row", "batch", "col")  # the axes of the matrix are not adjacent
TALL, WIDE = f("heads", "embed", "pos"), f("heads", "pos", "embed")
TP, PT = ("embed", "pos"), ("pos", "embed")
EYE = np.eye(4, dtype=np.float32)


def _well(a: axn.NamedArray) -> axn.NamedArray:
    """Make a matrix well-conditioned, and positive definite once it is symmetric."""
    return a + 8.0 * axn.named(EYE, RC)


def _well_last(a: Any) -> Any:
    """Do the same by position, with the matrices last."""
    return a + 8.0 * jnp.broadcast_to(EYE, a.shape)


def _well_apart(a: Any) -> Any:
    """Do the same for (row, batch, col)."""
    return _well_last(jnp.moveaxis(a, 0, 1))


def _squared(results: Any, *places: int) -> tuple[Any, ...]:
    """Square some of the results: the sign of a vector is arbitrary."""
    return tuple(x * x if i in places else x for i, x in enumerate(results))


def _with_size(absolute: Any, results: Any) -> tuple[Any, Any]:
    """Remove the phase of eigenvectors, which is arbitrary."""
    values, vectors = results
    return values, absolute(vectors)


def _eigh_apart(a: Any) -> tuple[Any, Any]:
    values, vectors = _squared(jnp.linalg.eigh(jnp.moveaxis(a, 0, 1)), 1)
    return values, jnp.moveaxis(vectors, 1, 0)


def _product(results: Any) -> Any:
    return axn.dot(*results, axis="new", out_axes=APART.names)


def _solve(a: Any, b: Any) -> Any:
    """Solve for `a` with axes (batch, row, col) and `b` with (heads, row, batch)."""
    x = jnp.linalg.solve(_well_last(a), jnp.moveaxis(b, (2, 1), (0, 1)))
    return jnp.moveaxis(x, (0, 1), (2, 1))


LINALG = [
    Case(
        "linalg.inv",
        (BATCHED,),
        lambda a: la.inv(_well(a), RC),
        lambda a: jnp.linalg.inv(_well_last(a)),
        names=("batch", "col", "row"),
    ),
    Case(
        "linalg.inv",
        (APART,),
        lambda a: la.inv(_well(a), RC),
        lambda a: jnp.moveaxis(jnp.linalg.inv(_well_apart(a)), 1, 0),
        "apart",
        names=("col", "batch", "row"),
    ),
    Case(
        "linalg.inv",
        (PLAIN,),
        lambda a: la.inv(_well(a), ("col", "row")),
        lambda a: jnp.linalg.inv(_well_last(a)),
        "turned",
        names=("col", "row"),
        sharded=False,
    ),
    Case(
        "linalg.inv",
        (PLAIN, f("row")),
        lambda a, b: axn.dot(la.inv(_well(a), RC), b, axis="row"),
        lambda a, b: jnp.linalg.solve(_well_last(a), b),
        "solves",
        names=("col",),
    ),
    Case(
        "linalg.cholesky",
        (BATCHED,),
        lambda a: la.cholesky(_well(a), RC),
        lambda a: jnp.linalg.cholesky(_well_last(a)),
        names=("batch", *RC),
    ),
    Case(
        "linalg.cholesky",
        (PLAIN,),
        lambda a: la.cholesky(_well(a), ("col", "row")),
        lambda a: jnp.linalg.cholesky(_well_last(a)).T,
        "upper",
        names=RC,
        sharded=False,
    ),
    Case(
        "linalg.det",
        (APART,),
        lambda a: la.det(_well(a), RC),
        lambda a: jnp.linalg.det(_well_apart(a)),
        names=("batch",),
        rtol=1e-4,
    ),
    Case(
        "linalg.slogdet",
        (APART,),
        lambda a: la.slogdet(_well(a), RC),
        lambda a: tuple(jnp.linalg.slogdet(_well_apart(a))),
        names=(("batch",), ("batch",)),
    ),
]

DECOMPOSITIONS = [
    Case(
        "linalg.qr",
        (TALL,),
        lambda a: la.qr(a, TP, "new"),
        lambda a: tuple(jnp.linalg.qr(a)),
        names=(("heads", "embed", "new"), ("heads", "new", "pos")),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.qr",
        (WIDE,),
        lambda a: la.qr(a, PT, axn.Axis("new", 4)),
        lambda a: tuple(jnp.linalg.qr(a)),
        "wide",
        names=(("heads", "pos", "new"), ("heads", "new", "embed")),
        sharded=False,
        grad=False,
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.svd",
        (TALL,),
        lambda a: _squared(la.svd(a, TP, "new"), 0, 2),
        lambda a: _squared(jnp.linalg.svd(a, full_matrices=False), 0, 2),
        names=(("heads", "embed", "new"), ("heads", "new"), ("heads", "new", "pos")),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "linalg.svd",
        (APART,),
        lambda a: _product(la.svd(a, RC, "new")),
        lambda a: a,
        "product",
        names=APART.names,
        grad=False,
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.svdvals",
        (WIDE,),
        lambda a: la.svdvals(a, PT, axn.Axis("new", 4)),
        lambda a: jnp.linalg.svdvals(a),
        names=("heads", "new"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.eigh",
        (BATCHED,),
        lambda a: _squared(la.eigh(a, RC, "new"), 1),
        lambda a: _squared(jnp.linalg.eigh(a), 1),
        names=(("batch", "new"), ("batch", "row", "new")),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "linalg.eigh",
        (APART,),
        lambda a: _squared(la.eigh(a, RC, "col"), 1),
        lambda a: _eigh_apart(a),
        "in place",
        names=(("batch", "col"), ("row", "batch", "col")),
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "linalg.eigvalsh",
        (BATCHED,),
        lambda a: la.eigvalsh(a, RC, "new"),
        lambda a: jnp.linalg.eigvalsh(a),
        names=("batch", "new"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.eig",
        (BATCHED,),
        lambda a: _with_size(axn.abs, la.eig(a, RC, "new")),
        lambda a: _with_size(np.abs, jnp.linalg.eig(a)),
        names=(("batch", "new"), ("batch", "row", "new")),
        grad=False,
        rtol=1e-3,
        atol=1e-3,
    ),
    Case(
        "linalg.eigvals",
        (BATCHED,),
        lambda a: la.eigvals(a, RC, "new"),
        lambda a: jnp.linalg.eigvals(a),
        names=("batch", "new"),
        rtol=1e-3,
        atol=1e-3,
    ),
]


def _tridiagonal(lower: Any, upper: Any, b: Any) -> Any:
    """Solve by a whole matrix for diagonals with axis row and `b` with axes (row, batch)."""
    matrix = jnp.diag(lower[1:], -1) + 4 * jnp.eye(4) + jnp.diag(upper[:-1], 1)
    return jnp.linalg.solve(matrix, b)


SYSTEMS = [
    Case(
        "linalg.tridiagonal_solve",
        (of("unit", "row"), of("unit", "row"), f("row", "batch")),
        lambda lower, upper, b: la.tridiagonal_solve(lower, 4 * axn.ones_like(lower), upper, b, "row"),
        _tridiagonal,
        names=("row", "batch"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.solve",
        (BATCHED, f("heads", "row", "batch")),
        lambda a, b: la.solve(_well(a), b, RC),
        _solve,
        names=("heads", "col", "batch"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.solve",
        (BATCHED, f("row")),
        lambda a, b: la.solve(_well(a), b, RC),
        lambda a, b: jnp.linalg.solve(_well_last(a), jnp.broadcast_to(b, (8, 4))[..., None])[..., 0],
        "shared",
        names=("batch", "col"),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "linalg.solve",
        (PLAIN, f("batch", "row", "heads")),
        lambda a, b: la.solve(_well(a), b, RC),
        lambda a, b: jax.vmap(lambda side: jnp.linalg.solve(_well_last(a), side))(b),
        "sides",
        names=("batch", "col", "heads"),
        rtol=1e-4,
        atol=1e-4,
    ),
]

NORMS = [
    Case("linalg.norm", (BATCHED,), lambda a: la.norm(a), lambda a: jnp.sqrt(jnp.sum(a * a)), names=()),
    Case(
        "linalg.norm",
        (BATCHED,),
        lambda a: la.norm(a, ord=3),
        lambda a: jnp.sum(jnp.abs(a) ** 3) ** (1 / 3),
        "all",
        names=(),
    ),
    Case(
        "linalg.norm",
        (BATCHED,),
        lambda a: la.norm(a, "row", ord=1),
        lambda a: jnp.sum(jnp.abs(a), axis=1),
        "vectors",
        names=("batch", "col"),
    ),
    Case(
        "linalg.norm",
        (APART,),
        lambda a: la.norm(a, RC),
        lambda a: jnp.sqrt(jnp.sum(a * a, axis=(0, 2))),
        "matrices",
        names=("batch",),
    ),
    Case(
        "linalg.norm",
        (APART,),
        lambda a: la.norm(a, ("col", "row"), ord=1),
        lambda a: jnp.max(jnp.sum(jnp.abs(a), axis=2), axis=0),
        "turned",
        names=("batch",),
        sharded=False,
    ),
    Case(
        "linalg.norm",
        (TALL,),
        lambda a: la.norm(a, TP, ord="nuc"),
        lambda a: jnp.sum(jnp.linalg.svdvals(a), axis=-1),
        "nuclear",
        names=("heads",),
        rtol=1e-4,
        atol=1e-4,
    ),
]

CASES = [*LINALG, *DECOMPOSITIONS, *SYSTEMS, *NORMS]
