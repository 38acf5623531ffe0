"""Composes piano music: a language model of notes."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Composer(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Note, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Composer(
            table=nn.Embedding.init(Note, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Note, key=keys[2], use_bias=False),
        )

    def __call__(self, notes):
        return self.head(self.norm(self.blocks.fold(self.table(notes))))


ADAM = optax.adam(2e-4)
forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Composer.__call__)


def begin(key, *axes):
    model = Composer.init(*axes, key=key)
    return model, ADAM.init(model)  # pyright: ignore[reportArgumentType]


def loss(model, notes, following):
    return nn.cross_entropy_loss(forward(model, notes), "note", following).scalar()


def clipped(gradients, most=1.0):
    """Gradients of at most this norm, of all parameters together."""
    gradients = axn.unshard(gradients)
    norm = optax.tree.norm(gradients)
    factor = jax.numpy.minimum(1.0, most / (norm + 1e-6))
    return jax.tree.map(lambda g: g * factor, gradients), norm


def step(model, state, notes, following):
    value, gradients = axn.value_and_grad(loss)(model, notes, following)
    gradients, norm = clipped(gradients)
    updates, state = ADAM.update(gradients, state, model)
    return optax.apply_updates(model, updates), state, {"loss": value, "norm": norm}
