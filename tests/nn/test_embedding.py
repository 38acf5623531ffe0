"""`one_hot`, and `Embedding` against look-ups and products."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.embedding import Embedding, one_hot
from axonym.nn.mup import EmbeddingMup
from benchmarks.communication import bytes_moved
from tests.helpers import assert_named, spec

Batch, Pos, Vocab, Heads, Size = axn.make_axes(batch=4, pos=2, vocab=10, heads=3, size=2)
Embed = axn.Axis("embed", 6)
KEY = jax.random.key(0, impl="rbg")  # which compiles faster
WEIGHT = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
TOKENS = np.array([[7, 0], [3, 3], [9, 1], [0, 2]])
LAYER = Embedding(axn.named(WEIGHT, (Vocab, Embed)), Vocab, Embed)
IDS = axn.named(TOKENS, (Batch, Pos))


def test_one_hot() -> None:
    found = one_hot(axn.named([2, 0, 5, -1], Batch), axn.Axis("class", 3), dtype=jnp.bfloat16)
    expected = [[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert_named(found, axn.named(jnp.array(expected, jnp.bfloat16), ("batch", "class")))
    assert_named(one_hot(1, axn.Axis("class", 3)), axn.named([0.0, 1.0, 0.0], "class"))


def test_one_hot_of_a_dtype_that_lacks_some_classes() -> None:
    found = one_hot(axn.named(np.array([100, -1], np.int8), "batch"), axn.Axis("class", 300))
    np.testing.assert_array_equal(np.argwhere(found.array), [[0, 100]])


@pytest.mark.parametrize("last", [-1, np.int32(-1), np.array(-1), jnp.array(-1), 2])
def test_a_single_class_counts_from_the_end(last: Any) -> None:
    """The mask of a loss at all positions but the last is made so."""
    expected = axn.named([0.0, 0.0, 1.0], "class")
    assert_named(one_hot(last, axn.Axis("class", 3)), expected)
    assert_named(jax.jit(lambda i: one_hot(i, axn.Axis("class", 3)))(last), expected)


@pytest.mark.parametrize("number", [3, -4])
def test_a_single_class_must_be_there(number: int) -> None:
    with pytest.raises(ValueError, match=rf"one_hot: class {number} is out of range for \(class=3\)"):
        one_hot(number, axn.Axis("class", 3))


def test_the_axis_of_the_classes_must_be_new() -> None:
    with pytest.raises(ValueError, match="one_hot: 'batch' would name more than one axis"):
        one_hot(axn.named([2], "batch"), Batch)


def test_how_the_embeddings_start() -> None:
    """With a standard deviation of one by the number of elements of an embedding."""
    layer = Embedding.init(Vocab, (Heads, Size), key=KEY, init_scale=2)
    assert layer.weight.axes == (Vocab, Heads, Size)
    drawn = jax.random.truncated_normal(KEY, -3, 3, (10, 3, 2))
    np.testing.assert_allclose(layer.weight.array, drawn * (2 / 6), rtol=1e-6)
    old = Embedding.init(Vocab, (Heads, Size), key=KEY, init_scale=7, initializer_range=2)
    np.testing.assert_array_equal(layer.weight.array, old.weight.array)
    with pytest.raises(ValueError, match="Embedding needs axes with sizes, got only the name 'embed'"):
        Embedding.init(Vocab, "embed", key=KEY)  # pyright: ignore[reportArgumentType]


def test_embed_and_unembed(mesh: Mesh) -> None:
    x = LAYER(IDS)
    assert_named(x, axn.named(WEIGHT[TOKENS], (Batch, Pos, Embed)))
    logits = axn.named(WEIGHT[TOKENS] @ WEIGHT.T, (Batch, Pos, Vocab))

    def loss(layer: Embedding, ids: axn.NamedArray):
        logits = layer.unembed(layer.embed(ids))
        return (logits**2).sum().array, logits

    raw = jax.jit(jax.grad(lambda w: ((jnp.take(w, TOKENS, axis=0) @ w.T) ** 2).sum()))(WEIGHT)
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "vocab": "model"}):
        layer, ids = axn.shard((LAYER, IDS))
        assert spec(layer.weight) == ("model", None)
        gradient, found = jax.jit(jax.grad(loss, has_aux=True))(layer, ids)
        embedded = layer(ids)
    assert spec(embedded) == ("data", None, None) and spec(found) == ("data", None, "model")
    assert_named(embedded, x)
    assert_named(found, logits, rtol=1e-4, atol=1e-5)
    assert spec(gradient.weight)[0] == "model"
    np.testing.assert_allclose(gradient.weight.array, raw, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fills", [True, False], ids=["take", "index"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_tables_split_both_ways(dtype: type, fills: bool, mesh: Mesh) -> None:
    """Each device finds the rows that it has, with its columns; tokens and what was found are all that is sent."""
    table = np.random.default_rng(1).normal(size=(10, 8)).astype(np.float32)
    ids = np.array([[7, 0], [3, 3], [15, 1], [0, 4]]) - (5 if dtype == np.int32 else 0)

    def step(table: axn.NamedArray, ids: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray]:
        found, pull = jax.vjp(lambda table: axn.take(table, "vocab", ids) if fills else table["vocab", ids], table)
        return found, pull(axn.where(axn.isnan(found), 0.0, found))[0]

    named = axn.named(table, ("vocab", "embed")), axn.named(ids.astype(dtype), (Batch, Pos))
    with jax.set_mesh(mesh):
        split = axn.fsdp(step, {"vocab": "model", "embed": "data"}, {"batch": "data", "vocab": "model"})
        found, gradient = jax.block_until_ready(split(*named))
        moved = bytes_moved(split.lower(*named).compile())
    at = np.clip(np.where(ids < 0, ids + 10, ids), 0, 9)
    known = ((ids >= -10) & (ids < 10))[..., None] | (not fills)
    assert_named(found, axn.named(np.where(known, table[at], np.float32(np.nan)), (Batch, Pos, "embed")))
    assert spec(found) == ("data", None, None) and spec(gradient) == ("model", "data")
    # No gradient goes back to the nearest row of an id that is out of range.
    counts = np.bincount(at[(ids >= -10) & (ids < 10)], minlength=10)
    np.testing.assert_allclose(gradient.array, counts[:, None] * table, rtol=1e-6)
    rows = 2 * 8 * 4  # of the part of the batch that each device has
    expected = {"all-gather": ids.size * 4, "all-to-all": 2 * rows, "all-reduce": rows}
    assert {kind: m.bytes for kind, m in moved.items()} == expected


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32])
def test_tokens_that_are_not_there(dtype: type) -> None:
    """They are an error where they are known, and in jit they give NaN, not another token's embedding."""
    ids = np.array([0, 9, 10, 200]).astype(dtype) if dtype != np.int32 else np.array([0, -1, 10, -11])
    tokens = axn.named(jnp.asarray(ids), Batch)
    with pytest.raises(
        IndexError, match=r"Embedding\.embed: .* out of range for axis 'vocab' of size 10: a token lies in"
    ):
        LAYER(tokens)
    found = jax.jit(lambda ids: LAYER(ids))(tokens).array
    np.testing.assert_array_equal(found[:2], WEIGHT[[0, -1]])
    assert np.isnan(found[2:]).all()


