"""Measure weights stored in few bits: the bytes of a Llama parameter, the loss, and the memory to generate text."""

from __future__ import annotations

from typing import Any

import jax

import axonym as axn
from axonym.quantization import quantize_weights
from examples.models import llama

from .harness import Row

CONFIG = llama.Config(
    Vocab=axn.Axis("vocab", 256),
    Embed=axn.Axis("embed", 256),
    Layers=axn.Axis("layers", 4),
    KVHeads=axn.Axis("kv_heads", 2),
    Group=axn.Axis("group", 2),
    HeadSize=axn.Axis("head_size", 64),
    Mlp=axn.Axis("mlp", 768),
)
STORED = {"int8": ("int8", None), "float8_e4m3fn": ("float8_e4m3fn", None), "int4 in groups of 64": ("int4", 64)}


def stored(model: Any) -> int:
    """The bytes of a model on its device."""
    return sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(model))


def rows() -> list[Row]:
    """Against float32."""
    model = llama.Llama.init(CONFIG, key=jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(model))
    tokens = axn.named(jax.random.randint(jax.random.key(1), (2, 32), 0, CONFIG.Vocab.size), ("batch", "pos"))
    loss = jax.jit(llama.Llama.loss)
    exact, found = float(loss(model, tokens)), []
    native_int4 = jax.__version_info__ >= (0, 12) or jax.default_backend() != "cpu"  # before, it takes a byte on CPUs
    for what, (dtype, group) in STORED.items():
        small = quantize_weights(model, dtype, group=group)
        limit = 0.17 if dtype == "int4" and native_int4 else 0.3
        texts = (f"{stored(m) / count:.2f}" for m in (small, model))
        found.append(Row("weights", f"bytes of a parameter, {what}", *texts, stored(small) / stored(model), limit))
        value = float(loss(small, tokens))
        found.append(Row("weights", f"loss, {what}", f"{value:.4f}", f"{exact:.4f}", value / exact, 1.01))
    return found
