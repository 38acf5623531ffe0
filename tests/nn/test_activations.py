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

pytestmark = pytest.mark.usefixtures("quick_compilation")

ELEMENTWISE = [
    *("celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "leaky_relu", "log_sigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softplus", "squareplus", "swish"),
]
POSITIONAL: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(jax.nn, name) for name in ELEMENTWISE},
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}
VALUES = np.array([[-7.0, -1.0, -0.25, 0.0], [0.25, 1.0, 2.0, 7.0]], np.float32)


@pytest.mark.parametrize("name", POSITIONAL)
def test_values(name: str) -> None:
    activation, expected = getattr(activations, name), POSITIONAL[name](VALUES)
    x = axn.named(VALUES, ("batch", "embed"))
    assert_named(activation(x), axn.named(np.asarray(expected), x.axes), rtol=1e-5, atol=1e-6)
    tree = activation({"named": x, "raw": jnp.asarray(VALUES)})
    np.testing.assert_allclose(tree["named"].array, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tree["raw"], expected, rtol=1e-5, atol=1e-6)
    assert activation.__name__ == name


def test_values_and_gradients_stay_where_they_are(explicit_mesh: Mesh) -> None:
    x = axn.named(VALUES[:, None, :].repeat(4, 1), ("model", "data", "embed"))

    @jax.jit
    def run(x):
        def loss(x):
            results = {name: getattr(activations, name)(x) for name in POSITIONAL}
            return sum(r.sum().array for r in results.values()), results

        return jax.grad(loss, has_aux=True)(x)

    with jax.set_mesh(explicit_mesh):
        x = axn.shard(x, {"data": "data", "model": "model"})
        gradient, results = run(x)
    assert {spec(r) for r in (gradient, *results.values())} == {("model", "data", None)}
    raw = [f for n, f in POSITIONAL.items() if hasattr(jax.nn, n)]
    raw += [lambda x: jnp.square(jax.nn.relu(x)), lambda x: x * jax.nn.sigmoid(1.702 * x)]
    expected = jax.jit(jax.grad(lambda v: sum(f(v).sum() for f in raw)))(VALUES)
    np.testing.assert_allclose(np.asarray(gradient.array)[:, 0], expected, rtol=1e-5, atol=1e-5)


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
        position = x.names.index(axn.axis_name(axis))
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
