"""A classifier of whole documents, such as contracts or papers."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Reader(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, Label, *, key):
        keys = jax.random.split(key, 3)
        return Reader(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, False, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Label, key=keys[2]),
        )

    def __call__(self, tokens):
        x = self.norm(self.blocks.fold(self.table(tokens)))
        return self.head(x.mean("pos"))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Reader.__call__)


def loss(model, tokens, labels):
    return nn.cross_entropy_loss(forward(model, tokens), "label", labels).scalar()
