"""A language model of source code, with several perceptrons in each layer."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import SelfAttention


class Perceptrons(eqx.Module):
    router: nn.Linear
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(Embed, Expert, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Perceptrons(
            router=nn.Linear.init(Embed, Expert, key=keys[0], use_bias=False),
            up=nn.Linear.init(Embed, (Expert, Mlp), key=keys[1], use_bias=False),
            down=nn.Linear.init((Expert, Mlp), Embed, key=keys[2], use_bias=False),
        )

    def __call__(self, x):
        scores = nn.softmax(self.router(x).astype("float32"), "expert")
        best, _ = axn.top_k(scores, "expert", 2, "choice")
        gates = axn.where(scores >= best["choice", -1], scores, 0)
        gates = (gates / gates.sum("expert")).astype(x.dtype)
        return self.down(nn.silu(self.up(x)) * gates)


class Layer(eqx.Module):
    norms: list[nn.RmsNorm]
    attention: SelfAttention
    perceptrons: Perceptrons

    @staticmethod
    def init(Embed, Heads, HeadSize, Expert, Mlp, *, key):
        first, second = jax.random.split(key)
        return Layer(
            norms=[nn.RmsNorm.init(Embed, use_bias=False) for _ in range(2)],
            attention=SelfAttention.init(Embed, Heads, HeadSize, True, True, key=first),
            perceptrons=Perceptrons.init(Embed, Expert, Mlp, key=second),
        )

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptrons(self.norms[1](x))


class Coder(eqx.Module):
    table: nn.Embedding
    layers: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Expert, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Coder(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            layers=nn.Stacked.init(Layers, Layer, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Expert, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, tokens):
        return self.head(self.norm(self.layers.fold(self.table(tokens))))


forward = mixed_precision("params=float32,compute=bfloat16,output=bfloat16", Coder.__call__)


def loss(model, tokens, following):
    return nn.cross_entropy_loss(forward(model, tokens), "vocab", following, dtype="float32").scalar()
