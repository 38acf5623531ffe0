"""Measure training and generation with the Llama of `examples/models/llama.py`, against the same in plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import jax
import numpy as np

import axonym as axn
from examples.models import generation, llama

from . import plain_llama
from .harness import Row, side_by_side
from .program import compared

BATCH, POS, ROOM = 4, 32, 256
CONFIG = llama.Config(
    Vocab=axn.Axis("vocab", 128),
    Embed=axn.Axis("embed", 64),
    Layers=axn.Axis("layers", 4),
    KVHeads=axn.Axis("kv_heads", 2),
    Group=axn.Axis("group", 2),
    HeadSize=axn.Axis("head_size", 16),
    Mlp=axn.Axis("mlp", 128),
)
WRITER = dataclasses.replace(
    CONFIG, Vocab=axn.Axis("vocab", 4096), Embed=axn.Axis("embed", 256), Mlp=axn.Axis("mlp", 1024)
)
"""The model that writes: as large as it takes for a token to cost more than its call."""


def step(model: llama.Llama, tokens: axn.NamedArray) -> tuple[jax.Array, llama.Llama]:
    """A training step by gradient descent."""
    value, gradients = jax.value_and_grad(llama.Llama.loss)(model, tokens)
    return value, jax.tree.map(lambda p, g: p - plain_llama.LEARNING_RATE * g, model, gradients)


def decode(model: llama.Llama, text: Any) -> Any:
    """Take the likeliest token."""
    return generation.step(model, text, jax.random.key(0), generation.Sampling(temperature=0))


def empty_text(model: llama.Llama, batch: int, room: int) -> generation.Text:
    """Texts of one token each, which is the first of the vocabulary."""
    Batch, KPos = axn.Axis("batch", batch), axn.Axis("key_pos", room)
    token, written = axn.zeros(Batch, "int32"), jax.numpy.zeros((), "int32")
    return generation.Text(token, model.empty_cache(Batch, KPos), None, written)


def rows() -> list[Row]:
    """The optimized steps, against the hand-written ones."""
    return [*_training_rows(), *_decoding_rows()]


def _training_rows() -> list[Row]:
    model = llama.Llama.init(CONFIG, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, POS), 0, CONFIG.Vocab.size)
    named_tokens, params = axn.named(tokens, ("batch", "pos")), plain_llama.params_of(model)
    ours, theirs = jax.jit(step), jax.jit(functools.partial(plain_llama.step, CONFIG))
    np.testing.assert_allclose(ours(model, named_tokens)[0], theirs(params, tokens)[0], rtol=1e-5)
    return compared("llama", ours.lower(model, named_tokens).compile(), theirs.lower(params, tokens).compile())


def flat(step: Any, model: llama.Llama) -> tuple[Any, list[jax.Array]]:
    """A step with the model as a list of its arrays, as `examples/generate.py` calls it, and that list."""
    arrays, structure = jax.tree.flatten(model)
    return lambda arrays, text: step(jax.tree.unflatten(structure, arrays), text), arrays


def _decoding_rows() -> list[Row]:
    model = llama.Llama.init(WRITER, key=jax.random.key(0))
    params = plain_llama.params_of(model)
    step, arrays = flat(decode, model)
    ours = jax.jit(step, donate_argnums=1)
    theirs = jax.jit(functools.partial(plain_llama.decode, WRITER), donate_argnums=1)
    texts: list[Any] = [empty_text(model, BATCH, ROOM), plain_llama.empty_text(WRITER, BATCH, ROOM)]
    programs = ours.lower(arrays, texts[0]).compile(), theirs.lower(params, texts[1]).compile()
    found = [dataclasses.replace(row, what=f"decoding: {row.what}", limit=1.2) for row in compared("llama", *programs)]
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    found.append(Row("llama", "decoding: temporary memory", *map(str, memory), memory[0] / memory[1], 1.0))
    found.append(_bytes_of_a_step(model, texts[0], programs[0]))

    def next_named() -> None:
        texts[0] = ours(arrays, texts[0])
        jax.block_until_ready(texts[0].token.array)

    def next_plain() -> None:
        texts[1] = theirs(params, texts[1])
        jax.block_until_ready(texts[1]["token"])

    for _ in range(ROOM // 2):
        next_named()
        next_plain()
        np.testing.assert_array_equal(texts[0].token.array, texts[1]["token"])
    times = side_by_side(next_named, next_plain, repeats=20)
    rates = [BATCH / statistics.median(seconds) for seconds in times]
    shown = [f"{rate:.0f} tokens/s" for rate in rates]
    # A ratio of times, as in all rows: above 1, the hand-written step writes more.
    return [*found, Row("llama", "decoding: tokens per second", *shown, rates[1] / rates[0], 1.1)]


def _bytes_of_a_step(model: llama.Llama, text: generation.Text, step: Any) -> Row:
    """The bytes that a step reads and writes, to those that it must: its weights, the cache, and a slot of it.

    XLA counts the loop over the blocks once, and where a slot of the cache is written in place, it counts all of the
    cache as read and written. So blocks are counted as often as they run, without that. On a CPU, the weights of a
    block are copied out of the stack before they are multiplied, in the hand-written step too: they move three times.
    """

    def without_blocks(model: llama.Llama, token: axn.NamedArray) -> axn.NamedArray:
        return dataclasses.replace(model, blocks=None)._logits(model._embedded(token)).argmax("vocab")

    def bytes_of(*arrays: Any) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(arrays))

    once = step.cost_analysis()["bytes accessed"]
    rest = jax.jit(without_blocks).lower(model, text.token).compile().cost_analysis()["bytes accessed"]
    keys, layers = text.cache.keys, model.blocks.Block.size
    cache = bytes_of(keys, text.cache.values)
    moved = rest + layers * (once - rest - 2 * cache)
    needed = bytes_of(model.blocks, model.norm, model.head) + cache + cache // keys.axis_size("key_pos")
    return Row("llama", "decoding: bytes moved, to those needed", f"{moved:.0f}", f"{needed}", moved / needed, 3.0)
