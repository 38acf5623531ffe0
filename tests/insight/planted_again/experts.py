"""A language model in which each token goes to two of several experts."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import SelfAttention


class Experts(eqx.Module):
    router: nn.Linear
    up: nn.MoELinear
    down: nn.MoELinear

    @staticmethod
    def init(Experts_, Embed, Mlp, *, key):
        keys = jax.random.split(key, 3)
        return Experts(
            router=nn.Linear.init(Embed, Experts_.alias("scores"), key=keys[0], use_bias=False),
            up=nn.MoELinear.init(Experts_, Embed, Mlp, key=keys[1], use_bias=False),
            down=nn.MoELinear.init(Experts_, Mlp, Embed, key=keys[2], use_bias=False),
        )

    def __call__(self, x):
        def of_experts(layers, rows, sizes):
            up, down = layers
            return down(nn.silu(up(rows, sizes)), sizes)

        scores = nn.softmax(self.router(x).astype("float32"), "scores")
        weights, chosen = axn.top_k(scores, "scores", 2, "choice")
        weights = (weights / weights.sum("choice")).astype(x.dtype)
        found = nn.dispatch(of_experts, (self.up, self.down), x, chosen, self.up.Experts)
        return axn.dot(found, weights, axis="choice")


class Layer(eqx.Module):
    norms: list[nn.RmsNorm]
    attention: SelfAttention
    experts: Experts

    @staticmethod
    def init(Embed, Heads, HeadSize, Mlp, Experts_, *, key):
        first, second = jax.random.split(key)
        return Layer(
            norms=[nn.RmsNorm.init(Embed, use_bias=False) for _ in range(2)],
            attention=SelfAttention.init(Embed, Heads, HeadSize, True, True, key=first),
            experts=Experts.init(Experts_, Embed, Mlp, key=second),
        )

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class Language(eqx.Module):
    table: nn.Embedding
    layers: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, Experts_, *, key):
        keys = jax.random.split(key, 3)
        return Language(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            layers=nn.Stacked.init(Layers, Layer, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, Experts_, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, tokens):
        return self.head(self.norm(self.layers.fold(self.table(tokens))))


forward = mixed_precision("params=float32,compute=bfloat16,output=bfloat16", Language.__call__)


def loss(model, tokens, following):
    return nn.cross_entropy_loss(forward(model, tokens), "vocab", following, dtype="float32").scalar()
