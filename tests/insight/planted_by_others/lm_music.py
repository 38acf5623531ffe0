"""A model of music as tokens, with sinusoidal positions instead of rotary ones."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from axonym.nn.attention import Causal, dot_product_attention
from axonym.precision import mixed_precision
from blocks import BF16, FeedForward, abstract, integers, key_of, state_of

Batch, Pos, Vocab = axn.make_axes(batch=32, pos=1024, vocab=16384)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=2048, heads=16, head_size=128, mlp=5632, layers=12)

MESH = {"data": 4, "model": 2}
STORED = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model"}
COMPUTE = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}


def sinusoids():
    """A wave for each pair of features, from short to long."""
    frequency = axn.exp(-jnp.log(1e4) * axn.arange(Embed) / Embed.size)
    return axn.sin(axn.dot(axn.arange(Pos), frequency, axis=()))


class Layer(eqx.Module):
    norms: list[nn.RmsNorm]
    qkv: nn.Linear
    out: nn.Linear
    mlp: FeedForward

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Layer(
            [nn.RmsNorm.init(Embed, use_bias=False), nn.RmsNorm.init(Embed, use_bias=False)],
            nn.Linear.init(Embed, (axn.Axis("qkv", 3), Heads, HeadSize), key=keys[0], use_bias=False),
            nn.Linear.init((Heads, HeadSize), Embed, key=keys[1], use_bias=False),
            FeedForward.init(Embed, Mlp, key=keys[2]),
        )

    def __call__(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unbind("qkv")
        k, v = (a.rename({"pos": "key_pos"}) for a in (k, v))
        x = x + self.out(dot_product_attention(q, k, v, "key_pos", "head_size", mask=Causal("pos")))
        return x + self.mlp(self.norms[1](x))


class Composer(eqx.Module):
    table: nn.Embedding
    layers: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Composer(
            nn.Embedding.init(Vocab, Embed, key=keys[0]),
            nn.Stacked.init(Layers, Layer, gradient_checkpointing=True)(key=keys[1]),
            nn.RmsNorm.init(Embed, use_bias=False),
            nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, tokens):
        x = Embed.size**0.5 * self.table(tokens)
        x = x + sinusoids()
        return self.head(self.norm(self.layers.fold(x)))


optimizer = optax.adamw(3e-4, weight_decay=0.1)
forward = mixed_precision(BF16, Composer.__call__)


def loss(model, tokens, targets):
    return nn.cross_entropy_loss(forward(model, tokens), "vocab", targets)


def train(model, state, tokens, targets):
    value, gradients = axn.value_and_grad(loss)(model, tokens, targets)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Composer.init, key=key_of())
    return model, state_of(optimizer, model), integers(Batch, Pos), integers(Batch, Pos)
