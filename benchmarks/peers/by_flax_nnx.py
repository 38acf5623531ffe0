"""The transformer with Flax NNX: objects own their parameters, and `nnx.jit` updates them in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


def sharded(*axes: str | None) -> Any:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


def layer_norm(sizes: Sizes, rngs: nnx.Rngs) -> nnx.LayerNorm:
    scale = nnx.with_partitioning(nnx.initializers.ones, ("data",))
    bias = nnx.with_partitioning(nnx.initializers.zeros, ("data",))
    return nnx.LayerNorm(sizes.embed, epsilon=EPS, scale_init=scale, bias_init=bias, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm1 = layer_norm(sizes, rngs)
        self.attention = nnx.MultiHeadAttention(
            sizes.heads,
            sizes.embed,
            sizes.heads * sizes.head_size,
            use_bias=False,
            kernel_init=sharded("data", None, None),
            out_kernel_init=sharded(None, None, "data"),
            decode=False,
            rngs=rngs,
        )
        self.norm2 = layer_norm(sizes, rngs)
        self.up = nnx.Linear(sizes.embed, sizes.mlp, use_bias=False, kernel_init=sharded("data", None), rngs=rngs)
        self.down = nnx.Linear(sizes.mlp, sizes.embed, use_bias=False, kernel_init=sharded(None, "data"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, spec: P | None = None):
        self.spec = spec
        self.table = nnx.Embed(sizes.vocab, sizes.embed, embedding_init=sharded(None, "data"), rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs=rngs) for _ in range(sizes.layers)])
        self.norm = layer_norm(sizes, rngs)
        self.head = nnx.Linear(sizes.embed, sizes.vocab, use_bias=False, kernel_init=sharded("data", None), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = x if self.spec is None else jax.lax.with_sharding_constraint(x, self.spec)
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Transformer, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


@nnx.jit
def step(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model, tokens, targets)
    optimizer.update(model, gradients)
    return value


def place_batch(mesh: jax.sharding.Mesh, *arrays: Any) -> Any:
    return jax.device_put(arrays, NamedSharding(mesh, P("data")))


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    fn = nnx.jit(Block.__call__)
    args = (_model(sizes, weights, _one_device()).blocks[0], jnp.asarray(make_inputs(sizes)))
    return Program(lambda: fn(*args), lambda: fn.lower(*args))


def make_step(sizes: Sizes, weights: Any) -> Program:
    return _training(_model(sizes, weights, _one_device()), jax.tree.map(jnp.asarray, make_tokens(sizes)))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    return _training(_model(sizes, weights, mesh, P("data")), place_batch(mesh, *make_tokens(sizes)))


def _one_device() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def _training(model: Transformer, batch: Any) -> Program:
    with jax.set_mesh(model.head.kernel.get_value().sharding.mesh):
        optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    return Program(lambda: step(model, optimizer, *batch), lambda: step.lower(model, optimizer, *batch))


def _model(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh, spec: P | None = None) -> Transformer:
    def put(parameter: Any, w: jax.Array) -> None:
        assert parameter.get_value().shape == w.shape
        parameter.set_value(jax.device_put(w, parameter.get_value().sharding))

    def norm(layer: Any, w: Any) -> None:
        put(layer.scale, w["scale"]), put(layer.bias, w["bias"])

    with jax.set_mesh(mesh):
        model = Transformer(sizes, rngs=nnx.Rngs(0), spec=spec)
    put(model.table.embedding, weights["table"]), put(model.head.kernel, weights["head"])
    norm(model.norm, weights["norm"])
    for block, w in zip(model.blocks, weights["blocks"], strict=True):
        norm(block.norm1, w["norm1"]), norm(block.norm2, w["norm2"])
        a = block.attention
        for layer, name in ((a.query, "q"), (a.key, "k"), (a.value, "v"), (a.out, "o")):
            put(layer.kernel, w[name])
        put(block.up.kernel, w["up"]), put(block.down.kernel, w["down"])
    return model
