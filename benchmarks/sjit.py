"""What `sjit` costs in a call, against `jax.jit` with the same shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from axonym.sharding import MeshShardingHelper, TreePathShardingRule

from .harness import Row, timed_row

LIMIT = 1.3


def _add_one(leaves):
    return jax.tree.map(lambda x: x + 1, leaves)


def rows() -> list[Row]:
    """With the mesh in force around the call and without, and with annotations, which are put in force too."""
    helper = MeshShardingHelper([8], ["data"])
    lies = NamedSharding(helper.mesh, P("data"))
    rule = TreePathShardingRule((".*", P("data")))
    ours = helper.sjit(_add_one, in_shardings=(rule,), out_shardings=rule)
    annotated = helper.sjit(_add_one, (rule,), rule, annotation_shardings={"hidden": P("data")})
    theirs = jax.jit(_add_one, in_shardings=(lies,), out_shardings=lies)
    found = []
    for count in (1, 100):
        leaves = [jax.device_put(jnp.full((8, 4), i, jnp.float32), lies) for i in range(count)]
        with helper:
            found.append(_row(f"{count} leaves, mesh in force", ours, theirs, leaves))
            found.append(_row(f"{count} leaves, mesh in force, annotations", annotated, theirs, leaves))
        found.append(_row(f"{count} leaves, no mesh in force", ours, theirs, leaves))
    return found


def _row(what: str, ours: Callable[..., Any], theirs: Callable[..., Any], leaves: list[jax.Array]) -> Row:
    return timed_row(
        "sjit",
        what,
        lambda: jax.block_until_ready(ours(leaves)),
        lambda: jax.block_until_ready(theirs(leaves)),
        LIMIT,
        repeats=max(20, 300 // len(leaves)),
    )
