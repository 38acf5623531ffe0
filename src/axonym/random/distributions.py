"""Distributions: first of independent elements, one row each, then of vectors and matrices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelector, AxisSpec
from ..core import errors
from ..named_array import NamedArray
from ..ops._op_types import publish
from ..ops._operands import at_least_float32, one_axis, scalar
from ._draw import Key, Parameter, axis_of, draw, new_axes

F = TypeVar("F", bound=Callable[..., Any])


def _document_sampler(summary: str, example: str = "", shown: str = "float32", **arguments: str) -> Callable[[F], F]:
    """Document a sampler: the summary, its own and the common arguments, and an example."""

    def document(op: F) -> F:
        described = {
            "key": "a random key.",
            "shape": "the axes of the result.",
            **arguments,
            "dtype": "the dtype of the result.",
        }
        lines = "\n".join(f"        {name}: {described[name]}" for name in inspect.signature(op).parameters)
        op.__doc__ = f"""{summary}

    Arguments:
{lines}

    >>> print(axn.random.{op.__name__}(jax.random.key(0), {{"batch": 100}}{example and ", " + example}))
    {shown}[batch=100]
    """
        return errors.say_how_to_call(op)

    return document


# --- continuous, without parameters ---


class _Sampler(Protocol):
    def __call__(self, key: Key, shape: AxisSpec, dtype: DTypeLike | None = float) -> NamedArray: ...


def _standard_sampler(fn: Callable[..., jax.Array], summary: str) -> _Sampler:
    def op(key: Key, shape: AxisSpec, dtype: DTypeLike | None = float) -> NamedArray:
        return draw(fn, key, shape, dtype=dtype)

    return _document_sampler(summary)(publish(op, fn.__name__, __name__, summary))


cauchy = _standard_sampler(jax.random.cauchy, "Draw from the standard Cauchy distribution.")
exponential = _standard_sampler(jax.random.exponential, "Draw from the exponential distribution of rate one.")
gumbel = _standard_sampler(jax.random.gumbel, "Draw from the standard Gumbel distribution.")
laplace = _standard_sampler(jax.random.laplace, "Draw from the standard Laplace distribution.")
logistic = _standard_sampler(jax.random.logistic, "Draw from the standard logistic distribution.")
maxwell = _standard_sampler(jax.random.maxwell, "Draw from the Maxwell distribution of scale one.")
normal = _standard_sampler(jax.random.normal, "Draw from the standard normal distribution.")
rademacher = _standard_sampler(jax.random.rademacher, "Draw plus or minus one with equal probability.")


# --- continuous, with parameters ---


@_document_sampler(
    "Draw from the beta distribution.",
    "2.0, 3.0",
    a="the first shape parameter, positive.",
    b="the second shape parameter, positive.",
)
def beta(key: Key, shape: AxisSpec, a: Parameter, b: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.beta, key, shape, {"a": a, "b": b}, dtype=dtype)


@_document_sampler("Draw from the chi-squared distribution.", "3.0", df="the degrees of freedom, positive.")
def chisquare(key: Key, shape: AxisSpec, df: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.chisquare, key, shape, {"df": df}, dtype=dtype)


def _double_sided_maxwell(key: Any, loc: Any, scale: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # JAX adds the shape of the parameters to the shape of the draws; here there is one draw for each position.
    return loc + scale * jax.random.double_sided_maxwell(key, 0.0, 1.0, shape, dtype)


@_document_sampler(
    "Draw from the double-sided Maxwell distribution.", "0.0, 1.0", loc="the center.", scale="the scale, positive."
)
def double_sided_maxwell(
    key: Key, shape: AxisSpec, loc: Parameter, scale: Parameter, dtype: DTypeLike | None = float
) -> NamedArray:
    return draw(_double_sided_maxwell, key, shape, {"loc": loc, "scale": scale}, dtype=dtype)


@_document_sampler(
    "Draw from the F distribution.",
    "2.0, 5.0",
    dfnum="the degrees of freedom of the numerator, positive.",
    dfden="the degrees of freedom of the denominator, positive.",
)
def f(key: Key, shape: AxisSpec, dfnum: Parameter, dfden: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.f, key, shape, {"dfnum": dfnum, "dfden": dfden}, dtype=dtype)


@_document_sampler("Draw from the gamma distribution of scale one.", "2.0", a="the shape parameter, positive.")
def gamma(key: Key, shape: AxisSpec, a: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.gamma, key, shape, {"a": a}, dtype=dtype)


@_document_sampler(
    "Draw from the generalized normal distribution.",
    "1.5",
    p="the shape parameter, positive; 2 gives a normal and 1 a Laplace distribution.",
)
def generalized_normal(key: Key, shape: AxisSpec, p: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.generalized_normal, key, shape, {"p": p}, dtype=dtype)


@_document_sampler(
    "Draw logarithms of the gamma distribution, exact even if the draws themselves are too small for the dtype.",
    "0.01",
    a="the shape parameter, positive.",
)
def loggamma(key: Key, shape: AxisSpec, a: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.loggamma, key, shape, {"a": a}, dtype=dtype)


@_document_sampler(
    "Draw exponentials of a normal distribution around zero.",
    sigma="the standard deviation of the normal distribution.",
)
def lognormal(key: Key, shape: AxisSpec, sigma: Parameter = 1.0, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.lognormal, key, shape, {"sigma": sigma}, dtype=dtype)


@_document_sampler("Draw from the Pareto distribution of scale one.", "3.0", b="the shape parameter, positive.")
def pareto(key: Key, shape: AxisSpec, b: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.pareto, key, shape, {"b": b}, dtype=dtype)


@_document_sampler("Draw from the Rayleigh distribution.", "2.0", scale="the scale, positive.")
def rayleigh(key: Key, shape: AxisSpec, scale: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.rayleigh, key, shape, {"scale": scale}, dtype=dtype)


@_document_sampler("Draw from Student's t distribution.", "3.0", df="the degrees of freedom, positive.")
def t(key: Key, shape: AxisSpec, df: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.t, key, shape, {"df": df}, dtype=dtype)


@_document_sampler(
    "Draw from the triangular distribution.",
    "0.0, 1.0, 4.0",
    left="the lower end.",
    mode="the position of the highest density.",
    right="the upper end.",
)
def triangular(
    key: Key, shape: AxisSpec, left: Parameter, mode: Parameter, right: Parameter, dtype: DTypeLike | None = float
) -> NamedArray:
    parameters = {"left": left, "mode": mode, "right": right}
    return draw(jax.random.triangular, key, shape, parameters, dtype=dtype)


@_document_sampler(
    "Draw from the standard normal distribution, cut off at both ends.",
    "-1.0, 1.0",
    lower="the lower end.",
    upper="the upper end.",
)
def truncated_normal(
    key: Key, shape: AxisSpec, lower: Parameter, upper: Parameter, dtype: DTypeLike | None = float
) -> NamedArray:
    return draw(jax.random.truncated_normal, key, shape, {"lower": lower, "upper": upper}, dtype=dtype)


@_document_sampler(
    "Draw uniformly from `minval`, which can occur, to `maxval`, which cannot.",
    "minval=-1.0",
    minval="the lower end.",
    maxval="the upper end.",
)
def uniform(
    key: Key, shape: AxisSpec, dtype: DTypeLike | None = float, minval: Parameter = 0.0, maxval: Parameter = 1.0
) -> NamedArray:
    return draw(jax.random.uniform, key, shape, {"minval": minval, "maxval": maxval}, dtype=dtype)


@_document_sampler("Draw from the Wald distribution of scale one.", "2.0", mean="the mean, positive.")
def wald(key: Key, shape: AxisSpec, mean: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.wald, key, shape, {"mean": mean}, dtype=dtype)


@_document_sampler(
    "Draw from the Weibull distribution of minima.",
    "1.0, 2.0",
    scale="the scale, positive.",
    concentration="the shape parameter, positive.",
)
def weibull_min(
    key: Key, shape: AxisSpec, scale: Parameter, concentration: Parameter, dtype: DTypeLike | None = float
) -> NamedArray:
    parameters = {"scale": scale, "concentration": concentration}
    return draw(jax.random.weibull_min, key, shape, parameters, dtype=dtype)


# --- discrete ---


@_document_sampler("Draw True or False.", "0.2", "bool", p="the probability of True.")
def bernoulli(key: Key, shape: AxisSpec, p: Parameter = 0.5) -> NamedArray:
    return draw(_bernoulli, key, shape, {"p": p})


def _bernoulli(key: Any, p: jax.Array, shape: Any) -> jax.Array:
    # JAX draws numbers of the dtype of the probabilities.
    return jax.random.bernoulli(key, at_least_float32(p), shape)


@_document_sampler(
    "Draw the number of successes in independent trials.",
    "10, 0.2",
    n="the number of trials.",
    p="the probability of success in each trial.",
)
def binomial(key: Key, shape: AxisSpec, n: Parameter, p: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.binomial, key, shape, {"n": n, "p": p}, dtype=dtype)


@_document_sampler("Draw random bits.", shown="uint32")
def bits(key: Key, shape: AxisSpec, dtype: DTypeLike | None = None) -> NamedArray:
    return draw(jax.random.bits, key, shape, dtype=dtype)


@_document_sampler(
    "Draw the number of trials until a success.", "0.2", "int32", p="the probability of success in each trial."
)
def geometric(key: Key, shape: AxisSpec, p: Parameter, dtype: DTypeLike | None = int) -> NamedArray:
    return draw(jax.random.geometric, key, shape, {"p": p}, dtype=dtype)


@_document_sampler("Draw from the Poisson distribution.", "3.0", "int32", lam="the rate, which is the mean.")
def poisson(key: Key, shape: AxisSpec, lam: Parameter, dtype: DTypeLike | None = int) -> NamedArray:
    return draw(jax.random.poisson, key, shape, {"lam": lam}, dtype=dtype)


@_document_sampler(
    "Draw integers from `minval` to `maxval` - 1 with equal probability.",
    "0, 10",
    "int32",
    minval="the smallest number.",
    maxval="the first number that is too large.",
)
def randint(
    key: Key, shape: AxisSpec, minval: Parameter, maxval: Parameter, dtype: DTypeLike | None = int
) -> NamedArray:
    return draw(jax.random.randint, key, shape, {"minval": minval, "maxval": maxval}, dtype=dtype)


# --- vectors, points and matrices: the axes of a draw follow the axes of the shape ---


def ball(key: Key, shape: AxisSpec, D: Axis, p: float = 2.0, dtype: DTypeLike | None = float) -> NamedArray:
    """Draw points uniformly from the unit ball.

    Arguments:
        shape: the axes of the result, without `D`.
        D: the axis of the coordinates, which is last in the result.
        p: the norm of the ball, 2 for the Euclidean one. A scalar.

    >>> x = axn.random.ball(jax.random.key(0), {"batch": 8}, axn.Axis("space", 3))
    >>> x.shape
    {'batch': 8, 'space': 3}
    >>> axn.all(axn.linalg.norm(x, axis="space") <= 1).item()
    True
    """
    coordinates = one_axis("random.ball", "D", D)
    p = scalar("random.ball", "p", p)
    return draw(jax.random.ball, key, shape, {"p": p}, dtype=dtype, along=(coordinates,), d=coordinates.size)


def dirichlet(
    key: Key, shape: AxisSpec, alpha: NamedArray, axis: AxisSelector, dtype: DTypeLike | None = float
) -> NamedArray:
    """Draw from the Dirichlet distribution: positive numbers that add up to one along an axis.

    Arguments:
        shape: the axes of the result, without `axis`.
        alpha: the concentration of each number, positive. It has `axis`, and no axes that the result lacks.
        axis: the axis of `alpha` along which the numbers add up to one; last in the result.

    >>> alpha = axn.named([1.0, 2.0, 3.0], "kind")
    >>> axn.random.dirichlet(jax.random.key(0), {"batch": 8}, alpha, "kind").shape
    {'batch': 8, 'kind': 3}
    """
    along = (axis_of("random.dirichlet", "alpha", alpha, axis),)
    return draw(jax.random.dirichlet, key, shape, {"alpha": alpha}, dtype=dtype, along=along, further={"alpha": along})


def multinomial(
    key: Key, shape: AxisSpec, n: Parameter, p: NamedArray, axis: AxisSelector, dtype: DTypeLike | None = float
) -> NamedArray:
    """Draw how often each of several outcomes occurs in a number of trials.

    Arguments:
        shape: the axes of the result, without `axis`.
        n: the number of trials.
        p: the probability of each outcome. It has `axis`, and no axes that the result lacks.
        axis: the axis of `p` for the outcomes; last in the result.

    >>> p = axn.named([0.2, 0.3, 0.5], "kind")
    >>> axn.random.multinomial(jax.random.key(0), {"batch": 2}, 10, p, "kind").sum("kind")
    NamedArray(float32[batch=2], [10. 10.])
    """
    along = (axis_of("random.multinomial", "p", p, axis),)
    return draw(_multinomial, key, shape, {"n": n, "p": p}, dtype=dtype, along=along, further={"p": along})


def _multinomial(
    key: Any, n: jax.Array, p: jax.Array, shape: tuple[int, ...], dtype: DTypeLike | None = None
) -> jax.Array:
    # The meaning of the shape differs between versions of JAX; without one, the result has the shape of `p`.
    return jax.random.multinomial(key, n, jnp.broadcast_to(p, (*shape, p.shape[-1])), dtype=dtype)


def multivariate_normal(
    key: Key,
    shape: AxisSpec,
    mean: NamedArray,
    cov: NamedArray,
    axis: AxisSelector,
    dtype: DTypeLike | None = float,
    method: str = "cholesky",
) -> NamedArray:
    """Draw vectors from a normal distribution.

    Arguments:
        shape: the axes of the result, without `axis`.
        mean: the mean. It has `axis`, and no axes that the result lacks.
        cov: the covariances. It has `axis`, another axis of that size for the columns, and no others that the result
            lacks.
        axis: the axis of the vectors; last in the result.
        method: how the covariances are decomposed: 'cholesky', 'eigh' or 'svd'.

    >>> mean, cov = axn.zeros({"space": 2}), axn.eye(axn.Axis("space", 2), axn.Axis("column", 2))
    >>> axn.random.multivariate_normal(jax.random.key(0), {"batch": 8}, mean, cov, "space").shape
    {'batch': 8, 'space': 2}
    """
    what = "random.multivariate_normal"
    rows = axis_of(what, "mean", mean, axis)
    axis_of(what, "cov", cov, rows)
    others = [a for a in cov.axes if a.name not in {rows.name, *(b.name for b in new_axes(what, shape))}]
    if len(others) != 1 or others[0].size != rows.size:
        raise ValueError(
            f"{what}: besides {rows.name!r} and axes of the result, `cov` has one axis of size {rows.size} for its "
            f"columns, got {errors.describe_shape(cov.shape)}. Rename it with `cov.rename`, or add an axis of a batch "
            "to `shape`."
        )
    parameters, further = {"mean": mean, "cov": cov}, {"mean": (rows,), "cov": (rows, others[0])}
    options = {"dtype": dtype, "along": (rows,), "further": further, "method": method}
    return draw(jax.random.multivariate_normal, key, shape, parameters, **options)


def orthogonal(key: Key, shape: AxisSpec, Row: Axis, Col: Axis, dtype: DTypeLike | None = float) -> NamedArray:
    """Draw matrices with orthonormal rows or columns, uniformly.

    Arguments:
        shape: the axes of the result, without `Row` and `Col`; `()` for one matrix.
        Row: the axis of the rows.
        Col: the axis of the columns, which is last in the result.

    >>> Row, Col = axn.make_axes(row=3, col=2)
    >>> x = axn.random.orthogonal(jax.random.key(0), (), Row, Col)
    >>> axn.dot(x, x.rename({"col": "other"}), axis="row").array.round(3) + 0
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    row, col = one_axis("random.orthogonal", "Row", Row), one_axis("random.orthogonal", "Col", Col)
    return draw(jax.random.orthogonal, key, shape, dtype=dtype, along=(row, col), n=row.size, m=col.size)
