"""Masks: every rule against the sentence that defines it, and how masks combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.attention import (
    Causal,
    causal_mask,
    combine_masks_and,
    combine_masks_or,
    dot_product_attention,
    forgetful_causal_mask,
    mask_to_bias,
    prefix_lm_mask,
    sliding_window_mask,
)
from tests.helpers import assert_named, spec

Batch, Pos, KPos = axn.make_axes(batch=8, pos=4, key_pos=6)

CAUSAL: Any = Causal("pos")
RULES = {
    "causal": (lambda *starts: causal_mask(Pos, KPos, *starts), lambda q, k: k <= q),
    "window": (lambda *starts: sliding_window_mask(Pos, KPos, 2, *starts), lambda q, k: k <= q and q - k < 2),
    "prefix": (lambda *starts: prefix_lm_mask(Pos, KPos, 3, *starts), lambda q, k: k <= q or k < 3),
}


def by_rule(rule: Any, q_start: int = 0, k_start: int = 0) -> np.ndarray:
    return np.array([[rule(q_start + q, k_start + k) for k in range(6)] for q in range(4)])


@pytest.mark.parametrize("what", RULES)
def test_masks_by_position(what: str) -> None:
    make, rule = RULES[what]
    for starts in ((), (2,), (3, 1), (0, 2)):
        assert_named(make(*starts), axn.named(jnp.asarray(by_rule(rule, *starts)), (Pos, KPos)))
    each = axn.arange(Batch)
    wanted = np.stack([by_rule(rule, i, 1) for i in range(8)])
    assert_named(make(each, 1), axn.named(jnp.asarray(wanted), (Batch, Pos, KPos)))


def test_lengths_of_prefixes_may_differ() -> None:
    found = prefix_lm_mask(Pos, KPos, prefix_len=axn.arange(Batch))
    wanted = np.stack([by_rule(lambda q, k, n=n: k <= q or k < n) for n in range(8)])
    assert_named(found, axn.named(jnp.asarray(wanted), (Batch, Pos, KPos)))


def test_a_mask_is_split_like_where_it_starts(mesh: Any) -> None:
    with jax.set_mesh(mesh):
        starts = axn.shard(axn.arange(Batch), {"batch": "data"})
        for found in (causal_mask(Pos, KPos, starts), jax.jit(lambda s: causal_mask(Pos, KPos, s))(starts)):
            assert spec(found) == ("data", None, None)
    assert_named(found, causal_mask(Pos, KPos, axn.arange(Batch)))


@pytest.mark.parametrize("what", RULES)
def test_masks_are_sharded_by_the_active_mapping(what: str, mesh: Any) -> None:
    make, rule = RULES[what]
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "pos": "model"}):
        for found in (make(), jax.jit(make)()):
            assert found.array.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("model")), 2)
            assert_named(found, axn.named(jnp.asarray(by_rule(rule)), (Pos, KPos)))
        assert spec(make(axn.arange(Batch)))[:2] == ("data", "model")
        with axn.axis_mapping({"pos": "data"}), pytest.raises(ValueError, match=r"'pos' of size 6 .* over data=4"):
            causal_mask(Pos.resize(6), KPos)


def test_positions_of_masks_are_replicated_along_a_sequence(mesh: Any) -> None:
    """Where queries and keys are sharded over the same mesh axes, each device needs more of the mask than a shard."""
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "pos": "model", "key_pos": "model"}):
        assert causal_mask(Pos, KPos).array.sharding.is_fully_replicated
        assert spec(causal_mask(Pos, KPos, axn.arange(Batch)))[0] == "data"
        assert {*spec(causal_mask(Pos, KPos, axn.arange(Batch)))[1:]} <= {None}


@pytest.mark.parametrize("window", [None, 2])
def test_causal_written_out(window: int | None) -> None:
    padding = axn.named(np.arange(6) < np.arange(8)[:, None], (Batch, KPos))
    rule = (lambda q, k: k <= q) if window is None else RULES["window"][1]
    mask = Causal(Pos, window)
    assert_named(mask.written_out(Pos, KPos), axn.named(jnp.asarray(by_rule(rule)), (Pos, KPos)))
    both = combine_masks_and(padding, mask)
    assert isinstance(both, Causal) and both.window == window
    wanted = by_rule(rule) & np.asarray(padding.array)[:, None]
    assert_named(both.written_out(Pos, KPos), axn.named(jnp.asarray(wanted), (Batch, Pos, KPos)))


def test_combining() -> None:
    causal, padding = causal_mask(Pos, KPos), axn.named(np.arange(6) < np.arange(8)[:, None], (Batch, KPos))
    a, b = np.asarray(causal.array), np.asarray(padding.array)[:, None]
    axes = (Batch, Pos, KPos)
    assert_named(combine_masks_and(causal, padding), axn.named(jnp.asarray(a & b), axes))
    assert_named(combine_masks_or(causal, padding), axn.named(jnp.asarray(a | b), axes))
    for combine in (combine_masks_and, combine_masks_or):
        assert combine(None, None) is None
        assert combine(causal, None) is combine(None, causal) is causal
    narrow = combine_masks_and(Causal("pos", 3), Causal("pos"))
    assert (narrow.QPos, narrow.window, narrow.also) == ("pos", 3, None)


def test_forgetful_mask() -> None:
    Long = axn.Axis("key_pos", 4000)

    def kept(seed: int, *options: Any) -> float:
        found = np.asarray(forgetful_causal_mask(Long, 0.3, *options, key=jax.random.key(seed)).array)
        assert found[0]
        return found.mean()

    np.testing.assert_allclose([kept(seed, False) for seed in range(3)], 0.7, atol=0.03)
    sampled = [kept(seed) for seed in range(10)]
    assert 0.68 < min(sampled) < 0.8 and 0.9 < max(sampled) <= 1.0


def test_mask_to_bias() -> None:
    found = mask_to_bias(causal_mask(Pos, KPos), -5.0)
    assert_named(found, axn.named(jnp.where(by_rule(RULES["causal"][1]), 0.0, -5.0), (Pos, KPos)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: causal_mask(Pos, Pos), "causal_mask: 'pos' would name more than one axis"),
        (lambda: Causal("pos", 0), "Causal: the window must be at least 1, got 0"),
        (lambda: combine_masks_or(CAUSAL, causal_mask(Pos, KPos)), r"cannot be combined by or\. .* `written_out"),
        (lambda: combine_masks_and(Causal("pos"), Causal("time")), "one mask is causal in 'pos', the other in 'time'"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("window", [None, 3])
def test_queries_that_do_not_fit_the_mesh_attend(window: int | None, mesh: Mesh) -> None:
    """A mask that attention itself makes is no new array of the user's, which would have to fit."""
    q = axn.named(np.ones((2, 1, 4), np.float32), ("batch", "pos", "size"))
    k = axn.named(np.ones((2, 8, 4), np.float32), ("batch", "key_pos", "size"))
    attend = lambda: dot_product_attention(q, k, k, "key_pos", "size", mask=Causal("pos", window))
    expected = attend()
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": "data"}):
        assert_named(attend(), expected)
