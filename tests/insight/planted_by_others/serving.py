"""A decoder with grouped queries and a cache of keys and values, for serving."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn
from axonym.nn.attention import KVCache, apply_rotary, dot_product_attention
from blocks import FeedForward, abstract, key_of

Vocab, Embed, Mlp, Layers = axn.make_axes(vocab=32768, embed=4096, mlp=14336, layers=16)
KVHeads, Group, HeadSize = axn.make_axes(kv_heads=8, group=4, head_size=128)


class ServedBlock(eqx.Module):
    norms: list[nn.RmsNorm]
    q: nn.Linear
    kv: nn.Linear
    out: nn.Linear
    mlp: FeedForward

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return ServedBlock(
            [nn.RmsNorm.init(Embed, use_bias=False), nn.RmsNorm.init(Embed, use_bias=False)],
            nn.Linear.init(Embed, (KVHeads, Group, HeadSize), key=keys[0], use_bias=False),
            nn.Linear.init(Embed, (axn.Axis("kv", 2), KVHeads, HeadSize), key=keys[1], use_bias=False),
            nn.Linear.init((KVHeads, Group, HeadSize), Embed, key=keys[2], use_bias=False),
            FeedForward.init(Embed, Mlp, key=keys[3]),
        )

    def __call__(self, carry, layer):
        x, cache = carry
        h = self.norms[0](x)
        positions = cache["layers", layer].lengths
        k, v = self.kv(h).unbind("kv")
        q, k = (apply_rotary(a, "head_size", positions) for a in (self.q(h), k))
        cache = cache.update(k, v, at={"layers": layer})
        own = cache["layers", layer]
        x = x + self.out(dot_product_attention(q, own.keys, own.values, "key_pos", "head_size", own.mask(positions)))
        return x + self.mlp(self.norms[1](x)), cache


class Served(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Served(
            nn.Embedding.init(Vocab, Embed, key=keys[0]),
            nn.Stacked.init(Layers, ServedBlock)(key=keys[1]),
            nn.RmsNorm.init(Embed, use_bias=False),
            nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )

    def __call__(self, token, cache):
        """The logits that follow one token of each text."""
        x, cache = self.blocks.fold((self.table(token), cache), axn.arange(Layers))
        return self.head(self.norm(x)), cache


def weights():
    """The model in bfloat16, as it is served."""
    model = abstract(Served.init, key=key_of())
    return abstract(lambda m: jax.tree.map(lambda x: x.astype(jnp.bfloat16), m), model)


def empty_cache(batch, length):
    axes = (batch, Layers), KVHeads, axn.Axis("key_pos", length), HeadSize
    return abstract(lambda: KVCache.init(*axes, dtype=jnp.bfloat16))
