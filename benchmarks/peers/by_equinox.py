"""The transformer with Equinox: modules for single positions, mapped over positions and texts."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: jax.Array):
        k1, k2, k3 = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(sizes.embed, EPS)
        self.attention = eqx.nn.MultiheadAttention(
            sizes.heads, sizes.embed, qk_size=sizes.head_size, vo_size=sizes.head_size, key=k1
        )
        self.norm2 = eqx.nn.LayerNorm(sizes.embed, EPS)
        self.up = eqx.nn.Linear(sizes.embed, sizes.mlp, use_bias=False, key=k2)
        self.down = eqx.nn.Linear(sizes.mlp, sizes.embed, use_bias=False, key=k3)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class Transformer(eqx.Module):
    table: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: jax.Array):
        first, last, *rest = jax.random.split(key, 2 + sizes.layers)
        self.table = eqx.nn.Embedding(sizes.vocab, sizes.embed, key=first)
        self.blocks = [Block(sizes, key=k) for k in rest]
        self.norm = eqx.nn.LayerNorm(sizes.embed, EPS)
        self.head = eqx.nn.Linear(sizes.embed, sizes.vocab, use_bias=False, key=last)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.table)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model: Transformer, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(tokens), targets).mean()


@eqx.filter_jit
def step(model: Transformer, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Transformer, Any, Any]:
    value, gradients = eqx.filter_value_and_grad(loss)(model, tokens, targets)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def place(mesh: jax.sharding.Mesh, model: Transformer) -> Transformer:
    def sharding(x: jax.Array) -> NamedSharding:
        # The axis of features of the residual stream; in square weights, that of the inputs.
        sizes = [i for i, size in enumerate(x.shape) if size == model.norm.weight.size]
        spec = [None] * x.ndim
        spec[sizes[-1]] = "data"
        return NamedSharding(mesh, P(*spec))

    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, jax.tree.map(sharding, arrays)), rest)


def place_batch(mesh: jax.sharding.Mesh, *arrays: Any) -> Any:
    return eqx.filter_shard(arrays, NamedSharding(mesh, P("data")))


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    fn = eqx.filter_jit(lambda block, x: jax.vmap(block)(x))
    args = (_model(sizes, weights).blocks[0], jnp.asarray(make_inputs(sizes)))
    return Program(lambda: fn(*args), lambda: fn.lower(*args))


def make_step(sizes: Sizes, weights: Any) -> Program:
    return _training(_model(sizes, weights), jax.tree.map(jnp.asarray, make_tokens(sizes)))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    return _training(place(mesh, _model(sizes, weights)), place_batch(mesh, *make_tokens(sizes)))


def _training(model: Transformer, batch: Any) -> Program:
    kept: list[Any] = [model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))]

    def call() -> jax.Array:
        kept[0], kept[1], value = step(*kept, *batch)
        return value

    return Program(call, lambda: step.lower(*kept, *batch))


def _model(sizes: Sizes, weights: Any) -> Transformer:
    def norms(n: Any) -> Any:
        return n.weight, n.bias

    def scale_and_bias(w: Any) -> Any:
        return w["scale"], w["bias"]

    def block(block: Block, w: Any) -> Block:
        def where(b: Block) -> Any:
            a = b.attention
            projections = (a.query_proj, a.key_proj, a.value_proj, a.output_proj, b.up, b.down)
            return *(p.weight for p in projections), *norms(b.norm1), *norms(b.norm2)

        linear = [w[n].reshape(sizes.embed, -1).T for n in "qkv"]
        linear += [w["o"].reshape(-1, sizes.embed).T, w["up"].T, w["down"].T]
        return eqx.tree_at(where, block, (*linear, *scale_and_bias(w["norm1"]), *scale_and_bias(w["norm2"])))

    model = Transformer(sizes, key=jax.random.key(0))
    values = (weights["table"], weights["head"].T, *scale_and_bias(weights["norm"]))
    model = eqx.tree_at(lambda m: (m.table.weight, m.head.weight, *norms(m.norm)), model, values)
    blocks = [block(b, w) for b, w in zip(model.blocks, weights["blocks"], strict=True)]
    return eqx.tree_at(lambda m: m.blocks, model, blocks)
