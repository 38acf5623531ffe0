"""Layers and training helpers that the projects in this folder share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import axonym as axn
from axonym import nn
from axonym.nn.attention import Causal, apply_rotary, dot_product_attention
from axonym.precision import mixed_precision

BF16 = "params=float32,compute=bfloat16,output=float32"


class Attention(eqx.Module):
    qkv: nn.Linear
    out: nn.Linear
    causal: bool = eqx.field(static=True)

    @staticmethod
    def init(embed, heads, head_size, causal, *, key):
        first, second = jax.random.split(key)
        return Attention(
            nn.Linear.init(embed, (axn.Axis("qkv", 3), heads, head_size), key=first, use_bias=False),
            nn.Linear.init((heads, head_size), embed, key=second, use_bias=False),
            causal,
        )

    def __call__(self, x):
        q, k, v = self.qkv(x).unbind("qkv")
        q, k = (apply_rotary(a, "head_size", "pos") for a in (q, k))
        k, v = (a.rename({"pos": "key_pos"}) for a in (k, v))
        mask = Causal("pos") if self.causal else None
        return self.out(dot_product_attention(q, k, v, "key_pos", "head_size", mask=mask))


class FeedForward(eqx.Module):
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(embed, mlp, *, key):
        keys = jax.random.split(key, 3)
        return FeedForward(
            nn.Linear.init(embed, mlp, key=keys[0], use_bias=False),
            nn.Linear.init(embed, mlp, key=keys[1], use_bias=False),
            nn.Linear.init(mlp, embed, key=keys[2], use_bias=False),
        )

    def __call__(self, x):
        return self.down(nn.silu(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    attention_norm: nn.RmsNorm
    attention: Attention
    mlp_norm: nn.RmsNorm
    mlp: FeedForward

    @staticmethod
    def init(embed, heads, head_size, mlp, causal=True, *, key):
        first, second = jax.random.split(key)
        return Block(
            nn.RmsNorm.init(embed, use_bias=False),
            Attention.init(embed, heads, head_size, causal, key=first),
            nn.RmsNorm.init(embed, use_bias=False),
            FeedForward.init(embed, mlp, key=second),
        )

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(vocab, layers, embed, heads, head_size, mlp, *, key):
        keys = jax.random.split(key, 3)
        return Decoder(
            nn.Embedding.init(vocab, embed, key=keys[0]),
            nn.Stacked.init(layers, Block, gradient_checkpointing=True)(embed, heads, head_size, mlp, key=keys[1]),
            nn.RmsNorm.init(embed, use_bias=False),
            nn.Linear.init(embed, vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, tokens):
        return self.head(self.norm(self.blocks.fold(self.table(tokens))))


class Encoder(eqx.Module):
    """A stack of blocks in which all positions see each other."""

    blocks: nn.Stacked
    norm: nn.RmsNorm

    @staticmethod
    def init(layers, embed, heads, head_size, mlp, *, key):
        stack = nn.Stacked.init(layers, Block, gradient_checkpointing=True)
        return Encoder(
            stack(embed, heads, head_size, mlp, False, key=key),
            nn.RmsNorm.init(embed, use_bias=False),
        )

    def __call__(self, x):
        return self.norm(self.blocks.fold(x))


def abstract(init, *args, **kwargs):
    """What `init` makes, without values."""
    return eqx.filter_eval_shape(init, *args, **kwargs)


def integers(*axes):
    return abstract(lambda: axn.zeros(axes, jnp.int32))


def floats(*axes, dtype=jnp.float32):
    return abstract(lambda: axn.zeros(axes, dtype))


def key_of():
    return jax.random.key(0)


def state_of(optimizer, model):
    return abstract(lambda m: optimizer.init(eqx.filter(m, eqx.is_inexact_array)), model)
