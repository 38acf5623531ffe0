"""Measure calls of `named_jit` with rules for arguments and results, against `jax.jit` with shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import TreePathShardingRule

from .harness import Row, timed_row

LIMIT = 1.3


def _add_one(leaves):
    return jax.tree.map(lambda x: x + 1, leaves)


def rows() -> list[Row]:
    """With annotations, which are made active too, and without."""
    mesh = axn.make_mesh({"data": 8})
    lies = NamedSharding(mesh, P("data"))
    rule = TreePathShardingRule((".*", P("data")))
    placements = {"in_placement": (rule,), "out_placement": rule}
    ours = axn.named_jit(_add_one, **placements)
    annotated = axn.named_jit(_add_one, **placements, annotation_shardings={"hidden": P("data")})
    theirs = jax.jit(_add_one, in_shardings=(lies,), out_shardings=lies)
    found = []
    with axn.set_mesh(mesh):
        for count in (1, 100):
            leaves = [jax.device_put(jnp.full((8, 4), i, jnp.float32), lies) for i in range(count)]
            found.append(_row(f"{count} leaves", ours, theirs, leaves))
            found.append(_row(f"{count} leaves, annotations", annotated, theirs, leaves))
    return found


def _row(what: str, ours: Callable[..., Any], theirs: Callable[..., Any], leaves: list[jax.Array]) -> Row:
    return timed_row(
        "rules",
        what,
        lambda: jax.block_until_ready(ours(leaves)),
        lambda: jax.block_until_ready(theirs(leaves)),
        LIMIT,
        repeats=max(20, 300 // len(leaves)),
    )
