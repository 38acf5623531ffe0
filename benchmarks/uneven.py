"""Compare a vocabulary that its devices do not divide, stored padded, with the rounded size.

The step is the step of `examples/train_lm.py --mapping tensor`, on two by four devices. With the compiler for TPUs
(the extra `tpu-plan`), its program for eight TPUs is compared, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

import axonym as axn
from axonym.insight import Report, explain
from axonym.precision import Policy

from .harness import Row, side_by_side

SIZE, ROUNDED = 50257, 50260
BATCH, POS = 16, 128
"""Tokens of a step: fewer than by default, so that a step is short."""
WHY_TIME = "on CPUs, XLA masks logits in a pass of its own before each reduction over the vocabulary"
WHY_MEMORY = "on CPUs, XLA copies the moments of Adam, since it computes the new ones twice"
TPUS = "v5e:2x4"


def rows() -> list[Row]:
    """Compare the time of a step, its memory and its collectives with the rounded size."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    modules: Any = (importlib.import_module(f"training.{name}") for name in ("config", "data", "steps", "strategies"))

    config, data, steps, strategies = modules
    strategy = strategies.choose("tensor", "auto", config.ModelSizes.kv_heads, jax.device_count())
    batch = np.random.default_rng(0).integers(0, SIZE, (BATCH, POS)).astype(np.int32)
    topologies = [None, *([TPUS] if importlib.util.find_spec("libtpu") else [])]

    def step(size: int) -> tuple[Any, list[Report]]:
        data.VOCAB = size
        start, train, _ = steps.plain_functions(
            config.ModelSizes(), steps.make_optimizer(config.Optimizer()), Policy.parse("float32")
        )
        make: Any = axn.named_jit(start, strategy.compute, uneven="pad")
        compiled: Any = axn.named_jit(
            train, strategy.compute, in_placement=strategy.compute, donate_args=(True, False), uneven="pad"
        )
        tokens = axn.named(batch, ("batch", "pos"))
        described = jax.eval_shape(make, jax.random.key(0)), jax.eval_shape(lambda: tokens)
        reports = [explain(compiled, *described, mesh=mesh, topology=where) for where in topologies]
        state, tokens = make(jax.random.key(0)), axn.shard(tokens, strategy.compute)

        def run() -> None:
            nonlocal state
            state, metrics = jax.block_until_ready(compiled(state, tokens))
            assert np.isfinite(metrics["loss"])

        return run, reports

    with jax.set_mesh(mesh := strategies.make_mesh(strategy)):
        (ours, uneven), (theirs, even) = step(SIZE), step(ROUNDED)
        times = side_by_side(ours, theirs, repeats=2, rounds=4, warm=1)
    what = f"train_lm --mapping tensor, vocabulary {SIZE} stored padded, to {ROUNDED}"
    medians = [statistics.median(x) for x in times]
    shown = [f"{m * 1e3:.0f} ms (min {min(x) * 1e3:.0f})" for m, x in zip(medians, times, strict=True)]
    found = [Row("uneven", f"{what}: step", shown[0], shown[1], medians[0] / medians[1], 1.25, WHY_TIME)]
    for where, *both in zip(topologies, uneven, even, strict=True):
        on = f"{what}{'' if where is None else f', on TPUs ({where})'}"
        totals = [0 if report.memory is None else report.memory.total for report in both]
        memory = [f"{total / 2**20:.2f} MiB" for total in totals]
        limit, why = (1.12, WHY_MEMORY) if where is None else (1.02, "")
        found.append(Row("uneven", f"{on}: memory", memory[0], memory[1], totals[0] / totals[1], limit, why))
        sent = [Counter((c.kind, c.sent, c.times) for c in report.collectives) for report in both]
        differ = sum(((sent[0] - sent[1]) + (sent[1] - sent[0])).values())
        counts = [str(x.total()) for x in sent]
        found.append(Row("uneven", f"{on}: collectives that differ", counts[0], counts[1], 1.0 + differ, 1.0))
    return found
