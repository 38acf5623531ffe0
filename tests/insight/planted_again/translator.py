"""Translation: an encoder reads a sentence, and a decoder writes it in another language."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block, CrossBlock


class Translator(eqx.Module):
    table: nn.Embedding
    encoder: nn.Stacked
    norm: nn.RmsNorm
    decoder: nn.Stacked
    last: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 4)
        encoder = nn.Stacked.init(Layers, Block, gradient_checkpointing=True)
        decoder = nn.Stacked.init(Layers, CrossBlock, gradient_checkpointing=True)
        return Translator(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            encoder=encoder(Embed, Heads, HeadSize, Mlp, False, key=keys[1]),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            decoder=decoder(Embed, Embed, Heads, HeadSize, Mlp, key=keys[2]),
            last=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Vocab, key=keys[3], use_bias=False),
        )

    def __call__(self, source, target):
        memory = self.norm(self.encoder.fold(self.table(source))).rename({"pos": "source"})
        return self.head(self.last(self.decoder.fold(self.table(target), memory)))


forward = mixed_precision("params=float32,compute=bfloat16,output=bfloat16", Translator.__call__)


def loss(model, source, target, following):
    logits = forward(model, source, target)
    return nn.cross_entropy_loss(logits, "vocab", following, dtype="float32").scalar()
