"""Activations against those of `jax.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn import activations
from tests.helpers import assert_named, spec

LIKE_JAX = [
    *("celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu", "log_sigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softplus", "squareplus"),
]
POSITIONAL: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(jax.nn, name) for name in LIKE_JAX},
    "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
}
VALUES = np.array([[-7.0, -1.0, -0.25, 0.1], [0.25, 1.0, 2.0, 7.0]], np.float32)


def _run(functions: dict[str, Callable[[Any], Any]], x: Any) -> tuple[Any, Any]:
    """Compute the values and gradients of all activations in one program, to compile only once."""

    def loss(x: Any, name: str) -> Any:
        y = functions[name](x)
        return jnp.sum(y.array if isinstance(y, axn.NamedArray) else y), y

    found = {name: jax.grad(loss, has_aux=True)(x, name) for name in functions}
    return {name: y for name, (_, y) in found.items()}, {name: g for name, (g, _) in found.items()}


def test_values_and_gradients(explicit_mesh: Mesh) -> None:
    """Those of the positional functions, where the array lies."""
    functions = {name: getattr(activations, name) for name in POSITIONAL}
    expected = jax.jit(lambda x: _run(POSITIONAL, x))(VALUES)
    with jax.set_mesh(explicit_mesh):
        x = axn.shard(axn.named(VALUES, ("batch", "embed")), {"batch": "model", "embed": "data"})
        found = jax.jit(lambda x: _run(functions, x))(x)
    for ours, theirs in zip(found, expected, strict=True):
        for name in POSITIONAL:
            assert_named(ours[name], axn.named(theirs[name], x.names), rtol=1e-5, atol=1e-5)
            assert spec(ours[name]) == ("model", "data")


@pytest.mark.parametrize("name", POSITIONAL)
def test_what_they_take(name: str) -> None:
    activation = getattr(activations, name)
    assert activation.__name__ == name
    found = jax.eval_shape(activation, {"named": axn.named(VALUES, ("batch", "embed")), "raw": VALUES, "number": 1.0})
    assert str(found["named"]) == "float32[batch=2, embed=4]"
    assert (found["raw"].shape, found["number"].shape) == ((2, 4), ())


def test_options() -> None:
    x = axn.named(VALUES, ("batch", "embed"))
    np.testing.assert_allclose(activations.gelu(x, approximate=False).array, jax.nn.gelu(VALUES, approximate=False))
    np.testing.assert_allclose(activations.leaky_relu(x, 0.5).array, jax.nn.leaky_relu(VALUES, 0.5))
    np.testing.assert_allclose(activations.elu(x, alpha=2).array, jax.nn.elu(VALUES, 2))
    np.testing.assert_allclose(activations.celu(x, jnp.float32(2)).array, jax.nn.celu(VALUES, 2))
    with pytest.raises(ValueError, match="leaky_relu: `negative_slope` must be a scalar"):
        activations.leaky_relu(x, jnp.ones(4))  # pyright: ignore[reportArgumentType]  # that it is wrong is the point


def test_glu(explicit_mesh: Mesh) -> None:
    x = axn.named(VALUES, ("batch", "embed"))
    for axis in ("embed", axn.Axis("batch", 2)):
        position = x.names.index(axn.axis.axis_name(axis))
        expected = jax.nn.glu(VALUES, position)
        assert_named(activations.glu(x, axis), axn.named(expected, x.names), rtol=1e-6)
    with jax.set_mesh(explicit_mesh):
        sharded = axn.shard(x, {"batch": "model", "embed": "data"})
        np.testing.assert_allclose(jax.jit(lambda x: activations.glu(x, "embed"))(sharded).array, jax.nn.glu(VALUES))


def test_glu_of_what_has_no_halves() -> None:
    x = axn.ones({"batch": 2, "embed": 3})
    with pytest.raises(ValueError, match=r"glu: axis 'embed' of \(batch=2, embed=3\) must have an even size"):
        activations.glu(x, "embed")
    with pytest.raises(ValueError, match=r"glu: no axis 'embde'.*Did you mean 'embed'"):
        activations.glu(x, "embde")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_that_have_no_negative_or_no_square(dtype: str) -> None:
    values = np.array([0, 1, 5, 100, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max])
    x = axn.named(values.astype(dtype), "x")
    for name in POSITIONAL:
        found = np.asarray(getattr(activations, name)(x).array, np.float64)
        np.testing.assert_allclose(found, POSITIONAL[name](values.astype(np.float32)), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(activations.glu(x, "x").array, jax.nn.glu(values.astype(np.float32)), rtol=1e-5)
