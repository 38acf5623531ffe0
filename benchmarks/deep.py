"""Time tracing, lowering and compiling a deep model against plain JAX: 64 layers, in a loop and one by one.

Also compares the largest array in the program that makes the layers with a shard of them.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym.nn import Linear, Stacked

from . import models
from .harness import Row
from .stacked import Block, named_loss, raw_loss

LAYERS, ROUNDS = 64, 5


def rows() -> list[Row]:
    """All rows of the section: a value and gradient, for which JAX has nothing traced or compiled yet."""
    params, batch = models.make_params(LAYERS), models.make_batch()
    layers = params["layers"]
    Layers = axn.Axis("layers", LAYERS)
    raw = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    stacked = Stacked(Block({name: axn.named(w, (Layers, *models.AXES[name])) for name, w in raw.items()}), Layers)
    x = jax.random.normal(jax.random.key(2), (models.BATCH, models.POS, models.EMBED))
    named_x = axn.named(x, (models.Batch, models.Pos, models.Embed))
    found = _compared("a loop", (named_loss, stacked, named_x), (raw_loss(False), raw, x))
    ours = models.named_loss, models.name_params(params), *models.name_batch(batch)
    found += _compared("one by one", ours, (models.raw_loss, params, *batch))
    return found + [_made(explicit, mapping) for explicit in (False, True) for mapping in MAPPINGS]


MAPPINGS = {"embed": ("data", "model")}, {"layers": "data", "mlp": "model"}


def _made(explicit: bool, mapping: dict[str, Any]) -> Row:
    """Compare the largest array in the program that makes layers on eight devices with a shard of the layers."""
    Layers = axn.Axis("layers", LAYERS)
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        make = axn.named_jit(lambda key: Stacked.init(Layers, Linear)(models.Embed, models.Mlp, key=key), mapping)
        program = make.lower(jax.random.key(0)).compile()
    largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\d+\[([\d,]+)\]", program.as_text()))
    shard = LAYERS * models.EMBED * models.MLP // 8
    what = f"making layers sharded by {mapping} on {'Explicit' if explicit else 'Auto'} axes: largest array, to a shard"
    return Row("deep", what, f"{largest:,}", f"{shard:,}", largest / shard, 1.0)


def _compared(what: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> list[Row]:
    pairs = [(_seconds(*ours), _seconds(*theirs)) for _ in range(ROUNDS)]
    found = []
    for i, (stage, limit) in enumerate((("trace and lower", 1.2), ("compile", 1.1))):
        a, b = (statistics.median(pair[side][i] for pair in pairs) for side in (0, 1))
        found.append(Row("deep", f"{LAYERS} layers, {what}: {stage}", f"{a:.2f} s", f"{b:.2f} s", a / b, limit))
    return found


def _seconds(loss: Callable[..., Any], *args: Any) -> tuple[float, float]:
    jax.clear_caches()
    gc.collect()
    gc.disable()  # a collection takes as long as a tenth of the tracing
    try:
        start = time.perf_counter()
        lowered = jax.jit(jax.value_and_grad(loss)).lower(*args)
        middle = time.perf_counter()
        lowered.compile()
        return middle - start, time.perf_counter() - middle
    finally:
        gc.enable()
