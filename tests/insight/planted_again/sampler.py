"""Makes pictures of descriptions: a text encoder, and a transformer that removes noise step by step."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn

from blocks import Block, CrossBlock


class Painter(eqx.Module):
    table: nn.Embedding
    text: nn.Stacked
    text_norm: nn.RmsNorm
    inward: nn.Linear
    time: nn.Linear
    blocks: nn.Stacked
    norm: nn.RmsNorm
    outward: nn.Linear

    @staticmethod
    def init(Vocab, Words, TextLayers, TextMlp, Latent, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 6)
        model = Painter(
            table=nn.Embedding.init(Vocab, Words, key=keys[0]),
            text=nn.Stacked.init(TextLayers, Block)(Words, Heads, HeadSize, TextMlp, False, key=keys[1]),
            text_norm=nn.RmsNorm.init(Words, use_bias=False),
            inward=nn.Linear.init(Latent, Embed, key=keys[2]),
            time=nn.Linear.init(axn.Axis("wave", 256), Embed, key=keys[3]),
            blocks=nn.Stacked.init(Layers, CrossBlock)(Embed, Words, Heads, HeadSize, Mlp, False, key=keys[4]),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            outward=nn.Linear.init(Embed, Latent, key=keys[5]),
        )
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)

    def describe(self, tokens):
        return self.text_norm(self.text.fold(self.table(tokens))).rename({"pos": "source"})

    def noise(self, x, time, memory):
        waves = axn.sin(time * axn.exp(-axn.arange(axn.Axis("wave", 256)) / 32.0)).astype(x.dtype)
        h = self.blocks.fold(self.inward(x) + self.time(waves), memory)
        return self.outward(self.norm(h))


def paint(model, tokens, noise, times):
    """Pictures of descriptions, from noise."""

    def closer(x, time):
        found = model.noise(x, time, model.describe(tokens))
        return x - (found * 0.02).astype(x.dtype)

    return axn.fold(closer, "steps")(noise, times)
