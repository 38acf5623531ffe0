"""Distributions whose draws are vectors, points or matrices: their axes follow those of the shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _errors
from ..array import NamedArray
from ..axis import Axis, AxisSelector, AxisSpec
from ..ops._operands import one_axis, scalar
from ._draw import Key, Parameter, axis_of, draw, new_axes


def ball(key: Key, shape: AxisSpec, D: Axis, p: Any = 2.0, dtype: Any = float) -> NamedArray:
    """Draw points uniformly from the unit ball.

    Arguments:
        key: a random key.
        shape: the axes of the result, without `D`.
        D: the axis of the coordinates, which is last in the result.
        p: the norm of the ball, 2 for the Euclidean one. A scalar.
        dtype: the dtype of the result.

    >>> x = axn.random.ball(jax.random.key(0), {"batch": 8}, axn.Axis("space", 3))
    >>> print(x)
    float32[batch=8, space=3]
    >>> axn.all(axn.linalg.norm(x, axis="space") <= 1).item()
    True
    """
    coordinates = one_axis("random.ball", "D", D)
    p = scalar("random.ball", "p", p)
    return draw(jax.random.ball, key, shape, {"p": p}, dtype=dtype, along=(coordinates,), d=coordinates.size)


def dirichlet(key: Key, shape: AxisSpec, alpha: NamedArray, axis: AxisSelector, dtype: Any = float) -> NamedArray:
    """Draw from the Dirichlet distribution: positive numbers that add up to one along an axis.

    Arguments:
        key: a random key.
        shape: the axes of the result, without `axis`.
        alpha: the concentration of each number, positive. It has `axis`, and no axes that the result lacks.
        axis: the axis of `alpha` along which the numbers add up to one; last in the result.
        dtype: the dtype of the result.

    >>> alpha = axn.named([1.0, 2.0, 3.0], "kind")
    >>> print(axn.random.dirichlet(jax.random.key(0), {"batch": 8}, alpha, "kind"))
    float32[batch=8, kind=3]
    """
    along = (axis_of("random.dirichlet", "alpha", alpha, axis),)
    return draw(jax.random.dirichlet, key, shape, {"alpha": alpha}, dtype=dtype, along=along, further={"alpha": along})


def multinomial(
    key: Key, shape: AxisSpec, n: Parameter, p: NamedArray, axis: AxisSelector, dtype: Any = float
) -> NamedArray:
    """Draw how often each of several outcomes occurs in a number of trials.

    Arguments:
        key: a random key.
        shape: the axes of the result, without `axis`.
        n: the number of trials.
        p: the probability of each outcome. It has `axis`, and no axes that the result lacks.
        axis: the axis of `p` for the outcomes; last in the result.
        dtype: the dtype of the result.

    >>> p = axn.named([0.2, 0.3, 0.5], "kind")
    >>> axn.random.multinomial(jax.random.key(0), {"batch": 2}, 10, p, "kind").sum("kind")
    NamedArray(float32[batch=2], [10. 10.])
    """
    along = (axis_of("random.multinomial", "p", p, axis),)
    return draw(_multinomial, key, shape, {"n": n, "p": p}, dtype=dtype, along=along, further={"p": along})


def _multinomial(key: Any, n: jax.Array, p: jax.Array, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
    # The meaning of the shape differs between versions of JAX; without one it is that of `p`.
    return jax.random.multinomial(key, n, jnp.broadcast_to(p, (*shape, p.shape[-1])), dtype=dtype)


def multivariate_normal(
    key: Key,
    shape: AxisSpec,
    mean: NamedArray,
    cov: NamedArray,
    axis: AxisSelector,
    dtype: Any = float,
    method: str = "cholesky",
) -> NamedArray:
    """Draw vectors from a normal distribution.

    Arguments:
        key: a random key.
        shape: the axes of the result, without `axis`.
        mean: the mean. It has `axis`, and no axes that the result lacks.
        cov: the covariances. It has `axis`, another axis of that size for the columns, and no others that the result
            lacks.
        axis: the axis of the vectors; last in the result.
        dtype: the dtype of the result.
        method: how the covariances are decomposed: 'cholesky', 'eigh' or 'svd'.

    >>> mean, cov = axn.zeros({"space": 2}), axn.eye(axn.Axis("space", 2), axn.Axis("column", 2))
    >>> print(axn.random.multivariate_normal(jax.random.key(0), {"batch": 8}, mean, cov, "space"))
    float32[batch=8, space=2]
    """
    what = "random.multivariate_normal"
    rows = axis_of(what, "mean", mean, axis)
    axis_of(what, "cov", cov, rows)
    others = [a for a in cov.axes if a.name not in {rows.name, *(b.name for b in new_axes(what, shape))}]
    if len(others) != 1 or others[0].size != rows.size:
        raise ValueError(
            f"{what}: besides {rows.name!r} and axes of the result, `cov` has one axis of size {rows.size} for its "
            f"columns, got {_errors.describe_shape(cov.shape)}."
        )
    further = {"mean": (rows,), "cov": (rows, others[0])}
    parameters = {"mean": mean, "cov": cov}
    return draw(
        jax.random.multivariate_normal,
        key,
        shape,
        parameters,
        dtype=dtype,
        along=(rows,),
        further=further,
        method=method,
    )


def orthogonal(key: Key, shape: AxisSpec, Row: Axis, Col: Axis, dtype: Any = float) -> NamedArray:
    """Draw matrices uniformly from those with orthonormal rows or columns.

    Arguments:
        key: a random key.
        shape: the axes of the result, without `Row` and `Col`; `()` for one matrix.
        Row: the axis of the rows.
        Col: the axis of the columns, which is last in the result.
        dtype: the dtype of the result.

    >>> Row, Col = axn.make_axes(row=3, col=2)
    >>> x = axn.random.orthogonal(jax.random.key(0), (), Row, Col)
    >>> axn.dot(x, x.rename({"col": "other"}), axis="row").array.round(3) + 0
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    row, col = one_axis("random.orthogonal", "Row", Row), one_axis("random.orthogonal", "Col", Col)
    return draw(jax.random.orthogonal, key, shape, dtype=dtype, along=(row, col), n=row.size, m=col.size)
