"""Marks say the names of operands and results in a program that is traced for them, and change nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

import axonym as axn
from axonym.distribution.axis_marks import MARK, marking


def marks(jaxpr: Jaxpr) -> list[tuple[str | None, ...]]:
    return [eqn.params["names"] for eqn in jaxpr.eqns if eqn.primitive.name == MARK]


def product(x: Any, w: Any) -> jax.Array:
    return axn.dot(axn.named(x, ("batch", "embed")).rename({"batch": "rows"}), w, axis="embed").array


X, W = jnp.arange(6.0).reshape(2, 3), axn.named(jnp.arange(12.0).reshape(3, 4), ("embed", "mlp"))
OWN = [("rows", "embed"), ("embed", "mlp"), ("rows", "mlp")]


def test_operands_and_results_have_marks() -> None:
    with marking():
        assert marks(jax.make_jaxpr(product)(X, W).jaxpr) == OWN
    assert marks(jax.make_jaxpr(product)(X, W).jaxpr) == []


def test_derivatives_have_marks() -> None:
    with marking():
        found = marks(jax.make_jaxpr(jax.grad(lambda x: product(x, W).sum()))(X).jaxpr)
        transposed = jax.linear_transpose(lambda x: product(x, W), X)
        assert marks(jax.make_jaxpr(transposed)(jnp.ones((2, 4))).jaxpr)[-1] == OWN[0]
    assert found[:3] == OWN and found[3:] == [OWN[2], OWN[0]]


def test_vmap_adds_an_axis_without_a_name() -> None:
    with marking():
        found = marks(jax.make_jaxpr(jax.vmap(product, (1, None), 2))(jnp.ones((2, 5, 3)), W).jaxpr)
    assert [names.index(None) if None in names else None for names in found[:2]] == [1, None]
    assert [tuple(n for n in names if n is not None) for names in found] == OWN


def test_marks_change_no_result() -> None:
    with marking():
        marked = jax.jit(jax.value_and_grad(lambda x: product(x, W).sum()))(X)
    for a, b in zip(marked, jax.value_and_grad(lambda x: product(x, W).sum())(X), strict=True):
        np.testing.assert_array_equal(a, b)