def test_large_unsigned_tokens_are_not_negative() -> None:
    ids = axn.named(jnp.array([2**32 - 1, 2**32 - 10, 9, 2**31], jnp.uint32), Batch)
    assert np.isnan(jax.jit(lambda ids: LAYER(ids))(ids).array).all(1).tolist() == [True, True, False, True]


def test_several_axes() -> None:
    weight = axn.named(WEIGHT.reshape(10, 3, 2), (Vocab, Heads, Size))
    layer = Embedding(weight, Vocab, (Heads, Size))
    x = layer.embed(IDS)
    assert x.axes == (Batch, Pos, Heads, Size)
    np.testing.assert_allclose(layer.unembed(x).array, WEIGHT[TOKENS] @ WEIGHT.T, rtol=1e-4, atol=1e-5)


def test_mup() -> None:
    mup = Embedding(LAYER.weight, Vocab, Embed, EmbeddingMup)
    assert mup.reparam == EmbeddingMup(Embed, Vocab)
    assert_named(mup(IDS), LAYER(IDS))
    np.testing.assert_allclose(mup.unembed(mup(IDS)).array, WEIGHT[TOKENS] @ WEIGHT.T / 6, rtol=1e-4, atol=1e-5)


def test_resize() -> None:
    longer, shorter = LAYER.resize_embeddings(12), LAYER.resize_embeddings(4)
    assert longer.Vocab == longer.weight.axes[0] == Vocab.resize(12)
    np.testing.assert_array_equal(longer.weight.array[:10], WEIGHT)
    np.testing.assert_allclose(longer.weight.array[10:], WEIGHT.mean(0, keepdims=True).repeat(2, 0), rtol=1e-5)
    np.testing.assert_array_equal(shorter.weight.array, WEIGHT[:4])
    drawn = jax.jit(lambda key: LAYER.resize_embeddings(1000, key))(KEY).weight.array[10:]
    np.testing.assert_allclose(drawn.mean(0), WEIGHT.mean(0), atol=0.15)
    np.testing.assert_allclose(drawn.std(0), WEIGHT.std(0), atol=0.15)


def test_abstract() -> None:
    layer = eqx.filter_eval_shape(Embedding.init, Vocab, Embed, key=KEY)
    assert layer.weight.axes == (Vocab, Embed)
    assert eqx.filter_eval_shape(layer, IDS).axes == (Batch, Pos, Embed)


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"Embedding.unembed: no axis 'embed' in \(batch=2\). The layer maps \(embed=6\)"
    ):
        LAYER.unembed(axn.ones({"batch": 2}))
    with pytest.raises(TypeError, match=r"Embedding\.embed: expected a NamedArray, got list"):
        LAYER.embed([1, 2])  # pyright: ignore[reportArgumentType]


def test_a_single_class_counts_from_the_end_in_every_dtype() -> None:
    found = jax.jit(lambda i: axn.nn.one_hot(i, axn.Axis("class", 300)))(np.int8(-1))
    assert found.array.argmax() == 299
