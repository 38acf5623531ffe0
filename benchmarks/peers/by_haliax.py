"""The transformer with Haliax, as in its tutorial on sharding."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.nn.attention import causal_mask, dot_product_attention

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


class Block(eqx.Module):
    norm1: hax.nn.LayerNorm
    q: hax.nn.Linear
    k: hax.nn.Linear
    v: hax.nn.Linear
    o: hax.nn.Linear
    norm2: hax.nn.LayerNorm
    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> Block:
        Embed, Mlp = Axis("embed", sizes.embed), Axis("mlp", sizes.mlp)
        heads = (Axis("heads", sizes.heads), Axis("head_size", sizes.head_size))
        axes = [(Embed, heads)] * 3 + [(heads, Embed), (Embed, Mlp), (Mlp, Embed)]
        keys = jax.random.split(key, 6)
        linear = [
            hax.nn.Linear.init(*a, key=k, use_bias=False, out_first=False) for a, k in zip(axes, keys, strict=True)
        ]
        q, k, v, o, up, down = linear
        norm = hax.nn.LayerNorm.init(Embed, EPS)
        return Block(norm, q, k, v, o, norm, up, down)

    def __call__(self, x: NamedArray) -> NamedArray:
        h = self.norm1(x)
        q, k, v = self.q(h), self.k(h).rename({"pos": "key_pos"}), self.v(h).rename({"pos": "key_pos"})
        mask = causal_mask(q.resolve_axis("pos"), k.resolve_axis("key_pos"))
        x = x + self.o(dot_product_attention("key_pos", "head_size", q, k, v, mask=mask))
        return x + self.down(hax.nn.gelu(self.up(self.norm2(x))))


class Transformer(eqx.Module):
    table: hax.nn.Embedding
    blocks: list[Block]
    norm: hax.nn.LayerNorm
    head: hax.nn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> Transformer:
        Vocab, Embed = Axis("vocab", sizes.vocab), Axis("embed", sizes.embed)
        first, last, *rest = jax.random.split(key, 2 + sizes.layers)
        return Transformer(
            hax.nn.Embedding.init(Vocab, Embed, key=first),
            [Block.init(sizes, key=k) for k in rest],
            hax.nn.LayerNorm.init(Embed, EPS),
            hax.nn.Linear.init(Embed, Vocab, key=last, use_bias=False, out_first=False),
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Transformer, tokens: NamedArray, targets: NamedArray) -> Any:
    logits = model(tokens)
    one_hot = hax.nn.one_hot(targets, logits.resolve_axis("vocab"), dtype=logits.dtype)
    return hax.nn.cross_entropy_loss(logits, "vocab", one_hot).scalar()


def step(model: Transformer, state: Any, tokens: NamedArray, targets: NamedArray) -> tuple[Transformer, Any, Any]:
    value, gradients = eqx.filter_value_and_grad(loss)(model, tokens, targets)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


jitted_step = hax.named_jit(step)
COMPUTE, STORED = {"batch": "data"}, {"embed": "data"}
sharded_step = hax.named_jit(step, axis_resources=COMPUTE, out_axis_resources=STORED)


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    fn = hax.named_jit(lambda block, x: block(x))
    x = hax.named(jax.numpy.asarray(make_inputs(sizes)), ("batch", "pos", "embed"))
    args = (_model(sizes, weights).blocks[0], x)
    order = ("batch", "pos", "embed")
    return Program(lambda: fn(*args), lambda: fn.lower(*args), lambda y: y.rearrange(order).array)


def make_step(sizes: Sizes, weights: Any) -> Program:
    return _training(jitted_step, _model(sizes, weights), _batch(sizes))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    return _training(sharded_step, hax.shard(_model(sizes, weights), STORED), hax.shard(_batch(sizes), COMPUTE))


def _batch(sizes: Sizes) -> Any:
    return tuple(hax.named(jax.numpy.asarray(x), ("batch", "pos")) for x in make_tokens(sizes))


def _training(step: Any, model: Transformer, batch: Any) -> Program:
    kept: list[Any] = [model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))]

    def call() -> jax.Array:
        kept[0], kept[1], value = step(*kept, *batch)
        return value

    return Program(call, lambda: step.lower(*kept, *batch))


def _model(sizes: Sizes, weights: Any) -> Transformer:
    def norm(layer: Any, w: Any) -> Any:
        named = hax.named(w["scale"], "embed"), hax.named(w["bias"], "embed")
        return eqx.tree_at(lambda n: (n.weight, n.bias), layer, named)

    def linear(layer: Any, w: Any) -> Any:
        return eqx.tree_at(lambda n: n.weight, layer, hax.named(w, layer.weight.axes))

    def block(block: Block, w: Any) -> Block:
        layers = (norm if "norm" in n else linear for n in w)
        return Block(**{n: fill(getattr(block, n), w[n]) for n, fill in zip(w, layers, strict=True)})

    model = Transformer.init(sizes, key=jax.random.key(0))
    blocks = [block(b, w) for b, w in zip(model.blocks, weights["blocks"], strict=True)]
    return Transformer(
        linear(model.table, weights["table"]),
        blocks,
        norm(model.norm, weights["norm"]),
        linear(model.head, weights["head"]),
    )
