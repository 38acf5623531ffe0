"""Measure calls of `named_jit` against the same `jax.jit` on raw leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import axonym as axn
from axonym import nn

from .harness import Row, timed_row


def _add_one(leaves):
    return jax.tree.map(lambda x: x + 1, leaves)


def _add_one_with(leaves, activation, rate):
    return _add_one(leaves)


class Block(eqx.Module):
    """A layer of nine parameters in nine modules."""

    norms: tuple[nn.RmsNorm, ...]
    products: tuple[nn.Linear, ...]

    @staticmethod
    def init(key: Any) -> Block:
        row, col = axn.make_axes(row=8, col=4)
        norms = tuple(nn.RmsNorm.init(row, use_bias=False) for _ in range(2))
        return Block(norms, tuple(nn.Linear.init(row, col, key=key, use_bias=False) for _ in range(7)))


class Model(eqx.Module):
    """A hundred layers, which are not stacked."""

    blocks: tuple[Block, ...]


def rows() -> list[Row]:
    """Without a mesh, with a mesh and mappings, and with arguments that are not arrays."""
    return [*_rows_of_arrays(), *_rows_of_modules()]


def _rows_of_modules() -> list[Row]:
    """A model of many modules, which Equinox flattens in Python, against `jax.jit` of the same model."""
    model = Model(tuple(Block.init(jax.random.key(0)) for _ in range(100)))
    ours, theirs = [
        (jit(lambda model, x: x + 1), jit(lambda model: _add_one(model)), [model]) for jit in (axn.named_jit, jax.jit)
    ]
    x = jnp.ones(4)

    def call(used: Any, changed: Any, state: list[Model]) -> None:
        jax.block_until_ready(used(model, x))

    def step(used: Any, changed: Any, state: list[Model]) -> None:
        state[0] = changed(state[0])
        jax.block_until_ready(state[0].blocks[-1].products[-1].weight.array)

    return [
        timed_row("named_jit", what, partial(fn, *ours), partial(fn, *theirs), 1.35, repeats=20)
        for what, fn in (("a model of 100 layers, 900 leaves", call), ("the same, which returns another one", step))
    ]


def _rows_of_arrays() -> list[Row]:
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
