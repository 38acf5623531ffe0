"""The partitioning rule of an operation: the axes that may be sharded, and what the operation does with them.

A *factor* is what can be sharded: an axis, or one factor of a compound axis `(row col)`. The rule has the factors of
each dimension of each operand and result, and which of them are reduced, replicated or permuted. Shardy, XLA's
partitioner, calls this a sharding rule, and `for_shardy` makes one. Where Shardy does not decide, `derived_shardings`
infers the sharding of an operation from its operands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from ..axis import Names
from ..core import errors, parsing
from ..distribution.active_settings import Entry
from ..distribution.mesh_axes import mesh_axes, spec_of
from ..manual._axis_environment import ArgumentAxis, Axes, AxisEnvironment, interned

Dimension = tuple[str, ...]
"""The factors of a dimension, major to minor."""
Term = tuple[Dimension, ...]
"""The dimensions of an operand or result."""
Shardings = Mapping[str, Axes]
"""The mesh axes that each factor is sharded over; a replicated factor is left out."""

REPLICATED: Shardings = MappingProxyType({})

Infer = Callable[[Shardings, tuple[PartitionSpec, ...], Mapping[str, int]], Mapping[str, Entry]]
"""From the derived mesh axes of each axis, the partition specs of the operands, and the sizes of mesh axes, to the mesh
axes of each axis."""


@dataclasses.dataclass(frozen=True)
class PartitioningRule:
    """The rule that says how the axes of an operation's operands and results may be sharded.

    >>> from axonym.custom_partitioning import PartitioningRule
    >>> batch, vocab, k = ("batch",), ("vocab",), ("k",)
    >>> print(PartitioningRule(((batch, vocab), ()), ((batch, k),), {"batch": 8, "vocab": 6, "k": 2}, replicated={"k"}))
    batch vocab, -> batch k
    passed through: batch=8
    reduced: vocab=6
    replicated: k=2
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    sizes: Mapping[str, int]
    """The sizes of all factors."""
    replicated: frozenset[str] | set[str] = frozenset()
    """Factors that must be replicated: Shardy's need-replication factors."""
    permuted: frozenset[str] | set[str] = frozenset()
    """Factors whose shards devices exchange: Shardy's permutation factors."""
    groups: Mapping[str, Dimension] = dataclasses.field(default_factory=dict)
    """Axes of several factors, by name."""

    @functools.cached_property
    def reduced(self) -> frozenset[str]:
        """Return the factors that only operands have and that may be sharded: Shardy's reduction factors."""
        return frozenset(_factors_of(self.operands)) - set(_factors_of(self.results)) - self.replicated - self.permuted

    def __str__(self) -> str:
        """Show the rule in the notation of its string, and its factors by kind."""
        written = [
            [" ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in term) for term in side]
            for side in (self.operands, self.results)
        ]
        operands, results = (", ".join(terms).strip() for terms in written)
        lines = [f"{operands} -> {results}".strip()]
        special = self.reduced | self.replicated | self.permuted
        kinds = {
            "passed through": set(self.sizes) - special,
            "reduced": self.reduced,
            "replicated": self.replicated,
            "permuted": self.permuted,
        }
        for kind, factors in kinds.items():
            if factors:
                lines.append(f"{kind}: {', '.join(f'{f}={s}' for f, s in self.sizes.items() if f in factors)}")
        return "\n".join(lines)


# --- the machinery behind an operation ---


def for_shardy(rule: PartitioningRule) -> SdyShardingRule:
    """Return a rule as Shardy takes it. Factors are numbered, since names can be anything."""
    number = {factor: f"f{i}" for i, factor in enumerate(rule.sizes)}

    def dimension(factors: Dimension) -> str | CompoundFactor:
        return number[factors[0]] if len(factors) == 1 else CompoundFactor(*(number[f] for f in factors))

    def several(terms: tuple[Term, ...]) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(dimension, term)) for term in terms)

    alone = {d[0] for term in (*rule.operands, *rule.results) for d in term if len(d) == 1}
    return SdyShardingRule(
        several(rule.operands),
        several(rule.results),
        reduction_factors=tuple(n for f, n in number.items() if f in rule.reduced),
        need_replication_factors=tuple(n for f, n in number.items() if f in rule.replicated),
        permutation_factors=tuple(n for f, n in number.items() if f in rule.permuted),
        **{n: rule.sizes[f] for f, n in number.items() if f not in alone},
    )


