"""A language model of source code, fully sharded, with clipped gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, Decoder, abstract, integers, key_of, state_of

Batch, Pos, Vocab = axn.make_axes(batch=32, pos=1024, vocab=49152)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=2048, heads=16, head_size=128, mlp=5632, layers=16)

MESH = {"data": 8}
STORED = {"embed": "data"}
COMPUTE = {"batch": "data"}

CLIP = 1.0
optimizer = optax.adamw(3e-4, weight_decay=0.1)
forward = mixed_precision(BF16, Decoder.__call__)


def loss(model, tokens, targets):
    return nn.cross_entropy_loss(forward(model, tokens), "vocab", targets)


def train(model, state, tokens, targets):
    value, gradients = axn.value_and_grad(loss)(model, tokens, targets)
    gradients = axn.unshard(gradients)  # the norm is over all parameters
    norm = optax.tree.norm(gradients)
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), gradients)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return {"loss": value, "norm": norm}, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Decoder.init, Vocab, Layers, Embed, Heads, HeadSize, Mlp, key=key_of())
    return model, state_of(optimizer, model), integers(Batch, Pos), integers(Batch, Pos)
