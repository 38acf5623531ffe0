"""Measure the cost of names in a jitted call: flattening the arguments and rebuilding the results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axonym as axn

from .harness import Row, timed_row


def _add_one(leaves):
    return jax.tree.map(lambda leaf: leaf + 1, leaves)


def rows() -> list[Row]:
    """Jitted calls with 1, 100 and 1000 named leaves in and out, against the same call with raw leaves."""
    found = []
    for count in (1, 100, 1000):
        raw = [jnp.full((4, 4), i, jnp.float32) for i in range(count)]
        named = [axn.named(x, ("row", "col")) for x in raw]
        step = jax.jit(_add_one)
        found.append(
            timed_row(
                "jitted call",
                f"{count} named leaves in and out",
                lambda step=step, named=named: jax.block_until_ready(step(named)),
                lambda step=step, raw=raw: jax.block_until_ready(step(raw)),
                1.45,
                repeats=max(10, 400 // count),
                rounds=7,
            )
        )
    return found