def derived_shardings(
    rule: PartitioningRule, mesh: Mapping[str, int], found: Sequence[tuple[Term, Sequence[Entry]]]
) -> Shardings:
    """Return the sharding of each factor, given the terms of arrays and the entries of their partition specs.

    At most one factor is sharded over a mesh axis, and each factor has one sharding. Where arrays disagree, the first
    one decides. A factor is replicated if it must be, or if the mesh axes do not divide it.
    """
    chosen: dict[str, Axes] = {}
    taken: set[str] = set()
    for term, entries in found:
        for dimension, entry in zip(term, entries, strict=True):
            # The factors of a dimension, major to minor, take its mesh axes in turn, so that shards stay contiguous.
            left = list(mesh_axes(entry))
            for factor in dimension:
                if factor in rule.replicated:
                    break
                if factor not in chosen:
                    axes: Axes = ()
                    while left and left[0] not in taken and _divides_factor(rule, factor, (*axes, left[0]), mesh):
                        axes = (*axes, left.pop(0))
                    if axes:
                        chosen[factor] = axes
                        taken.update(axes)
                left = [a for a in left if a not in chosen.get(factor, ())]
                if not _used_up(rule, factor, chosen, mesh):
                    break
    return _contiguous_shardings(rule, chosen, mesh)


def _divides_factor(rule: PartitioningRule, factor: str, axes: Axes, mesh: Mapping[str, int]) -> bool:
    return rule.sizes[factor] % math.prod(mesh[a] for a in axes) == 0


def _used_up(rule: PartitioningRule, factor: str, chosen: Shardings, mesh: Mapping[str, int]) -> bool:
    """Return whether a factor is sharded into single elements, so that the next one in its dimension can be sharded."""
    return math.prod(mesh[a] for a in chosen.get(factor, ())) == rule.sizes[factor]


def _contiguous_shardings(rule: PartitioningRule, chosen: dict[str, Axes], mesh: Mapping[str, int]) -> Shardings:
    """Drop the shardings for which the shard of a device would not be contiguous in a dimension.

    A factor that can be sharded where it is alone in a dimension may not be if it follows another one.
    """
    for term in (*rule.operands, *rule.results):
        for dimension in term:
            for major, minor in itertools.pairwise(dimension):
                if minor in chosen and not _used_up(rule, major, chosen, mesh):
                    # From the start: without this sharding, others that relied on it may not be contiguous any more.
                    return _contiguous_shardings(rule, {f: a for f, a in chosen.items() if f != minor}, mesh)
    return chosen


def inferred_shardings(
    what: str,
    rule: PartitioningRule,
    mesh: Mapping[str, int],
    infer: Infer | None,
    derived: Shardings,
    operands: Sequence[Sequence[Entry]],
) -> Shardings:
    """Return the sharding of each factor by the author's own function, after checking that it is possible.

    Without a function this is `derived`. The operands are the entries of their partition specs.
    """
    if infer is None:
        return derived
    said = infer(dict(derived), tuple([PartitionSpec(*entries) for entries in operands]), dict(mesh))
    chosen = {factor: mesh_axes(entry) for factor, entry in said.items() if mesh_axes(entry)}
    what = f"{what}, inferred sharding"
    taken = [a for axes in chosen.values() for a in axes]
    for factor, axes in chosen.items():
        if factor not in rule.sizes:
            raise ValueError(f"{what}: there is no axis {factor!r}.{errors.suggestion(factor, rule.sizes)}")
        if unknown := [a for a in axes if a not in mesh]:
            raise ValueError(
                f"{what}: axis {factor!r} goes to mesh axis {unknown[0]!r}, which the mesh does not have."
                + errors.suggestion(unknown[0], mesh)
            )
        if twice := [a for a in axes if taken.count(a) > 1]:
            raise ValueError(f"{what}: mesh axis {twice[0]!r} can shard one axis, and is to shard several.")
        if factor in rule.replicated:
            raise ValueError(
                f"{what}: axis {factor!r} must be replicated. One that only operands have can be sharded if it is "
                "listed in `reduced`."
            )
        if not _divides_factor(rule, factor, axes, mesh):
            over = errors.describe_shape({a: mesh[a] for a in axes})
            raise ValueError(f"{what}: axis {factor!r} of size {rule.sizes[factor]} cannot be sharded over {over}.")
    return _contiguous_shardings(rule, chosen, mesh)


