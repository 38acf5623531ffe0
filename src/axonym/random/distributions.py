"""Distributions whose elements are independent draws: one row each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ..array import NamedArray
from ..axis import AxisSpec
from ._draw import Key, Parameter, draw

F = TypeVar("F", bound=Callable[..., Any])


def _row(summary: str, example: str = "", shown: str = "float32", **arguments: str) -> Callable[[F], F]:
    """Document a sampler: the summary, its own arguments among those of all, and an example."""

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

    >>> print(axn.random.{op.__name__}(jax.random.key(0), {{"batch": 8}}{example and ", " + example}))
    {shown}[batch=8]
    """
        return op

    return document


# --- continuous, without parameters ---


@_row("Draw from the standard Cauchy distribution.")
def cauchy(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.cauchy, key, shape, dtype=dtype)


@_row("Draw from the exponential distribution of rate one.")
def exponential(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.exponential, key, shape, dtype=dtype)


@_row("Draw from the standard Gumbel distribution.")
def gumbel(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.gumbel, key, shape, dtype=dtype)


@_row("Draw from the standard Laplace distribution.")
def laplace(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.laplace, key, shape, dtype=dtype)


@_row("Draw from the standard logistic distribution.")
def logistic(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.logistic, key, shape, dtype=dtype)


@_row("Draw from the Maxwell distribution of scale one.")
def maxwell(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.maxwell, key, shape, dtype=dtype)


@_row("Draw from the standard normal distribution.")
def normal(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.normal, key, shape, dtype=dtype)


@_row("Draw plus or minus one with equal probability.")
def rademacher(key: Key, shape: AxisSpec, dtype: Any = float) -> NamedArray:
    return draw(jax.random.rademacher, key, shape, dtype=dtype)


# --- continuous, with parameters ---


@_row(
    "Draw from the beta distribution.",
    "2.0, 3.0",
    a="the first shape parameter, positive.",
    b="the second shape parameter, positive.",
)
def beta(key: Key, shape: AxisSpec, a: Parameter, b: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.beta, key, shape, {"a": a, "b": b}, dtype=dtype)


@_row("Draw from the chi-squared distribution.", "3.0", df="the degrees of freedom, positive.")
def chisquare(key: Key, shape: AxisSpec, df: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.chisquare, key, shape, {"df": df}, dtype=dtype)


