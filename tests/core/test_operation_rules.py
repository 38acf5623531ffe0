"""What the table of rules says of primitives; `tests/distribution/test_on_shards.py` compares it with values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from axonym.core.operation_rules import PRIMITIVES, OperationRule, equations, rule_of
from tests.distribution.test_on_shards import CASES


def rule(fn: Any, *shapes: tuple[int, ...]) -> OperationRule:
    eqn = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).eqns[0]
    found = rule_of(eqn)
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_factors_make_up_all_dimensions(name: str) -> None:
    """Of each primitive: the sizes of its factors multiply to that of a dimension, and uses are of factors."""
    case = CASES[name]
    program = jax.make_jaxpr(case.fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in case.shapes))
    for eqn in equations(program.jaxpr):
        if (found := rule_of(eqn)) is None:
            assert eqn.primitive.name not in PRIMITIVES
            continue
        for terms, variables in ((found.operands, eqn.invars), (found.results, eqn.outvars)):
            for term, v in zip(terms, variables, strict=True):
                assert tuple(math.prod(found.sizes[f] for f in own) for own in term) == v.aval.shape, eqn
        assert {*found.uses} <= {*range(len(found.sizes))}


def test_an_unknown_primitive_has_no_rule() -> None:
    back = jax.make_jaxpr(lambda x: jax.pure_callback(np.sin, x, x))(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert rule_of(back.eqns[0]) is None


def test_uses() -> None:
    assert rule(lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0)]), (2, 3)).needed == {1}
    assert rule(lambda x: lax.reduce_sum(x, (1,)), (2, 3)).summed == {1: "sum"}
    assert rule(lambda x: lax.reduce_window(x, 0.0, lax.add, (1,), (1,), [(1, -1)]), (4,)).needed == {0}
    assert rule(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (2, 3, 3)).needed == {1, 2}
