"""A model of many layers, written by name and by position, for the tests of scanned models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.nn.scan import BlockSeq, Stacked

KEY = jax.random.key(0)
Layers, Batch, Embed, Mlp = axn.make_axes(layers=4, batch=8, embed=16, mlp=24)
X = axn.named(np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32), (Batch, Embed))


class Layer(eqx.Module):
    """A residual block, with named arrays, a raw array, and leaves that are no arrays."""

    up: axn.NamedArray
    down: axn.NamedArray
    scale: jax.Array
    activation: Callable[[Any], Any]
    rate: float = 0.5

    @staticmethod
    def init(*, key: jax.Array) -> Layer:
        up = axn.random.uniform(key, (Embed, Mlp), minval=-0.5, maxval=0.5)
        return Layer(up, up.rearrange((Mlp, Embed)), jnp.full((), 0.9), axn.tanh)

    def __call__(self, x: axn.NamedArray, shift: Any = 0.0) -> axn.NamedArray:
        h = axn.tree_checkpoint_name(self.activation(axn.dot(x, self.up, axis=Embed)), "hidden")
        return x * self.scale + axn.dot(h, self.down, axis=Mlp) * self.rate + shift


def raw_fold(up: jax.Array, down: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Apply the layers one after another, by position."""

    def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        up, down, scale = of_layer
        return x * scale + jnp.tanh(x @ up) @ down * 0.5, None

    return jax.lax.scan(layer, x, (up, down, scale))[0]


def raw_parts(layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the arrays of one layer, or of all, stacked."""
    return layer.up.array, layer.down.array, layer.scale


_RNG = np.random.default_rng(1)
STACKED = Layer(
    axn.named(jnp.asarray(_RNG.uniform(-0.5, 0.5, (4, 16, 24)), jnp.float32), (Layers, Embed, Mlp)),
    axn.named(jnp.asarray(_RNG.uniform(-0.5, 0.5, (4, 24, 16)), jnp.float32), (Layers, Mlp, Embed)),
    jnp.asarray([0.9, 0.8, 1.1, 1.0]),
    axn.tanh,
)
"""All layers as one. They are not drawn by `init`, which takes seconds to compile."""


def make(kind: Any, policy: Any = False) -> Any:
    """Make the layers as a `Stacked` or a `BlockSeq`."""
    layers = Stacked(STACKED, Layers, policy)
    return layers if kind is Stacked else BlockSeq(layers.unstacked(), Layers, policy)
