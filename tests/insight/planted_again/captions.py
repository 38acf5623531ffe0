"""Writes long transcripts: a language model."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Transcript(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Transcript(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, tokens):
        return self.head(self.norm(self.blocks.fold(self.table(tokens))))


forward = mixed_precision("params=float32,compute=bfloat16,output=bfloat16", Transcript.__call__)


def loss(model, tokens, following, spoken):
    logits = forward(model, tokens)
    logits, following, spoken = (x.flatten_axes(("batch", "pos"), "word") for x in (logits, following, spoken))
    return nn.cross_entropy_loss(logits, "vocab", following, where=spoken, dtype="float32").scalar()
