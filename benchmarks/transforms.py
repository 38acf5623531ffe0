"""Measure what transforms over a named axis add to the positional ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.transforms.scan import fold
from axonym.transforms.vmap import vmap

from . import models
from .harness import Row, timed_row
from .program import instructions

Batch, Embed, Mlp = axn.make_axes(batch=32, embed=64, mlp=128)
SCANNED = 12
Layers = axn.Axis("layers", SCANNED)


def rows() -> list[Row]:
    """All rows of the section."""
    return vmap_rows() + scan_rows()


def vmap_rows() -> list[Row]:
    """Gradients of each example, by `axonym.vmap` and by `jax.vmap`: the optimized program, and a call of it."""
    rng = np.random.default_rng(0)
    w1, w2, x = (
        jnp.asarray(rng.normal(size=tuple(a.size for a in axes)), jnp.float32)
        for axes in ((Embed, Mlp), (Mlp, Embed), (Batch, Embed))
    )
    named = (axn.named(w1, (Embed, Mlp)), axn.named(w2, (Mlp, Embed)), axn.named(x, (Batch, Embed)))
    raw = (w1, w2, x)
    ours = jax.jit(vmap(jax.grad(_named_loss, argnums=(0, 1)), Batch))
    theirs = jax.jit(jax.vmap(jax.grad(_raw_loss, argnums=(0, 1)), in_axes=(None, None, 0)))
    a, b = (instructions(f.lower(*args).compile()) for f, args in ((ours, named), (theirs, raw)))
    counts = [("all instructions", sum(a.values()), sum(b.values()))]
    counts += [(kind, a[kind], b[kind]) for kind in ("dot", "transpose", "copy")]
    found = [Row("transforms", f"vmap: {what}", str(m), str(n), m / n if n else 1.0 + m, 1.0) for what, m, n in counts]
    found.append(
        timed_row(
            "transforms",
            "vmap: tracing",
            lambda: jax.make_jaxpr(vmap(_named_loss, Batch))(*named),
            lambda: jax.make_jaxpr(jax.vmap(_raw_loss, in_axes=(None, None, 0)))(*raw),
            1.2,
            repeats=20,
        )
    )
    return found


def scan_rows() -> list[Row]:
    """The value and gradient of a stack of blocks, by `axonym.fold` and by `jax.lax.scan`, and calls of both."""
    layers = models.make_params(SCANNED)["layers"]
    raw = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    named = {name: axn.named(w, (Layers, *models.AXES[name])) for name, w in raw.items()}
    x = jax.random.normal(jax.random.key(2), (models.BATCH, models.POS, models.EMBED))
    named_x = axn.named(x, (models.Batch, models.Pos, models.Embed))
    found = []
    for remat in (False, True):
        ours = _program(_folded(remat), named, named_x)
        what = f"scan{', checkpointed' if remat else ''}"
        # What the scan adds, around one and the same block; and what block and scan add together.
        found += _compared(f"{what}, same block", ours, _program(_scanned(_named_block, remat), named, named_x))
        # Fewer instructions, fused in other places: the bytes differ by less than one in a hundred, either way.
        found += _compared(f"{what}, by hand", ours, _program(_scanned(_raw_block, remat), raw, x), bytes_limit=1.01)
    step, raw_step = fold(_step, "layers"), lambda c, x: (_step(c, x), None)
    values, start = axn.ones({"layers": SCANNED, "embed": 4}), axn.zeros({"embed": 4})
    found.append(
        timed_row(
            "transforms",
            "scan: eager call",
            lambda: jax.block_until_ready(step(start, values)),
            lambda: jax.block_until_ready(jax.lax.scan(raw_step, start.array, values.array)),
            1.0,
            repeats=50,
        )
    )
    found.append(
        timed_row(
            "transforms",
            "scan: tracing",
            # New function objects each time, so that nothing but the tracing of their bodies is measured.
            lambda: jax.make_jaxpr(lambda *args: fold(lambda x, w: _named_block(x, w), Layers)(*args))(named_x, named),
            lambda: jax.make_jaxpr(lambda *args: jax.lax.scan(lambda x, w: (_raw_block(x, w), None), *args))(x, raw),
            1.0,
            repeats=10,
        )
    )
    return found


def _folded(remat: bool) -> Callable[..., Any]:
    return lambda layers, x: axn.sum(fold(_named_block, Layers, remat=remat)(x, layers) ** 2).scalar()


def _scanned(block: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    """The same with `jax.lax.scan`. Named arrays are renamed in the body: the scan leaves them one name too many."""
    body = jax.checkpoint(block, prevent_cse=False) if remat else block

    def sliced(layer: Any) -> Any:
        return {k: axn.NamedArray(w.array, w.names[1:]) if axn.is_named_array(w) else w for k, w in layer.items()}

    def loss(layers: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda x, layer: (body(x, sliced(layer)), None), x, layers)[0]
        return jnp.sum((y.array if axn.is_named_array(y) else y) ** 2)

    return loss


def _program(loss: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss)).lower(*args).compile()


def _compared(what: str, ours: Any, theirs: Any, bytes_limit: float = 1.0) -> list[Row]:
    a, b = instructions(ours), instructions(theirs)
    counts = [("all instructions", sum(a.values()), sum(b.values()))]
    counts += [(kind, a[kind], b[kind]) for kind in ("dot", "transpose", "copy")]
    counts += [("temporary memory", *(f.memory_analysis().temp_size_in_bytes for f in (ours, theirs)))]
    rows = [
        Row("transforms", f"{what}: {k}", f"{m:.0f}", f"{n:.0f}", m / n if n else 1.0 + m, 1.0) for k, m, n in counts
    ]
    m, n = (f.cost_analysis()["bytes accessed"] for f in (ours, theirs))
    return [*rows, Row("transforms", f"{what}: bytes accessed", f"{m:.0f}", f"{n:.0f}", m / n, bytes_limit)]


def _step(carry: Any, x: Any) -> Any:
    return carry * 0.5 + x


def _named_block(x: Any, layer: Any) -> Any:
    x = x + models.named_attention(layer, models.named_norm(x, layer["scale1"]))
    h = axn.tanh(axn.dot(models.named_norm(x, layer["scale2"]), layer["up"], axis=models.Embed))
    return x + axn.dot(h, layer["down"], axis=models.Mlp)


def _raw_block(x: Any, layer: Any) -> Any:
    x = x + models.raw_attention(layer, models.raw_norm(x, layer["scale1"]))
    h = jnp.tanh(jnp.einsum("bpe,em->bpm", models.raw_norm(x, layer["scale2"]), layer["up"]))
    return x + jnp.einsum("bpm,me->bpe", h, layer["down"])


def _named_loss(w1: Any, w2: Any, x: Any) -> Any:
    hidden = axn.tanh(axn.dot(x, w1, axis=Embed))
    return axn.sum((axn.dot(hidden, w2, axis=Mlp) - x) ** 2).scalar()


def _raw_loss(w1: Any, w2: Any, x: Any) -> Any:
    return jnp.sum((jnp.tanh(x @ w1) @ w2 - x) ** 2)