def _double_sided_maxwell(key: Any, loc: Any, scale: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # JAX adds the shape of the parameters to that of the draws; here there is one draw for each position.
    return loc + scale * jax.random.double_sided_maxwell(key, 0.0, 1.0, shape, dtype)


@_row(
    "Draw from the double-sided Maxwell distribution.",
    "0.0, 1.0",
    loc="the centre.",
    scale="the scale, positive.",
)
def double_sided_maxwell(key: Key, shape: AxisSpec, loc: Parameter, scale: Parameter, dtype: Any = float) -> NamedArray:
    return draw(_double_sided_maxwell, key, shape, {"loc": loc, "scale": scale}, dtype=dtype)


@_row(
    "Draw from the F distribution.",
    "2.0, 5.0",
    dfnum="the degrees of freedom of the numerator, positive.",
    dfden="the degrees of freedom of the denominator, positive.",
)
def f(key: Key, shape: AxisSpec, dfnum: Parameter, dfden: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.f, key, shape, {"dfnum": dfnum, "dfden": dfden}, dtype=dtype)


@_row("Draw from the gamma distribution of scale one.", "2.0", a="the shape parameter, positive.")
def gamma(key: Key, shape: AxisSpec, a: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.gamma, key, shape, {"a": a}, dtype=dtype)


@_row(
    "Draw from the generalised normal distribution.",
    "1.5",
    p="the shape parameter, positive; 2 gives a normal and 1 a Laplace distribution.",
)
def generalized_normal(key: Key, shape: AxisSpec, p: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.generalized_normal, key, shape, {"p": p}, dtype=dtype)


@_row(
    "Draw logarithms of the gamma distribution, exact even if the draws themselves are too small for the dtype.",
    "0.01",
    a="the shape parameter, positive.",
)
def loggamma(key: Key, shape: AxisSpec, a: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.loggamma, key, shape, {"a": a}, dtype=dtype)


@_row(
    "Draw exponentials of a normal distribution around zero.",
    sigma="the standard deviation of the normal distribution.",
)
def lognormal(key: Key, shape: AxisSpec, sigma: Parameter = 1.0, dtype: Any = float) -> NamedArray:
    return draw(jax.random.lognormal, key, shape, {"sigma": sigma}, dtype=dtype)


@_row("Draw from the Pareto distribution of scale one.", "3.0", b="the shape parameter, positive.")
def pareto(key: Key, shape: AxisSpec, b: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.pareto, key, shape, {"b": b}, dtype=dtype)


@_row("Draw from the Rayleigh distribution.", "2.0", scale="the scale, positive.")
def rayleigh(key: Key, shape: AxisSpec, scale: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.rayleigh, key, shape, {"scale": scale}, dtype=dtype)


@_row("Draw from Student's t distribution.", "3.0", df="the degrees of freedom, positive.")
def t(key: Key, shape: AxisSpec, df: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.t, key, shape, {"df": df}, dtype=dtype)


@_row(
    "Draw from the triangular distribution.",
    "0.0, 1.0, 4.0",
    left="the lower end.",
    mode="the position of the highest density.",
    right="the upper end.",
)
def triangular(
    key: Key, shape: AxisSpec, left: Parameter, mode: Parameter, right: Parameter, dtype: Any = float
) -> NamedArray:
    parameters = {"left": left, "mode": mode, "right": right}
    return draw(jax.random.triangular, key, shape, parameters, dtype=dtype)


@_row(
    "Draw from the standard normal distribution, cut off at both ends.",
    "-1.0, 1.0",
    lower="the lower end.",
    upper="the upper end.",
)
def truncated_normal(key: Key, shape: AxisSpec, lower: Parameter, upper: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.truncated_normal, key, shape, {"lower": lower, "upper": upper}, dtype=dtype)


@_row(
    "Draw uniformly from `minval`, which can occur, to `maxval`, which cannot.",
    "minval=-1.0",
    minval="the lower end.",
    maxval="the upper end.",
)
def uniform(
    key: Key, shape: AxisSpec, dtype: Any = float, minval: Parameter = 0.0, maxval: Parameter = 1.0
) -> NamedArray:
    return draw(jax.random.uniform, key, shape, {"minval": minval, "maxval": maxval}, dtype=dtype)


@_row("Draw from the Wald distribution of scale one.", "2.0", mean="the mean, positive.")
def wald(key: Key, shape: AxisSpec, mean: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.wald, key, shape, {"mean": mean}, dtype=dtype)


@_row(
    "Draw from the Weibull distribution of minima.",
    "1.0, 2.0",
    scale="the scale, positive.",
    concentration="the shape parameter, positive.",
)
def weibull_min(
    key: Key, shape: AxisSpec, scale: Parameter, concentration: Parameter, dtype: Any = float
) -> NamedArray:
    parameters = {"scale": scale, "concentration": concentration}
    return draw(jax.random.weibull_min, key, shape, parameters, dtype=dtype)


# --- discrete ---


@_row("Draws of True and False.", "0.2", "bool", p="the probability of True.")
def bernoulli(key: Key, shape: AxisSpec, p: Parameter = 0.5) -> NamedArray:
    return draw(jax.random.bernoulli, key, shape, {"p": p})


@_row(
    "Draw the number of successes in independent trials.",
    "10, 0.2",
    n="the number of trials.",
    p="the probability of success in each trial.",
)
def binomial(key: Key, shape: AxisSpec, n: Parameter, p: Parameter, dtype: Any = float) -> NamedArray:
    return draw(jax.random.binomial, key, shape, {"n": n, "p": p}, dtype=dtype)


@_row("Random bits.", shown="uint32")
def bits(key: Key, shape: AxisSpec, dtype: Any = None) -> NamedArray:
    return draw(jax.random.bits, key, shape, dtype=dtype)


@_row(
    "How many trials it takes until something happens.", "0.2", "int32", p="the probability of success in each trial."
)
def geometric(key: Key, shape: AxisSpec, p: Parameter, dtype: Any = int) -> NamedArray:
    return draw(jax.random.geometric, key, shape, {"p": p}, dtype=dtype)


@_row("Draw from the Poisson distribution.", "3.0", "int32", lam="the rate, which is the mean.")
def poisson(key: Key, shape: AxisSpec, lam: Parameter, dtype: Any = int) -> NamedArray:
    return draw(jax.random.poisson, key, shape, {"lam": lam}, dtype=dtype)


@_row(
    "Draw integers from `minval` to `maxval` - 1 with equal probability.",
    "0, 10",
    "int32",
    minval="the smallest number.",
    maxval="the first number that is too large.",
)
def randint(key: Key, shape: AxisSpec, minval: Parameter, maxval: Parameter, dtype: Any = int) -> NamedArray:
    return draw(jax.random.randint, key, shape, {"minval": minval, "maxval": maxval}, dtype=dtype)
