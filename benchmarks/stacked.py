"""Measure what `axonym.nn.Stacked` adds to a scan over stacked parameters in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym.nn import Stacked

from . import models
from .communication import Moved, bytes_moved_in_loops
from .harness import Row, timed_row
from .program import instructions

Layers = axn.Axis("layers", 12)
STORAGE, COMPUTE = {"embed": "data"}, {"batch": "data"}
BATCH = 8


class Block(eqx.Module):
    """A transformer block with the parameters of `models`."""

    weights: dict[str, axn.NamedArray]

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        w = self.weights
        x = x + models.named_attention(w, models.named_norm(x, w["scale1"]))
        h = axn.tanh(axn.dot(models.named_norm(x, w["scale2"]), w["up"], axis=models.Embed))
        return x + axn.dot(h, w["down"], axis=models.Mlp)


def _raw_block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    x = x + models.raw_attention(w, models.raw_norm(x, w["scale1"]))
    h = jnp.tanh(jnp.einsum("bpe,em->bpm", models.raw_norm(x, w["scale2"]), w["up"]))
    return x + jnp.einsum("bpm,me->bpe", h, w["down"])


def rows() -> list[Row]:
    """All rows of the section."""
    layers = models.make_params(Layers.size)["layers"]
    raw = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    block = Block({name: axn.named(w, (Layers, *models.AXES[name])) for name, w in raw.items()})
    x = jax.random.normal(jax.random.key(2), (models.BATCH, models.POS, models.EMBED))
    named_x = axn.named(x, (models.Batch, models.Pos, models.Embed))
    found = []
    for remat in (False, True):
        stacked = Stacked(block, Layers, remat)
        found += _program_rows("checkpointed: " if remat else "", (stacked, named_x), (raw, x), remat)
    stacked, body = Stacked(block, Layers), lambda x, w: (_raw_block(x, w), None)
    found.append(
        timed_row(
            "stacked",
            "tracing",
            lambda: jax.make_jaxpr(lambda *args: stacked.fold_via(lambda layer, x: layer(x))(*args))(named_x),
            lambda: jax.make_jaxpr(lambda *args: jax.lax.scan(lambda x, w: body(x, w), *args))(x, raw),
            1.0,
            repeats=10,
        )
    )
    found.append(
        timed_row(
            "stacked",
            "eager call",
            lambda: jax.block_until_ready(stacked.fold(named_x)),
            lambda: jax.block_until_ready(jax.lax.scan(body, x, raw)),
            1.0,
            repeats=20,
        )
    )
    return found + _fsdp_rows(block)


def named_loss(layers: Stacked[Block], x: axn.NamedArray) -> jax.Array:
    """What the layers make of an array, as one number."""
    return axn.sum(layers.fold(x) ** 2).scalar()


def raw_loss(remat: bool) -> Callable[..., jax.Array]:
    """The same in plain JAX."""
    block = jax.checkpoint(_raw_block, prevent_cse=False) if remat else _raw_block
    return lambda layers, x: jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, layers)[0] ** 2)


def _program_rows(what: str, ours: Any, theirs: Any, remat: bool) -> list[Row]:
    """The optimized value and gradient."""
    a: Any = jax.jit(jax.value_and_grad(named_loss)).lower(*ours).compile()
    b: Any = jax.jit(jax.value_and_grad(raw_loss(remat))).lower(*theirs).compile()
    m, n = instructions(a), instructions(b)
    counts = [("all instructions", sum(m.values()), sum(n.values()))]
    counts += [(kind, m[kind], n[kind]) for kind in ("dot", "transpose", "copy", "while")]
    counts += [("temporary memory", *(f.memory_analysis().temp_size_in_bytes for f in (a, b)))]
    return [Row("stacked", f"{what}{k}", f"{m:.0f}", f"{n:.0f}", m / n if n else 1.0 + m, 1.0) for k, m, n in counts]


def _fsdp_rows(block: Block) -> list[Row]:
    """What a step under `fsdp` gathers: one layer in a turn of the loop, and nothing outside."""
    x = axn.ones((models.Batch.resize(BATCH), models.Pos, models.Embed))
    layer = sum(w.nbytes for w in block.weights.values()) // Layers.size
    found = []
    for explicit in (False, True):
        with jax.set_mesh(axn.make_mesh({"data": 8}, explicit=explicit)):
            step = axn.fsdp(jax.value_and_grad(named_loss), STORAGE, COMPUTE)
            inside, outside = bytes_moved_in_loops(step.lower(Stacked(block, Layers), x).compile())
        what = f"fsdp, {'Explicit' if explicit else 'Auto'}"
        found.append(_against(f"{what}: gathered in a turn, against one layer", _gathered(inside), layer))
        found.append(_against(f"{what}: gathered outside of the loop, against nothing", _gathered(outside), 0))
    return found


def _gathered(moved: dict[str, Moved]) -> int:
    return moved["all-gather"].bytes


def _against(what: str, ours: int, theirs: int) -> Row:
    ratio = ours / theirs if theirs else 1.0 + ours
    return Row("stacked", what, f"{ours / 1024:.0f} KiB", f"{theirs / 1024:.0f} KiB", ratio, 1.0)
