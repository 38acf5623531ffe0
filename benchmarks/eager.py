"""Measure the cost of names in single operations outside jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axonym as axn

from .harness import Row, timed_row


def rows() -> list[Row]:
    """Everyday operations on small arrays, where dispatch is all there is."""
    X = jnp.arange(8 * 16.0).reshape(8, 16)
    B = jnp.arange(16.0)
    W = jnp.ones((16, 32))
    x, b, w = axn.named(X, ("batch", "embed")), axn.named(B, "embed"), axn.named(W, ("embed", "mlp"))
    xt, XT = x.rearrange(("embed", "batch")), X.T
    pairs = [
        ("add, same axes", lambda: x + x, lambda: X + X, 1.1),
        ("add, broadcast", lambda: x + b, lambda: X + B[None, :], 1.0),
        ("add, transposed", lambda: x + xt, lambda: X + XT.T, 1.0),
        ("multiply by a scalar", lambda: x * 2.0, lambda: X * 2.0, 1.1),
        ("exp", lambda: axn.exp(x), lambda: jnp.exp(X), 1.25),
        ("sum over an axis", lambda: x.sum("embed"), lambda: X.sum(1), 1.1),
        # Three frames and the look-up of the kernel take 1.3 us, and the program 5: there is no frame to leave out.
        ("dot", lambda: axn.dot(x, w, axis="embed"), lambda: X @ W, 1.25),
        ("integer index", lambda: x["batch", 3], lambda: X[3], 0.5),
        ("slice", lambda: x["embed", 2:6], lambda: X[:, 2:6], 1.0),
    ]
    # Outside of jit, tokens and targets are looked at, which copies them to the host; `out_of_range` turns that off.
    Vocab, Embed = axn.make_axes(vocab=512, embed=64)
    IDS = jnp.arange(64 * 512, dtype=jnp.int32).reshape(64, 512) % Vocab.size
    ids, logits = axn.named(IDS, ("batch", "pos")), axn.zeros({"batch": 64, "vocab": 512})
    few, targets = ids["batch", 0, "pos", slice(0, 8)], ids["batch", 1, "pos", slice(0, 64)].rename({"pos": "batch"})
    layer = axn.nn.Embedding.init(Vocab, Embed, key=jax.random.key(0))
    TABLE, FEW = layer.weight.array, few.array
    pairs += [
        ("look up 8 tokens", lambda: layer(few), lambda: TABLE.at[FEW].get(mode="fill"), 1.0),
        ("look up 32768 tokens", lambda: layer(ids), lambda: TABLE.at[IDS].get(mode="fill"), 1.0),
        (
            "loss of 64 targets, and unchecked",
            lambda: axn.nn.cross_entropy_loss(logits, Vocab, targets),
            lambda: axn.nn.cross_entropy_loss(logits, Vocab, targets, out_of_range=0.0),
            2.0,
        ),
    ]
    return [*(timed_row("eager", *pair) for pair in pairs), *sharded_rows()]


def sharded_rows() -> list[Row]:
    """`shard` of an array that is in place, and a layer, which asks for that at each call, on a mesh."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    mesh = axn.make_mesh({"data": -1})
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        x, layer = axn.shard((axn.ones((Batch, Embed)), axn.nn.Linear.init(Embed, Mlp, key=jax.random.key(0))))
        assert layer.bias is not None
        X, W, B, lies = x.array, layer.weight.array, layer.bias.array, x.array.sharding
        return [
            timed_row(
                "eager", "shard in place, to device_put", lambda: axn.shard(x), lambda: jax.device_put(X, lies), 0.5
            ),
            timed_row("eager", "Linear on a mesh", lambda: layer(x).array, lambda: X @ W.T + B, 1.2),
        ]
