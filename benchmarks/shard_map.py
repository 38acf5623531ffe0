"""Measure `axn.shard_map` against the positional `jax.shard_map`: calls, tracing, and the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import axonym as axn

from .harness import Row, timed_row
from .program import instructions

MAPPING = {"batch": "data", "mlp": "model"}
BATCH, EMBED, MLP, LAYERS = 32, 64, 128, 8


def named(layers, x):
    """Tensor-parallel layers, and a loss averaged over the batch."""
    for layer in layers:
        h = axn.tanh(axn.dot(x, layer["up"], axis="embed"))
        x = x + axn.psum(axn.dot(h, layer["down"], axis="mlp"), "mlp")
    return x, axn.pmean(axn.mean(x * x), "batch")


def positional(layers, x):
    """The same by position."""
    for layer in layers:
        h = jnp.tanh(x @ layer["up"])
        x = x + jax.lax.psum(h @ layer["down"], "model")
    return x, jax.lax.pmean(jnp.mean(x * x), "data")


def rows() -> list[Row]:
    """The same program from both, and the time to call and to trace it."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    raw = [{"up": draw(EMBED, MLP), "down": draw(MLP, EMBED)} for _ in range(LAYERS)], draw(BATCH, EMBED)
    layers = [
        {"up": axn.named(p["up"], ("embed", "mlp")), "down": axn.named(p["down"], ("mlp", "embed"))} for p in raw[0]
    ]
    own = layers, axn.named(raw[1], ("batch", "embed"))

    by_name = axn.shard_map(named, mapping=MAPPING)
    specs = [{"up": P(None, "model"), "down": P("model")}] * LAYERS, P("data")
    by_position = jax.shard_map(positional, in_specs=specs, out_specs=(P("data"), P()))
    small_name = axn.shard_map(lambda x: x + 1, mapping=MAPPING)
    small_position = jax.shard_map(lambda x: x + 1, in_specs=P("data"), out_specs=P("data"))

    mesh = axn.make_mesh({"data": 4, "model": 2})
    with jax.set_mesh(mesh):
        own = axn.shard(own, MAPPING)
        raw = jax.tree.map(lambda x: x.array, own, is_leaf=axn.is_named_array)
        ours, theirs = jax.jit(by_name), jax.jit(by_position)
        a, b = (instructions(f.lower(*args).compile()) for f, args in ((ours, own), (theirs, raw)))
        total = sum(a.values()), sum(b.values())
        return [
            Row("shard_map", "instructions", str(total[0]), str(total[1]), total[0] / total[1], 1.0),
            timed_row(
                "shard_map",
                f"jitted call, {2 * LAYERS + 1} leaves in",
                lambda: jax.block_until_ready(ours(*own)),
                lambda: jax.block_until_ready(theirs(*raw)),
                1.2,
                repeats=60,
            ),
            timed_row(
                "shard_map",
                "eager call of one operation",
                lambda: jax.block_until_ready(small_name(own[1])),
                lambda: jax.block_until_ready(small_position(raw[1])),
                1.2,
                repeats=5,
            ),
            timed_row(
                "shard_map",
                f"tracing value and gradient of {LAYERS} layers",
                lambda: _trace(by_name, own),
                lambda: _trace(by_position, raw),
                1.2,
                repeats=5,
            ),
        ]


def _trace(fn, args):
    def loss(layers, x):
        value = fn(layers, x)[1]
        return value.array if axn.is_named_array(value) else value

    return jax.jit(jax.value_and_grad(loss)).trace(*args)
