"""Small models whose matrices, experts, heads and norms have their own roles."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn

Embed, Mlp, Vocab, Experts = axn.make_axes(embed=8, mlp=16, vocab=32, experts=4)
Heads, Size = axn.make_axes(heads=2, head_size=4)


class Block(eqx.Module):
    norm: axn.nn.RmsNorm
    query: axn.nn.Linear
    up: axn.nn.Linear
    down: axn.nn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        a, b, c = jax.random.split(key, 3)
        return Block(
            axn.nn.RmsNorm.init(Embed),
            axn.nn.Linear.init(Embed, (Heads, Size), key=a),
            axn.nn.Linear.init(Embed, Mlp, key=b),
            axn.nn.Linear.init(Mlp, Embed, key=c, out_first=False, use_bias=False),
        )


class Model(eqx.Module):
    table: axn.nn.Embedding
    blocks: Any
    experts: axn.nn.MoELinear
    head: axn.nn.Linear


def model(layers: int = 8, blocks: Any = axn.nn.Stacked) -> Any:
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    return Model(
        axn.nn.Embedding.init(Vocab, Embed, key=a),
        blocks.init(axn.Axis("layers", layers), Block)(key=b),
        axn.nn.MoELinear.init(Experts, Embed, Mlp, key=c, use_bias=False),
        axn.nn.Linear.init(Embed, Vocab, key=d),
    )


def gradients(of: Any) -> Any:
    """Draw gradients of the shapes of parameters."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), of)
