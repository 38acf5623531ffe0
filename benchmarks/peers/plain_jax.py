"""The transformer in plain JAX: dictionaries of arrays, and functions of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


def init(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 2 + 6 * sizes.layers))
    e, h, s, m, v = sizes.embed, sizes.heads, sizes.head_size, sizes.mlp, sizes.vocab

    def draw(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def init_norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(e), "bias": jnp.zeros(e)}

    def init_block() -> dict[str, Any]:
        qkv = {name: draw(e, h, s, fan_in=e) for name in "qkv"}
        o, up, down = draw(h, s, e, fan_in=h * s), draw(e, m, fan_in=e), draw(m, e, fan_in=m)
        return {"norm1": init_norm(), **qkv, "o": o, "norm2": init_norm(), "up": up, "down": down}

    table, head = draw(v, e, fan_in=e), draw(e, v, fan_in=e)
    return {"table": table, "blocks": [init_block() for _ in range(sizes.layers)], "norm": init_norm(), "head": head}


def norm(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)
    return x * w["scale"] + w["bias"]


def block(w: dict[str, Any], x: jax.Array) -> jax.Array:
    h = norm(w["norm1"], x)
    q, k, v = (jnp.einsum("bpe,ehs->bphs", h, w[name]) for name in "qkv")
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bphs,hse->bpe", h, w["o"])
    h = jax.nn.gelu(norm(w["norm2"], x) @ w["up"])
    return x + h @ w["down"]


def loss(params: dict[str, Any], tokens: jax.Array, targets: jax.Array, spec: P | None = None) -> jax.Array:
    x = params["table"][tokens]
    for w in params["blocks"]:
        x = x if spec is None else jax.lax.with_sharding_constraint(x, spec)
        x = block(w, x)
    logits = norm(params["norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array, spec: P | None = None) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, tokens, targets, spec)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


jitted_step = jax.jit(step)


SPECS = {
    "table": P(None, "data"),
    "scale": P("data"),
    "bias": P("data"),
    "q": P("data"),
    "k": P("data"),
    "v": P("data"),
    "o": P(None, None, "data"),
    "up": P("data"),
    "down": P(None, "data"),
    "head": P("data"),
}


def place(mesh: jax.sharding.Mesh, params: Any) -> Any:
    def placed(path: Any, x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, SPECS[path[-1].key]))

    return jax.tree_util.tree_map_with_path(placed, params)


def sharded_step(params: Any, state: Any) -> Any:
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(functools.partial(step, spec=P("data")), out_shardings=(*shardings, None))


def place_batch(mesh: jax.sharding.Mesh, *arrays: Any) -> Any:
    return jax.device_put(arrays, NamedSharding(mesh, P("data")))


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    fn, args = jax.jit(block), (weights["blocks"][0], jnp.asarray(make_inputs(sizes)))
    return Program(lambda: fn(*args), lambda: fn.lower(*args))


def make_step(sizes: Sizes, weights: Any) -> Program:
    return _training(lambda *_: jitted_step, weights, jax.tree.map(jnp.asarray, make_tokens(sizes)))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    return _training(sharded_step, place(mesh, weights), place_batch(mesh, *make_tokens(sizes)))


def _training(make: Any, params: Any, batch: Any) -> Program:
    kept = [params, OPTIMIZER.init(params)]
    step = make(*kept)

    def call() -> jax.Array:
        kept[0], kept[1], value = step(*kept, *batch)
        return value

    return Program(call, lambda: step.lower(*kept, *batch))


def make_weights(sizes: Sizes) -> Any:
    """The weights that all libraries are given."""
    weights = jax.tree.map(np.asarray, init(sizes, jax.random.key(0)))
    rng = np.random.default_rng(0)  # as they are initialized, norms would hide what is mixed up
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape).astype(np.float32)), weights)
