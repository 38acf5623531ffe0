"""Measure kernels, a training step and a decoding step of a Llama with 300M parameters in bfloat16, on a GPU or TPU.

On a CPU it measures a toy model, to test the section itself. It runs only if it is named. `calls` and `eager` measure
the cost of calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.insight import CHIPS
from axonym.nn.attention import Causal, dot_product_attention
from axonym.quantization import QuantizationConfig, quantize_linear_layers
from examples.models.llama import Config, Llama

from . import llama, plain_llama
from .harness import Row, side_by_side, timed_row

SECTION = "accelerator"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, and how much it works on at once."""

    config: Config
    batch: int
    pos: int
    texts: int
    room: int


TOY = Sizes(llama.CONFIG, batch=2, pos=32, texts=2, room=64)
LARGE = Sizes(
    Config(
        Vocab=axn.Axis("vocab", 32_000),
        Embed=axn.Axis("embed", 1024),
        Layers=axn.Axis("layers", 20),
        KVHeads=axn.Axis("kv_heads", 8),
        Group=axn.Axis("group", 2),
        HeadSize=axn.Axis("head_size", 64),
        Mlp=axn.Axis("mlp", 2816),
    ),
    batch=8,
    pos=1024,
    texts=32,
    room=2048,
)


def rows() -> list[Row]:
    """All rows of the section. A toy has no limits."""
    on_cpu = jax.default_backend() == "cpu"
    sizes = TOY if on_cpu else LARGE
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), Llama.init(sizes.config, key=jax.random.key(0)))
    found = [
        *_training(model, sizes),
        *_decoding(model, sizes),
        _attention(sizes),
        *map(functools.partial(_float8, sizes), (1, 4)),
    ]
    return [dataclasses.replace(row, limit=math.inf) for row in found] if on_cpu else found


def _training(model: Llama, sizes: Sizes) -> list[Row]:
    params = plain_llama.params_of(model)
    tokens = jax.random.randint(jax.random.key(1), (sizes.batch, sizes.pos), 0, sizes.config.Vocab.size)
    ours = _Repeated(jax.jit(llama.step, donate_argnums=0), model, axn.named(tokens, ("batch", "pos")))
    plain = jax.jit(functools.partial(plain_llama.step, sizes.config), donate_argnums=0)
    theirs = _Repeated(plain, params, tokens)
    np.testing.assert_allclose(ours.value(), theirs.value(), rtol=2e-2)
    count = sum(p.size for p in jax.tree.leaves(params)) - sizes.config.Vocab.size * sizes.config.Embed.size
    flops = 6 * count * tokens.size
    return _compared("training step", ours, theirs, lambda seconds: _rate(flops, seconds))


def _decoding(model: Llama, sizes: Sizes) -> list[Row]:
    params = plain_llama.params_of(model)
    step, arrays = llama.flat(llama.decode, model)
    named = jax.jit(lambda text, arrays: ((), step(arrays, text)), donate_argnums=0)
    ours = _Repeated(named, llama.empty_text(model, sizes.texts, sizes.room), arrays)
    fn = functools.partial(plain_llama.decode, sizes.config)
    plain = jax.jit(lambda text, params: ((), fn(params, text)), donate_argnums=0)
    empty = plain_llama.empty_text(sizes.config, sizes.texts, sizes.room, jnp.bfloat16)
    theirs = _Repeated(plain, empty, params)
    return _compared("decoding", ours, theirs, lambda seconds: f"{sizes.texts / seconds:.0f} tokens/s")


def _attention(sizes: Sizes) -> Row:
    """The kernel of the platform against named operations, forward and backward."""
    c = sizes.config
    axes = *axn.make_axes(batch=sizes.batch, pos=sizes.pos, heads=c.KVHeads.size * c.Group.size), c.HeadSize
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (axn.random.normal(key, axes, dtype=jnp.bfloat16) for key in keys)

    def gradients(implementation: Any) -> Callable[[], Any]:
        def total(q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray) -> jax.Array:
            k, v = (x.rename({"pos": "key_pos"}) for x in (k, v))
            mask = Causal("pos")
            y = dot_product_attention(q, k, v, "key_pos", "head_size", mask, implementation=implementation)
            return y.sum().scalar().astype(jnp.float32)

        fn = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        return lambda: jax.block_until_ready(fn(q, k, v))

    return timed_row(
        SECTION, "attention: kernel, to named", gradients("fused"), gradients("named"), 1.2, repeats=5, rounds=3
    )


def _float8(sizes: Sizes, times: int) -> Row:
    """A linear layer whose products are of 8-bit floats, against the layer, with so many times the model's features."""
    Embed, Mlp = (a.resize(times * a.size) for a in (sizes.config.Embed, sizes.config.Mlp))
    layer = axn.nn.Linear.init(Embed, Mlp, key=jax.random.key(3), use_bias=False)
    layer = jax.tree.map(lambda p: p.astype(jnp.bfloat16), layer)
    Tokens = axn.Axis("tokens", sizes.batch * sizes.pos)
    x = axn.random.normal(jax.random.key(4), (Tokens, Embed), dtype=jnp.bfloat16)

    def gradients(layer: Any) -> Callable[[], Any]:
        # The gradient of a plain sum is constant, which would spare a product.
        fn = jax.jit(jax.grad(lambda layer, x: (layer(x).astype(jnp.float32) ** 2).sum().scalar(), argnums=(0, 1)))
        return lambda: jax.block_until_ready(fn(layer, x))

    small = quantize_linear_layers(layer, QuantizationConfig(fp8=True))
    what, limit = f"linear {Embed.size} to {Mlp.size}: float8, to bfloat16", 1.25 if times == 1 else 0.85
    return timed_row(SECTION, what, gradients(small), gradients(layer), limit, repeats=5, rounds=3)


class _Repeated:
    """A compiled step that is given what it returned last."""

    def __init__(self, fn: Any, state: Any, constant: Any):
        self._fn, self._state, self._constant = fn, jax.tree.map(jnp.copy, state), constant
        self.temporary = fn.lower(state, constant).compile().memory_analysis().temp_size_in_bytes

    def value(self) -> Any:
        value, self._state = self._fn(self._state, self._constant)
        return value

    def __call__(self) -> None:
        self.value()
        jax.block_until_ready(self._state)


def _compared(what: str, ours: _Repeated, theirs: _Repeated, note: Callable[[float], str]) -> list[Row]:
    times = side_by_side(ours, theirs, repeats=5, rounds=3)
    a, b = (statistics.median(t) for t in times)
    timed = Row(SECTION, what, f"{a * 1e3:.2f} ms", f"{b * 1e3:.2f} ms", a / b, 1.05, f"({note(a)}, {note(b)})")
    a, b = ours.temporary, theirs.temporary
    memory = Row(SECTION, f"{what}: temporary memory", f"{a / 2**20:.1f} MiB", f"{b / 2**20:.1f} MiB", a / b, 1.05)
    return [timed, memory]


def _rate(flops: float, seconds: float) -> str:
    """The share of the device's peak that is model flops, or where the peak is not known, these in a second."""
    kind = jax.devices()[0].device_kind.lower().replace("tpu v5 lite", "v5e").replace("tpu v6 lite", "v6e")
    peak = next((chip.flops for chip in CHIPS.values() if chip.name in kind), None)
    return f"{flops / seconds / 1e12:.3g} TFLOP/s" if peak is None else f"{flops / seconds / peak:.1%} of the peak"
