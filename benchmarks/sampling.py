"""Measure the bytes that operations over a sharded vocabulary move between devices, against a gather of the logits.

Bytes are those that collectives deliver to each device, read from the compiled programs. The search for the least
likely token of a top-p, the only loop that moves data, counts as often as it runs. The limit is exactly what the
algorithm needs to move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym import argmax, top_k
from axonym.nn import cross_entropy_loss
from axonym.random import categorical
from axonym.random.sampling import STEPS

from .communication import bytes_moved_in_loops
from .harness import Row

DEVICES, BATCH, VOCAB, K = 8, 32, 128 * 1024, 64
NUMBER = 4 * BATCH
"""The bytes of one number for each example."""


def delivered(fn: Callable[..., Any], *args: Any) -> int:
    """The bytes that the collectives of a compiled function deliver to each device."""
    in_a_step, outside = bytes_moved_in_loops(jax.jit(fn).lower(*args).compile())
    return STEPS * sum(m.bytes for m in in_a_step.values()) + sum(m.bytes for m in outside.values())


def rows() -> list[Row]:
    """Candidates, tokens and losses of a batch, its logits sharded over all devices by vocabulary."""
    mesh = axn.make_mesh({"model": DEVICES})
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))

    def array(dtype: Any, sharding: Any, **axes: int) -> axn.NamedArray:
        return axn.named(jax.ShapeDtypeStruct(tuple(axes.values()), dtype, sharding=sharding), tuple(axes))

    whole = jax.NamedSharding(mesh, jax.P())
    logits = array(jnp.float32, sharding, batch=BATCH, vocab=VOCAB)
    targets, key = array(jnp.int32, whole, batch=BATCH), jax.random.key(0)

    def loss(x: axn.NamedArray, targets: axn.NamedArray) -> jax.Array:
        return cross_entropy_loss(x, "vocab", targets, axn.sum).scalar()

    # A candidate is a value and a place. Top-p takes the largest logit, and three sums for all and in each step.
    candidate = 2 * NUMBER * DEVICES
    cases: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
        (f"top_k, k={K}", lambda x: top_k(x, "vocab", K), (), K * candidate),
        ("argmax", lambda x: argmax(x, "vocab"), (), candidate),
        ("categorical", lambda x, k: categorical(k, x, "vocab", temperature=0.7), (key,), candidate),
        (
            f"categorical, top_k={K}, top_p, min_p",
            lambda x, k: categorical(k, x, "vocab", top_k=K, top_p=0.9, min_p=0.01),
            (key,),
            K * candidate,
        ),
        (
            "categorical, top_p of the full vocabulary",
            lambda x, k: categorical(k, x, "vocab", top_p=0.9),
            (key,),
            candidate + (1 + 3 * (STEPS + 1)) * NUMBER,
        ),
        ("cross_entropy_loss", lambda x, t: cross_entropy_loss(x, "vocab", t, None), (targets,), 3 * NUMBER),
        ("cross_entropy_loss and its gradient", jax.value_and_grad(loss), (targets,), 3 * NUMBER),
    ]
    with jax.set_mesh(mesh):
        gathered = delivered(lambda x: jax.lax.with_sharding_constraint(x.array, whole), logits)
        return [_row(what, delivered(fn, logits, *args), gathered, limit / gathered) for what, fn, args, limit in cases]


def _row(what: str, ours: int, gathered: int, limit: float) -> Row:
    note = f"of {gathered / 2**20:.0f} MiB, 1 part in {gathered / ours:.0f}"
    return Row("sampling", f"bytes moved by {what}", str(ours), str(gathered), ours / gathered, limit, note)
