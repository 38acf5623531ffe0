"""Generate samples of text during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from models.generation import Sampling, generate
from models.llama import Llama

import axonym as axn
from axonym import Axis, NamedArray
from axonym.precision import Policy

from . import config as settings, data
from .steps import distributed
from .strategies import Strategy

Writer = Callable[[Llama, jax.Array, int], list[str]]


def make_writer(reports: settings.Reports, policy: Policy, strategy: Strategy, mesh: jax.sharding.Mesh) -> Writer:
    """A function from a model, a key and the number of the step to texts."""
    # Devices that have texts of their own write as many each; those that are too many are not shown.
    Batch = Axis("batch", reports.samples)
    # A single token has no positions to shard, and in a pipeline nothing would follow it: layers are all-gathered.
    compute = {name: entry for name, entry in strategy.compute.items() if name not in ("pos", "layers")}
    storage = {name: entry for name, entry in strategy.storage.items() if name != "pos"}
    writing = dataclasses.replace(strategy, compute=compute, storage=storage)
    Batch = axn.sharding.round_axis_for_partitioning(Batch, writing.compute, mesh)
    prompt, sampling = data.encode(reports.prompt), Sampling(temperature=reports.temperature, top_k=reports.top_k)
    prompts = axn.named(np.tile(prompt, (Batch.size, 1)), (Batch, Axis("pos", prompt.size)))

    def write(model: Llama, key: jax.Array, step: Any, prompts: NamedArray) -> NamedArray:
        # The key is one for this step, so what is written does not depend on what was written before.
        key, model = jax.random.fold_in(key, step), policy.cast_to_compute(model)
        return generate(model, prompts, reports.sample_length, key, sampling)

    compiled = distributed(write, writing)

    def texts(model: Llama, key: jax.Array, step: int) -> list[str]:
        written = jax.block_until_ready(compiled(model, key, np.int32(step), prompts))
        tokens = axn.to_host(written).rearrange(("batch", "pos")).array[: reports.samples]
        return [reports.prompt + data.decode(row) for row in tokens]

    return texts
