"""Text generation: one token more for each of many conversations."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn
from axonym.nn.attention import KVCache, apply_rotary, dot_product_attention

from blocks import FeedForward


class Attention(eqx.Module):
    query: nn.Linear
    kv: nn.Linear
    out: nn.Linear

    @staticmethod
    def init(Embed, KVHeads, Group, HeadSize, *, key):
        keys = jax.random.split(key, 3)
        return Attention(
            query=nn.Linear.init(Embed, (KVHeads, Group, HeadSize), key=keys[0], use_bias=False),
            kv=nn.Linear.init(Embed, (axn.Axis("kv", 2), KVHeads, HeadSize), key=keys[1], use_bias=False),
            out=nn.Linear.init((KVHeads, Group, HeadSize), Embed, key=keys[2], use_bias=False),
        )

    def __call__(self, x, cache, layer):
        positions = cache["layers", layer].positions(x.resolve_axis("pos"))
        q = apply_rotary(self.query(x), "head_size", positions)
        k, v = self.kv(x).unbind("kv")
        k = apply_rotary(k, "head_size", positions)
        cache = cache.update(*(a.rename({"pos": "key_pos"}) for a in (k, v)), at={"layers": layer})
        own = cache["layers", layer]
        y = dot_product_attention(q, own.keys, own.values, "key_pos", "head_size", mask=own.mask(positions))
        return self.out(y), cache


class Layer(eqx.Module):
    norms: list[nn.RmsNorm]
    attention: Attention
    feed: FeedForward

    @staticmethod
    def init(Embed, KVHeads, Group, HeadSize, Mlp, *, key):
        first, second = jax.random.split(key)
        return Layer(
            norms=[nn.RmsNorm.init(Embed, use_bias=False) for _ in range(2)],
            attention=Attention.init(Embed, KVHeads, Group, HeadSize, key=first),
            feed=FeedForward.init(Embed, Mlp, key=second),
        )

    def __call__(self, x, cache, layer):
        y, cache = self.attention(self.norms[0](x), cache, layer)
        x = x + y
        return x + self.feed(self.norms[1](x)), cache


class Writer(eqx.Module):
    table: nn.Embedding
    layers: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp, *, key):
        keys = jax.random.split(key, 3)
        model = Writer(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            layers=nn.Stacked.init(Layers, Layer)(Embed, KVHeads, Group, HeadSize, Mlp, key=keys[1]),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Vocab, key=keys[2], use_bias=False),
        )
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)

    def __call__(self, tokens, cache):
        """The output of the layers for some tokens more, and the cache with them."""

        def body(layer, carry, i):
            return layer(*carry, i)

        cache = cache.require_room(tokens.axis_size("pos"))
        return self.layers.fold_via(body)((self.table(tokens), cache), axn.arange(self.layers.Block))

    def logits(self, x):
        return self.head(self.norm(x))


def empty(Batch, Layers, KVHeads, KeyPos, HeadSize):
    return KVCache.init((Batch, Layers), KVHeads, KeyPos, HeadSize, jnp.bfloat16)


def one_more(model, cache, tokens, key):
    """Choose one token more for each conversation, and write it into the cache."""
    x, cache = model(tokens.broadcast_axis(axn.Axis("pos", 1)), cache)
    logits = model.logits(x["pos", 0]).astype("float32")
    return axn.random.categorical(key, logits, "vocab", temperature=0.8, top_k=40), cache
