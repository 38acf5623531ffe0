"""`MLP` against the positional form, and sharded over a mesh."""

from __future__ import annotations

import re

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.mlp import MLP
from tests.helpers import assert_named, spec

Batch, In, Out = axn.make_axes(batch=4, feature=3, label=2)
KEY = jax.random.key(0, impl="rbg")  # which compiles faster


def test_layers() -> None:
    mlp = eqx.filter_eval_shape(MLP.init, In, Out, 8, 3, key=KEY, use_final_bias=False)
    assert [layer.weight.names for layer in mlp.layers] == [
        ("mlp", "feature"),
        ("mlp2", "mlp"),
        ("mlp", "mlp2"),
        ("label", "mlp"),
    ]
    assert [layer.bias is not None for layer in mlp.layers] == [True, True, True, False]
    assert mlp.In is In and mlp.Out is Out
    start = MLP.init((), (), 8, 1, key=KEY, use_bias=False, use_final_bias=False)
    for layer, key, scale in zip(start.layers, jax.random.split(KEY), (1, 8**-0.5), strict=True):
        drawn = jax.random.truncated_normal(key, -3, 3, (8,))
        np.testing.assert_allclose(layer.weight.array, drawn * np.float32(scale), rtol=1e-6)


def test_options() -> None:
    options = {"out_first": False, "use_bias": False}
    mlp = eqx.filter_eval_shape(MLP.init, (In, Batch), (), axn.Axis("hidden", 5), 1, key=KEY, **options)
    assert [layer.weight.names for layer in mlp.layers] == [("feature", "batch", "hidden"), ("hidden",)]
    assert [layer.bias is not None for layer in mlp.layers] == [False, True]
    alone = eqx.filter_eval_shape(MLP.init, In, In, 8, 0, key=KEY)
    assert [layer.weight.names for layer in alone.layers] == [("feature", "feature_in")]
    with pytest.raises(ValueError, match="MLP: `depth`, the number of hidden layers, must not be negative, got -1"):
        MLP.init(In, Out, 8, -1, key=KEY)


def test_values_on_a_mesh(mesh: Mesh) -> None:
    """Of three layers, the second sums over the mesh, and that is all that is exchanged."""
    shapes = eqx.filter_eval_shape(MLP.init, In, Out, 8, 2, axn.tanh, key=KEY)
    draw = np.random.default_rng(0).normal
    mlp = jax.tree.map(lambda x: draw(size=x.shape).astype(np.float32), shapes)
    x = axn.named(draw(size=(3, 4)).astype(np.float32), (In, Batch))
    h = x.array.T
    for layer in mlp.layers:
        h = h @ layer.weight.array.T + layer.bias.array
        h = h if layer is mlp.layers[-1] else np.tanh(h)
    expected = axn.named(h, (Batch, Out))
    assert_named(mlp(x), expected, rtol=1e-5, atol=1e-6)
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "mlp": "model"}):
        mlp, x = axn.shard((mlp, x))
        program = jax.jit(lambda mlp, x: mlp(x)).lower(mlp, x).compile()
        found = program(mlp, x)
    assert_named(found, expected, rtol=1e-5, atol=1e-6)
    assert spec(found) == ("data", None)
    exchanged = re.findall(r"= \S+ (all-\w+|reduce-scatter|collective-permute)\(", program.as_text() or "")
    assert exchanged == ["all-reduce"]
