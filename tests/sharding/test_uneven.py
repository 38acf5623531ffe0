"""Axes that their mesh axes do not divide: stored padded, with their true size inside compiled functions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import nn
from axonym.distribution.padded_array import PaddedArray, is_padded, padded_array
from tests.helpers import assert_named

Batch, Pos, Embed, Mlp = axn.make_axes(batch=8, pos=4, embed=8, mlp=12)
Vocab, Heads, HeadSize, Experts = axn.make_axes(vocab=28, heads=28, head_size=4, experts=60)
X = axn.named(np.arange(28.0, dtype=np.float32), "vocab")
OPTIMIZER = optax.adam(0.1)


def draw(*axes: axn.Axis) -> axn.NamedArray:
    rng = np.random.default_rng(sum(a.size for a in axes))
    return axn.named(rng.normal(size=[a.size for a in axes]).astype(np.float32) / 4, axes)


def devices_of(**sizes: int) -> Mesh:
    return axn.make_mesh(sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])


def poisoned(tree: Any) -> Any:
    """Put NaN, or a large number, into all padding."""

    def poison(x: Any) -> Any:
        if not is_padded(x):
            return x
        kept = np.pad(np.ones(x.shape, bool), [(0, n - m) for n, m in zip(x.array.shape, x.shape, strict=True)])
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 2**30
        return padded_array(jnp.where(jax.device_put(kept, x.sharding), x.array, wrong), x.shape)

    return jax.tree.map(poison, tree, is_leaf=is_padded)


# --- models ---


def of_tokens(params: Any, tokens: axn.NamedArray) -> Any:
    (vocab,) = (a for a in params["table"].axes if a.name == "vocab")
    h = axn.tanh(params["table"].take("vocab", tokens))
    logits = axn.dot(h, params["out"], axis=Embed)
    return axn.mean(nn.cross_entropy_loss(logits, vocab, nn.one_hot(axn.roll(tokens, 1, "pos"), vocab))).scalar()


def of_heads(params: Any, x: axn.NamedArray) -> Any:
    q, k, v = (axn.dot(x, params[n], axis=Embed) for n in "qkv")
    k, v = (y.rename({"pos": "key_pos"}) for y in (k, v))
    y = nn.attention.dot_product_attention(q, k, v, "key_pos", HeadSize)
    return axn.mean(axn.square(axn.dot(y, params["o"], axis=(Heads, HeadSize)) - x)).scalar()


def of_experts(params: Any, x: axn.NamedArray) -> Any:
    scores = nn.softmax(axn.dot(x, params["router"], axis=Embed), Experts)
    each = axn.dot(nn.gelu(axn.dot(x, params["up"], axis=Embed)), params["down"], axis=Mlp)
    chosen = axn.argmax(axn.dot(x, params["router"], axis=Embed), Experts)

    def of_rows(params: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
        layer = nn.MoELinear(params["up"], None, Experts, Embed, Mlp)
        return nn.gelu(layer(rows, sizes))

    held = {"up": params["up"]}
    sent = nn.dispatch(of_rows, held, x, chosen, Experts)
    return (axn.mean(axn.square(axn.dot(each, scores, axis=Experts) - x)) + axn.mean(sent)).scalar()


def of_batch(params: Any, x: axn.NamedArray) -> Any:
    h = nn.standardize(axn.dot(x, params["up"], axis=Embed), "batch")
    y = axn.dot(nn.gelu(h), params["down"], axis=Mlp)
    return (axn.mean(axn.square(y - x)) + axn.max(y) + axn.std(y["pos", 0])).scalar()


def of_rolls(params: Any, x: axn.NamedArray) -> Any:
    u = params["u"]
    for _ in range(3):
        u = u + 0.1 * (axn.roll(u, 1, "vocab") + axn.roll(u, -1, "vocab") - 2 * u) * params["speed"]
    return axn.mean(axn.square(u - x)).scalar()


def tokens_of(vocab: axn.Axis) -> axn.NamedArray:
    return axn.named(np.random.default_rng(0).integers(0, 1001, (8, 4)).astype(np.int32), ("batch", "pos"))


def vocabulary(size: int) -> tuple[Any, Any]:
    vocab = axn.Axis("vocab", size)
    return {"table": draw(vocab, Embed), "out": draw(Embed, vocab)}, tokens_of(vocab)


LARGE = axn.Axis("batch", 100)
ONE, TWO = {"data": 8}, {"data": 4, "model": 2}
HEADS = {n: draw(Embed, Heads, HeadSize) for n in "qkv"} | {"o": draw(Heads, HeadSize, Embed)}
EXPERTS = {"router": draw(Embed, Experts), "up": draw(Experts, Embed, Mlp), "down": draw(Experts, Mlp, Embed)}
CASES: dict[str, tuple[Any, Any, Any, dict[str, int], Any]] = {
    "vocabulary": (of_tokens, *vocabulary(1001), ONE, {"vocab": "data"}),
    "vocabulary and batch": (of_tokens, *vocabulary(1001), TWO, {"vocab": "model", "batch": "data"}),
    "vocabulary over both": (of_tokens, *vocabulary(1001), TWO, {"vocab": ("data", "model")}),
    "heads": (of_heads, HEADS, draw(Batch, Pos, Embed), ONE, {"heads": "data"}),
    "heads over both": (of_heads, HEADS, draw(Batch, Pos, Embed), TWO, {"heads": ("data", "model")}),
    "experts": (of_experts, EXPERTS, draw(Batch, Pos, Embed), ONE, {"experts": "data"}),
    "experts over both": (of_experts, EXPERTS, draw(Batch, Pos, Embed), TWO, {"experts": ("data", "model")}),
    "batch": (of_batch, {"up": draw(Embed, Mlp), "down": draw(Mlp, Embed)}, draw(LARGE, Pos, Embed), ONE, {"batch": "data"}),
    "batch and features": (
        of_batch,
        {"up": draw(Embed, Mlp), "down": draw(Mlp, Embed)},
        draw(LARGE, Pos, Embed),
        {"a": 2, "b": 3},
        {"batch": "b", "mlp": "a"},
    ),
    "rolls": (of_rolls, {"u": draw(Vocab), "speed": draw(Vocab)}, draw(Vocab), ONE, {"vocab": "data"}),
}


def step_of(loss: Any) -> Any:
    def step(state: Any, x: axn.NamedArray) -> Any:
        params, kept = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, kept = OPTIMIZER.update(gradients, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


def start(params: Any) -> Any:
    return params, OPTIMIZER.init(params)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_device(case: str) -> None:
    """Three steps of Adam, with NaN in all padding before each; the state is donated."""
    loss, params, x, sizes, mapping = CASES[case]
    one = jax.jit(step_of(loss))
    with jax.set_mesh(devices_of(**sizes)), axn.axis_mapping(mapping, uneven="pad"):
        state, placed = axn.named_jit(start)(params), axn.shard(x)
        assert any(map(is_padded, jax.tree.leaves((state, placed), is_leaf=is_padded)))
        step = axn.named_jit(step_of(loss), donate_args=(True, False))
        expected: Any = start(params)
        for _ in range(3):
            given = poisoned(state)
            state, value = jax.block_until_ready(step(given, poisoned(placed)))
            assert all(y.is_deleted() for y in jax.tree.leaves(given[0]))
            expected, wanted = one(expected, x)
            np.testing.assert_allclose(value, wanted, rtol=2e-5)
        assert jax.tree.structure(given) == jax.tree.structure(state)
        for found, true in zip(jax.tree.leaves(axn.to_host(state)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, true, rtol=1e-3, atol=2e-4)


def program(size: int, mapping: Any) -> Any:
    """Compile a step of the model with a vocabulary of a size."""
    params, tokens = vocabulary(size)
    with axn.axis_mapping(mapping, uneven="pad"):
        state, placed = jax.eval_shape(axn.named_jit(start), params), axn.shard(tokens)
        return axn.named_jit(step_of(of_tokens), donate_args=(True, False)).lower(state, placed).compile()


@pytest.mark.parametrize(
    ("sizes", "mapping"),
    [(ONE, {"vocab": "data"}), (TWO, {"vocab": "model", "batch": "data"})],
    ids=["one axis", "two axes"],
)
def test_the_program_is_that_of_the_rounded_size(sizes: dict[str, int], mapping: Any) -> None:
    """The same collectives of the same sizes, 2% of memory, and every buffer of the state is overwritten."""
    with jax.set_mesh(devices_of(**sizes)):
        uneven, even = (program(size, mapping) for size in (1001, 1008))
    collective = re.compile(r"= (\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")
    found, wanted = (Counter(collective.findall(p.as_text())) for p in (uneven, even))
    assert wanted
    assert found == wanted
    ours, theirs = (p.memory_analysis() for p in (uneven, even))
    needs = [m.temp_size_in_bytes + m.argument_size_in_bytes - m.alias_size_in_bytes for m in (ours, theirs)]
    assert needs[0] <= 1.02 * needs[1]
    assert ours.alias_size_in_bytes == theirs.alias_size_in_bytes > 0
