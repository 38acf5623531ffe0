"""Rules: placements that are decided for each leaf, from paths, shapes and names.

A rule places one leaf at a time: it returns a partition spec, a resource mapping, a sharding or another rule, or None
to pass the leaf on. Rules compose: `first | second` applies the second to leaves that the first passes on, and
`rule.exclude(pattern)` passes on more leaves. A rule can be used wherever a placement can.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import errors
from ..distribution.active_settings import Entry
from ..distribution.mesh_axes import check_in_mesh, mesh_axes, shard_count
from .leaves import Leaf
from .mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from .meshes import AnyMesh
from .placement import LeafPlacement, Rule, entries_for, is_placement, unused_in, unused_names

__all__ = [
    "FSDPShardingRule",
    "LogicalAxesRule",
    "MappingShardingRule",
    "PolicyShardingRule",
    "ShardingRule",
    "TreePathShardingRule",
]


class ShardingRule(Rule):
    """A placement that is decided for each leaf. Your own rules derive from it and define `place`.

    >>> class OnlyMatrices(axn.sharding.ShardingRule):
    ...     def place(self, leaf, mesh):
    ...         return jax.P("data") if len(leaf.shape) == 2 else None
    >>> mesh = axn.make_mesh({"data": 2})
    >>> rule = OnlyMatrices() | axn.sharding.PolicyShardingRule(lambda path, x: jax.P())
    >>> axn.shard({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, rule, mesh)["w"].sharding.spec
    P('data', None)
    """

    def __or__(self, other: LeafPlacement) -> ShardingRule:
        """Use another placement for leaves that this rule passes on."""
        return _first_of(self, other)

    def __ror__(self, other: LeafPlacement) -> ShardingRule:
        return _first_of(other, self)

    def exclude(self, pattern: str) -> ShardingRule:
        """Return this rule, except that it passes on leaves in whose path a regular expression is found.

        >>> rule = axn.sharding.FSDPShardingRule("data", min_fsdp_size=0).exclude("norm") | jax.P()
        >>> axn.shard({"norm": jnp.ones(2)}, rule, axn.make_mesh({"data": 2}))["norm"].sharding.spec
        P(None,)
        """
        return _Excluding(self, re.compile(pattern))

    def lenient(self) -> ShardingRule:
        """Return this rule, except that an axis that its mesh axes do not divide is replicated, not an error.

        >>> rule = axn.sharding.TreePathShardingRule((".*", jax.P("data"))).lenient()
        >>> axn.shard(jnp.ones(3), rule, axn.make_mesh({"data": 2})).sharding.spec
        P(None,)
        """
        return _Lenient(self)


# Equal rules share cache entries. Your own rules are equal to themselves only, unless they are such dataclasses, too.
_BY_VALUE = dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
"""Compares rules that convert their arguments; nothing changes them later."""


@dataclasses.dataclass(frozen=True, repr=False)
class _FirstOf(ShardingRule):
    """A rule that returns the answer of the first placement that does not pass the leaf on."""

    placements: tuple[LeafPlacement, ...]

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        answer = None
        for placement in self.placements:
            found = placement.answer(leaf, mesh) if isinstance(placement, Rule) else placement
            answer = found if answer is None else answer
            # A mapping without an entry for the leaf answers only if no other placement does.
            if found is not None and not (isinstance(found, Mapping) and set(leaf.names or ()).isdisjoint(found)):
                return found
        return answer

    def refusal(self, leaf: Leaf) -> str | None:
        found = [p.refusal(leaf) for p in self.placements if isinstance(p, Rule)]
        return "; ".join(r for r in found if r) or None

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        return [found for placement in self.placements for found in unused_in(placement, leaves)]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.placements))


def _first_of(*placements: LeafPlacement) -> ShardingRule:
    if any(p is None or not is_placement(p) for p in placements):
        return NotImplemented
    return _FirstOf(tuple(map(_as_rule, placements)))


@dataclasses.dataclass(frozen=True, repr=False)
class _Excluding(ShardingRule):
    rule: ShardingRule
    pattern: re.Pattern[str]

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return None if self.pattern.search(leaf.path) else self.rule

    def refusal(self, leaf: Leaf) -> str | None:
        if self.pattern.search(leaf.path):
            return f"{self.pattern.pattern!r} excludes it from {self.rule!r}"
        return self.rule.refusal(leaf)

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        left = [leaf for leaf in leaves if not self.pattern.search(leaf.path)]
        return [*_found_nowhere(self.pattern, leaves), *self.rule.unused(left)]

    def __repr__(self) -> str:
        return f"{self.rule!r}.exclude({self.pattern.pattern!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Lenient(ShardingRule):
    rule: ShardingRule

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        answer = self.rule.answer(leaf, mesh)
        if isinstance(answer, Mapping):
            answer = normalize_mapping(answer, repr(self))
        own = isinstance(answer, NamedSharding)
        mesh = answer.mesh if own else mesh
        entries = entries_for(leaf, answer)
        if mesh is None or entries is None or len(entries) > len(leaf.shape or ()):
            return answer
        # An entry that does not divide the size is replicated; unknown mesh axes are kept, for the error.
        known = [e is not PartitionSpec.UNCONSTRAINED and all(a in mesh.shape for a in mesh_axes(e)) for e in entries]
        sizes = zip(entries, known, leaf.shape or (), strict=False)
        spec = PartitionSpec(*(None if k and size % shard_count(mesh, e) else e for e, k, size in sizes))
        return NamedSharding(mesh, spec) if own else spec

    def refusal(self, leaf: Leaf) -> str | None:
        return self.rule.refusal(leaf)

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        return self.rule.unused(leaves)

    def __repr__(self) -> str:
        return f"{self.rule!r}.lenient()"


@dataclasses.dataclass(frozen=True, repr=False)
class FSDPShardingRule(ShardingRule):
    """Shard one axis of every large array.

    The rule picks the axis whose size is divisible by the largest power of two or, with `fsdp_axis_size`, the largest
    axis divisible by that number. Ties go to the first axis. An axis that the mesh does not divide is never chosen.
    Arrays that are small, or have no axis to choose, are replicated.

    >>> rule = axn.sharding.FSDPShardingRule("data", min_fsdp_size=16)
    >>> axn.shard({"w": jnp.ones((6, 16)), "b": jnp.ones(8)}, rule, axn.make_mesh({"data": 2}))["w"].sharding.spec
    P(None, 'data')
    """

    fsdp_axis_name: str | Sequence[str] = "fsdp"
    """The mesh axis, or several, to shard over."""
    fsdp_axis_size: int | None = None
    """A number that must divide the axis, besides the mesh."""
    min_fsdp_size: int = 1048576
    """The least number of elements of an array that is sharded."""

    def __post_init__(self) -> None:
        if self.fsdp_axis_size is not None and self.fsdp_axis_size < 1:
            raise ValueError(f"FSDPShardingRule: `fsdp_axis_size` is a size, got {self.fsdp_axis_size}.")
        if not isinstance(self.fsdp_axis_name, str):  # a list has no hash
            object.__setattr__(self, "fsdp_axis_name", tuple(self.fsdp_axis_name))

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        shape: tuple[int, ...] = leaf.shape or ()
        if mesh is not None:
            check_in_mesh(repr(self), mesh_axes(self.fsdp_axis_name), mesh)
        if math.prod(shape) < self.min_fsdp_size:
            return PartitionSpec()
        divisors = [1 if mesh is None else shard_count(mesh, self.fsdp_axis_name), self.fsdp_axis_size or 1]
        possible = [i for i, size in enumerate(shape) if size > 1 and not any(size % d for d in divisors)]
        if not possible:
            return PartitionSpec()
        # `size & -size` is the largest power of two that divides a size.
        merits = [size if self.fsdp_axis_size is not None else size & -size for size in shape]
        chosen = max(possible, key=merits.__getitem__)
        return PartitionSpec(*(self.fsdp_axis_name if i == chosen else None for i in range(len(shape))))

    def __repr__(self) -> str:
        return f"FSDPShardingRule({self.fsdp_axis_name!r})"


@_BY_VALUE
class TreePathShardingRule(ShardingRule):
    """Shard each leaf by the first pattern that is found in its path.

    Paths read like `layers/0/attn/q`. Patterns are regular expressions, searched for anywhere in the path.

    >>> rule = axn.sharding.TreePathShardingRule(("attn/.*", jax.P("data")), (".*", jax.P()))
    >>> axn.shard({"attn": {"q": jnp.ones(8)}}, rule, axn.make_mesh({"data": 2}))["attn"]["q"].sharding.spec
    P('data',)
    """

    rules: tuple[tuple[re.Pattern[str], LeafPlacement], ...]
    strict: bool

    def __init__(self, *rules: tuple[str, LeafPlacement], strict: bool = True):
        """Arguments:
        *rules: pairs of a pattern and a placement: a partition spec, a resource mapping, a sharding, another rule.
        strict: whether an array with axes that no pattern matches is an error; if not, it is replicated.
        """
        for rule in rules:
            if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], (str, re.Pattern)):
                raise TypeError(f"TreePathShardingRule: a rule is a pair of a pattern and a placement, got {rule!r}.")
            if rule[1] is None or not is_placement(rule[1]):
                raise TypeError(
                    f"TreePathShardingRule: {rule[0]!r} needs a placement (P() replicates), got {rule[1]!r}."
                )
        self.rules = tuple((re.compile(pattern), _as_rule(placement)) for pattern, placement in rules)
        self.strict = strict

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        found = self._first(leaf)
        # Arrays without axes, such as the count of an optimizer, are replicated in any case.
        replicated = found is None and (not self.strict or leaf.shape == ())
        return PartitionSpec() if replicated else found

    def _first(self, leaf: Leaf) -> LeafPlacement:
        return next((placement for pattern, placement in self.rules if pattern.search(leaf.path)), None)

    def refusal(self, leaf: Leaf) -> str | None:
        if isinstance(found := self._first(leaf), Rule):  # it passes the leaf on
            return found.refusal(leaf)
        patterns = [pattern.pattern for pattern, _ in self.rules]
        near = difflib.get_close_matches(leaf.path, patterns, n=2, cutoff=0.3) or patterns[:2]
        listed = " and ".join(map(repr, near)) if near else "there are none"
        return f"no pattern of TreePathShardingRule is found in its path; the nearest of {len(patterns)}: {listed}"

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        found = []
        for pattern, placement in self.rules:
            found += _found_nowhere(pattern, leaves)
            found += unused_in(placement, [leaf for leaf in leaves if pattern.search(leaf.path)])
        return found

    def __repr__(self) -> str:
        return f"TreePathShardingRule({errors.counted(len(self.rules), 'pattern')})"


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyShardingRule(ShardingRule):
    """Shard each leaf as a function says.

    >>> rule = axn.sharding.PolicyShardingRule(lambda path, x: jax.P("data") if x.ndim == 1 else jax.P())
    >>> axn.shard({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, rule, axn.make_mesh({"data": 2}))["b"].sharding.spec
    P('data',)
    """

    policy: Callable[[str, Any], LeafPlacement]
    """A function of the path of a leaf, such as `layers/0/attn/q`, and the leaf, a named array if it has names.
    It returns a placement for the leaf, or None to pass it on."""

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return self.policy(leaf.path, leaf.value)

    def refusal(self, leaf: Leaf) -> str:
        return f"the policy {getattr(self.policy, '__name__', self.policy)} gave no placement for it"

    def __repr__(self) -> str:
        return f"PolicyShardingRule({getattr(self.policy, '__name__', self.policy)})"


@_BY_VALUE
class MappingShardingRule(ShardingRule):
    """A resource mapping as a rule: it places leaves with names and passes on leaves without.

    >>> rule = axn.sharding.MappingShardingRule({"batch": "data"}) | axn.sharding.FSDPShardingRule("data")
    >>> axn.shard(axn.ones({"batch": 4}), rule, axn.make_mesh({"data": 2})).array.sharding.spec
    P('data',)
    """

    mapping: Mapping[str, Entry] = dataclasses.field(hash=False)

    def __init__(self, mapping: ResourceMapping):
        """Arguments:
        mapping: from axes to mesh axes.
        """
        if not is_resource_mapping(mapping):
            raise TypeError(f"MappingShardingRule: expected a resource mapping, got {mapping!r}.")
        self.mapping = normalize_mapping(mapping, "MappingShardingRule")

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return self.mapping if leaf.names is not None else None

    def refusal(self, leaf: Leaf) -> str:
        return "it has no named axes that a resource mapping could place"

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        return unused_in(self.mapping, leaves)

    def __repr__(self) -> str:
        return f"MappingShardingRule({self.mapping})"


@_BY_VALUE
class LogicalAxesRule(ShardingRule):
    """Shard raw arrays by a mapping and a tree that names their axes, as used by MaxText and other Flax models.

    In place of each array, the tree has a tuple or `PartitionSpec` of names. None marks an axis without a name; an
    empty tuple replicates the array. The states of optimizers contain the paths of the
    parameters, so the names apply to the states too. An array that the tree has no names for is passed on.

    >>> names = {"up": ("embed", "mlp"), "scale": ("embed",)}
    >>> rule = axn.sharding.LogicalAxesRule(names, {"embed": "data"})
    >>> axn.shard({"up": jnp.ones((2, 4)), "scale": jnp.ones(2)}, rule, axn.make_mesh({"data": 2}))["up"].sharding.spec
    P('data', None)
    """

    names: Mapping[str, tuple[str | None, ...]] = dataclasses.field(hash=False)
    pairs: tuple[tuple[str, Entry], ...]
    strict: bool

    def __init__(self, tree: Any, mapping: ResourceMapping | Sequence[tuple[str, Any]]):
        """Arguments:
        tree: the names.
        mapping: from names to mesh axes; or Flax's logical axis rules, pairs of a name and a mesh axis. Each name
            takes the first pair whose mesh axes the array does not use yet.
        """
        found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axis_names)[0]
        if wrong := [_path_text(path) for path, names in found if not is_axis_names(names)]:
            raise TypeError(f"LogicalAxesRule: {wrong[0]} must be a tuple of names, each a string or None.")
        self.names = {_path_text(path): tuple(names) for path, names in found}
        self.strict = isinstance(mapping, Mapping)
        mappings = [mapping] if self.strict else [{name: entry} for name, entry in mapping]
        self.pairs = tuple(pair for m in mappings for pair in normalize_mapping(m, "LogicalAxesRule").items())

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        names = self._names_of(leaf)
        if names is None:
            return None
        if names and len(names) != len(leaf.shape or ()):
            listed = errors.describe_axes(map(str, names))
            raise ValueError(f"LogicalAxesRule: {leaf.path} has shape {leaf.shape}, and its names are {listed}.")
        found: dict[str | None, Entry] = {}
        for name, entry in self.pairs:
            taken = {a for e in found.values() for a in mesh_axes(e)}
            if name in names and name not in found and (self.strict or taken.isdisjoint(mesh_axes(entry))):
                found[name] = entry
        return PartitionSpec(*map(found.get, names))

    def _names_of(self, leaf: Leaf) -> tuple[str | None, ...] | None:
        path = leaf.path.removesuffix("/value")  # Flax's boxes of arrays
        # The complete path, or else its longest end that has names.
        parts = path.split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        return next((self.names[end] for end in ends if end in self.names), None)

    def refusal(self, leaf: Leaf) -> str:
        return f"the tree of names has none for it.{errors.suggestion(leaf.path, self.names)}"

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        known = {n for names in map(self._names_of, leaves) for n in names or () if n is not None}
        return unused_names(dict(self.pairs), known)

    def __repr__(self) -> str:
        return f"LogicalAxesRule({errors.counted(len(self.names), 'array')})"


def is_axis_names(x: Any) -> bool:
    """Return whether something is a sequence of names of axes, or None for axes without a name."""
    return isinstance(x, (tuple, list, PartitionSpec)) and all(isinstance(n, str | None) for n in x)


def _path_text(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/").removesuffix("/value") or "the array"


def _as_rule(placement: LeafPlacement) -> LeafPlacement:
    """Convert a mapping to a rule, because a mapping would not pass on leaves without names."""
    return MappingShardingRule(placement) if isinstance(placement, Mapping) else placement


def _found_nowhere(pattern: re.Pattern[str], leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Return the message for a pattern that occurs in no path."""
    if any(pattern.search(leaf.path) for leaf in leaves):
        return []
    hint = errors.suggestion(pattern.pattern, [leaf.path for leaf in leaves])
    return [(pattern.pattern, f"pattern {pattern.pattern!r} is found in no path of the tree.{hint}")]
