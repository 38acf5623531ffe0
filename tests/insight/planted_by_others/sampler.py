"""Draws pictures from a text: a denoiser is applied many times, given what an encoder makes of the text."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn
from blocks import Encoder, abstract, floats, integers, key_of

Batch, Pos, Latent, Steps = axn.make_axes(batch=64, pos=256, latent=16, steps=40)
Words, Vocab = axn.make_axes(pos=256, vocab=32000)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=1024, heads=16, head_size=64, mlp=2816, layers=16)

ALONE = 4  # the first steps do not see the text

MESH = {"data": 8}
MAPPING = {"batch": "data"}


class Painter(eqx.Module):
    table: nn.Embedding
    reader: Encoder
    enter: nn.Linear
    denoiser: Encoder
    leave: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 5)
        return Painter(
            nn.Embedding.init(Vocab, Embed, key=keys[0]),
            Encoder.init(Layers, Embed, Heads, HeadSize, Mlp, key=keys[1]),
            nn.Linear.init(Latent, Embed, key=keys[2]),
            Encoder.init(Layers, Embed, Heads, HeadSize, Mlp, key=keys[3]),
            nn.Linear.init(Embed, Latent, key=keys[4]),
        )

    def read(self, words):
        """A vector for each text."""
        return self.reader(self.table(words)).mean("pos")

    def velocity(self, x, text, level):
        return self.leave(self.denoiser(self.enter(x) + text + level.astype(x.dtype)))


def sample(model, words, noise):
    def closer(x, step):
        level = 1 - step / Steps.size
        seen = axn.where(step < ALONE, 0, words)
        toward = model.velocity(x, model.read(seen), level)
        return x - toward / Steps.size

    return axn.fold(closer, Steps)(noise, axn.arange(Steps))


def arguments():
    model = abstract(Painter.init, key=key_of())
    model = abstract(lambda m: jax.tree.map(lambda x: x.astype(jnp.bfloat16), m), model)
    return model, integers(Batch, Words), floats(Batch, Pos, Latent, dtype=jnp.bfloat16)
