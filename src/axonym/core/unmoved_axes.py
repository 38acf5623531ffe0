"""Say which axes of the results of a program are axes of its arguments, position for position.

Each dimension of a value has a set of labels: an axis of the arguments, and whether elements have moved along it. The
rules of `operation_rules` say what an operation does; one without a rule moves all elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from .operation_rules import Inside, inside, rule_of

Label = frozenset[tuple[str, bool]]
Labels = tuple[Label, ...]
_NONE: Label = frozenset()


def unmoved_axes(jaxpr: Any, given: Sequence[Sequence[str]]) -> list[tuple[str | None, ...]]:
    """Return the axis of the arguments that each dimension of the results of a program is, or None.

    Arguments:
        jaxpr: a program.
        given: the names of the axes of its arguments; an empty string for one that is not followed.
    """

    def only_axis(label: Label) -> str | None:
        unmoved = [n for n, moved in label if not moved]
        return unmoved[0] if len(unmoved) == 1 and (unmoved[0], True) not in label else None

    followed = [tuple(frozenset([(n, False)] if n else []) for n in names) for names in given]
    return [tuple(map(only_axis, labels)) for labels in _labels_of_results(jaxpr, followed)]


def _labels_of_results(jaxpr: Any, given: Sequence[Labels]) -> list[Labels]:
    known = dict(zip(jaxpr.invars, given, strict=True))

    def read(v: Any) -> Labels:
        return known[v] if not isinstance(v, Literal) and v in known else (_NONE,) * len(getattr(v.aval, "shape", ()))

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _labels_of_operation(eqn, [*map(read, eqn.invars)]), strict=True))
    return [*map(read, jaxpr.outvars)]


def _labels_of_operation(eqn: Any, xs: Sequence[Labels]) -> Sequence[Labels]:
    if (rule := rule_of(eqn)) is None:
        bodies = [f for f in inside(eqn) if f.how != "test"]
        if not bodies or bodies[0].how == "device":
            every = _label_when_moved(label for x in xs for label in x)
            return [(every,) * len(v.aval.shape) for v in eqn.outvars]
        return [_labels_of_either(*several) for several in zip(*(_labels_of_body(f, xs) for f in bodies), strict=True)]
    found: dict[int, Label] = defaultdict(frozenset)
    for x, term in zip(xs, rule.operands, strict=True):
        for label, dim in zip(x, term, strict=True):
            for f in dim:
                found[f] |= label if len(dim) == 1 else _label_when_moved([label])
    # Running totals stay at their places, and what is summed is gone; other uses bring elements to other places.
    moved = _label_when_moved(found[f] for f in rule.needed if rule.uses[f] != "scan")

    def label_of(dim: Sequence[int]) -> Label:
        return moved | (found[dim[0]] if len(dim) == 1 else _label_when_moved(found[f] for f in dim))

    return [tuple(map(label_of, term)) for term in rule.results]


def _labels_of_body(f: Inside, xs: Sequence[Labels]) -> list[Labels]:
    """Follow the axes through a function, until what a loop carries changes no more."""
    last, carried = len(f.operands) - f.sliced, slice(f.first, f.first + f.carried)
    given = [xs[i] for i in f.operands]
    along = _NONE.union(*(x[0] for x in given[last:]))
    given[last:] = [x[1:] for x in given[last:]]
    while (results := _labels_of_results(f.jaxpr, given)) and f.how == "loop":
        carry = [_labels_of_either(*pair) for pair in zip(given[carried], results[: f.carried], strict=True)]
        if carry == given[carried]:
            return [*carry, *((along, *x) for x in results[f.carried :])]
        given[carried] = carry
    return results


def _labels_of_either(*several: Labels) -> Labels:
    """Return the labels of a value that is one of several."""
    return tuple([_NONE.union(*labels) for labels in zip(*several, strict=True)])


def _label_when_moved(labels: Iterable[Label]) -> Label:
    """Return the axes of several labels, along which elements have moved."""
    return frozenset((n, True) for n, _ in _NONE.union(*labels))
