"""Samplers of vectors, and selections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import random
from tests.random.samplers import AXES, KEY, MAPPING, Batch, Pos, assert_same, entries

# --- vectors ---


Space = axn.Axis("space", 5)
VECTORS: dict[str, tuple[Callable[..., axn.NamedArray], Callable[..., jax.Array], tuple[tuple[axn.Axis, ...], ...]]] = {
    "ball": (
        lambda key, p: random.ball(key, AXES, Space, p),
        lambda key, p: jax.random.ball(key, 5, p, (8, 3, 4)),
        ((),),
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_the_program_is_that_of_jax(name: str) -> None:
    by_name, by_position, layouts = VECTORS[name]
    given = [axn.ones(axes) for axes in layouts]
    found = jax.make_jaxpr(lambda key, *xs: by_name(key, *xs).array)(KEY, *given)
    wanted = jax.make_jaxpr(by_position)(KEY, *(x.array for x in given))
    assert str(found) == str(wanted)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_with_parameters_by_name(name: str, explicit_mesh: Mesh) -> None:
    """In another order, with part of the axes, and on Explicit axes, where their type says how the result lies."""
    by_name, _, layouts = VECTORS[name]

    def typed(key: Any, *values: Any) -> axn.NamedArray:
        drawn = by_name(key, *values)
        assert entries(drawn) == MAPPING
        return drawn

    given = [axn.ones([a for a in axes[::-1] if a is not Pos]) for axes in layouts]
    with jax.set_mesh(explicit_mesh), axn.axis_mapping(MAPPING):
        assert jax.eval_shape(typed, KEY, *given).axes == (*AXES, Space)


# --- selections ---


def test_categorical() -> None:
    Vocab = axn.Axis("vocab", 16)
    logits = random.normal(KEY, (Vocab, Batch))
    assert jax.eval_shape(lambda key: random.categorical(key, logits, "vocab"), KEY).axes == (Batch,)
    shape = {"draw": 5, "batch": 8}
    drawn = random.categorical(KEY, logits, Vocab, shape)
    assert drawn.shape == shape
    assert_same(random.categorical(KEY, logits.rearrange((Batch, Vocab)), "vocab", shape), drawn.array)
    other = random.categorical(KEY, logits, "vocab", {"batch": 8, "draw": 5})
    assert other.shape == {"batch": 8, "draw": 5}
    assert_same(other.rearrange(("draw", "batch")), drawn.array)
    spread = logits.broadcast_axis(axn.Axis("draw", 5))
    assert_same(random.categorical(KEY, spread, "vocab").rearrange(("draw", "batch")), drawn.array)
    some = random.categorical(KEY, logits, "vocab", shape, top_k=3, temperature=axn.named([0.0] * 4 + [1.0], "draw"))
    assert (some["draw", :4] == axn.argmax(logits, "vocab")).all().item()
    assert (some.array[4] == random.categorical(KEY, logits, "vocab", shape, top_k=3).array[4]).all()


def test_categorical_by_frequency() -> None:
    """Draws from the same logits are independent, with the probabilities of the softmax."""
    p = jnp.array([0.1, 0.4, 0.05, 0.3, 0.15])
    drawn = random.categorical(KEY, axn.named(jnp.log(p), "vocab"), "vocab", {"draw": 4000, "pair": 2}).array
    found = jnp.bincount(drawn[:, 0] * 5 + drawn[:, 1], length=25).reshape(5, 5) / 4000
    np.testing.assert_allclose(found, jnp.outer(p, p), atol=0.02)


def test_categorical_without_replacement() -> None:
    """The first of the draws has the probabilities of the softmax, the second those of what is left, and so on."""
    p = np.array([0.5, 0.3, 0.2])
    logits = axn.named(jnp.log(p), "vocab").broadcast_axis(axn.Axis("case", 4000))
    drawn = axn.top_k(logits + random.gumbel(KEY, logits.axes), "vocab", 2)[1].array
    for i in range(3):
        for j in {0, 1, 2} - {i}:
            share = ((drawn[:, 0] == i) & (drawn[:, 1] == j)).mean()
            np.testing.assert_allclose(share, p[i] * p[j] / (1 - p[i]), atol=0.03)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_choice(replace: bool, weighted: bool) -> None:
    a = axn.arange(AXES)
    p = axn.named(jnp.array([0.1, 0.2, 0.3, 0.4]), "embed") if weighted else None
    drawn = random.choice(KEY, {"draw": 2, "embed": 2}, a, "embed", replace=replace, p=p)
    assert drawn.shape == {"draw": 2, "embed": 2, "batch": 8, "pos": 3}
    weights = None if p is None else p.array
    wanted = jax.random.choice(KEY, a.array, (2, 2), replace=replace, p=weights, axis=2)
    assert_same(drawn, jnp.moveaxis(wanted, (2, 3), (0, 1)))


@pytest.mark.parametrize("independent", [True, False])
def test_permutation(independent: bool) -> None:
    a = axn.arange(AXES)
    drawn = random.permutation(KEY, a, "pos", independent=independent)
    assert drawn.axes == AXES
    assert_same(drawn, jax.random.permutation(KEY, a.array, 1, independent))
