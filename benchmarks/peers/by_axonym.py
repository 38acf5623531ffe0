"""The transformer with Axonym."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import Axis, NamedArray, nn
from axonym.nn.attention import Causal, dot_product_attention

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


class Block(eqx.Module):
    norm1: nn.LayerNorm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    norm2: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> Block:
        Embed, Mlp = Axis("embed", sizes.embed), Axis("mlp", sizes.mlp)
        heads = (Axis("heads", sizes.heads), Axis("head_size", sizes.head_size))
        axes = [(Embed, heads)] * 3 + [(heads, Embed), (Embed, Mlp), (Mlp, Embed)]
        keys = jax.random.split(key, 6)
        linear = [nn.Linear.init(*a, key=k, use_bias=False, out_first=False) for a, k in zip(axes, keys, strict=True)]
        q, k, v, o, up, down = linear
        norm = nn.LayerNorm.init(Embed, EPS)
        return Block(norm, q, k, v, o, norm, up, down)

    def __call__(self, x: NamedArray) -> NamedArray:
        h = self.norm1(x)
        q, k, v = self.q(h), self.k(h).rename({"pos": "key_pos"}), self.v(h).rename({"pos": "key_pos"})
        x = x + self.o(dot_product_attention(q, k, v, "key_pos", "head_size", mask=Causal("pos")))
        return x + self.down(nn.gelu(self.up(self.norm2(x))))


class Transformer(eqx.Module):
    table: nn.Embedding
    blocks: list[Block]
    norm: nn.LayerNorm
    head: nn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> Transformer:
        Vocab, Embed = Axis("vocab", sizes.vocab), Axis("embed", sizes.embed)
        first, last, *rest = jax.random.split(key, 2 + sizes.layers)
        return Transformer(
            nn.Embedding.init(Vocab, Embed, key=first),
            [Block.init(sizes, key=k) for k in rest],
            nn.LayerNorm.init(Embed, EPS),
            nn.Linear.init(Embed, Vocab, key=last, use_bias=False, out_first=False),
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Transformer, tokens: NamedArray, targets: NamedArray) -> NamedArray:
    return nn.cross_entropy_loss(model(tokens), "vocab", targets)


def step(model: Transformer, state: Any, tokens: NamedArray, targets: NamedArray) -> tuple[Transformer, Any, Any]:
    value, gradients = axn.value_and_grad(loss)(model, tokens, targets)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return optax.apply_updates(model, updates), state, value


jitted_step = axn.named_jit(step)
COMPUTE, STORED = {"batch": "data"}, {"embed": "data"}
sharded_step = axn.fsdp(step, STORED, COMPUTE)


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    fn = axn.named_jit(lambda block, x: block(x))
    args = (_model(sizes, weights).blocks[0], axn.named(make_inputs(sizes), ("batch", "pos", "embed")))
    args = jax.tree.map(jax.numpy.asarray, args)
    return Program(lambda: fn(*args).array, lambda: fn.lower(*args))


def make_step(sizes: Sizes, weights: Any) -> Program:
    return _training(jitted_step, _model(sizes, weights), _batch(sizes))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    model, batch = axn.shard(_model(sizes, weights), STORED), axn.shard(_batch(sizes), COMPUTE)
    return _training(sharded_step, model, batch)


def _batch(sizes: Sizes) -> Any:
    return tuple(axn.named(jax.numpy.asarray(x), ("batch", "pos")) for x in make_tokens(sizes))


def _training(step: Any, model: Transformer, batch: Any) -> Program:
    kept: list[Any] = [model, OPTIMIZER.init(model)]

    def call() -> jax.Array:
        kept[0], kept[1], value = step(*kept, *batch)
        return value.array

    return Program(call, lambda: step.lower(*kept, *batch))


def _model(sizes: Sizes, weights: Any) -> Transformer:
    def norm(layer: Any, w: Any) -> Any:
        named = axn.named(w["scale"], "embed"), axn.named(w["bias"], "embed")
        return eqx.tree_at(lambda n: (n.weight, n.bias), layer, named)

    def linear(layer: Any, w: Any) -> Any:
        return eqx.tree_at(lambda n: n.weight, layer, axn.named(w, layer.weight.axes))

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
