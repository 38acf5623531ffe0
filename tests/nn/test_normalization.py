"""Functions along axes, and the layers that normalize."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.normalization import LayerNorm, RmsNorm, log_softmax, softmax, standardize
from tests.helpers import assert_named, spec

Batch, Pos, Embed = axn.make_axes(batch=4, pos=2, embed=6)
X = axn.named(np.random.default_rng(0).normal(1, 3, (4, 2, 6)).astype(np.float32), (Batch, Pos, Embed))
RAW = np.asarray(X.array, np.float64)
MASK = axn.named(np.arange(6) % 3 > 0, Embed)
SELECTIONS = {"embed": -1, ("embed", "batch"): (2, 0), None: (0, 1, 2)}


def _softmax(x: np.ndarray, axis: Any, where: Any = True) -> np.ndarray:
    e = np.where(where, np.exp(x), 0)
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("axis", SELECTIONS)
def test_along_axes(axis: Any) -> None:
    expected = _softmax(RAW, SELECTIONS[axis])
    assert_named(softmax(X, axis), axn.named(expected.astype(np.float32), X.axes), rtol=1e-5)
    np.testing.assert_allclose(log_softmax(X, axis).array, np.log(expected), rtol=1e-5, atol=1e-5)
    total = axn.logsumexp(X, axis)
    assert total.names == tuple(n for n in X.names if axis and n not in axis)
    np.testing.assert_allclose(total.array, np.log(np.exp(RAW).sum(SELECTIONS[axis])), rtol=1e-5)


def test_only_some_elements_take_part() -> None:
    mask = np.asarray(MASK.array)
    np.testing.assert_allclose(softmax(X, "embed", where=MASK).array, _softmax(RAW, -1, mask), rtol=1e-5)
    kept = log_softmax(X, Embed, where=MASK).array[..., mask]
    np.testing.assert_allclose(kept, np.log(_softmax(RAW, -1, mask)[..., mask]), rtol=1e-4)
    np.testing.assert_allclose(
        axn.logsumexp(X, "embed", where=MASK).array, np.log(np.exp(RAW[..., mask]).sum(-1)), rtol=1e-5
    )
    some = RAW[..., mask]
    expected = (RAW - some.mean(-1, keepdims=True)) / np.sqrt(some.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(standardize(X, "embed", where=MASK).array, expected, rtol=1e-4, atol=1e-5)


def test_standardize() -> None:
    expected = (RAW - RAW.mean((0, 2), keepdims=True)) / np.sqrt(RAW.var((0, 2), keepdims=True) + 0.1)
    found = standardize(X, (Embed, Batch), eps=0.1)
    assert_named(found, axn.named(expected.astype(np.float32), X.axes), rtol=1e-4, atol=1e-5)
    given = standardize(X, Embed, mean=X.mean(Embed), variance=axn.ones(Pos) * 4, eps=0)
    np.testing.assert_allclose(given.array, (RAW - RAW.mean(-1, keepdims=True)) / 2, rtol=1e-4, atol=1e-5)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight[None, None] + bias[None, None]


def _rms_norm(x: Any, weight: Any, bias: Any) -> Any:
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-5) * weight[None, None] + bias[None, None]


def test_layers(mesh: Mesh) -> None:
    weight, bias = axn.named(np.arange(6, dtype=np.float32), Embed), axn.named(np.ones(6, np.float32), Embed)
    layers = LayerNorm(Embed, weight, bias), RmsNorm(Embed, bias, weight)

    def loss(layers, x):
        results = [layer(x) for layer in layers]
        return sum((y * y).sum().array for y in results), results

    def raw_loss(parameters, x):
        results = [fn(x, *p) for fn, p in zip((_layer_norm, _rms_norm), parameters, strict=True)]
        return sum((y * y).sum() for y in results), results

    parameters = [(weight.array, bias.array), (bias.array, weight.array)]
    raw_gradients, expected = jax.jit(jax.grad(raw_loss, (0, 1), has_aux=True))(parameters, X.array)
    with jax.set_mesh(mesh):
        placed = axn.shard((layers, X), {"batch": "data", "embed": "model"})
        gradients, found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*placed)
    for y, e in zip(found, expected, strict=True):
        assert_named(y, axn.named(e, X.axes), rtol=1e-4, atol=1e-5)
    assert spec(found[0]) == spec(found[1]) == spec(gradients[1]) == ("data", None, "model")
    for gradient, e in zip(*map(jax.tree.leaves, (gradients, raw_gradients)), strict=True):
        np.testing.assert_allclose(gradient, e, rtol=1e-3, atol=1e-3)


def test_several_axes_and_no_parameters() -> None:
    layer = LayerNorm.init((Embed, Batch), 0.25, use_weight=False, use_bias=False)
    expected = (RAW - RAW.mean((0, 2), keepdims=True)) / np.sqrt(RAW.var((0, 2), keepdims=True) + 0.25)
    np.testing.assert_allclose(layer(X).array, expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.leaves(layer) == []
    scaled = RmsNorm.init({"embed": 6, "pos": 2})
    assert scaled.weight is not None and scaled.weight.axes == (Embed, Pos)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", [LayerNorm, RmsNorm])
def test_half_precision(kind: type[LayerNorm] | type[RmsNorm], dtype: Any) -> None:
    """What is normalized in float32 goes back before it is scaled. The squares of large numbers are not in float16."""
    half = (X * 1000).astype(dtype)
    layer = kind.init(Embed, use_weight=False, use_bias=False)
    exact = np.asarray(half.array, np.float32)
    exact = exact - exact.mean(-1, keepdims=True) * (kind is LayerNorm)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    assert_named(layer(half), axn.named(jnp.asarray(exact, dtype), X.axes), rtol=float(jnp.finfo(dtype).eps))
    assert kind.init(Embed)(half).dtype == jnp.float32  # that of the weight
    whole = axn.arange(Embed)
    assert_named(layer(whole), layer(whole.astype(np.float32)))


def test_dtype() -> None:
    half = X.astype(jnp.bfloat16)
    layer = RmsNorm.init(Embed, use_weight=False, use_bias=False, dtype=jnp.bfloat16)
    found, exact = layer(half), RmsNorm.init(Embed, use_weight=False, use_bias=False)(half)
    assert found.dtype == jnp.bfloat16 and axn.any(found != exact)
    np.testing.assert_allclose(found.astype(np.float32).array, exact.astype(np.float32).array, rtol=0.02)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"softmax: no axis 'embde' in \(batch=4, pos=2, embed=6\).*'embed'"):
        softmax(X, "embde")
    with pytest.raises(ValueError, match=r"standardize: `mean` has axes \(heads\) that the array"):
        standardize(X, Embed, mean=axn.ones({"heads": 2}))
    with pytest.raises(ValueError, match=r"no axis 'embed' in \(batch=2\)"):
        LayerNorm.init(Embed)(axn.ones({"batch": 2}))
    with pytest.raises(TypeError, match="softmax: expected a NamedArray"):
        softmax(jnp.ones(3))  # pyright: ignore[reportArgumentType]
