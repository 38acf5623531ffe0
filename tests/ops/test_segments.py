"""Segments: errors, dtypes, the gradient of products, and what is sent if both arrays are sharded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from tests.helpers import spec

untyped: Any = axn  # for calls that a type checker would refuse

EDGE, NODE = axn.Axis("edge", 16), axn.Axis("node", 8)
X = axn.random.normal(jax.random.key(0), (EDGE, axn.Axis("embed", 4)))
S = axn.named(np.arange(16, dtype=np.int32) % 9 - 1, "edge")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: axn.segment_sum(X, S * 1.0, NODE),
            TypeError,
            r"^segment_sum: `segments` must be integers, got float32",
        ),
        (lambda: axn.segment_sum(X, S.rename({"edge": "row"}), NODE), ValueError, r"`segments` has axes \(row\) that"),
        (
            lambda: axn.segment_max(X, S, NODE, axis="embed"),
            ValueError,
            r"^segment_max: no axis 'embed' in \(edge=16\)",
        ),
        (lambda: axn.segment_sum(X, S["edge", :3], NODE), ValueError, r"axis 'edge' has conflicting sizes: 16 .* 3"),
        (
            lambda: axn.segment_min(X, S["edge", 0], NODE),
            ValueError,
            r"^segment_min: .* axes to reduce along, got none",
        ),
        (lambda: axn.segment_sum(X, S, axn.Axis("embed", 8)), ValueError, r"^segment_sum: .*'embed'"),
        (lambda: untyped.segment_sum(X, S, 8), TypeError, r"Write `axonym.Axis\('new', 8\)`"),
        (lambda: untyped.segment_sum(X, [0, 1], NODE), TypeError, r"^segment_sum: expected a NamedArray, got list"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("wrong", [-2, 8])
def test_numbers_out_of_range(wrong: int) -> None:
    """An error outside jit, also in a gradient there; in jit they belong to no segment, as -1 does everywhere."""
    s = axn.where(S == 3, wrong, S)
    every: list[Any] = [axn.segment_sum, axn.segment_mean, axn.segment_max, axn.segment_min]
    for reduce in every:
        message = rf"^{reduce.__name__}: {wrong} out of range for axis 'node' of size 8: a segment lies in 0..7. -1"
        with pytest.raises(IndexError, match=message):
            reduce(X, s, NODE)
        with pytest.raises(IndexError, match=message):
            jax.grad(lambda x, reduce=reduce: reduce(x, s, NODE).sum().scalar())(X)
        expected = reduce(X, axn.where(S == 3, -1, S), NODE)
        np.testing.assert_array_equal(jax.jit(reduce, static_argnums=2)(X, s, NODE).array, expected.array)


def test_small_dtypes_do_not_overflow() -> None:
    zero = axn.zeros({"edge": 1000}, dtype=jnp.uint8)
    for dtype in (jnp.bfloat16, jnp.int8):
        ones = axn.ones({"edge": 1000}, dtype=dtype)
        total, mean = (
            axn.segment_sum(ones, zero, axn.Axis("node", 1)),
            axn.segment_mean(ones, zero, axn.Axis("node", 1)),
        )
        assert total.dtype == axn.sum(ones).dtype and total.tolist() == [1000] and mean.tolist() == [1]
    assert axn.segment_max(axn.named([True, False], "edge"), S["edge", :2], NODE).dtype == bool


def _collectives(fn: Any, *args: Any) -> list[tuple[str, str]]:
    found = r"= (\w+\[[\d,]*\])\S* ((?:all|reduce|collective|ragged)-[\w-]+)\("
    return re.findall(found, fn.lower(*args).compile().as_text())


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded_segments_send_results_alone(explicit: bool) -> None:
    """Each device reduces its own elements, and results are combined. The gradient sends nothing."""
    expected, mapping = axn.segment_max(X, S, NODE), {"edge": "data", "node": "model"}
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        x, s = axn.shard(X, mapping), axn.shard(S, mapping)
        program = axn.named_jit(lambda x, s: axn.segment_max(x, s, NODE), mapping)
        found = jax.block_until_ready(program(x, s))
        np.testing.assert_array_equal(found.array, expected.array)
        assert spec(found) == ("model", None)
        assert _collectives(program, x, s) == [("f32[4,4]", "all-reduce")]

        cotangent = axn.shard(axn.ones((NODE, *X.axes[1:])), {})
        pull = jax.jit(lambda x, s, y: jax.vjp(lambda x: axn.segment_sum(x, s, NODE), x)[1](y))
        assert _collectives(pull, x, s, cotangent) == []
        np.testing.assert_array_equal(jax.block_until_ready(pull(x, s, cotangent))[0]["embed", 0].array, S.array >= 0)


def test_mean_in_half_precision() -> None:
    """Which has neither the sum nor the number of elements."""
    x = axn.ones({"edge": 70_000}, dtype=jnp.float16)
    assert axn.segment_mean(x, axn.zeros({"edge": 70_000}, dtype=int), axn.Axis("node", 1)).tolist() == [1]
