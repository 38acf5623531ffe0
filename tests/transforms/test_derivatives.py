"""Gradients, Jacobians and Hessians by name, and the refusal of named results under `jax.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from tests.helpers import assert_named, spec

X = axn.named([1.0, 2.0], "x")


def mean_square(x: axn.NamedArray) -> axn.NamedArray:
    return (x * x).mean()


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, eqx.filter_grad, eqx.filter_value_and_grad])
def test_a_named_result_is_explained(transform: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"returned a named array, float32\[\]: end it with `\.scalar\(\)`"):
        transform(mean_square)(X)
    with pytest.raises(
        ValueError, match=r"float32\[x=2\]: end it with `\.mean\(\)\.scalar\(\)`, or use `axonym\.grad`"
    ):
        transform(lambda x: x * x)(X)


def test_grad_takes_it_as_it_is() -> None:
    assert_named(axn.grad(mean_square)(X), X)
    value, gradient = jax.jit(axn.value_and_grad(mean_square))(X)
    assert isinstance(value, axn.NamedArray) and value.item() == 2.5
    assert_named(gradient, X)
    assert axn.grad(lambda x: x**2)(3.0) == axn.grad(lambda x: x**2, 0)(np.float32(3)) == 6
    both = axn.grad(lambda x, y: (x * y).sum(), (0, -1))(X, 3 * X)
    assert_named(both[0], 3 * X)
    assert_named(both[1], X)
    assert axn.value_and_grad(lambda x: (mean_square(x), {"seen": x.names}), has_aux=True)(X)[0][1] == {"seen": ("x",)}
    assert axn.grad(lambda x: (mean_square(x), "aux"), has_aux=True)(X)[1] == "aux"


def test_models_have_the_gradients_of_equinox() -> None:
    model = axn.nn.MLP.init(axn.Axis("embed", 4), axn.Axis("label", 2), width=8, depth=1, key=jax.random.key(0))
    model = (model, axn.arange(axn.Axis("x", 3)), "static")
    x = axn.random.normal(jax.random.key(1), {"batch": 8, "embed": 4})
    found = axn.grad(lambda model, x: mean_square(model[0](x)))(model, x)
    expected = eqx.filter_grad(lambda model, x: mean_square(model[0](x)).scalar())(model, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert eqx.tree_equal(found, expected)


def test_jacobians_have_the_axes_of_both() -> None:
    w = axn.named(jnp.arange(6.0).reshape(2, 3), ("x", "y"))

    def product(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        return {"y": axn.dot(x, w, axis="x"), "norm": (x * x).sum(), "static": 3}

    found = axn.jacobian(product, (0, 1))(X, w)
    assert found["static"] is None
    by_x, by_w = found["y"]
    assert_named(by_x, w.rename({"x": "d_x"}).rearrange(("y", "d_x")))
    assert by_w.shape == {"y": 3, "d_x": 2, "d_y": 3}
    np.testing.assert_array_equal(by_w.array, np.einsum("ab,c->acb", np.eye(3), [1, 2]))
    assert_named(found["norm"][0], 2 * X.rename({"x": "d_x"}))
    few = axn.jacobian(lambda x: x.sum(), prefix="by_")(X)  # in reverse
    assert_named(few, axn.ones({"by_x": 2}))
    assert axn.jacobian(jnp.sin)(0.0) == 1


def test_hessians_are_symmetric() -> None:
    found = axn.hessian(lambda tree: (tree["x"] ** 3 * tree["scale"]).sum())({"x": X, "scale": axn.named(2.0, ())})
    assert_named(found["x"]["x"], axn.named(jnp.diag(12 * X.array), ("x", "d_x")))
    assert_named(found["x"]["scale"], 3 * X**2)
    assert_named(found["scale"]["x"], 3 * X.rename({"x": "d_x"}) ** 2)


def test_shardings_are_those_of_the_function(mesh: Mesh) -> None:
    x, w = axn.ones({"batch": 8, "embed": 4}), axn.ones({"embed": 4, "mlp": 2})
    expected = axn.jacobian(lambda x, w: axn.dot(x, w, axis="embed"), 1)(x, w)
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        found = axn.named_jit(axn.jacobian(lambda x, w: axn.dot(x, w, axis="embed"), 1))(axn.shard(x), w)
        assert spec(found)[0] == P("data")[0]
    assert_named(found, expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.grad(lambda x: x * x)(X), TypeError, r"returns one number, got float32\[x=2\]. Reduce it"),
        (lambda: axn.grad(lambda x: "text")(X), TypeError, "returns one number, got str"),
        (lambda: axn.grad(mean_square, 1)(X), TypeError, "there is no argument 1 among 1"),
        (lambda: axn.grad(mean_square, (0, -1))(X), TypeError, r"`argnums` has an argument twice, \(0, -1\)"),
        (lambda: axn.grad(mean_square)(axn.arange({"x": 2})), TypeError, "argument 0 has no floating-point array"),
        (lambda: axn.grad(mean_square, has_aux=True)(X), TypeError, "the function returns a pair, got NamedArray"),
        (lambda: axn.jacobian(lambda x: x.array)(X), TypeError, "Name the raw one with `axonym.named`"),
        (lambda: axn.jacobian(lambda x: x, prefix="")(X), ValueError, "Another `prefix` tells them apart"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
