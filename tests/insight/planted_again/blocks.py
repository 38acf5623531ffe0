"""Parts that several models share."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.nn.attention import Causal, apply_rotary, dot_product_attention


class SelfAttention(eqx.Module):
    qkv: nn.Linear
    out: nn.Linear
    causal: bool = eqx.field(static=True)
    rotary: bool = eqx.field(static=True)

    @staticmethod
    def init(Embed, Heads, HeadSize, causal, rotary, *, key):
        first, second = jax.random.split(key)
        return SelfAttention(
            qkv=nn.Linear.init(Embed, (axn.Axis("qkv", 3), Heads, HeadSize), key=first, use_bias=False),
            out=nn.Linear.init((Heads, HeadSize), Embed, key=second, use_bias=False),
            causal=causal,
            rotary=rotary,
        )

    def __call__(self, x):
        q, k, v = self.qkv(x).unbind("qkv")
        if self.rotary:
            q, k = (apply_rotary(a, "head_size", "pos") for a in (q, k))
        k, v = (a.rename({"pos": "key_pos"}) for a in (k, v))
        mask = Causal("pos") if self.causal else None
        return self.out(dot_product_attention(q, k, v, "key_pos", "head_size", mask=mask))


class CrossAttention(eqx.Module):
    query: nn.Linear
    kv: nn.Linear
    out: nn.Linear

    @staticmethod
    def init(Embed, Memory, Heads, HeadSize, *, key):
        keys = jax.random.split(key, 3)
        return CrossAttention(
            query=nn.Linear.init(Embed, (Heads, HeadSize), key=keys[0], use_bias=False),
            kv=nn.Linear.init(Memory, (axn.Axis("kv", 2), Heads, HeadSize), key=keys[1], use_bias=False),
            out=nn.Linear.init((Heads, HeadSize), Embed, key=keys[2], use_bias=False),
        )

    def __call__(self, x, memory):
        k, v = self.kv(memory).unbind("kv")
        return self.out(dot_product_attention(self.query(x), k, v, "source", "head_size"))


class FeedForward(eqx.Module):
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(Embed, Mlp, *, key):
        first, second = jax.random.split(key)
        return FeedForward(
            up=nn.Linear.init(Embed, Mlp, key=first, use_bias=False),
            down=nn.Linear.init(Mlp, Embed, key=second, use_bias=False),
        )

    def __call__(self, x):
        return self.down(nn.gelu(self.up(x)))


class Block(eqx.Module):
    before_attention: nn.RmsNorm
    attention: SelfAttention
    before_feed: nn.RmsNorm
    feed: FeedForward

    @staticmethod
    def init(Embed, Heads, HeadSize, Mlp, causal=True, rotary=True, *, key):
        first, second = jax.random.split(key)
        return Block(
            before_attention=nn.RmsNorm.init(Embed, use_bias=False),
            attention=SelfAttention.init(Embed, Heads, HeadSize, causal, rotary, key=first),
            before_feed=nn.RmsNorm.init(Embed, use_bias=False),
            feed=FeedForward.init(Embed, Mlp, key=second),
        )

    def __call__(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.feed(self.before_feed(x))


class CrossBlock(eqx.Module):
    own: Block
    before_cross: nn.RmsNorm
    cross: CrossAttention

    @staticmethod
    def init(Embed, Memory, Heads, HeadSize, Mlp, causal=True, rotary=True, *, key):
        first, second = jax.random.split(key)
        return CrossBlock(
            own=Block.init(Embed, Heads, HeadSize, Mlp, causal, rotary, key=first),
            before_cross=nn.RmsNorm.init(Embed, use_bias=False),
            cross=CrossAttention.init(Embed, Memory, Heads, HeadSize, key=second),
        )

    def __call__(self, x, memory):
        x = x + self.own.attention(self.own.before_attention(x))
        x = x + self.cross(self.before_cross(x), memory)
        return x + self.own.feed(self.own.before_feed(x))


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))


def start(init):
    """A function of a key that makes the model and the state of the optimizer."""

    def begin(key):
        model = init(key=key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    return begin


def train(loss):
    """A step of training, of a loss of the model and a batch."""

    def step(model, state, *batch):
        value, gradients = axn.value_and_grad(loss)(model, *batch)
        updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, {"loss": value, "norm": optax.tree.norm(gradients)}

    return step
