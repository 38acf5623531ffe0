"""Measure the time and the error of each tier of `axonym.insight.explain`, against the compiled program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

import axonym as axn
from axonym.insight import Report, explain, plan
from examples.models import llama

from .harness import Row
from .llama import CONFIG, step

BATCH, POS = 16, 32
MESH = {"data": 4, "model": 2}
TENSOR = dict.fromkeys(("mlp", "kv_heads", "vocab"), "model")
MAPPINGS: dict[str, Any] = {
    "FSDP along one of two axes of the batch": ({"embed": "data"}, {"batch": ("data", "model")}),
    "FSDP and tensor parallelism": ({"embed": "data"} | TENSOR, {"batch": "data"} | TENSOR),
}
OFF = 1.05
"""How far what is sent may be off."""
TIMES = {"names": 0.25, "partitioner": 0.8}
"""The share of the time of compiling to the end that a tier may take."""


def rows() -> list[Row]:
    """Bytes and times for a model that the tests do not hold: tied embeddings, biases, and normalized heads."""
    config = dataclasses.replace(CONFIG, tied=True, bias=True, norm_heads=True)
    model = jax.eval_shape(lambda key: llama.Llama.init(config, key=key), jax.random.key(0))
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": BATCH, "pos": POS}, dtype=int))
    found, longest = [], 0.0
    for what, mapping in MAPPINGS.items():

        def explained(by: str, mapping: Any = mapping) -> Report:
            return explain(step, model, tokens, mapping=mapping, mesh=axn.make_mesh(MESH), by=by)

        truth, longest = _timed(lambda: explained("compiled"))
        for tier, limit in TIMES.items():
            report, seconds = _timed(lambda: explained(tier))  # noqa: B023
            sent, true = report.total_sent() or 0, truth.total_sent() or 0
            shown = f"{sent / 1024:.0f} KiB", f"{true / 1024:.0f} KiB"
            name = f"by={tier!r}, {what}"
            found.append(Row("insight", f"{name}: bytes sent", *shown, max(sent, true) / min(sent, true), OFF))
            times = f"{seconds:.2f} s", f"{longest:.2f} s"
            found.append(Row("insight", f"{name}: time", *times, seconds / longest, limit))
    planned, seconds = _timed(lambda: plan(step, model, tokens, chips=8))
    # Most mappings are told by names alone; the partitioner is asked of a few others, and takes most of the time.
    count, compiling = planned.considered, planned.considered * longest
    what = f"plan, {count} mappings: time, against compiling {count} programs"
    found.append(Row("insight", what, f"{seconds:.2f} s", f"{compiling:.0f} s", seconds / compiling, 0.1))
    return found


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start
