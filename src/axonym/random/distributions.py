"""Distributions: first of independent elements, one row each, then of vectors and matrices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
from jax.typing import DTypeLike

from ..axis import Axis, AxisSpec
from ..core import errors
from ..named_array import NamedArray
from ..ops._op_types import publish
from ..ops._operands import at_least_float32, one_axis, scalar
from ._draw import Key, Parameter, draw

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


@_document_sampler("Draw from the gamma distribution of scale one.", "2.0", a="the shape parameter, positive.")
def gamma(key: Key, shape: AxisSpec, a: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.gamma, key, shape, {"a": a}, dtype=dtype)


@_document_sampler(
    "Draw logarithms of the gamma distribution, exact even if the draws themselves are too small for the dtype.",
    "0.01",
    a="the shape parameter, positive.",
)
def loggamma(key: Key, shape: AxisSpec, a: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.loggamma, key, shape, {"a": a}, dtype=dtype)


@_document_sampler("Draw from the Pareto distribution of scale one.", "3.0", b="the shape parameter, positive.")
def pareto(key: Key, shape: AxisSpec, b: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.pareto, key, shape, {"b": b}, dtype=dtype)


@_document_sampler("Draw from Student's t distribution.", "3.0", df="the degrees of freedom, positive.")
def t(key: Key, shape: AxisSpec, df: Parameter, dtype: DTypeLike | None = float) -> NamedArray:
    return draw(jax.random.t, key, shape, {"df": df}, dtype=dtype)


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
