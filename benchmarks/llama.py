"""A step of training Llama: the model of `examples/models/llama.py`, against the same in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from examples.models import llama

from .harness import Row
from .program import compared

LEARNING_RATE = 0.1
BATCH, POS = 4, 32
CONFIG = llama.Config(
    Vocab=axn.Axis("vocab", 128),
    Embed=axn.Axis("embed", 64),
    Layers=axn.Axis("layers", 4),
    KVHeads=axn.Axis("kv_heads", 2),
    Group=axn.Axis("group", 2),
    HeadSize=axn.Axis("head_size", 16),
    Mlp=axn.Axis("mlp", 128),
)


# --- with names ---


def named_step(model: llama.Llama, tokens: axn.NamedArray) -> tuple[jax.Array, llama.Llama]:
    value, gradients = jax.value_and_grad(llama.Llama.loss)(model, tokens)
    return value, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, model, gradients)


# --- in plain JAX ---


def raw_params(model: llama.Llama) -> dict[str, Any]:
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


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + CONFIG.norm_eps) * scale[None, None]


def rotary(x: jax.Array) -> jax.Array:
    """Of an array whose axes are batch, position, any number of heads, feature."""
    half = x.shape[-1] // 2
    heads = tuple(range(2, x.ndim - 1))
    frequencies = jnp.asarray(CONFIG.rotary.theta ** -(np.arange(half) / half), jnp.float32)
    angles = jnp.expand_dims(jnp.arange(POS, dtype=jnp.float32)[None, :, None] * frequencies[None, None, :], heads)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q = rotary(jnp.einsum("bpe,kgse->bpkgs", x, weights["q"]))
    k = rotary(jnp.einsum("bpe,kse->bpks", x, weights["k"]))
    v = jnp.einsum("bpe,kse->bpks", x, weights["v"])
    scores = jnp.einsum("bpkgs,bqks->bkpgq", q, k) * CONFIG.HeadSize.size**-0.5
    causal = jnp.arange(POS)[None, :] <= jnp.arange(POS)[:, None]
    scores = jnp.where(causal[None, None, :, None, :], scores, float(jnp.finfo(jnp.float32).min))
    attended = jnp.einsum("bkpgq,bqks->bpkgs", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bpkgs,ekgs->bpe", attended, weights["o"])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Find the right logit without a look-up, so that tokens could be sharded, and targets need not be tokens."""
    largest = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    right = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    surprise = jnp.log(jnp.sum(jnp.exp(logits), -1)) - jnp.sum(jnp.where(right, logits, 0), -1)
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), surprise, 0)


def raw_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + attention(weights, norm(x, weights["norm1"]))
        h = norm(x, weights["norm2"])
        h = jax.nn.silu(jnp.einsum("bpe,me->bpm", h, weights["gate"])) * jnp.einsum("bpe,me->bpm", h, weights["up"])
        return x + jnp.einsum("bpm,em->bpe", h, weights["down"]), None

    block = jax.checkpoint(block, prevent_cse=False)
    x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
    logits = jnp.einsum("bpe,ve->bpv", norm(x, params["norm"]), params["head"])
    surprise = cross_entropy(logits, jnp.roll(tokens, -1, 1))
    followed = jnp.broadcast_to(jnp.arange(POS)[None] < POS - 1, surprise.shape)
    return jnp.mean(surprise, where=followed)


def raw_step(params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    value, gradients = jax.value_and_grad(raw_loss)(params, tokens)
    return value, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)


def rows() -> list[Row]:
    """The optimized step, against the hand-written one."""
    model = llama.Llama.init(CONFIG, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, POS), 0, CONFIG.Vocab.size)
    named_tokens, params = axn.named(tokens, ("batch", "pos")), raw_params(model)
    ours, theirs = jax.jit(named_step), jax.jit(raw_step)
    np.testing.assert_allclose(ours(model, named_tokens)[0], theirs(params, tokens)[0], rtol=1e-5)
    return compared("llama", ours.lower(model, named_tokens).compile(), theirs.lower(params, tokens).compile())
