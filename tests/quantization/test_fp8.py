"""8-bit floats: the formula, the state that travels as a gradient, and meshes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from axonym.nn import Linear
from axonym.precision import Policy
from axonym.quantization import (
    Fp8DotGeneralOp,
    QuantizationConfig,
    accumulate_gradients,
    apply_updates,
    dot_general_with_precision,
    in_qdq,
    out_qdq,
    partition_for_grad_overwrite,
    quantize_linear_layers,
)
from tests.helpers import assert_named, spec

Batch, Embed, Mlp = axn.make_axes(batch=16, embed=8, mlp=4)
X = axn.random.normal(jax.random.key(0), (Batch, Embed))
PLAIN = Linear.init(Embed, Mlp, key=jax.random.key(1))
LAYER = quantize_linear_layers(PLAIN, QuantizationConfig(fp8=True, amax_history_length=3))


def loss(layer: Linear, x: axn.NamedArray) -> jax.Array:
    return axn.sum(layer(x) ** 2).scalar()


def rounded(x: Any, scale: float, dtype: Any = ml_dtypes.float8_e4m3fn) -> np.ndarray:
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(np.asarray(x) / np.float32(scale), -largest, largest).astype(dtype).astype(np.float32) * scale


def after_a_step(layer: Linear) -> Linear:
    return dataclasses.replace(layer, dot_general=jax.grad(loss)(layer, X).dot_general)


def test_values_and_gradients() -> None:
    """Operands and the gradient of the result are rounded, by scales that follow from the step before."""
    weight, x = np.asarray(PLAIN.weight.array), np.asarray(X.array)
    first = jax.grad(loss)(LAYER, X).dot_general
    y = rounded(x, 1) @ rounded(weight, 1).T
    np.testing.assert_allclose(LAYER(X).array, y, rtol=1e-5, atol=1e-5)
    for history, of in (("input", x), ("kernel", weight), ("output_grad", 2 * y)):
        np.testing.assert_allclose(getattr(first, f"{history}_amax_history"), [np.abs(of).max(), 0, 0], rtol=1e-5)
        np.testing.assert_array_equal(getattr(first, f"{history}_scale"), [1])

    layer = after_a_step(LAYER)
    scales = [np.abs(x).max() / 448, np.abs(weight).max() / 448, np.abs(2 * y).max() / 57344]
    short_x, short_weight = rounded(x, scales[0]), rounded(weight, scales[1])
    y = short_x @ short_weight.T
    np.testing.assert_allclose(layer(X).array, y, rtol=1e-4, atol=1e-5)
    of_layer, of_x = jax.grad(loss, (0, 1))(layer, X)
    gradient = rounded(2 * y, scales[2], ml_dtypes.float8_e5m2)
    np.testing.assert_allclose(of_layer.weight.array, gradient.T @ short_x, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(of_x.array, gradient @ short_weight, rtol=1e-3, atol=1e-3)
    found = of_layer.dot_general
    np.testing.assert_allclose(
        [found.input_scale[0], found.kernel_scale[0], found.output_grad_scale[0]], scales, rtol=1e-5
    )


def test_products_are_of_8_bit_floats() -> None:
    """Also those of the gradients; and a rounded array stays rounded whatever the compiler."""
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(LAYER, X))
    products = re.findall(r"(\w+):f32\[[\d,]*\] = dot_general\[.*?\] (\w+) (\w+)", text, re.DOTALL)
    kinds = dict(re.findall(r"(\w+):(\w+\[[\d,]*\]) =", text))
    operands = sorted(tuple(sorted(kinds[n] for n in names)) for _, *names in products)
    assert operands == [
        ("f8_e4m3fn[16,8]", "f8_e4m3fn[4,8]"),
        ("f8_e4m3fn[16,8]", "f8_e5m2[16,4]"),
        ("f8_e4m3fn[4,8]", "f8_e5m2[16,4]"),
    ]
    assert "optimization_barrier" in str(
        jax.make_jaxpr(lambda x: in_qdq(jnp.float32, x, jnp.ones(1), jnp.zeros(3)))(1.0)
    )


def test_second_derivatives() -> None:
    """They pass through the rounding, as for gradient penalties, whatever their size."""

    def penalty(dot_general: Any, weight: axn.NamedArray, factor: float) -> jax.Array:
        def output(x: axn.NamedArray) -> jax.Array:
            return axn.sum(axn.dot(x, weight, axis=Embed, dot_general=dot_general) ** 2).scalar()

        return factor * axn.sum(jax.grad(output)(X) ** 2).scalar()

    exact = jax.grad(penalty, 1)(jax.lax.dot_general, PLAIN.weight, 1.0)
    for factor in (1.0, 1e4):
        found = jax.grad(penalty, 1)(after_a_step(LAYER).dot_general, PLAIN.weight, factor) / factor
        assert_named(found, exact, atol=0.1 * float(jnp.abs(exact.array).max()))


def test_residuals_of_any_policy() -> None:
    """Policies that save what is rounded find numbers, not NaN, which JAX makes of large 8-bit floats."""
    layer = after_a_step(LAYER)
    expected = jax.grad(loss, (0, 1))(layer, X)
    for policy in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable):
        found = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(layer, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_without_names_on_explicit_mesh_axes(explicit_mesh: Mesh) -> None:
    op, numbers = Fp8DotGeneralOp.init(4), (((1,), (1,)), ((), ()))
    x, w = X.array, PLAIN.weight.array
    gradients = jax.grad(lambda op, x, w: jnp.sum(op(x, w, numbers) ** 2), (1, 2))
    expected = gradients(op, x, w)
    with jax.set_mesh(explicit_mesh):
        placed = jax.device_put(x, P("data")), jax.device_put(w, P("model"))
        found = jax.jit(gradients)(op, *placed)
    for a, b, of in zip(found, expected, placed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert spec(a) == spec(of)


def test_history() -> None:
    """The newest takes the place of the oldest, and a scale is kept as long as the history says nothing."""
    history = jnp.array([1.0, 896.0, 3.0])
    of_scale, of_history = jax.grad(lambda s, h: jnp.sum(in_qdq(jnp.float32, jnp.array([5.0, -7.0]), s, h)), (0, 1))(
        jnp.ones(1), history
    )
    np.testing.assert_array_equal(of_scale, [2])
    np.testing.assert_array_equal(of_history, [7, 3, 1])
    of_one = jax.grad(lambda h: jnp.sum(in_qdq(jnp.float32, jnp.array([5.0, -7.0]), jnp.ones(1), h)))(jnp.ones(1))
    np.testing.assert_array_equal(of_one, [7])
    for unusable in (jnp.zeros(3), jnp.array([1.0, jnp.inf, 0.0])):
        assert in_qdq(jnp.float32, jnp.array(1000.0), jnp.full(1, 2.0), unusable) == 896
    assert out_qdq(jnp.float32, jnp.array(1000.3), jnp.ones(1), history) == jnp.float32(1000.3)


def test_only_gradients_have_the_highest_precision() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return dot_general_with_precision(x, w, (((1,), (0,)), ((), ()))).sum()

    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    assert "HIGHEST" not in str(jax.make_jaxpr(loss)(x, w))
    assert str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)).count("precision=(Precision.HIGHEST") == 2
    np.testing.assert_array_equal(jax.grad(loss)(x, w), np.full((2, 3), 4))


def test_step_with_overwrites() -> None:
    """Weights get updates, state gets new values, and a model without bias or state goes through as well."""
    model = {"quantized": LAYER, "plain": dataclasses.replace(PLAIN, bias=None), "count": 3}
    gradient = {"quantized": jax.grad(loss)(LAYER, X), "plain": jax.grad(loss)(model["plain"], X), "count": None}
    overwrites, others = partition_for_grad_overwrite(gradient)
    assert others["quantized"].dot_general is None and overwrites["plain"].weight.array is None
    updates = jax.tree.map(lambda g: -0.5 * g, others)
    new = apply_updates(model, updates, overwrites)
    expected = PLAIN.weight - 0.5 * gradient["quantized"].weight
    assert_named(new["quantized"].weight, expected, rtol=1e-6)
    assert_named(new["plain"].weight, PLAIN.weight - 0.5 * gradient["plain"].weight, rtol=1e-6)
    assert new["plain"].bias is None and new["count"] == 3
    state = new["quantized"].dot_general
    assert isinstance(state, Fp8DotGeneralOp)
    np.testing.assert_allclose(state.input_amax_history, [np.abs(X.array).max(), 0, 0])
    half = apply_updates({"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.ones(2)}, {"w": None})
    assert half["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="`updates` has 1 leaf, the model 2"):
        apply_updates({"a": 1.0, "b": 2.0}, {"a": 1.0}, {"a": None, "b": None})


def test_gradients_of_several_batches() -> None:
    """Gradients add up, the largest values are those of both batches, and scales stay; None stands for no gradient."""
    first = {"layer": jax.grad(loss)(LAYER, X), "frozen": None}
    second = {"layer": jax.grad(loss)(LAYER, 3 * X), "frozen": None}
    total = accumulate_gradients(jax.tree.map(jnp.zeros_like, first), second)  # which has the largest values
    total = accumulate_gradients(total, first)
    assert_named(total["layer"].weight, first["layer"].weight + second["layer"].weight, rtol=1e-6)
    state = total["layer"].dot_general
    np.testing.assert_allclose(state.input_amax_history, [3 * np.abs(X.array).max(), 0, 0])
    np.testing.assert_allclose(state.input_scale, first["layer"].dot_general.input_scale)
    assert total["frozen"] is None
    assert accumulate_gradients({"w": None}, {"w": 1.0}) == {"w": 1.0}
    assert accumulate_gradients({"n": 1, "w": 1.0}, {"n": 2, "w": 2.0}) == {"n": 1, "w": 3.0}
    assert apply_updates({"n": 1, "w": 1.0}, {"n": 2, "w": 2.0}, {"n": None, "w": None}) == {"n": 1, "w": 3.0}


def test_leaves_that_have_no_gradient() -> None:
    """The gradient of integers has dtype float0, and stands for zeros; everything else but numbers stays."""
    arrays = {"w": axn.ones({"x": 2}), "n": axn.arange(axn.Axis("x", 2))}
    others = {"act": jnp.tanh, "kind": "s", "on": True, "k": 3}
    model = arrays | others
    gradient = jax.grad(lambda p: axn.sum(p["w"] * p["n"]).scalar(), allow_int=True)(arrays) | others
    total = accumulate_gradients(accumulate_gradients(gradient, gradient), gradient)
    np.testing.assert_array_equal(total["w"].array, [0, 3])
    assert total["n"].dtype == jax.dtypes.float0
    assert {name: total[name] for name in others} == others
    zeros = jax.tree.map(jnp.zeros_like, arrays) | others
    for found in (accumulate_gradients(zeros, gradient), accumulate_gradients(gradient, zeros)):
        np.testing.assert_array_equal(found["w"].array, [0, 1])
        np.testing.assert_array_equal(found["n"].array, [0, 0])
    new = apply_updates(model, total, dict.fromkeys(model))
    np.testing.assert_array_equal(new["w"].array, [1, 4])
    np.testing.assert_array_equal(new["n"].array, [0, 1])
    assert {name: new[name] for name in others} == others


def test_compute_dtype() -> None:
    layer = quantize_linear_layers(PLAIN, QuantizationConfig(fp8=True, compute_dtype=jnp.bfloat16))
    assert isinstance(layer.dot_general, Fp8DotGeneralOp) and layer.dot_general.input_amax_history.shape == (1024,)
    text = str(jax.make_jaxpr(lambda x: layer(x).array)(X))
    assert "f8_e4m3fn" in text and "bf16" in text
    result = layer(X)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result.array, PLAIN(X).array, rtol=0.2, atol=0.3)


@pytest.mark.parametrize("largest", [1e-5, 1e-3, 1.0])
def test_small_gradients_in_float16(largest: float) -> None:
    """Their scale is too small for float16, which does not make them zero."""
    layer = quantize_linear_layers(PLAIN, QuantizationConfig(fp8=True, amax_history_length=3))
    layer, x, g = Policy.parse("f16").cast_to_param((layer, X, largest * axn.cos(axn.arange((Batch, Mlp)))))

    def product(layer: Linear, x: axn.NamedArray) -> jax.Array:
        return axn.sum((layer(x) * g).astype(jnp.float32)).scalar()

    layer = dataclasses.replace(layer, dot_general=jax.grad(product)(layer, x).dot_general)
    found = np.asarray(jax.grad(product, 1)(layer, x).array, np.float32)
    exact = np.asarray(g.array, np.float32) @ np.asarray(layer.weight.array, np.float32)
    np.testing.assert_allclose(found, exact, atol=0.15 * np.abs(exact).max())


def test_empty_batches() -> None:
    found = jax.grad(loss)(LAYER, axn.zeros({"batch": 0, "embed": 8})).dot_general
    np.testing.assert_array_equal(found.input_amax_history, [0, 0, 0])


@pytest.mark.parametrize("how", ["partitioner", "shard_map"])
def test_on_meshes(how: str, mesh: Mesh) -> None:
    """The largest value is that of all devices, wherever the arrays are split."""
    layer = after_a_step(LAYER)
    expected = jax.grad(loss, (0, 1))(layer, X)
    mapping = {"batch": "data"} if how == "shard_map" else {"batch": "data", "embed": "model"}

    def of_part(layer: Linear, x: axn.NamedArray) -> Any:
        return jax.grad(lambda layer, x: axn.psum(axn.sum(layer(x) ** 2), "batch").scalar(), (0, 1))(layer, x)

    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed, x = axn.shard((layer, X), mapping)
        step = axn.shard_map(of_part) if how == "shard_map" else jax.grad(loss, (0, 1))
        found = jax.block_until_ready(jax.jit(step)(placed, x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize(
    ("parameters", "compute"),
    [({"embed": "data"}, {"batch": "data", "mlp": "model"}), ({"mlp": "data"}, {"batch": "data"})],
)
@pytest.mark.parametrize("remat", [False, True])
def test_under_fsdp(mesh: Mesh, remat: bool, parameters: Any, compute: Any) -> None:
    """Results lie as the layer's without rounding do, and devices send as much; the state is the same on all."""

    def on_mesh(layer: Linear) -> tuple[Any, list[str]]:
        step = axn.fsdp(jax.grad(jax.checkpoint(loss) if remat else loss, (0, 1)), parameters, compute)
        with jax.set_mesh(mesh):
            placed = axn.shard(layer, {**compute, **parameters}), axn.shard(X, compute)
            program = step.lower(*placed).compile().as_text() or ""
            sent = re.findall(r"(all-gather|reduce-scatter|all-to-all|collective-permute)\(", program)
            return jax.block_until_ready(step(*placed)), sorted(sent)

    layer = after_a_step(dataclasses.replace(LAYER, weight=8 * LAYER.weight, bias=axn.ones(Mlp)))
    expected = jax.grad(loss, (0, 1))(layer, X)
    (found, sent), (plain, sent_plain) = on_mesh(layer), on_mesh(dataclasses.replace(layer, dot_general=None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, expected)
    for get in (lambda g: g[0].weight, lambda g: g[0].bias, lambda g: g[1]):
        assert spec(get(found)) == spec(get(plain))
    assert sent == sent_plain
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(found[0].dot_general))


