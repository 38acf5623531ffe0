"""A small model with every kind of leaf, and its expected state dict in PyTorch's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import nn

KEY = jax.random.key(0)
Layers, Vocab, Embed, Heads, Size, Mlp = axn.make_axes(layers=3, vocab=8, embed=4, heads=2, size=6, mlp=8)


class Block(eqx.Module):
    """Linear layers from one axis to several and back, and a raw array."""

    norm: nn.LayerNorm
    attend: nn.Linear
    project: nn.Linear
    gain: jax.Array

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        k1, k2 = jax.random.split(key)
        norm = nn.LayerNorm.init(Embed)
        attend = nn.Linear.init(Embed, (Heads, Size), key=k1)
        project = nn.Linear.init((Heads, Size), Embed, key=k2, use_bias=False, out_first=False)
        return Block(norm, attend, project, jnp.full(2, 0.5))


class Model(eqx.Module):
    """An embedding and layers, stacked or in sequence."""

    embed: nn.Embedding
    layers: Any
    activation: Callable[[Any], Any]
    rate: float

    @staticmethod
    def init(kind: Any = nn.Stacked, *, key: jax.Array = KEY) -> Model:
        k1, k2 = jax.random.split(key)
        embed = nn.Embedding.init(Vocab, (Heads, Size), key=k1)
        return Model(embed, kind.init(Layers, Block)(key=k2), axn.tanh, 0.1)


def torch_form(model: Model) -> dict[str, np.ndarray]:
    """Return the expected state dict of the model, written out by position."""
    entries = {"embed.weight": np.asarray(model.embed.weight.array).reshape(8, 12)}
    for i, block in enumerate(model.layers.unstacked()):
        entries |= {
            f"layers.{i}.norm.weight": np.asarray(block.norm.weight.array),
            f"layers.{i}.norm.bias": np.asarray(block.norm.bias.array),
            f"layers.{i}.attend.weight": np.asarray(block.attend.weight.array).reshape(12, 4),
            f"layers.{i}.attend.bias": np.asarray(block.attend.bias.array).reshape(12),
            f"layers.{i}.project.weight": np.asarray(block.project.weight.array).reshape(12, 4),
            f"layers.{i}.gain": np.asarray(block.gain),
        }
    return entries


def assert_same_entries(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        assert isinstance(actual[key], np.ndarray) and actual[key].dtype == x.dtype, key
        np.testing.assert_array_equal(actual[key], x, err_msg=key)


def assert_same_tree(actual: Any, expected: Any) -> None:
    """Check that trees have equal structures, named arrays with the same axes in the same order, and equal values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if isinstance(b, (jax.Array, np.ndarray)):
            assert isinstance(a, jax.Array) and a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert type(a) is type(b) and a == b
