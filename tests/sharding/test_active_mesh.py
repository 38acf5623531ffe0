"""Under an older `with mesh:` the library compiles the same communication as under `jax.set_mesh`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import Axis, nn, random
from axonym.nn.attention import dot_product_attention
from axonym.schedules import GPipe
from tests.executed import executed

KEY = jax.random.key(0)
Batch, Embed, Mlp, Vocab, Experts = axn.make_axes(batch=8, embed=16, mlp=8, vocab=32, experts=4)
STORED: dict[str, Any] = {"embed": "data"}
COMPUTED: dict[str, Any] = {"batch": "data"}


def product(w: axn.NamedArray, x: axn.NamedArray) -> Any:
    return (axn.dot(x, w, axis="embed") ** 2).sum().scalar()


def look_up(table: axn.NamedArray, tokens: axn.NamedArray) -> Any:
    return (table.take("vocab", tokens) ** 2).sum().scalar()


def grouped(layer: nn.MoELinear, x: axn.NamedArray) -> axn.NamedArray:
    return layer(x, axn.named(jnp.full(4, 2), Experts))


def attend(q: axn.NamedArray, k: axn.NamedArray) -> axn.NamedArray:
    return dot_product_attention(q, k, k, "key_pos", "embed", context="ring")


def in_stages(blocks: nn.Stacked[Any], x: axn.NamedArray) -> Any:
    return blocks.fold(x, schedule=GPipe(2, "batch"))


LAYER = nn.MoELinear.init(Experts, Embed, Mlp, key=KEY)
BLOCKS = nn.Stacked.init(Axis("layers", 2), nn.RmsNorm, gradient_checkpointing=False)(Embed)
W, X, TOKENS = axn.ones((Embed, Mlp)), axn.ones((Batch, Embed)), axn.named(jnp.arange(8), Batch)
fsdp = lambda loss: axn.fsdp(jax.grad(loss), STORED, COMPUTED)
mapped = lambda fn, **mapping: axn.named_jit(fn, mapping)
# Each makes a compiled function and its arguments; `executed` has the collectives, among them the one that is named.
CASES: dict[str, tuple[Callable[[], tuple[Any, Any]], str | None]] = {
    "fsdp": (lambda: (fsdp(product), (W, X)), "reduce-scatter"),
    "a look-up under fsdp": (lambda: (fsdp(look_up), (axn.ones((Vocab, Embed)), TOKENS)), "all-to-all"),
    "a grouped product": (lambda: (mapped(grouped, batch="data", experts="data"), (LAYER, X)), "reduce-scatter"),
    "context attention": (
        lambda: (mapped(attend, batch="data", key_pos="data"), (X, X.rename({"batch": "key_pos"}))),
        "collective-permute",
    ),
    "a pipeline": (lambda: (mapped(in_stages, batch="data", layers="model"), (BLOCKS, X)), "collective-permute"),
    "new arrays": (lambda: (mapped(lambda: axn.zeros((Batch, Embed)), batch="data"), ()), None),
    "random draws": (lambda: (mapped(lambda: random.normal(KEY, (Batch, Embed)), batch="data"), ()), None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_older_mesh_context_compiles_the_same(case: str, auto_mesh: Mesh) -> None:
    make, expected = CASES[case]

    def compiled() -> dict[str, tuple[int, int]]:
        fn, args = make()
        return executed(fn.lower(*args).compile())

    with jax.set_mesh(auto_mesh):
        newer = compiled()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        with auto_mesh:
            assert compiled() == newer
    assert expected is None or expected in newer
