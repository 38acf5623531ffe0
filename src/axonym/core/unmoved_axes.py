"""Say which axes of the results of a program are axes of its arguments, position for position.

Each dimension of a value has the name of such an axis, an empty string if it is none, or None where elements have moved
along one. The rules of `operation_rules` say what an operation does; one without a rule moves everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from .operation_rules import Inside, inside, rule_of

Labels = tuple[str | None, ...]


def unmoved_axes(jaxpr: Any, given: Sequence[Labels]) -> list[Labels]:
    """Return the labels of the results of a program, from those of its arguments."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def read(v: Any) -> Labels:
        return known[v] if not isinstance(v, Literal) and v in known else ("",) * len(getattr(v.aval, "shape", ()))

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, [*map(read, eqn.invars)]), strict=True))
    return [*map(read, jaxpr.outvars)]


def _results(eqn: Any, xs: Sequence[Labels]) -> Sequence[Labels]:
    if (rule := rule_of(eqn)) is None:
        bodies = [f for f in inside(eqn) if f.how != "test"]
        if not bodies or bodies[0].how == "device":
            return [(None,) * len(v.aval.shape) for v in eqn.outvars]
        every = [_results_of_body(f, xs) for f in bodies]
        return [tuple(map(_met, *several)) for several in zip(*every, strict=True)]
    found = dict[int, str | None]()
    for x, term in zip(xs, rule.operands, strict=True):
        for label, dim in zip(x, term, strict=True):
            for f in dim:
                found[f] = _met(found.get(f, ""), label if len(dim) == 1 or not label else None)
    # Running totals stay at their places, and what is summed is gone; other uses bring elements to other places.
    moved = {f for f in rule.needed if found.get(f, "") != "" and rule.uses[f] != "scan"}

    def label_of(dim: Sequence[int]) -> str | None:
        labels = {None if f in moved or (moved and not found.get(f)) else found.get(f, "") for f in dim}
        return labels.pop() if len(dim) == 1 else None if labels - {""} else ""

    return [tuple(map(label_of, term)) for term in rule.results]


def _results_of_body(f: Inside, xs: Sequence[Labels]) -> list[Labels]:
    """Follow the axes through a function, until what a loop carries changes no more."""
    last, carried = len(f.operands) - f.sliced, slice(f.first, f.first + f.carried)
    given = [xs[i] for i in f.operands]
    along = _met("", *[x[0] for x in given[last:]])
    given[last:] = [x[1:] for x in given[last:]]
    while (results := unmoved_axes(f.jaxpr, given)) and f.how == "loop":
        carry = [tuple(map(_met, *pair)) for pair in zip(given[carried], results[: f.carried], strict=True)]
        if carry == given[carried]:
            return [*carry, *((along, *x) for x in results[f.carried :])]
        given[carried] = carry
    return results


def _met(*labels: str | None) -> str | None:
    """Return the label of elements that are made of several."""
    found = {x for x in labels if x != ""}
    return "" if not found else found.pop() if len(found) == 1 else None
