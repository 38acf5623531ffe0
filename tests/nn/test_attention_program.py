"""The compiled program of attention is that of hand-written code."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.nn.attention import Llama3Rotary, apply_rotary, causal_mask, dot_product_attention
from tests.helpers import draw
from tests.ops.test_contraction_program import INSTRUCTION

Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=2, pos=8, key_pos=8, heads=2, group=3, head_size=16)

Q, GROUPED = draw(Batch, Pos, Heads, Size), draw(Batch, Pos, Heads, Group, Size)
K, V = draw(Batch, KPos, Heads, Size), draw(Batch, KPos, Heads, Size) * 2
MASK = causal_mask(Pos, KPos)


def attend(query: Any, key: Any, value: Any, mask: Any) -> axn.NamedArray:
    return dot_product_attention(query, key, value, "key_pos", "head_size", mask)


def attend_by_hand(query: Any, key: Any, value: Any, mask: Any) -> Any:
    # `jnp.einsum` multiplies its operands in reverse
    scores = jnp.einsum("bkhd,bphd->bhpk", key, query) * 16**-0.5
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, float(jnp.finfo(scores.dtype).min)), axis=-1)
    return jnp.einsum("bkhd,bhpk->bphd", value, weights)


def attend_in_groups_by_hand(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = jnp.einsum("bkhd,bphgd->bhpgk", key, query) * 16**-0.5
    mask = mask[None, None, :, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, float(jnp.finfo(scores.dtype).min)), axis=-1)
    return jnp.einsum("bkhd,bhpgk->bphgd", value, weights)


def turn_by_hand(x: Any) -> Any:
    angles = jnp.arange(8).astype(jnp.float32)[None, :, None, None]
    angles = angles * jnp.asarray(Llama3Rotary().frequencies(16), jnp.float32)[None, None, None]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles) * 1.0, jnp.sin(angles) * 1.0
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


PROGRAMS = {
    "groups": ((GROUPED, K, V, MASK), attend, attend_in_groups_by_hand),
    "rotary": ((Q,), lambda x: apply_rotary(x, Size, Pos, Llama3Rotary()), turn_by_hand),
}


def compiled(fn: Any, *arguments: Any) -> tuple[list[Any], dict[str, int]]:
    """Return the result of a program, and how often it has each kind of instruction."""
    program = jax.jit(fn).lower(*arguments).compile()
    counts = collections.Counter(INSTRUCTION.findall(program.as_text() or ""))
    return jax.tree.leaves(program(*arguments)), counts


def assert_same(ours: Any, theirs: Any, *arguments: axn.NamedArray) -> None:
    found, counts = compiled(ours, *arguments)
    expected, wanted = compiled(theirs, *(x.array for x in arguments))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert counts == wanted


@pytest.mark.parametrize("what", PROGRAMS)
def test_program_is_that_of_the_hand_written_code(what: str) -> None:
    arguments, ours, theirs = PROGRAMS[what]
    assert_same(ours, theirs, *arguments)


def test_program_of_the_gradient_too() -> None:
    def gradient(fn: Any) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(jax.tree.leaves(fn(*xs))[0])), (0, 1, 2))

    assert_same(gradient(attend), gradient(attend_by_hand), Q, K, V, MASK)
