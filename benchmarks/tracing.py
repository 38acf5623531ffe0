"""Measure the cost of names while a program is traced."""

from __future__ import annotations

import jax

from . import models
from .harness import Row, timed_row

LAYERS = 12


def rows() -> list[Row]:
    """Tracing the value and gradient of a transformer of 12 unrolled layers, with everything else cached."""
    params, batch = models.make_params(LAYERS), models.make_batch()
    named_params, named_batch = models.name_params(params), models.name_batch(batch)

    def trace(loss, *args):
        # A new function object each time, so that nothing but the tracing of its body is measured.
        return jax.jit(lambda *a: jax.value_and_grad(loss)(*a)).trace(*args)

    return [
        timed_row(
            "tracing",
            f"value and grad, {LAYERS} layers",
            lambda: trace(models.named_loss, named_params, *named_batch),
            lambda: trace(models.raw_loss, params, *batch),
            1.0,
            repeats=2,
            rounds=4,
        )
    ]
