"""Compare a vocabulary that its devices do not divide, stored padded, with the rounded size.

The step is the step of `examples/train_lm.py --mapping tensor`, on two by four devices.
"""

from __future__ import annotations

import importlib
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

import axonym as axn
from axonym.precision import Policy

from .harness import Row, side_by_side

SIZE, ROUNDED = 1001, 1004
BATCH, POS = 16, 128
"""Tokens of a step: fewer than by default, so that a step is short."""


def rows() -> list[Row]:
    """The time of a step, its memory and its collectives, to those of the rounded size."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    modules: Any = (importlib.import_module(f"training.{name}") for name in ("config", "data", "steps", "strategies"))

    config, data, steps, strategies = modules
    strategy = strategies.choose("tensor", "auto", config.ModelSizes.kv_heads, jax.device_count())
    batch = np.random.default_rng(0).integers(0, SIZE, (BATCH, POS)).astype(np.int32)

    def step(size: int) -> tuple[Any, Any]:
        data.VOCAB = size
        start, train, _ = steps.plain_functions(config.ModelSizes(), config.Optimizer(), Policy.parse("float32"))
        make: Any = axn.named_jit(start, strategy.compute, uneven="pad")
        state = make(jax.random.key(0))
        tokens = axn.shard(axn.named(batch, ("batch", "pos")), strategy.compute)
        compiled: Any = axn.named_jit(
            train, strategy.compute, in_placement=strategy.compute, donate_args=(True, False), uneven="pad"
        )
        program: Any = compiled.lower(state, tokens).compile()

        def run() -> None:
            nonlocal state
            state, metrics = jax.block_until_ready(compiled(state, tokens))
            assert np.isfinite(metrics["loss"])

        return run, program

    with jax.set_mesh(strategies.make_mesh(strategy)):
        (ours, uneven), (theirs, even) = step(SIZE), step(ROUNDED)
        a, b = side_by_side(ours, theirs, repeats=8, rounds=4)
    what = f"train_lm --mapping tensor, vocabulary {SIZE} stored padded, to {ROUNDED}"
    medians = [statistics.median(x) for x in (a, b)]
    memory = [_memory(program) for program in (uneven, even)]
    sent = [_collectives(program) for program in (uneven, even)]
    same = sum((sent[0] - sent[1]).values()) + sum((sent[1] - sent[0]).values())
    pairs = [
        ("step", [f"{m * 1e3:.1f} ms" for m in medians], medians[0] / medians[1], 1.05),
        ("memory", [f"{m / 2**20:.2f} MiB" for m in memory], memory[0] / memory[1], 1.02),
        ("collectives that differ", [str(x.total()) for x in sent], 1.0 + same, 1.0),
    ]
    return [Row("uneven", f"{what}: {of}", both[0], both[1], ratio, limit) for of, both, ratio, limit in pairs]


def _memory(program: Any) -> int:
    found = program.memory_analysis()
    return (
        found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )


def _collectives(program: Any) -> Counter[Any]:
    pattern = r"= (\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    return Counter(re.findall(pattern, program.as_text()))
