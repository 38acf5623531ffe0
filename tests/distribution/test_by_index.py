"""What operations declare of their axes is what their primitives do: declared = derived.

The rule of an operation, an `AxisRule`, says what it does along its axes. The rules of the primitives that it consists
of say the same; if they treat every index by itself, the rule says so. The exceptions are data, each with its reason.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import axonym as axn
from axonym.core.operation_rules import inside, rule_of
from axonym.distribution.axis_rules import INFERRED
from axonym.distribution.operation_scope import ScopedOperation, operations_in
from tests.ops.test_operations import CASES

_CONSTANT = "of some dtypes the result is a constant, which has no sharding of its operand"
NOT_DECLARED = {
    **dict.fromkeys(("imag", "iscomplex", "isreal"), _CONSTANT),
    **dict.fromkeys(("isfinite", "isinf", "isneginf", "isposinf", "signbit"), _CONSTANT),
    "at[...].set": "it is only if a mask has all axes, and no index is looked up",
    "where": "a constant condition chooses one operand, and devices need not gather the other one",
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


def _operations() -> Iterator[tuple[ScopedOperation, Any]]:
    """Yield the equations of all cases, each with its operation."""
    for case in CASES:
        if case.jit:
            operands = [axn.named(np.asarray(o.draw(np.random.default_rng(0))), o.names) for o in case.operands]
            program = jax.make_jaxpr(lambda *xs, case=case: jax.tree.leaves(case.call(*xs)))(*operands)
            yield from _equations(program.jaxpr)


def test_operations_consist_of_primitives_that_do_what_they_declare() -> None:
    passing: dict[ScopedOperation, bool] = collections.defaultdict(lambda: True)
    uses: dict[ScopedOperation, set[str]] = collections.defaultdict(set)
    for operation, eqn in _operations():
        passing[operation] &= _passes(eqn) and _keeps_axes(operation)
        uses[operation] |= set(rule.uses.values()) if (rule := rule_of(eqn)) else {"unknown"}
    more = {op.name for op, passes in passing.items() if op.rule.by_index and not passes}
    assert not more, "they declare more than their primitives do"
    assert {op.name for op, passes in passing.items() if passes and not op.rule.by_index} == NOT_DECLARED.keys()
    assert len({op.name for op in passing if op.rule.by_index}) > 70
    words = {"sort": "index of", "near": "turned"}  # those of primitives, which say less
    inferred = {op: {words.get(use, use) for use in found} for op, found in uses.items() if op.rule.native}
    assert {op.name: found for op, found in inferred.items() if not found <= INFERRED} == {}
    assert len({op.name for op in inferred}) > 100
