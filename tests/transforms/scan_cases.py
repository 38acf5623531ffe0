"""A scan written twice, by name and by position, for the tests of scans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym.transforms.scan import scan
from tests.helpers import draw

Time, Batch, Embed = axn.make_axes(time=8, batch=4, embed=6)
Layer, Out = axn.make_axes(layer=3, out=6)

START, XS, LATE, WEIGHT = draw(Batch, Embed), draw(Time, Batch, Embed), draw(Batch, Time, Embed), draw(Embed)


def step(h: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """Run the body, by name."""
    h = axn.tanh(0.5 * h + x * w)
    return h, axn.sum(h * x, "embed")


def raw_step(h: jax.Array, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run the body, by position."""
    h = jnp.tanh(0.5 * h + x * w[None])
    return h, jnp.sum(h * x, -1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A scan by name; its arguments are START, the scanned arrays, and WEIGHT."""

    xs: axn.NamedArray
    axis: Any = "time"
    reverse: bool = False
    unroll: int | bool = 1
    remat: Any = False

    def ours(self, start: Any, xs: Any, w: Any) -> tuple[Any, Any]:
        return scan(step, self.axis, reverse=self.reverse, unroll=self.unroll, remat=self.remat)(start, xs, w)

    def theirs(self, start: Any, xs: Any, w: Any) -> tuple[Any, Any]:
        xs = jnp.moveaxis(xs, self.xs.names.index("time"), 0)
        return jax.lax.scan(lambda h, x: raw_step(h, x, w), start, xs, reverse=self.reverse)


CASES = {
    "first": Case(XS),
    "later": Case(LATE, Time),
    "reverse": Case(XS, reverse=True, unroll=3),
    "unrolled": Case(XS, unroll=True),
    "checkpointed": Case(LATE, remat=True),
    "nested": Case(XS, reverse=True, remat="nested"),
}


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scalar that depends on the carry and on the outputs."""

    def loss(*args: Any) -> Any:
        final, outputs = jax.tree.leaves(fn(*args))
        return jnp.sum(final**2) + jnp.sum(outputs**3)

    return loss
