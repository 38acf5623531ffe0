"""Trains an agent that plays a game in text, by the gradient of its policy."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn

from blocks import Block


class Agent(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    action: nn.Linear
    value: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, Action, *, key):
        keys = jax.random.split(key, 4)
        return Agent(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, True, False, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            action=nn.Linear.init(Embed, Action, key=keys[2]),
            value=nn.Linear.init(Embed, (), key=keys[3]),
        )

    def __call__(self, tokens):
        x = self.table(tokens)
        x = x + places(tokens.resolve_axis("pos"), x.resolve_axis("embed"))
        x = self.norm(self.blocks.fold(x))
        return self.action(x).astype("float32"), self.value(x).astype("float32")


def places(Pos, Embed):
    """Waves that tell where a token is."""
    k = axn.arange(Embed)
    rate = axn.exp(-(k // 2) * (2 * 9.21 / Embed.size))
    angle = axn.dot(axn.arange(Pos).astype("float32"), rate, axis=())
    return axn.where(k % 2 == 0, axn.sin(angle), axn.cos(angle))


def loss(model, tokens, actions, before, returns):
    """`before` has the logarithms of the probabilities under the policy that played."""
    small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    logits, value = small(tokens)
    now = -nn.cross_entropy_loss(logits, "action", actions, reduction=None)
    advantage = jax.tree.map(jax.lax.stop_gradient, returns - value)
    ratio = axn.exp(now - before)
    gain = axn.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    error = value - returns
    return (0.5 * (error * error).mean() - gain.mean()).scalar()
