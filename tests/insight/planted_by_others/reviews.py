"""Fits a head and the last norm to reviews of products, on top of a pretrained language model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, Encoder, abstract, integers, key_of, state_of

Batch, Pos, Vocab, Stars = axn.make_axes(batch=128, pos=512, vocab=32000, stars=5)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=2048, heads=16, head_size=128, mlp=5632, layers=12)

MESH = {"data": 8}
STORED = {"embed": "data"}
COMPUTE = {"batch": "data"}


class Reviewer(eqx.Module):
    table: nn.Embedding
    encoder: Encoder
    head: nn.MLP

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Reviewer(
            nn.Embedding.init(Vocab, Embed, key=keys[0]),
            Encoder.init(Layers, Embed, Heads, HeadSize, Mlp, key=keys[1]),
            nn.MLP.init(Embed, Stars, width=Mlp, depth=1, key=keys[2]),
        )

    def __call__(self, tokens):
        x = self.encoder(self.table(tokens))
        return self.head(x.mean("pos"))


optimizer = optax.adamw(1e-3)
forward = mixed_precision(BF16, Reviewer.__call__)


def loss(model, tokens, stars):
    return nn.cross_entropy_loss(forward(model, tokens), "stars", stars)


def only_head(updates):
    """The pretrained parameters stay as they are."""
    fixed = lambda m: (m.table, m.encoder.blocks)
    zeros = jax.tree.map(jnp.zeros_like, fixed(updates))
    return eqx.tree_at(fixed, updates, zeros)


def train(model, state, tokens, stars):
    value, gradients = axn.value_and_grad(loss)(model, tokens, stars)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, only_head(updates)), state


def arguments():
    model = abstract(Reviewer.init, key=key_of())
    return model, state_of(optimizer, model), integers(Batch, Pos), integers(Batch)