def test_experts_under_fsdp(mesh: Mesh) -> None:
    """Each layer of a stack under `vmap` has its own state, also where the stack is sharded."""
    Expert = axn.Axis("expert", 4)
    layers = axn.vmap(lambda key: Linear.init(Embed, Mlp, key=key), Expert)(jax.random.split(jax.random.key(1), 4))
    layers = quantize_linear_layers(layers, QuantizationConfig(fp8=True, amax_history_length=3))
    x = axn.random.normal(jax.random.key(2), (Expert, Batch, Embed))
    step = jax.grad(lambda layers, x: axn.sum(axn.vmap(lambda layer, x: layer(x), Expert)(layers, x) ** 2).scalar())
    expected = step(layers, x)
    with jax.set_mesh(mesh):
        for compute in ({"batch": "data"}, {"batch": "data", "expert": "model"}):
            found = jax.block_until_ready(axn.fsdp(step, {"embed": "data"}, compute)(layers, x))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, expected)
            assert spec(found.weight) == (compute.get("expert"), None, "data")


def test_second_derivatives_under_fsdp(mesh: Mesh) -> None:
    def penalty(layer: Linear, x: axn.NamedArray) -> jax.Array:
        def of_weight(weight: axn.NamedArray) -> jax.Array:
            return axn.mean(dataclasses.replace(layer, weight=weight)(x) ** 2).scalar()

        return jax.grad(lambda w: axn.sum(jax.grad(of_weight)(w) ** 2).scalar())(layer.weight).array

    layer = after_a_step(LAYER)
    expected = penalty(layer, X)
    with jax.set_mesh(mesh):
        found = axn.fsdp(penalty, {"embed": "data"}, {"batch": "data"})(layer, X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_product_needs_no_promotion() -> None:
    layer = Linear.init(Embed, Mlp, key=jax.random.key(1), use_bias=False, dot_general=Fp8DotGeneralOp.init())
    layer = dataclasses.replace(layer, weight=layer.weight.astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"):
        assert layer(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
