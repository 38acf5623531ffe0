"""Compare a convolution by products, as along a sharded axis, with the convolution of XLA, on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axonym.nn import _convolution

from .harness import Row, timed_row

BATCH, SIZE, CHANNELS, KERNEL = 4, 64, 32, 3
LAYOUT = "NHWC", "OIHW", "NHWC"


def rows() -> list[Row]:
    """The value and the gradients of input and weight: time, flops, and temporary memory."""
    x = jax.random.normal(jax.random.key(0), (BATCH, SIZE, SIZE, CHANNELS))
    weight = jax.random.normal(jax.random.key(1), (CHANNELS, CHANNELS, KERNEL, KERNEL))
    numbers = jax.lax.conv_dimension_numbers(x.shape, weight.shape, LAYOUT)
    of = _convolution.Parameters((1, 1), (1, 1), (1, 1), "SAME", 1)

    def compiled(convolve: Callable[..., jax.Array]) -> Any:
        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(convolve(x, weight, of, numbers)))

        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight).compile()

    ours, theirs = map(
        compiled, (functools.partial(_convolution.convolve_by_products, ()), _convolution.convolve_at_once)
    )
    what = f"value and gradients of a {KERNEL} x {KERNEL} convolution by products"
    ours_call, theirs_call = (functools.partial(_blocking, fn, x, weight) for fn in (ours, theirs))
    timed = timed_row("convolution", what, ours_call, theirs_call, 3.5, repeats=5)
    flops = [fn.cost_analysis()["flops"] for fn in (ours, theirs)]
    memory = [fn.memory_analysis().temp_size_in_bytes for fn in (ours, theirs)]
    counts = ("flops", flops, 1.1), ("temporary memory in bytes", memory, 7.0)
    return [
        timed,
        *(Row("convolution", f"{w} of it", f"{a:.0f}", f"{b:.0f}", a / b, limit) for w, (a, b), limit in counts),
    ]


def _blocking(fn: Any, *args: Any) -> None:
    jax.block_until_ready(fn(*args))
