"""Find the factors of operands and results: by the names of their axes, or by a string.

A string has a term for each operand and result, `"batch vocab, -> batch k"`; a blank term is a scalar. The words of a
term are matched with the axes of a named array by name and with the dimensions of a raw array by position. `...` stands
for all other dimensions, and `(row col)` for a dimension of several factors; `(pos: row col)` names this axis in a
named array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..axis import Names
from ..core import errors, parsing
from .rule import Dimension, Term


@dataclasses.dataclass(frozen=True, slots=True)
class NamedShape:
    """An operand or result: its names, if any, and its shape."""

    names: Names | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"of shape {self.shape}" if self.names is None else errors.describe_axes(self.names, self.shape)


@dataclasses.dataclass
class PartitioningTerms:
    """The terms of operands and results, and the sizes of their factors, gathered one array at a time."""

    what: str
    sizes: dict[str, int]
    operands: list[Term] = dataclasses.field(default_factory=list)
    results: list[Term] = dataclasses.field(default_factory=list)
    groups: dict[str, Dimension] = dataclasses.field(default_factory=dict)

    def record(self, factor: str, size: int, place: str) -> None:
        """Record a dimension that is one factor."""
        if self.sizes.setdefault(factor, size) != size:
            places = [("what came before", self.sizes[factor]), (place, size)]
            raise ValueError(errors.size_mismatch(self.what, factor, places))


def by_names(what: str, operands: Sequence[NamedShape], results: Sequence[NamedShape]) -> PartitioningTerms:
    """Return the terms by the names of axes alone; an axis without a name is a factor of its own."""
    terms = PartitioningTerms(what, {})
    for kind, arrays, into in (("operand", operands, terms.operands), ("result", results, terms.results)):
        for i, x in enumerate(arrays):
            term = []
            for position, size in enumerate(x.shape):
                name = f"{kind}{i}_{position}" if x.names is None else x.names[position]
                if kind == "operand":
                    terms.record(name, size, f"operand {i} {x}")
                # An axis that was resized is sharded independently.
                while terms.sizes.setdefault(name, size) != size:
                    name += "'"
                term.append((name,))
            into.append(tuple(term))
    return terms


def parse(what: str, text: str, sizes: Mapping[str, int]) -> parsing.Expression:
    """Parse the string of a rule, and check it and the sizes of factors as far as is possible without arrays."""
    expression = parsing.parse(what, text, comma="terms")
    for term in expression.lhs:
        if not term.ordered:
            expression.fail(term, "dimensions have an order, so they are written without braces.")
    known = words(expression)
    for name, size in sizes.items():
        if name not in known:
            listed = errors.quoted(known) or "none"
            raise TypeError(f"{what}: {name!r} is not among the axes of the rule, {listed}."
                            + errors.suggestion(name, known))  # fmt: skip
        if not isinstance(size, int):
            raise TypeError(f"{what}: {name}={size!r} should be the size of that axis, an integer.")
    return expression


def words(expression: parsing.Expression) -> list[str]:
    """Return all different words of an expression."""
    return list(dict.fromkeys(v.name for term in (*expression.lhs, *expression.rhs) for v in term.variables))


def by_string(
    expression: parsing.Expression,
    sizes: Mapping[str, int],
    operands: Sequence[NamedShape],
    results: Sequence[NamedShape],
) -> PartitioningTerms:
    """Return the terms that the string of a rule gives these operands and results."""
    what = expression.what
    terms = PartitioningTerms(what, dict(sizes))
    sides = (("operand", expression.lhs, operands, terms.operands), ("result", expression.rhs, results, terms.results))
    for kind, side, arrays, _ in sides:
        if len(side) != len(arrays):
            where = parsing.Place(side[0].start, max(side[-1].stop, side[0].start + 1))
            verb = "the call has" if kind == "operand" else "the function returns"
            expression.fail(where, f"{len(side)} {kind}{'s' * (len(side) != 1)} here, but {verb} {len(arrays)}.")
    groups: list[tuple[parsing.Group, int]] = []
    for kind, side, arrays, into in sides:
        for i, (term, x) in enumerate(zip(side, arrays, strict=True)):
            place = f"{kind} {i}"
            bound = (_bound_by_position if x.names is None else _bound_by_name)(expression, term, x, place)
            for (element, dimension), size in zip(bound, x.shape, strict=True):
                if isinstance(element, parsing.Group):
                    groups.append((element, size))
                    if element.name is not None:
                        name = element.name.name
                        if (known := terms.groups.setdefault(name, dimension)) != dimension:
                            expression.fail(element, f"{name!r} has the factors ({' '.join(known)}) before.")
                        if name in words(expression):
                            expression.fail(element, f"{name!r} is an axis here, and a factor elsewhere.")
                else:
                    terms.record(dimension[0], size, f"{place} {x}")
            into.append(tuple(dimension for _, dimension in bound))
    for group, size in groups:  # check the sizes of each, or compute the missing one
        members = [m.name for m in group.members]
        missing = [m for m in members if m not in terms.sizes]
        found = math.prod(terms.sizes[m] for m in members if m in terms.sizes)
        listed = ", ".join(f"{m}={terms.sizes.get(m, '?')}" for m in members)
        if len(missing) > 1:
            expression.fail(group, f"the sizes ({listed}) do not follow from {size}. Give them by keyword.")
        if size % found if missing else size != found:
            expression.fail(group, f"the sizes ({listed}) do not make up {size}.")
        if missing:
            terms.sizes[missing[0]] = size // found
    return terms


_Bound = list[tuple[parsing.Element, Dimension]]
"""For each dimension of an array, the element of the string that stands for it, and its factors."""


def _make_dimension(element: parsing.Element) -> Dimension:
    assert not isinstance(element, parsing.Dots)
    return (element.name,) if isinstance(element, parsing.Name) else tuple(m.name for m in element.members)


def _bound_by_position(expression: parsing.Expression, term: parsing.Term, x: NamedShape, place: str) -> _Bound:
    others = len(x.shape) - len(term.elements) + (term.dots is not None)
    if others < 0 or (others and term.dots is None):
        count = len(term.elements) - (term.dots is not None)
        at_least = "at least " if term.dots is not None else ""
        _fail_at_term(expression, term, f"{at_least}{count} dimension{'s' * (count != 1)} here, but {place} is {x}.")
    found = [
        [(e, (f"...{i}",)) for i in range(others)] if isinstance(e, parsing.Dots) else [(e, _make_dimension(e))]
        for e in term.elements
    ]
    return list(itertools.chain.from_iterable(found))


def _bound_by_name(expression: parsing.Expression, term: parsing.Term, x: NamedShape, place: str) -> _Bound:
    assert x.names is not None
    known: dict[str, parsing.Element] = {}
    for element in term.elements:
        if isinstance(element, parsing.Dots):
            continue
        if isinstance(element, parsing.Group) and element.name is None:
            expression.fail(element, f"{place} has names, so this group needs the name of its axis: `(name: a b)`.")
        name = element.name if isinstance(element, parsing.Name) else element.name.name  # pyright: ignore
        if name not in x.names:
            expression.fail(element, f"{place} {x} has no axis {name!r}.{errors.suggestion(name, x.names)}")
        known[name] = element
    others = [n for n in x.names if n not in known]
    if others and term.dots is None:
        listed = errors.quoted(others)
        _fail_at_term(expression, term, f"{place} {x} has {listed} as well. Name them, or add `...` for all others.")
    return [(known[n], _make_dimension(known[n])) if n in known else (term.dots or term, (n,)) for n in x.names]  # pyright: ignore


def _fail_at_term(expression: parsing.Expression, term: parsing.Term, message: str) -> NoReturn:
    """Raise an error that points at a term, even if it has no words."""
    expression.fail(parsing.Place(term.start, max(term.stop, term.start + 1)), message)
