"""Which layers of a model are quantized."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.nn import MLP, Linear, Stacked
from axonym.quantization import (
    DefaultDotGeneralOp,
    DotGeneralOp,
    Fp8DotGeneralOp,
    Int8DotGeneralOp,
    QuantizationConfig,
    quantize_linear_layers,
)
from tests.helpers import assert_named

Embed, Mlp = axn.make_axes(embed=4, mlp=4)
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, "0 1 2"),
        ("layers.0", "0"),
        ("layers", "0 1 2"),
        (".*[12]$", "1 2"),
        (["0"], "0"),
        (["layers.2", "1"], "1 2"),
    ],
)
def test_targets(targets: Any, expected: str) -> None:
    model = MLP.init(Embed, Mlp, 8, 2, key=KEY)
    quantized = quantize_linear_layers(model, QuantizationConfig(targets, int8=True))
    found = [str(i) for i, layer in enumerate(quantized.layers) if isinstance(layer.dot_general, Int8DotGeneralOp)]
    assert " ".join(found) == expected
    for new, old in zip(quantized.layers, model.layers, strict=True):
        assert new.weight is old.weight


def test_stacked_layers_have_a_state_each() -> None:
    class Block(eqx.Module):
        up: Linear

        @staticmethod
        def init(*, key: Any) -> Block:
            return Block(Linear.init(Embed, Embed, key=key))

        def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
            return self.up(x)

    Layers = axn.Axis("layers", 3)
    config = QuantizationConfig(targets=["up"], fp8=True, amax_history_length=2)
    model: Any = quantize_linear_layers(Stacked.init(Layers, Block)(key=KEY), config)
    op = model.stacked.up.dot_general
    assert op.input_scale.shape == (3, 1) and op.kernel_amax_history.shape == (3, 2)
    x = axn.random.normal(KEY, {"batch": 5, "embed": 4})
    gradient = jax.jit(jax.grad(lambda model: axn.sum(model.fold(x) ** 2).scalar()))(model)
    largest = np.abs(model.stacked.up.weight.array).max(axis=(1, 2))
    np.testing.assert_allclose(gradient.stacked.up.dot_general.kernel_amax_history[:, 0], largest)


def test_default_operation() -> None:
    """What is not quantized; a configuration that asks for nothing changes nothing."""
    layer = Linear.init(Embed, Mlp, key=KEY)
    assert quantize_linear_layers(layer, QuantizationConfig(targets="nowhere")) is layer
    default = Linear.init(Embed, Mlp, key=KEY, dot_general=DotGeneralOp.default())
    assert isinstance(default.dot_general, DefaultDotGeneralOp) and DefaultDotGeneralOp.init() == default.dot_general
    x = axn.random.normal(KEY, {"batch": 3, "embed": 4})
    assert_named(default(x), layer(x))
    spied = axn.dot(
        x, layer.weight, axis="embed", preferred_element_type=jnp.float16, dot_general=DefaultDotGeneralOp()
    )
    assert spied.dtype == jnp.float16


def test_abstract_models() -> None:
    """Shapes and dtypes are enough."""
    shapes: Any = eqx.filter_eval_shape(lambda key: Linear.init(Embed, Mlp, key=key), KEY)
    quantized = quantize_linear_layers(shapes, QuantizationConfig(fp8=True))
    assert isinstance(quantized.dot_general, Fp8DotGeneralOp)
    assert quantized.weight is shapes.weight


def test_refusals() -> None:
    with pytest.raises(ValueError, match="`fp8` and `int8` are both set"):
        QuantizationConfig(fp8=True, int8=True)
    model = {"up": Linear.init(Embed, Mlp, key=KEY), "down": Linear.init(Mlp, Embed, key=KEY)}
    with pytest.raises(ValueError, match=r"no linear layer matches targets \['upp'\]; the layers are down, up"):
        quantize_linear_layers(model, QuantizationConfig(targets=["upp"], int8=True))
    with pytest.raises(ValueError, match=r"no linear layer matches targets None\."):
        quantize_linear_layers({}, QuantizationConfig(int8=True))
