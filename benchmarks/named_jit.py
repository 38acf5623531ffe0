"""What `named_jit` costs in a call, against `jax.jit` doing the same on raw leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import axonym as axn

from .harness import Row, timed_row


def _add_one(leaves):
    return jax.tree.map(lambda x: x + 1, leaves)


def _add_one_with(leaves, activation, rate):
    return _add_one(leaves)


def rows() -> list[Row]:
    """Without a mesh, with a mesh and mappings, and with arguments that are not arrays."""
    found = []
    mesh = axn.make_mesh({"data": 8})
    lies = NamedSharding(mesh, PartitionSpec("data"))
    for count in (1, 100, 1000):
        repeats = max(20, 300 // count)
        raw = [jnp.full((8, 4), i, jnp.float32) for i in range(count)]
        named = [axn.named(x, ("row", "col")) for x in raw]
        ours, theirs = axn.named_jit(_add_one), jax.jit(_add_one)
        limit = {1: 1.35, 100: 1.5, 1000: 1.4}[count]
        found.append(_row(f"{count} leaves, no mesh", ours, named, theirs, raw, limit, repeats))

        static = axn.named_jit(_add_one_with)
        found.append(
            timed_row(
                "named_jit",
                f"{count} leaves, a function and a number",
                lambda static=static, named=named: jax.block_until_ready(static(named, jnp.tanh, float("0.5"))),
                lambda theirs=theirs, raw=raw: jax.block_until_ready(theirs(raw)),
                1.55,
                repeats=repeats,
            )
        )

        raw_split = [jax.device_put(x, lies) for x in raw]
        split = [axn.named(x, ("row", "col")) for x in raw_split]
        with jax.set_mesh(mesh):
            mapped = axn.named_jit(_add_one, {"row": "data"})
            by_hand = jax.jit(_add_one, out_shardings=lies)
            found.append(_row(f"{count} leaves, mesh and mapping", mapped, split, by_hand, raw_split, 1.2, 2 * repeats))
            found.append(
                timed_row(
                    "named_jit",
                    f"shard of {count} leaves already in place, against jax.device_put",
                    lambda split=split: axn.shard(split, {"row": "data"}),
                    lambda raw_split=raw_split: jax.device_put(raw_split, lies),
                    1.0,
                    repeats=repeats,
                )
            )
    return found


def _row(what, ours, named, theirs, raw, limit, repeats) -> Row:
    return timed_row(
        "named_jit",
        what,
        lambda: jax.block_until_ready(ours(named)),
        lambda: jax.block_until_ready(theirs(raw)),
        limit,
        repeats=repeats,
    )
