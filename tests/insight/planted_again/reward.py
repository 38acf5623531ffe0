"""A reward model: which of two answers do people prefer?"""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Judge(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Judge(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, (), key=keys[2]),
        )

    def __call__(self, tokens):
        x = self.blocks.fold(self.table(tokens))
        return self.head(self.norm(x["pos", -1]))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Judge.__call__)


def loss(model, answers):
    """Answers have an axis `pair`: the better one is first."""
    scores = forward(model, answers)
    return -nn.log_sigmoid(scores["pair", 0] - scores["pair", 1]).mean().scalar()
