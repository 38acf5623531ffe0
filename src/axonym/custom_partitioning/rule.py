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

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from ..core import errors
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
