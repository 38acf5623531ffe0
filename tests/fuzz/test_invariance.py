"""`check_shard_invariance` for functions that the fuzzer does not cover: matrices, models, experts, draws, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import axonym as axn
from axonym import Axis, NamedArray
from axonym.nn.attention import apply_rotary
from axonym.testing import check_shard_invariance

KEY = jax.random.key(0)
PAIR = ("row", "col")
X = axn.random.normal(KEY, {"batch": 8, "embed": 8})
MATRIX = axn.random.normal(KEY, {"batch": 8, "row": 4, "col": 4}) + axn.named(6 * np.eye(4, dtype=np.float32), PAIR)
LABELS = axn.random.randint(KEY, {"batch": 8}, 0, 4)
MODEL = axn.nn.MLP.init(Axis("embed", 8), Axis("class", 4), Axis("mlp", 8), 1, key=KEY)


def linear_algebra(a: NamedArray, b: NamedArray) -> Any:
    solved = axn.linalg.solve(a, b, PAIR)
    return solved, axn.linalg.slogdet(a, PAIR), axn.linalg.cholesky(a, PAIR)


def draws(key: jax.Array, x: NamedArray) -> Any:
    chosen = axn.random.choice(key, {"draw": 8}, x, "batch"), axn.random.permutation(key, x, "batch")
    return chosen, axn.random.categorical(key, x, "embed", top_k=3), axn.nn.Dropout(0.5)(x, key=key)


def norms(x: NamedArray) -> Any:
    groups = axn.nn.standardize(x.unflatten_axis("embed", {"group": 2, "channel": 4}), ("group", "channel"))
    return axn.nn.standardize(x, "batch"), groups, apply_rotary(x, "embed", "batch")


def hessian(w: NamedArray, x: NamedArray) -> Any:
    def loss(w: NamedArray) -> NamedArray:
        return axn.nn.cross_entropy_loss(axn.dot(x, w, axis="embed"), "class", LABELS)

    return axn.hessian(loss)(w)


def filtered(model: axn.nn.MLP, x: NamedArray) -> Any:
    @eqx.filter_value_and_grad
    def loss(model: axn.nn.MLP) -> Any:
        return eqx.filter_checkpoint(model)(x).var().array

    return eqx.filter(eqx.filter_jit(loss)(model), eqx.is_array)


def experts(layer: axn.nn.MoELinear, x: NamedArray) -> Any:
    """Rows sorted by expert, each device with some of the rows, or of the experts."""
    return layer(x, axn.named(np.array([3, 0, 4, 1], np.uint8), "expert"))


def vocabulary(table: axn.nn.Embedding, ids: NamedArray) -> Any:
    """Look-ups, logits and losses over a vocabulary that may be sharded."""
    return axn.nn.cross_entropy_loss(table.unembed(table.embed(ids)), "vocab", ids, axn.sum, ignore_index=3)


def narrow(x: NamedArray, z: NamedArray) -> Any:
    return axn.cumsum(axn.nn.softmax(x, "embed"), "batch"), axn.abs(axn.dot(z, axn.conj(z), axis="batch"))


CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (linear_algebra, (MATRIX, MATRIX["col", 0])),
    (draws, (KEY, X)),
    (norms, (X,)),
    (hessian, (axn.random.normal(KEY, {"embed": 8, "class": 4}), X)),
    (filtered, (MODEL, X)),
    (experts, (axn.nn.MoELinear.init(Axis("expert", 4), Axis("embed", 8), Axis("out", 8), key=KEY), X)),
    (vocabulary, (axn.nn.Embedding.init(Axis("vocab", 8), Axis("embed", 4), key=KEY), LABELS)),
    (narrow, (X.astype("float16"), X + 1j * X)),
]


@pytest.mark.parametrize(("function", "arguments"), CASES, ids=[function.__name__ for function, _ in CASES])
def test_what_programs_do_not_have(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    assert check_shard_invariance(function, *arguments, draws=2, seed=1).compared
