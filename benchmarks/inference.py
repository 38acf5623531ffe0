"""Measure `axonym.names.infer`, which traces a step of raw arrays and names its axes, against tracing it alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from examples.models import llama

from . import plain_llama
from .harness import Row

BATCH, POS, LAYERS, ROUNDS = 8, 2048, (4, 20, 80), 3
CONFIG = llama.Config(
    Vocab=axn.Axis("vocab", 128256),
    Embed=axn.Axis("embed", 8192),
    Layers=axn.Axis("layers", 80),
    KVHeads=axn.Axis("kv_heads", 8),
    Group=axn.Axis("group", 8),
    HeadSize=axn.Axis("head_size", 128),
    Mlp=axn.Axis("mlp", 28672),
)
"""The sizes of Llama 3 with 70 billion parameters. Arrays are abstract."""
PARAMS = {
    "table": "vocab embed",
    "head": "vocab embed",
    "norm": "embed",
    "norm1": "embed",
    "norm2": "embed",
    "q": "kv_heads group head_size embed",
    "k": "kv_heads head_size embed",
    "v": "kv_heads head_size embed",
    "o": "embed kv_heads group head_size",
    "gate": "mlp embed",
    "up": "mlp embed",
    "down": "embed mlp",
}
GIVEN = {key: PARAMS[key] for key in ("table", "q", "v", "up")}
"""What a user says; the names of all other axes follow."""


def rows() -> list[Row]:
    """Training steps: a perceptron, and a large transformer whose layers are not in a loop."""
    found = [_row("a perceptron of 2 layers", perceptron_step, *perceptron())]
    for count in LAYERS:
        found.append(_row(f"Llama 70B, {count} layers one by one", transformer_step(), *transformer(count)))
    step, count = transformer_step(jax.checkpoint), LAYERS[-1]
    return [*found, _row(f"the same, {count} layers, rematerialized", step, *transformer(count))]


def _row(what: str, step: Callable[..., Any], args: tuple[Any, ...], names: tuple[Any, ...]) -> Row:
    state = jax.eval_shape(lambda p: (jax.tree.map(jnp.zeros_like, p),) * 2, args[0])
    args, names = (args[0], state, *args[1:]), (names[0], None, *names[1:])
    assert not axn.names.infer(step, *args, names=names).mix_ups
    ways = (lambda: axn.names.infer(step, *args, names=names)), (lambda: jax.make_jaxpr(lambda *a: step(*a))(*args))
    pairs = [[_seconds(way) for way in ways] for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return Row("inference", f"{what}, a step with AdamW", f"{ours:.2f} s", f"{theirs:.2f} s", ours / theirs, 1.5)


def _seconds(call: Callable[[], Any]) -> float:
    jax.clear_caches()
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()  # both run Python in one thread, so other processes do not count
        call()
        return time.process_time() - start
    finally:
        gc.enable()


def adamw(params: Any, state: Any, gradients: Any) -> Any:
    """Return new parameters, and the new state: the averages of gradients and of their squares."""
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state[1], gradients)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - 1e-3 * (m / 0.1 / (jnp.sqrt(v / 0.001) + 1e-8) + 1e-4 * p)

    return jax.tree.map(update, params, first, second), (first, second)


def perceptron() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the step, without the state of the optimizer, and their names."""
    shapes = {"up": (512, 2048), "bias": (2048,), "down": (2048, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x, y = jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    return (params, x, y), ({"up": "embed mlp", "down": "mlp classes"}, "batch _", None)


def perceptron_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = jax.nn.gelu(x @ params["up"] + params["bias"][None]) @ params["down"]
        return jnp.mean(jax.nn.logsumexp(h, -1) - (h * y).sum(-1))

    value, gradients = jax.value_and_grad(loss)(params)
    return value, *adamw(params, state, gradients)


def transformer(layers: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the step, without the state of the optimizer, and their names."""
    size = {a.name: a.size for a in vars(CONFIG).values() if isinstance(a, axn.Axis)}
    of = {key: jax.ShapeDtypeStruct([size[n] for n in names.split()], jnp.bfloat16) for key, names in PARAMS.items()}
    outside = ("table", "head", "norm")
    block = {key: x for key, x in of.items() if key not in outside}
    params = {**{key: of[key] for key in outside}, "blocks": [block] * layers}
    given = {f"{'' if key in outside else '/'}{key}$": names for key, names in GIVEN.items()}
    return (params, jax.ShapeDtypeStruct((BATCH, POS), jnp.int32)), (given, "batch pos")


def transformer_step(wrap: Callable[[Any], Any] = lambda f: f) -> Callable[..., Any]:
    def block(x: jax.Array, w: Any) -> jax.Array:
        x = x + plain_llama.attention(CONFIG, w, plain_llama.norm(CONFIG, x, w["norm1"]))
        return x + plain_llama.perceptron(w, plain_llama.norm(CONFIG, x, w["norm2"]))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, layer = params["table"][tokens], wrap(block)
        for w in params["blocks"]:
            x = layer(x, w)
        logits = jnp.einsum("bpe,ve->bpv", plain_llama.norm(CONFIG, x, params["norm"]), params["head"])
        return jnp.mean(plain_llama.cross_entropy(logits, jnp.roll(tokens, -1, 1)))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return value, *adamw(params, state, gradients)

    return step
