"""Measure the first random draw of a shape, which is nearly all compilation, against JAX's sampler."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax

import axonym as axn

from .harness import Row, side_by_side


def rows() -> list[Row]:
    """Draws with four axes, each time of other sizes; on one device, and sharded over eight."""
    mesh, key = axn.make_mesh({"data": 8}), jax.random.key(0)
    samplers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "normal": (axn.random.normal, jax.random.normal),
        "truncated_normal": (
            lambda key, shape: axn.random.truncated_normal(key, shape, lower=-3.0, upper=3.0),
            lambda key, shape: jax.random.truncated_normal(key, -3.0, 3.0, shape),
        ),
    }
    found = []
    for name, (ours, theirs) in samplers.items():
        sizes = itertools.count(2)

        def named(ours: Callable[..., Any] = ours, sizes: Any = sizes) -> Any:
            shape = {"layers": 2, "embed": 8 * next(sizes), "heads": 2, "head_size": 3}
            return jax.block_until_ready(ours(key, shape))

        def raw(theirs: Callable[..., Any] = theirs, sizes: Any = sizes) -> Any:
            return jax.block_until_ready(theirs(key, (2, 8 * next(sizes), 2, 3)))

        found.append(_row(f"{name}, on one device", named, raw, 0.6))
        with jax.set_mesh(mesh), axn.axis_mapping({"embed": "data"}):
            found.append(_row(f"{name}, sharded over 8 devices, against one", named, raw, 1.0))
    return found


def _row(what: str, ours: Callable[[], Any], theirs: Callable[[], Any], limit: float) -> Row:
    a, b = side_by_side(ours, theirs, repeats=2, rounds=1, warm=1)
    ratio = statistics.median(a) / statistics.median(b)
    first, second = (f"{statistics.median(times):.2f} s" for times in (a, b))
    return Row("draws", f"first draw of four axes, {what}", first, second, ratio, limit)
