"""The model of `examples/models/llama.py` in plain JAX: its training step, and a step of decoding with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from examples.models.llama import Config, Llama

LEARNING_RATE = 0.1


def params_of(model: Llama) -> dict[str, Any]:
    """The arrays of a model."""
    block = model.blocks.stacked
    blocks = {
        "norm1": block.attention_norm.weight,
        "q": block.attention.q_proj.weight,
        "k": block.attention.k_proj.weight,
        "v": block.attention.v_proj.weight,
        "o": block.attention.o_proj.weight,
        "norm2": block.mlp_norm.weight,
        "gate": block.mlp.gate_proj.weight,
        "up": block.mlp.up_proj.weight,
        "down": block.mlp.down_proj.weight,
    }
    assert model.head is not None
    named = {"table": model.table.weight, "blocks": blocks, "norm": model.norm.weight, "head": model.head.weight}
    return jax.tree.map(jnp.asarray, jax.tree.map(lambda x: x.array, named, is_leaf=axn.is_named_array))


def norm(config: Config, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + config.norm_eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def rotary(config: Config, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn an array whose axes are those of the positions, any number of heads, and features."""
    half = x.shape[-1] // 2
    frequencies = jnp.asarray(config.rotary.theta ** -(np.arange(half) / half), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    angles = jnp.expand_dims(angles, tuple(range(positions.ndim, x.ndim - 1)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def perceptron(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = jax.nn.silu(jnp.einsum("...e,me->...m", x, w["gate"])) * jnp.einsum("...e,me->...m", x, w["up"])
    return jnp.einsum("...m,em->...e", h, w["down"])


def masked(config: Config, scores: jax.Array, mask: jax.Array) -> jax.Array:
    lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
    return jnp.where(mask, scores * config.HeadSize.size**-0.5, lowest)


# --- training ---


def attention(config: Config, w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    positions = jnp.arange(x.shape[1])
    q = rotary(config, jnp.einsum("bpe,kgse->bpkgs", x, w["q"]), positions[None])
    k = rotary(config, jnp.einsum("bpe,kse->bpks", x, w["k"]), positions[None])
    v = jnp.einsum("bpe,kse->bpks", x, w["v"])
    scores = jnp.einsum("bpkgs,bqks->bkpgq", q, k)
    causal = positions[None, :] <= positions[:, None]
    scores = masked(config, scores, causal[None, None, :, None, :])
    attended = jnp.einsum("bkpgq,bqks->bpkgs", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bpkgs,ekgs->bpe", attended, w["o"])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Find the right logit without a look-up, so that tokens could be sharded, and targets need not be tokens."""
    logits = logits.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    right = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    surprise = jnp.log(jnp.sum(jnp.exp(logits), -1)) - jnp.sum(jnp.where(right, logits, 0), -1)
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), surprise, 0)


def loss(config: Config, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + attention(config, w, norm(config, x, w["norm1"]))
        return x + perceptron(w, norm(config, x, w["norm2"])), None

    block = jax.checkpoint(block, prevent_cse=False)
    x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
    logits = jnp.einsum("bpe,ve->bpv", norm(config, x, params["norm"]), params["head"])
    surprise = cross_entropy(logits, jnp.roll(tokens, -1, 1))
    followed = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] < tokens.shape[1] - 1, surprise.shape)
    return jnp.mean(surprise, where=followed)


def step(config: Config, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    value, gradients = jax.value_and_grad(lambda p: loss(config, p, tokens))(params)
    return value, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)


# --- decoding ---


def empty_text(config: Config, batch: int, room: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Texts of one token each: the token, the keys and values of those before, and how many these are."""
    shape = batch, config.Layers.size, config.KVHeads.size, room, config.HeadSize.size
    token, length = (jnp.zeros(batch, jnp.int32) for _ in range(2))
    return {"token": token, "keys": jnp.zeros(shape, dtype), "values": jnp.zeros(shape, dtype), "length": length}


def decode(config: Config, params: dict[str, Any], text: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Take the likeliest token for each text; the positions of texts may differ."""
    length, examples = text["length"], jnp.arange(text["length"].shape[0])

    def block(carry: Any, given: Any) -> Any:
        (x, keys, values), (w, layer) = carry, given
        h = norm(config, x, w["norm1"])
        q = rotary(config, jnp.einsum("be,kgse->bkgs", h, w["q"]), length)
        k = rotary(config, jnp.einsum("be,kse->bks", h, w["k"]), length)
        keys = keys.at[examples, layer, :, length].set(k, unique_indices=True)
        values = values.at[examples, layer, :, length].set(jnp.einsum("be,kse->bks", h, w["v"]), unique_indices=True)
        mask = jnp.arange(keys.shape[3])[None] <= length[:, None]
        scores = masked(config, jnp.einsum("bkgs,bkqs->bkgq", q, keys[:, layer]), mask[:, None, None])
        attended = jnp.einsum("bkgq,bkqs->bkgs", jax.nn.softmax(scores, -1), values[:, layer])
        x = x + jnp.einsum("bkgs,ekgs->be", attended, w["o"])
        return (x + perceptron(w, norm(config, x, w["norm2"])), keys, values), None

    start = params["table"][text["token"]], text["keys"], text["values"]
    (x, keys, values), _ = jax.lax.scan(block, start, (params["blocks"], jnp.arange(config.Layers.size)))
    logits = jnp.einsum("be,ve->bv", norm(config, x, params["norm"]), params["head"])
    token = jnp.argmax(logits.astype(jnp.float32), -1).astype(jnp.int32)
    return {"token": token, "keys": keys, "values": values, "length": length + 1}
