"""Writing text with a model, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from models.llama import Llama

import axonym as axn
from axonym import Axis, NamedArray
from axonym.precision import Policy
from axonym.random import categorical

from . import config as settings, data
from .steps import distributed
from .strategies import Strategy

Writer = Callable[[Llama, jax.Array, int], list[str]]


def make_writer(reports: settings.Reports, policy: Policy, strategy: Strategy, mesh: jax.sharding.Mesh) -> Writer:
    """A function from a model, a key and the number of the step to texts."""
    # Devices that have texts of their own write as many each; those that are too many are not shown.
    Batch = Axis("batch", reports.samples)
    # A single token has no positions to shard.
    writing = Strategy(
        strategy.name, strategy.mesh, _without(strategy.compute, "pos"), _without(strategy.storage, "pos")
    )
    Batch = axn.sharding.round_axis_for_partitioning(Batch, writing.compute, mesh)
    prompt = data.encode(reports.prompt)
    prompts = axn.named(np.tile(prompt, (Batch.size, 1)), (Batch, Axis("pos", prompt.size)))

    def write(model: Llama, key: jax.Array, step: Any, prompts: NamedArray) -> NamedArray:
        # The key is one for this step, so what is written does not depend on what was written before.
        key, model = jax.random.fold_in(key, step), policy.cast_to_compute(model)
        return generate(model, prompts, reports.sample_length, key, reports.temperature, reports.top_k)

    compiled = distributed(write, writing)

    def texts(model: Llama, key: jax.Array, step: int) -> list[str]:
        written = jax.block_until_ready(compiled(model, key, np.int32(step), prompts))
        tokens = axn.to_host(written).rearrange(("batch", "pos")).array[: reports.samples]
        return [reports.prompt + data.decode(row) for row in tokens]

    return texts


def generate(
    model: Llama, prompts: NamedArray, count: int, key: jax.Array, temperature: float, top_k: int
) -> NamedArray:
    """As many tokens after each prompt, drawn from what the model says comes next.

    The tokens do not depend on the sharding, and a sharded vocabulary is never all-gathered.
    """
    Batch, New = prompts.resolve_axis("batch"), Axis("new", count)
    KPos = axn.sharding.round_axis_for_partitioning(Axis("key_pos", prompts.axis_size("pos") + count))

    def draw(logits: NamedArray, i: Any) -> NamedArray:
        last = logits["pos", -1].astype("float32")
        some = min(top_k, last.axis_size("vocab"))
        return categorical(jax.random.fold_in(key, i), last, "vocab", temperature=temperature, top_k=some)

    def step(carry: tuple[NamedArray, Any], i: NamedArray) -> tuple[tuple[NamedArray, Any], NamedArray]:
        token, cache = carry
        logits, cache = model.extend(token.broadcast_axis(Axis("pos", 1)), cache)
        return (draw(logits, i.array + 1), cache), token

    cache = model.empty_cache(Batch, KPos)
    logits, cache = model.extend(prompts, cache)
    first = draw(logits, 0)
    _, written = axn.scan(step, New)((first, cache), axn.arange(New))
    return written.rename({"new": "pos"})


def _without(mapping: Any, axis: str) -> dict[str, Any]:
    return {name: entry for name, entry in mapping.items() if name != axis}
