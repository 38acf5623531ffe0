"""Reductions of segments, whose numbers are an array; elements with -1 belong to no segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.helpers import public_name
from tests.ops.case import Case, f, of

NODE = axn.Axis("node", 4)


def _members(numbers: Any, empty: float, reduce: Callable[..., Any], axes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the reduction, along some axes, of [batch, pos, node, embed], with `empty` for elements of others."""
    of_segment = numbers[:, :, None, None] == jnp.arange(NODE.size)[:, None]
    return lambda x: reduce(jnp.where(of_segment, x[:, :, None], empty), axis=axes)


def _mean(x: Any, axis: Any) -> Any:
    return jnp.nan_to_num(jnp.nanmean(x, axis=axis))


def _cases(name: str, empty: float, reduce: Callable[..., Any]) -> list[Case]:
    op, operands = public_name(name), (f("batch", "pos", "embed"), of("int", "pos", "batch"))

    def in_range(s: axn.NamedArray) -> axn.NamedArray:
        return axn.where(s < NODE.size, axn.maximum(s, -1), -1)

    return [
        Case(
            name,
            operands,
            lambda x, s: op(x, in_range(s), NODE, axis="pos"),
            lambda x, s: _members(s.T, empty, reduce, (1,))(x),
            "batches",
            names=("batch", "node", "embed"),
        ),
        Case(
            name,
            operands,
            lambda x, s: op(x, in_range(s), NODE),
            lambda x, s: _members(s.T, empty, reduce, (0, 1))(x),
            "several axes",
            names=("node", "embed"),
        ),
    ]


CASES = [
    *_cases("segment_sum", 0.0, jnp.sum),
    *_cases("segment_mean", np.nan, _mean),
    *_cases("segment_max", -np.inf, jnp.max),
    *_cases("segment_min", np.inf, jnp.min),
]
