"""What operations declare of their axes is what their primitives do: declared = derived.

An operation that is `by_index` says that it treats every index of every axis by itself. The rules of the primitives
that it consists of say the same, and the other way round; the exceptions are data, each with its reason.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import axonym as axn
from axonym.core.operation_rules import inside, rule_of
from axonym.distribution.operation_scope import ScopedOperation, operations_in
from axonym.ops._kernels import BY_INDEX
from tests.ops.test_operations import CASES

_CONSTANT = "of some dtypes the result is a constant, which has no sharding of its operand"
NOT_DECLARED = {
    **dict.fromkeys(("imag", "iscomplex", "isreal"), _CONSTANT),
    **dict.fromkeys(("isfinite", "isinf", "isneginf", "isposinf", "signbit"), _CONSTANT),
    "broadcast_arrays": "it has several results, of which some have axes that an operand lacks",
}
"""The operations that treat every index by itself, and do not declare it, and why."""


def _equations(jaxpr: Any, scopes: str = "") -> Iterator[tuple[ScopedOperation, Any]]:
    """Yield the equations of a program that call no functions, each with the operation that it belongs to."""
    for eqn in jaxpr.eqns:
        here = f"{scopes}/{eqn.source_info.name_stack}"
        bodies = inside(eqn)
        for body in bodies:
            yield from _equations(body.jaxpr, here)
        if not bodies and (operations := operations_in(here)):
            yield operations[-1], eqn


def _keeps_axes(operation: ScopedOperation) -> bool:
    """Return whether all results have all axes of the operands, and no others."""
    before = {a.name for term in operation.operands for a in term}
    return all({a.name for a in term} == before for term in operation.results)


def _passes(eqn: Any) -> bool:
    """Return whether an equation treats every index of every axis by itself, and joins no axes."""
    rule = rule_of(eqn)
    return rule is not None and not rule.uses and all(len(d) < 2 for t in (*rule.operands, *rule.results) for d in t)


@pytest.mark.oldest
def test_operations_by_index_consist_of_primitives_by_index() -> None:
    derived: dict[str, bool] = collections.defaultdict(lambda: True)
    for case in CASES:
        if case.jit:
            operands = [axn.named(np.asarray(o.draw(np.random.default_rng(0))), o.names) for o in case.operands]
            program = jax.make_jaxpr(lambda *xs, case=case: jax.tree.leaves(case.call(*xs)))(*operands)
            for operation, eqn in _equations(program.jaxpr):
                derived[operation.name] &= _passes(eqn) and _keeps_axes(operation)
    by_index = {name for name, passes in derived.items() if passes}
    assert not (BY_INDEX & derived.keys()) - by_index, "they declare more than their primitives do"
    assert by_index - BY_INDEX == NOT_DECLARED.keys()
    assert len(BY_INDEX & derived.keys()) > 70
