"""The partitioning rule of an operation: the axes that may be sharded, and what the operation does with them.

A *factor* is what can be sharded: an axis, or one factor of a compound axis `(row col)`. The rule has the factors of
each dimension of each operand and result, and which of them are reduced, replicated or permuted. Shardy, XLA's
partitioner, calls this a sharding rule, and `PartitioningRule.for_shardy` makes one. Where Shardy does not decide,
`PartitioningRule.shardings` infers the sharding of an operation from its operands.
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

from .. import _errors
from .._context import Entry
from .._mesh_axes import mesh_axes, spec_of
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
        return frozenset(_factors(self.operands)) - set(_factors(self.results)) - self.replicated - self.permuted

    def __str__(self) -> str:
        """Show the rule in the notation of its string, and its factors by kind."""
        operands, results = (", ".join(map(_written, side)).strip() for side in (self.operands, self.results))
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

    def for_shardy(self) -> SdyShardingRule:
        """Return the rule as Shardy takes it. Factors are numbered, since names can be anything.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",), ("col",)),), ((("row",),),), {"row": 4, "col": 2})
        >>> print(rule.for_shardy())
        SdyShardingRule((('f0', 'f1'),), (('f0',),), {} reduction_factors=('f1',))
        """
        number = {factor: f"f{i}" for i, factor in enumerate(self.sizes)}

        def dimension(factors: Dimension) -> str | CompoundFactor:
            return number[factors[0]] if len(factors) == 1 else CompoundFactor(*(number[f] for f in factors))

        def several(terms: tuple[Term, ...]) -> tuple[ArrayMapping, ...]:
            return tuple(ArrayMapping(*map(dimension, term)) for term in terms)

        alone = {d[0] for term in (*self.operands, *self.results) for d in term if len(d) == 1}
        return SdyShardingRule(
            several(self.operands),
            several(self.results),
            reduction_factors=tuple(n for f, n in number.items() if f in self.reduced),
            need_replication_factors=tuple(n for f, n in number.items() if f in self.replicated),
            permutation_factors=tuple(n for f, n in number.items() if f in self.permuted),
            **{n: self.sizes[f] for f, n in number.items() if f not in alone},
        )

    def shardings(self, mesh: Mapping[str, int], found: Sequence[tuple[Term, Sequence[Entry]]]) -> Shardings:
        """Return the sharding of each factor, given the shardings of arrays.

        At most one factor is sharded over a mesh axis, and each factor has one sharding. Where arrays disagree, the
        first one decides. A factor is replicated if it must be, or if the mesh axes do not divide it.

        Arguments:
            mesh: the sizes of mesh axes.
            found: terms of arrays, with the entries of their partition specs.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",), ("col",)),), ((("row",),),), {"row": 4, "col": 3})
        >>> rule.shardings({"data": 2, "model": 2}, [(rule.operands[0], ("data", "model"))])
        {'row': ('data',)}
        """
        chosen: dict[str, Axes] = {}
        taken: set[str] = set()
        for term, entries in found:
            for dimension, entry in zip(term, entries, strict=True):
                left = list(mesh_axes(entry))
                for factor in dimension:
                    if factor in self.replicated:
                        break
                    if factor not in chosen:
                        axes: Axes = ()
                        while left and left[0] not in taken and self._divides(factor, (*axes, left[0]), mesh):
                            axes = (*axes, left.pop(0))
                        if axes:
                            chosen[factor] = axes
                            taken.update(axes)
                    left = [a for a in left if a not in chosen.get(factor, ())]
                    if not self._used_up(factor, chosen, mesh):
                        break
        return self._contiguous(chosen, mesh)

    def _divides(self, factor: str, axes: Axes, mesh: Mapping[str, int]) -> bool:
        return self.sizes[factor] % math.prod(mesh[a] for a in axes) == 0

    def _used_up(self, factor: str, chosen: Shardings, mesh: Mapping[str, int]) -> bool:
        """Return whether a factor is sharded into single elements, so that the next one of its dimension can be."""
        return math.prod(mesh[a] for a in chosen.get(factor, ())) == self.sizes[factor]

    def _contiguous(self, chosen: dict[str, Axes], mesh: Mapping[str, int]) -> Shardings:
        """Return the shardings without those by which the shard of a device would not be contiguous in a dimension.

        A factor that can be sharded where it is alone in a dimension may not be where it follows another one.
        """
        for term in (*self.operands, *self.results):
            for dimension in term:
                for major, minor in itertools.pairwise(dimension):
                    if minor in chosen and not self._used_up(major, chosen, mesh):
                        return self._contiguous({f: a for f, a in chosen.items() if f != minor}, mesh)
        return chosen

    def inferred(
        self,
        what: str,
        mesh: Mapping[str, int],
        infer: Infer | None,
        derived: Shardings,
        operands: Sequence[Sequence[Entry]],
    ) -> Shardings:
        """Return the sharding of each factor by the author's own function, after checking that it is possible.

        Arguments:
            what: the operation, for messages.
            mesh: the sizes of mesh axes.
            infer: the author's function; None to return `derived`.
            derived: the sharding that follows from the rule.
            operands: the entries of the partition specs of the operands.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",), ("col",)),), ((("row",),),), {"row": 4, "col": 3})
        >>> rule.inferred("op", {"data": 2}, lambda derived, operands, mesh: {"row": "data"}, {}, [(None, None)])
        {'row': ('data',)}
        """
        if infer is None:
            return derived
        said = infer(dict(derived), tuple([PartitionSpec(*entries) for entries in operands]), dict(mesh))
        chosen = {factor: mesh_axes(entry) for factor, entry in said.items() if mesh_axes(entry)}
        what = f"{what}, inferred sharding"
        taken = [a for axes in chosen.values() for a in axes]
        for factor, axes in chosen.items():
            if factor not in self.sizes:
                raise ValueError(f"{what}: there is no axis {factor!r}.{_errors.suggestion(factor, self.sizes)}")
            if unknown := [a for a in axes if a not in mesh]:
                raise ValueError(
                    f"{what}: axis {factor!r} goes to mesh axis {unknown[0]!r}, which the mesh does not have."
                    + _errors.suggestion(unknown[0], mesh)
                )
            if twice := [a for a in axes if taken.count(a) > 1]:
                raise ValueError(f"{what}: mesh axis {twice[0]!r} can shard one axis, and is to shard several.")
            if factor in self.replicated:
                raise ValueError(
                    f"{what}: axis {factor!r} must be replicated. One that only operands have can be sharded if it is "
                    "listed in `reduced`."
                )
            if not self._divides(factor, axes, mesh):
                over = _errors.describe_shape({a: mesh[a] for a in axes})
                raise ValueError(f"{what}: axis {factor!r} of size {self.sizes[factor]} cannot be sharded over {over}.")
        return self._contiguous(chosen, mesh)

    def spec(self, term: Term, shardings: Shardings) -> PartitionSpec:
        """Return the partition spec of an operand or result.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",), ("col",)),), ((("row",),),), {"row": 4, "col": 2})
        >>> rule.spec(rule.operands[0], {"col": ("data",)})
        P(None, 'data')
        """
        entries = [tuple(a for f in dimension for a in shardings.get(f, ())) for dimension in term]
        return spec_of(entries)

    def local_shape(self, term: Term, shardings: Shardings, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a shard of an operand or result.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",), ("col",)),), ((("row",),),), {"row": 4, "col": 2})
        >>> rule.local_shape(rule.operands[0], {"row": ("data",)}, {"data": 2})
        (2, 2)
        """
        return tuple(
            math.prod(self.sizes[f] // math.prod(mesh[a] for a in shardings.get(f, ())) for f in dimension)
            for dimension in term
        )

    def environment(self, shardings: Shardings, mesh: Mapping[str, int], checked: bool = False) -> AxisEnvironment:
        """Return the axis environment in which collectives take factors.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",),),), ((),), {"row": 4})
        >>> rule.environment({"row": ("data",)}, {"data": 2}).sharded_over("row")
        [('data',)]
        """
        parts = []
        for name, dimension in {**{f: (f,) for f in self.sizes}, **self.groups}.items():
            axes = tuple(a for f in dimension for a in shardings.get(f, ()))
            size = math.prod(self.sizes[f] for f in dimension)
            parts.append(ArgumentAxis(name, size, size // math.prod(mesh[a] for a in axes), axes))
        return interned(frozenset(parts), checked, any_sharding=True)

    def batched(self, name: str, size: int, batched: Sequence[bool]) -> PartitioningRule:
        """Add a dimension in front of some operands and of all results.

        >>> from axonym.custom_partitioning import PartitioningRule
        >>> rule = PartitioningRule(((("row",),), ()), ((("row",),),), {"row": 4})
        >>> print(rule.batched("draw", 2, [True, False]))
        draw row, -> draw row
        passed through: draw=2, row=4
        """
        operands = tuple(
            ((name,), *t) if is_batched else t for t, is_batched in zip(self.operands, batched, strict=True)
        )
        results = tuple(((name,), *t) for t in self.results)
        return dataclasses.replace(self, operands=operands, results=results, sizes={name: size, **self.sizes})


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

    The arguments are those of `PartitioningRule`, but `replicated` are only factors that operands and results have.
    """
    into, out = set(_factors(operands)), set(_factors(results))
    known = list(dict.fromkeys((*_factors(operands), *_factors(results))))
    for option, factors in (("reduced", reduced), ("replicated", replicated), ("permuted", permuted)):
        if missing := [f for f in factors if f not in known]:
            listed = ", ".join(map(repr, missing))
            hints = "".join(_errors.suggestion(f, known) for f in missing)
            raise ValueError(
                f"{what}: `{option}` has {listed}, but the axes of operands and results are "
                f"{_errors.describe_axes(known, [sizes[f] for f in known])}.{hints}"
            )
    if kept := [f for f in reduced if f in out]:
        listed = ", ".join(map(repr, kept))
        raise ValueError(
            f"{what}: `reduced` has {listed}, which the results have too. An axis that is passed through may be "
            "sharded without being listed."
        )
    must = set(replicated) | ((into ^ out) - set(reduced) - set(permuted))
    ordered = {f: sizes[f] for f in known}
    return PartitioningRule(
        tuple(operands), tuple(results), ordered, frozenset(must), frozenset(permuted), dict(groups)
    )


def _factors(terms: Sequence[Term]) -> list[str]:
    return [f for term in terms for dimension in term for f in dimension]


def _written(term: Term) -> str:
    return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in term)
