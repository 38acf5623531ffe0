"""A transformer, written twice: with names and in plain JAX. Both do the same arithmetic in the same layout.

Queries, keys and values are one product, as in large models: with tensor parallelism, the backward pass then sums over
devices once, not three times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn

BATCH, POS, EMBED, HEADS, SIZE, MLP, VOCAB = 4, 32, 64, 4, 16, 128, 128
Batch, Pos, Embed, Qkv, Heads, Size, Mlp, Vocab = axn.make_axes(
    batch=BATCH, pos=POS, embed=EMBED, qkv=3, heads=HEADS, size=SIZE, mlp=MLP, vocab=VOCAB
)


def make_params(layers: int, seed: int = 0) -> dict[str, Any]:
    """Raw parameters."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * layers))

    def normal(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape)

    def layer() -> dict[str, jax.Array]:
        return {
            "qkv": normal(EMBED, 3, HEADS, SIZE),
            "o": normal(HEADS, SIZE, EMBED),
            "up": normal(EMBED, MLP),
            "down": normal(MLP, EMBED),
            "scale1": jnp.ones(EMBED),
            "scale2": jnp.ones(EMBED),
        }

    return {"embed": normal(VOCAB, EMBED), "layers": [layer() for _ in range(layers)], "out": normal(EMBED, VOCAB)}


AXES = {
    "qkv": (Embed, Qkv, Heads, Size),
    "o": (Heads, Size, Embed),
    "up": (Embed, Mlp),
    "down": (Mlp, Embed),
    "scale1": (Embed,),
    "scale2": (Embed,),
}


def name_params(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters with names."""
    return {
        "embed": axn.named(params["embed"], (Vocab, Embed)),
        "layers": [{k: axn.named(v, AXES[k]) for k, v in layer.items()} for layer in params["layers"]],
        "out": axn.named(params["out"], (Embed, Vocab)),
    }


# --- with names ---


def named_norm(x: axn.NamedArray, scale: axn.NamedArray) -> axn.NamedArray:
    return x * axn.rsqrt(axn.mean(x * x, Embed) + 1e-6) * scale


def named_attention(layer: dict[str, Any], x: axn.NamedArray) -> axn.NamedArray:
    qkv = axn.dot(x, layer["qkv"], axis=Embed, out_axes=("qkv", "batch", "pos", "heads", "size"))
    q, k, v = qkv[Qkv, 0], qkv[Qkv, 1].rename({"pos": "key"}), qkv[Qkv, 2].rename({"pos": "key"})
    scores = axn.dot(q, k, axis=Size, out_axes=("batch", "heads", "pos", "key")) * SIZE**-0.5
    causal = axn.arange(Pos) >= axn.arange(Pos.alias("key")).broadcast_axis(Pos)
    scores = axn.where(causal, scores, -1e9)
    weights = axn.exp(scores - axn.max(scores, "key"))
    weights = weights / axn.sum(weights, "key")
    mixed = axn.dot(weights, v, axis="key", out_axes=("batch", "pos", "heads", "size"))
    return axn.dot(mixed, layer["o"], axis=(Heads, Size))


def named_loss(params: dict[str, Any], tokens: axn.NamedArray, targets: axn.NamedArray) -> jax.Array:
    x = params["embed"]["vocab", tokens]
    for layer in params["layers"]:
        x = x + named_attention(layer, named_norm(x, layer["scale1"]))
        h = axn.tanh(axn.dot(named_norm(x, layer["scale2"]), layer["up"], axis=Embed))
        x = x + axn.dot(h, layer["down"], axis=Mlp)
    logits = axn.dot(x, params["out"], axis=Embed)
    top = axn.max(logits, Vocab)
    normalizer = axn.log(axn.sum(axn.exp(logits - top), Vocab)) + top
    return axn.mean(normalizer - logits["vocab", targets]).scalar()


# --- in plain JAX ---


def raw_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None, :]


def raw_attention(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    qkv = jnp.einsum("bpe,echs->cbphs", x, layer["qkv"])
    q, k, v = qkv[0], qkv[1], qkv[2]
    scores = jnp.einsum("bphs,bkhs->bhpk", q, k) * SIZE**-0.5
    causal = jnp.arange(POS)[:, None] >= jnp.arange(POS)[None, :]
    scores = jnp.where(causal[None, None], scores, -1e9)
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    mixed = jnp.einsum("bhpk,bkhs->bphs", weights, v)
    return jnp.einsum("bphs,hse->bpe", mixed, layer["o"])


def raw_loss(params: dict[str, Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + raw_attention(layer, raw_norm(x, layer["scale1"]))
        h = jnp.tanh(jnp.einsum("bpe,em->bpm", raw_norm(x, layer["scale2"]), layer["up"]))
        x = x + jnp.einsum("bpm,me->bpe", h, layer["down"])
    logits = jnp.einsum("bpe,ev->bpv", x, params["out"])
    top = jnp.max(logits, -1, keepdims=True)
    normalizer = jnp.log(jnp.sum(jnp.exp(logits - top), -1)) + top[..., 0]
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(normalizer - picked)


def make_batch(seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Raw tokens and targets."""
    first, second = jax.random.split(jax.random.key(seed))
    return jax.random.randint(first, (BATCH, POS), 0, VOCAB), jax.random.randint(second, (BATCH, POS), 0, VOCAB)


def name_batch(batch: tuple[jax.Array, jax.Array]) -> tuple[axn.NamedArray, axn.NamedArray]:
    """The same with names."""
    tokens, targets = batch
    return axn.named(tokens, (Batch, Pos)), axn.named(targets, (Batch, Pos))
