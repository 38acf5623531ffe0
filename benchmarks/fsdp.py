"""Measure the bytes that an `fsdp` step moves, against the same step in plain JAX and the minimum.

The step takes the value and gradient of a transformer and updates its parameters. In plain JAX the step is one
`jax.shard_map`: parameters are gathered with `lax.all_gather` where they are used, its transpose reduce-scatters the
gradients, and tensor parallelism sums with `lax.psum`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import axonym as axn

from . import models
from .communication import Moved, bytes_moved
from .harness import Row

LAYERS, BATCH = 2, 8

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "8 data": ({"data": 8}, {"embed": "data"}, {"batch": "data"}),
    "2 replica x 4 data": ({"replica": 2, "data": 4}, {"embed": "data"}, {"batch": ("replica", "data")}),
    "4 data x 2 model": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model", "heads": "model"},
        {"batch": "data", "mlp": "model", "heads": "model"},
    ),
}


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    """Raw tokens and targets."""
    rng = np.random.default_rng(0)
    return rng.integers(0, models.VOCAB, (BATCH, models.POS)), rng.integers(0, models.VOCAB, (BATCH, models.POS))


def named_step(params: Any, tokens: Any, targets: Any) -> Any:
    """The step with names; how it is distributed is not its business."""
    loss, grads = jax.value_and_grad(models.named_loss)(params, tokens, targets)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


# --- the same in plain JAX ---


def _gather(w: jax.Array, axis: int, others: tuple[str, ...]) -> jax.Array:
    if others:
        w = jax.lax.pcast(w, others, to="varying")
    return jax.lax.all_gather(w, "data", axis=axis, tiled=True)


def _hand_loss(params: Any, tokens: jax.Array, targets: jax.Array, *, sizes: dict[str, int]) -> jax.Array:
    """Apply the transformer to the shard of the batch, the heads and the hidden features of one device."""
    replicas = ("replica",) if "replica" in sizes else ()
    tensor = "model" in sizes
    batch_axes = (*replicas, "data")
    gather = functools.partial(_gather, others=replicas)

    def enter(x):  # a replicated activation goes into a contraction sharded over heads or hidden features
        return jax.lax.pcast(x, ("model",), to="varying") if tensor else x

    def leave(x):  # and each device has one term of the sum
        return jax.lax.psum(x, "model") if tensor else x

    def norm(x, scale):
        scale = gather(scale, 0)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None, :]

    x = gather(params["embed"], 1)[tokens]
    for layer in params["layers"]:
        h = enter(norm(x, layer["scale1"]))
        qkv = jnp.einsum("bpe,echs->cbphs", h, gather(layer["qkv"], 0))
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = jnp.einsum("bphs,bkhs->bhpk", q, k) * models.SIZE**-0.5
        causal = jnp.arange(models.POS)[:, None] >= jnp.arange(models.POS)[None, :]
        scores = jnp.where(causal[None, None], scores, -1e9)
        weights = jax.nn.softmax(scores, -1)
        mixed = jnp.einsum("bhpk,bkhs->bphs", weights, v)
        x = x + leave(jnp.einsum("bphs,hse->bpe", mixed, gather(layer["o"], 2)))
        h = jnp.tanh(jnp.einsum("bpe,em->bpm", enter(norm(x, layer["scale2"])), gather(layer["up"], 0)))
        x = x + leave(jnp.einsum("bpm,me->bpe", h, gather(layer["down"], 1)))
    logits = jnp.einsum("bpe,ev->bpv", x, gather(params["out"], 0))
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return jax.lax.pmean(-jnp.mean(picked), batch_axes)


def hand_step(sizes: dict[str, int]) -> Any:
    """Make the step as one `jax.shard_map`, and the specs of its parameters."""
    model = "model" if "model" in sizes else None
    rest = {
        "qkv": P("data", None, model),
        "o": P(model, None, "data"),
        "up": P("data", model),
        "down": P(model, "data"),
        "scale1": P("data"),
        "scale2": P("data"),
    }
    specs = {"embed": P(None, "data"), "layers": [rest] * LAYERS, "out": P("data")}
    batch = P(("replica", "data")) if "replica" in sizes else P("data")

    def step(params, tokens, targets):
        loss, grads = jax.value_and_grad(functools.partial(_hand_loss, sizes=sizes))(params, tokens, targets)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return jax.jit(jax.shard_map(step, in_specs=(specs, batch, batch), out_specs=(P(), specs)))


def _total(moved: dict[str, Moved]) -> int:
    return sum(m.bytes for m in moved.values())


def _described(moved: dict[str, Moved]) -> str:
    return ", ".join(f"{kind} {m.count}: {m.bytes / 1024:.0f} KiB" for kind, m in sorted(moved.items()))


def rows() -> list[Row]:
    """Bytes delivered to each device by every kind of collective, on three meshes."""
    params, batch = models.make_params(LAYERS), make_batch()
    named, named_batch = (
        models.name_params(params),
        tuple(axn.named(x, (models.Batch.resize(BATCH), models.Pos)) for x in batch),
    )
    found = []
    for name, (sizes, storage, compute) in LAYOUTS.items():
        for explicit in (False, True):
            with jax.set_mesh(axn.make_mesh(sizes, explicit=explicit)):
                ours = bytes_moved(axn.fsdp(named_step, storage, compute).lower(named, *named_batch).compile())
            with jax.set_mesh(axn.make_mesh(sizes)):
                theirs = bytes_moved(hand_step(sizes).lower(params, *batch).compile())
            found.append(
                Row(
                    "fsdp",
                    f"{name}, {'Explicit' if explicit else 'Auto'}: bytes moved",
                    f"{_total(ours) / 1024:.0f} KiB",
                    f"{_total(theirs) / 1024:.0f} KiB",
                    _total(ours) / _total(theirs),
                    1.0,
                    f"({_described(ours)}; by hand {_described(theirs)})",
                )
            )
            if name == "8 data":
                least = sum(x.nbytes for x in jax.tree.leaves(params))
                found.append(
                    Row(
                        "fsdp",
                        f"{name}, {'Explicit' if explicit else 'Auto'}: against one gather and one scatter of all",
                        f"{_total(ours) / 1024:.0f} KiB",
                        f"{least * 9 / 8 / 1024:.0f} KiB",
                        _total(ours) / (least * 9 / 8),
                        1.0,
                        "(the least if every parameter is gathered once and its gradient scattered)",
                    )
                )
    return found
