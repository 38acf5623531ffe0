"""The task for every library: a transformer, its block, its training step, and the step on eight devices.

The weights are drawn once, as the dictionary of arrays from `plain_jax.init`, and passed to each library. In the file
of a library, the code above the line "for the comparison" is what a user writes; its lines are counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int = 8
    pos: int = 64
    vocab: int = 256
    embed: int = 128
    heads: int = 4
    head_size: int = 32
    mlp: int = 512
    layers: int = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one library: how it is called as in a loop of training, and how it is lowered."""

    call: Callable[[], Any]
    """Runs it once, and keeps what it changes."""
    lower: Callable[[], Any]
    array: Callable[[Any], Any] = lambda result: result
    """The array that all libraries must agree on, from what a call returned."""


OPTIMIZER = optax.adamw(1e-3)
EPS = 1e-5


def make_inputs(sizes: Sizes) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(sizes.batch, sizes.pos, sizes.embed)).astype(np.float32)


def make_tokens(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and those that follow."""
    tokens = np.random.default_rng(2).integers(0, sizes.vocab, (sizes.batch, sizes.pos + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]
