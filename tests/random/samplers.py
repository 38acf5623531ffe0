"""Every sampler, with its parameters and the positional draws of JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import random

KEY = jax.random.key(7)
Batch, Pos, Embed = AXES = axn.make_axes(batch=8, pos=3, embed=4)
LARGE = axn.make_axes(batch=512, embed=256)
MAPPING = {"batch": "data", "embed": "model"}
Vocab, Kind, Column = axn.make_axes(vocab=16, kind=6, column=6)

# The parameters of each sampler, as intervals from which the tests take values.
POSITIVE, UNIT = (0.5, 3.0), (0.1, 0.9)
SAMPLERS: dict[str, dict[str, tuple[float, float]]] = {
    "bernoulli": {"p": UNIT},
    "beta": {"a": POSITIVE, "b": POSITIVE},
    "cauchy": {},
    "exponential": {},
    "gamma": {"a": POSITIVE},
    "gumbel": {},
    "laplace": {},
    "loggamma": {"a": POSITIVE},
    "logistic": {},
    "normal": {},
    "pareto": {"b": POSITIVE},
    "poisson": {"lam": (0.5, 20.0)},
    "rademacher": {},
    "randint": {"minval": (-9, 0), "maxval": (1, 50)},
    "t": {"df": POSITIVE},
    "truncated_normal": {"lower": (-2.0, -1.0), "upper": (0.0, 2.0)},
    "uniform": {"minval": (-2.0, -1.0), "maxval": (1.0, 2.0)},
    "weibull_min": {"scale": POSITIVE, "concentration": POSITIVE},
}
INTEGERS = {"poisson", "randint"}
# One of each kind of program; all are compared with JAX's before they are compiled.
REPRESENTATIVE = ("normal", "uniform", "randint", "bernoulli", "truncated_normal")
# The axes of the first, second and third parameter: some of those of the result, in another order, or none.
LAYOUTS = (("embed", "batch"), ("pos",), ())


def parameters(name: str) -> dict[str, Any]:
    """Return named arrays and scalars for the parameters of a sampler."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for names, (label, (low, high)) in zip(LAYOUTS, SAMPLERS[name].items(), strict=False):
        shape = tuple(a.size for n in names for a in AXES if a.name == n)
        drawn = rng.integers(int(low), int(high), shape) if isinstance(low, int) else rng.uniform(low, high, shape)
        array = jnp.asarray(drawn, jnp.int32 if isinstance(low, int) else jnp.float32)
        found[label] = axn.named(array, names) if names else float(drawn)
    return found


def whole(x: Any) -> Any:
    """Return a positional parameter, broadcast to all axes."""
    return axn.broadcast_to(x, AXES).array if isinstance(x, axn.NamedArray) else x


def expected(name: str, key: Any, *values: Any) -> jax.Array:
    """Draw by position with JAX."""
    shape = tuple(a.size for a in AXES)
    given = dict(zip(SAMPLERS[name], values, strict=True))
    options = {} if name == "bernoulli" else {"dtype": int if name in INTEGERS else float}
    return getattr(jax.random, name)(key, **given, shape=shape, **options)


def sample(name: str, key: Any, *values: Any) -> axn.NamedArray:
    """Draw with the sampler, passing parameters by position; those of `uniform` come after the dtype."""
    return getattr(random, name)(key, AXES, *((float,) if name == "uniform" else ()), *values)


def assert_same(found: Any, wanted: Any, message: str = "", rtol: float = 3e-6) -> None:
    found = found.array if isinstance(found, axn.NamedArray) else found
    assert found.dtype == wanted.dtype, message
    exact = not jnp.issubdtype(wanted.dtype, jnp.floating)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), 0 if exact else rtol, 1e-6, err_msg=message)


def entries(x: axn.NamedArray) -> dict[str, Any]:
    """Return the mesh axes of each sharded axis."""
    array: Any = x.array
    spec = array.sharding.spec if hasattr(array, "sharding") else jax.typeof(array).sharding.spec
    return {n: e for n, e in zip(x.names, spec, strict=False) if e is not None}


def largest_buffer(fn: Callable[..., Any], *args: Any) -> int:
    """Return the number of elements of the largest array in the compiled program, on one device."""
    program = jax.jit(fn).lower(*args).compile().as_text()
    assert program is not None
    shapes = re.findall(r"\b(?:f32|u32|s32|pred)\[([\d,]+)\]", program)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)
