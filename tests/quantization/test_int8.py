"""8-bit integers: the formula, which gradients are rounded, and meshes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn import Linear
from axonym.quantization import Int8DotGeneralOp, QuantizationConfig, quantize_linear_layers
from axonym.quantization._products import ProductAxes, multiply
from tests.helpers import assert_named, spec

Batch, Embed, Mlp = axn.make_axes(batch=16, embed=8, mlp=4)
X = axn.random.normal(jax.random.key(0), (Batch, Embed))
OP = Int8DotGeneralOp.init()


def rounded(x: np.ndarray, summed: int) -> np.ndarray:
    """Round each row of an array to integers up to 127, and scale back."""
    scale = np.abs(x).max(axis=summed, keepdims=True) / 127
    return np.rint(x / scale) * scale


def test_values_and_gradients() -> None:
    """Rounded forward and for the gradient of the input; that of the weight is exact."""
    layer = Linear.init(Embed, Mlp, key=jax.random.key(1), use_bias=False, dot_general=OP)
    x, weight = np.asarray(X.array), np.asarray(layer.weight.array)
    np.testing.assert_allclose(layer(X).array, rounded(x, 1) @ rounded(weight, 1).T, rtol=1e-4, atol=1e-5)
    factor = axn.random.normal(jax.random.key(2), (Batch, Mlp))
    of_layer, of_x = jax.grad(lambda layer, x: axn.sum(layer(x) * factor).scalar(), (0, 1))(layer, X)
    g = np.asarray(factor.array)
    np.testing.assert_allclose(of_layer.weight.array, g.T @ x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_x.array, rounded(g, 1) @ rounded(weight, 0), rtol=1e-4, atol=1e-5)


def test_second_derivatives() -> None:
    """They pass through the rounding, as for gradient penalties."""

    def penalty(dot_general: Any, weight: axn.NamedArray) -> jax.Array:
        def output(x: axn.NamedArray) -> jax.Array:
            return axn.sum(axn.dot(x, weight, axis=Embed, dot_general=dot_general) ** 2).scalar()

        return axn.sum(jax.grad(output)(X) ** 2).scalar()

    weight = axn.random.normal(jax.random.key(1), (Embed, Mlp))
    exact, found = (jax.grad(penalty, 1)(d, weight) for d in (jax.lax.dot_general, OP))
    assert_named(found, exact, atol=0.02 * float(jnp.abs(exact.array).max()))


def test_a_product_needs_no_promotion() -> None:
    layer = Linear.init(Embed, Mlp, key=jax.random.key(1), dot_general=OP)
    gradient = jax.grad(lambda layer: axn.sum(layer(X)).scalar())
    expected = gradient(layer).weight.array
    jax.clear_caches()
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(gradient(layer).weight.array, expected)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("b e, m e -> b m", "b e", "m e"),
        ("h b e, e h m -> b m h", "h b e", "e h m"),
        ("b e f, f m e -> m b", "b e f", "f m e"),
        ("b e, e -> b", "b e", "e"),
    ],
)
def test_any_contraction(equation: str, left: str, right: str) -> None:
    """Near enough to the product itself, and so its gradients; and a product of integers inside."""
    sizes = {"b": 3, "e": 4, "m": 5, "h": 2, "f": 3}
    lhs, rhs = (
        axn.random.normal(jax.random.key(i), {n: sizes[n] for n in names.split()})
        for i, names in enumerate((left, right))
    )

    def product(dot_general: Any, lhs: axn.NamedArray, rhs: axn.NamedArray) -> axn.NamedArray:
        return axn.einsum(equation, lhs, rhs, dot_general=dot_general)

    def loss(dot_general: Any, *operands: axn.NamedArray) -> tuple[jax.Array, axn.NamedArray]:
        y = product(dot_general, *operands)
        return axn.sum(y**2).scalar(), y

    gradient = jax.value_and_grad(loss, (1, 2), has_aux=True)
    (_, exact), of_exact = jax.jit(functools.partial(gradient, jax.lax.dot_general))(lhs, rhs)
    (_, found), of_found = jax.jit(functools.partial(gradient, OP))(lhs, rhs)
    assert_named(found, exact, atol=0.06)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.5), of_found, of_exact)
    assert "i32" in str(jax.make_jaxpr(lambda *x: product(OP, *x).array)(lhs, rhs))


@pytest.mark.parametrize("size", [1, 5, 8, 16, 17])
def test_sums_of_a_multiple_of_16_on_gpus(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sums of 8-bit numbers are wrong on some GPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lhs, rhs = (jax.random.randint(jax.random.key(i), (3, size), -100, 100, jnp.int8) for i in range(2))
    found = functools.partial(multiply, ProductAxes(("m", "k"), ("n", "k"), ("m", "n")), dtype=jnp.int32)
    np.testing.assert_array_equal(found(lhs, rhs), np.asarray(lhs, int) @ np.asarray(rhs.T, int))
    (product,) = (e for e in jax.make_jaxpr(found)(lhs, rhs).eqns if e.primitive.name == "dot_general")
    assert product.invars[0].aval.shape == (3, -(-size // 16) * 16)


def test_zeros_and_dtypes() -> None:
    """A row of zeros has no largest value; and the result has the dtype of the operands, or the one asked for."""
    dot = lambda x, w, **options: axn.dot(x, w, axis="x", dot_general=OP, **options)
    zeros, ones = axn.zeros({"y": 2, "x": 3}), axn.ones({"x": 3})
    assert_named(dot(zeros, ones), axn.zeros({"y": 2}))
    assert not np.isnan(jax.grad(lambda x: axn.sum(dot(x, ones)).scalar())(zeros).array).any()
    half = dot(axn.ones({"y": 2, "x": 3}, jnp.bfloat16), ones.astype(jnp.bfloat16))
    assert_named(half, axn.named(jnp.full(2, 3, jnp.bfloat16), "y"))
    assert dot(half.rename({"y": "x"}), axn.ones({"x": 2}), preferred_element_type=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    """Integers cannot say it, so the scale does."""
    found = axn.dot(X.at["batch", 1, "embed", 2].set(bad), axn.ones(Embed), axis=Embed, dot_general=OP)
    np.testing.assert_array_equal(jnp.isnan(found.array), np.arange(16) == 1)


def test_on_meshes(mesh: Mesh) -> None:
    layer = quantize_linear_layers(Linear.init(Embed, Mlp, key=jax.random.key(1)), QuantizationConfig(int8=True))

    def loss(layer: Linear, x: axn.NamedArray) -> jax.Array:
        return axn.sum(layer(x) ** 2).scalar()

    def of_part(layer: Linear, x: axn.NamedArray) -> Any:
        return jax.grad(lambda layer, x: axn.psum(axn.sum(layer(x) ** 2), "batch").scalar(), (0, 1))(layer, x)

    expected, gradients = layer(X), jax.grad(loss, (0, 1))(layer, X)
    mapping = {"batch": "data", "mlp": "model"}
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed, x = axn.shard((layer, X), mapping)
        result = jax.jit(lambda layer, x: layer(x))(placed, x)
        assert spec(result) == ("data", "model")
        assert_named(result, expected, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(placed, x)), gradients)
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(jax.jit(axn.shard_map(of_part, mapping={"batch": "data"}))(layer, X))
    jax.tree.map(close, found, gradients)


@pytest.mark.parametrize("remat", [False, True])
def test_under_fsdp(mesh: Mesh, remat: bool) -> None:
    """A sharded row has a scale in each shard, so the gradient differs, and is no less accurate."""
    plain = Linear.init(Embed, Mlp, key=jax.random.key(1))
    layer = quantize_linear_layers(plain, QuantizationConfig(int8=True))

    def loss(layer: Linear, x: axn.NamedArray) -> jax.Array:
        return axn.sum(layer(x) ** 2).scalar()

    exact, expected = (jax.grad(loss, (0, 1))(each, X) for each in (plain, layer))
    step, found = jax.grad(jax.checkpoint(loss) if remat else loss, (0, 1)), []
    with jax.set_mesh(mesh):
        for compute in ({"batch": "data"}, {"batch": "data", "mlp": "model"}):
            found.append(jax.block_until_ready(axn.fsdp(step, {"embed": "data"}, compute)(layer, X)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found[0], expected)
    off, finer_off = (axn.max(abs(g[1] - exact[1])).item() for g in found)
    assert finer_off < 1.5 * off
