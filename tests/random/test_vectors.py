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
from tests.random.samplers import (
    AXES,
    KEY,
    MAPPING,
    Batch,
    Pos,
    assert_same,
    entries,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# --- vectors ---


Space = axn.Axis("space", 5)
VECTORS: dict[str, tuple[Callable[..., axn.NamedArray], Callable[..., jax.Array], tuple[tuple[axn.Axis, ...], ...]]] = {
    "ball": (
        lambda key: random.ball(key, AXES, Space, 1.0),
        lambda key: jax.random.ball(key, 5, 1.0, (8, 3, 4)),
        (),
    ),
    "dirichlet": (
        lambda key, alpha: random.dirichlet(key, AXES, alpha, "space"),
        lambda key, alpha: jax.random.dirichlet(key, alpha, (8, 3, 4)),
        ((*AXES, Space),),
    ),
    "multinomial": (
        lambda key, n, p: random.multinomial(key, AXES, n, p, "space"),
        lambda key, n, p: jax.random.multinomial(key, n, p, dtype=float),
        (AXES, (*AXES, Space)),
    ),
    "multivariate_normal": (
        lambda key, mean, cov: random.multivariate_normal(key, AXES, mean, cov, "space", method="svd"),
        lambda key, mean, cov: jax.random.multivariate_normal(key, mean, cov, (8, 3, 4), method="svd"),
        ((*AXES, Space), (*AXES, Space, Space.alias("column"))),
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


def test_multivariate_normal() -> None:
    factor = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
    covariance = jnp.asarray(factor @ factor.transpose(0, 2, 1) + np.eye(3, dtype=np.float32))
    mean = axn.named(jnp.arange(24.0).reshape(3, 8), ("space", "batch"))
    cov = axn.named(covariance.transpose(1, 2, 0), ("space", "column", "embed"))
    drawn = random.multivariate_normal(KEY, AXES, mean, cov, "space", method="eigh")
    assert drawn.axes == (*AXES, axn.Axis("space", 3))
    by_position = jnp.broadcast_to(mean.array.T[:, None, None], (8, 3, 4, 3)), covariance
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.random.multivariate_normal(KEY, *by_position, (8, 3, 4), method="eigh")
    assert_same(drawn, wanted, rtol=1e-4)


def test_orthogonal() -> None:
    Row, Col = axn.make_axes(row=3, col=2)
    drawn = random.orthogonal(KEY, Batch, Row, Col)
    assert drawn.axes == (Batch, Row, Col)
    assert_same(drawn, jax.random.orthogonal(KEY, 3, (8,), m=2))
    assert random.orthogonal(KEY, (), Col, Row).axes == (Col, Row)


# --- selections ---


def test_categorical() -> None:
    Vocab = axn.Axis("vocab", 16)
    logits = random.normal(KEY, (Vocab, Batch))
    by_position = logits.array.T
    assert jax.eval_shape(lambda key: random.categorical(key, logits, "vocab"), KEY).axes == (Batch,)
    shape = {"draw": 5, "batch": 8}
    wanted = jax.random.categorical(KEY, by_position, shape=(5, 8))
    assert_same(random.categorical(KEY, logits, Vocab, shape), wanted)
    assert_same(random.categorical(KEY, logits.rearrange((Batch, Vocab)), "vocab", shape), wanted)
    other = random.categorical(KEY, logits, "vocab", {"batch": 8, "draw": 5})
    assert other.shape == {"batch": 8, "draw": 5}
    spread = jnp.broadcast_to(by_position[:, None], (8, 5, 16))
    assert_same(other, jax.random.categorical(KEY, spread))


def test_categorical_without_replacement() -> None:
    logits = random.normal(KEY, {"vocab": 6, "batch": 2})
    drawn = random.categorical(KEY, logits, "vocab", {"batch": 2, "draw": 6}, replace=False)
    wanted = jax.random.categorical(KEY, logits.array.T, shape=(6, 2), replace=False)
    assert_same(drawn.rearrange(("draw", "batch")), wanted)
    assert np.sort(np.asarray(drawn.array), axis=1).tolist() == [list(range(6))] * 2


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
