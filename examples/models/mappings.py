"""Strategies for the models of this folder: mappings from their axes to mesh axes.

The mesh has two axes, "data" and "model". A strategy consists of two mappings: the compute mapping is active while a
step runs; the parameter mapping places parameters between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import axonym as axn

ALL = ("data", "model")

# Axes along which devices compute independently: heads of attention, hidden features, tokens to predict.
TENSOR = {"heads": ALL, "kv_heads": ALL, "mlp": ALL, "vocab": ALL}

COMPUTE: dict[str, dict[str, Any]] = {
    # Each device has its own texts, and all parameters.
    "data": {"batch": ALL},
    # The same, but parameters are stored sharded.
    "fsdp": {"batch": ALL},
    # Each device has all texts, and computes with its own shard of the parameters.
    "tensor": TENSOR,
    # Each device has its own stretch of every text, and attends along all of it.
    "sequence": {"pos": ALL, "key_pos": ALL},
    # FSDP along `data`, and tensor parallelism along `model`.
    "mixed": {"batch": "data"} | dict.fromkeys(TENSOR, "model"),
}
STORAGE: dict[str, dict[str, Any]] = COMPUTE | {
    "fsdp": {"embed": ALL},
    "mixed": COMPUTE["mixed"] | {"embed": "data"},
}


def distributed_init(init: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """Compile a function that makes parameters, so that each device makes its own shards."""
    return axn.named_jit(init, STORAGE[strategy])


def distributed_step(step: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """Compile a step of training for the active mesh under one of the strategies."""
    compute, storage = COMPUTE[strategy], STORAGE[strategy]
    if storage == compute:
        return axn.named_jit(step, compute, in_placement=compute)
    return axn.fsdp(step, storage, compute)
