"""A language model of genomes."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import OPTIMIZER, Block


class Genome(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Base, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Genome(
            table=nn.Embedding.init(Base, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Base, key=keys[2], use_bias=False),
        )

    def __call__(self, bases):
        return self.head(self.norm(self.blocks.fold(self.table(bases))))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Genome.__call__)


def loss(model, bases, following):
    return nn.cross_entropy_loss(forward(model, bases), "base", following).scalar()


def step(model, state, bases, following):
    value, gradients = axn.value_and_grad(eqx.filter_checkpoint(loss))(model, bases, following)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, {"loss": value, "norm": optax.tree.norm(gradients)}