def spec_of_term(term: Term, shardings: Shardings) -> PartitionSpec:
    """Return the partition spec of an operand or result."""
    return spec_of(tuple(a for f in dimension for a in shardings.get(f, ())) for dimension in term)


def local_shape(rule: PartitioningRule, term: Term, shardings: Shardings, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a shard of an operand or result."""
    return tuple(
        math.prod(rule.sizes[f] // math.prod(mesh[a] for a in shardings.get(f, ())) for f in dimension)
        for dimension in term
    )


def environment_of(
    rule: PartitioningRule, shardings: Shardings, mesh: Mapping[str, int], checked: bool = False
) -> AxisEnvironment:
    """Return the axis environment in which collectives take factors."""
    parts = []
    for name, dimension in {**{f: (f,) for f in rule.sizes}, **rule.groups}.items():
        axes = tuple(a for f in dimension for a in shardings.get(f, ()))
        size = math.prod(rule.sizes[f] for f in dimension)
        parts.append(ArgumentAxis(name, size, size // math.prod(mesh[a] for a in axes), axes))
    return interned(frozenset(parts), checked, any_sharding=True)


def batched_rule(rule: PartitioningRule, name: str, size: int, batched: Sequence[bool]) -> PartitioningRule:
    """Add a dimension in front of some operands and of all results."""
    operands = tuple(((name,), *t) if is_batched else t for t, is_batched in zip(rule.operands, batched, strict=True))
    results = tuple(((name,), *t) for t in rule.results)
    return dataclasses.replace(rule, operands=operands, results=results, sizes={name: size, **rule.sizes})


def make_rule(
    what: str,
    operands: Sequence[Term],
    results: Sequence[Term],
    sizes: Mapping[str, int],
    reduced: Sequence[str],
    replicated: Sequence[str],
    permuted: Sequence[str],
    groups: Mapping[str, Dimension],
) -> PartitioningRule:
    """Check what the author lists, and make the rule: a factor that is neither listed nor passed through is replicated.

    The arguments are as for `PartitioningRule`, but `replicated` are only factors that operands and results have.
    """
    into, out = set(_factors_of(operands)), set(_factors_of(results))
    known = list(dict.fromkeys((*_factors_of(operands), *_factors_of(results))))
    for option, factors in (("reduced", reduced), ("replicated", replicated), ("permuted", permuted)):
        if missing := [f for f in factors if f not in known]:
            raise ValueError(
                f"{what}: `{option}` has {errors.quoted(missing)}, but the axes of operands and results are "
                f"{errors.describe_axes(known, [sizes[f] for f in known])}.{errors.suggestions(missing, known)}"
            )
    if kept := [f for f in reduced if f in out]:
        listed = errors.quoted(kept)
        raise ValueError(
            f"{what}: `reduced` has {listed}, which the results have too. An axis that is passed through may be "
            "sharded without being listed."
        )
    must = set(replicated) | ((into ^ out) - set(reduced) - set(permuted))
    ordered = {f: sizes[f] for f in known}
    return PartitioningRule(
        tuple(operands), tuple(results), ordered, frozenset(must), frozenset(permuted), dict(groups)
    )


def _factors_of(terms: Sequence[Term]) -> list[str]:
    return [f for term in terms for dimension in term for f in dimension]


# --- the factors of operands and results: by the names of their axes, or by a string ---
#
# A string has a term for each operand and result, `"batch vocab, -> batch k"`; a blank term is a scalar. The words of a
# term are matched with the axes of a named array by name and with the dimensions of a raw array by position. `...`
# stands for all other dimensions, and `(row col)` for a dimension of several factors; `(pos: row col)` names this axis
# in a named array.


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
