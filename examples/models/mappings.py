"""How the models of this folder can be distributed: mappings from their axes to those of a mesh.

The mesh has two axes, "data" and "model". A mapping at work says what is split while a step computes, one at rest where
parameters lie between steps if that is different. Each is all that there is to a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import axonym as axn

ALL = ("data", "model")

# Axes of which each device computes a part without the others: heads of attention, hidden features, tokens to predict.
TENSOR = {"heads": ALL, "kv_heads": ALL, "mlp": ALL, "vocab": ALL}

AT_WORK: dict[str, dict[str, Any]] = {
    # Each device has its own texts, and all parameters.
    "data": {"batch": ALL},
    # The same, but between uses each device keeps only a part of every parameter.
    "fsdp": {"batch": ALL},
    # Each device has all texts, and its own part of what the parameters compute.
    "tensor": TENSOR,
    # Each device has its own stretch of every text. What it attends to, keys and values, it gets from the others.
    "sequence": {"pos": ALL},
    # Rows of devices have their own texts and keep parts of parameters; within a row, work is split by tensor.
    "mixed": {"batch": "data"} | dict.fromkeys(TENSOR, "model"),
}
AT_REST: dict[str, dict[str, Any]] = AT_WORK | {
    "fsdp": {"embed": ALL},
    "mixed": AT_WORK["mixed"] | {"embed": "data"},
}


def distributed_init(init: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """A function that makes parameters, compiled so that each device makes its own part of them."""
    return axn.named_jit(init, AT_REST[strategy])


def distributed_step(step: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """A step of training, compiled for the mesh in force under one of the strategies."""
    at_work, at_rest = AT_WORK[strategy], AT_REST[strategy]
    if at_rest == at_work:
        return axn.named_jit(step, at_work, in_axis_resources=at_work)
    return axn.fsdp(step, at_rest, at_work)
