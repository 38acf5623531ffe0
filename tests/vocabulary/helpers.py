"""Helpers for tests of operations over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import axonym as axn
from benchmarks.communication import bytes_moved

Batch, Vocab = axn.make_axes(batch=8, vocab=64)


def draw(*axes: axn.Axis, seed: int = 0) -> axn.NamedArray:
    values = np.random.default_rng(seed).normal(size=[a.size for a in axes])
    return axn.named((2 * values).astype(np.float32), axes)


LOGITS = draw(Batch, Vocab)


def run(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a compiled function on the host."""
    return jax.tree.map(np.asarray, jax.block_until_ready(jax.jit(fn)(*args)))


def moved(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Return the bytes that each kind of collective in the compiled program delivers."""
    return {kind: found.bytes for kind, found in bytes_moved(jax.jit(fn).lower(*args).compile()).items()}
