"""Resolve a placement for a tree to a partition spec for every leaf. Nothing else resolves placements.

A *placement* says how the leaves of a tree are sharded. It is one of

- a resource mapping: named arrays by their names, and raw arrays by the names that `field(axis_names=...)` gives in
  Equinox modules, and `with_partitioning` in Flax;
- a `PartitionSpec` or a `NamedSharding`, for every array below it, by position;
- a rule, which decides for each leaf which of the above it gets: see `axonym.sharding.ShardingRule`;
- None: the active mapping;
- a tree prefix of these, so that parts of a tree are placed in different ways.

`resolve` computes and checks all specs before anything moves: its error lists every wrong leaf by its path in the tree.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..axis import Names, name_of
from ..core import errors
from ..distribution.active_settings import Entry, active_mapping, active_uneven, pads_uneven
from ..distribution.mesh_axes import (
    AnyMesh,
    axes_of_type,
    entries_by_name,
    is_parameter,
    mesh_axes,
    padded,
    restricted,
    types_of,
)
from ..named_array import NamedArray, is_named_array, raw
from .leaves import Leaf, child_of, is_not_told, leaves_of, warn_if_not_told
from .mapping import NO_SIZES, ResourceMapping, as_mapping, is_resource_mapping, normalize_mapping
from .meshes import as_seen_here, current_mesh, in_trace

LeafPlacement: TypeAlias = "ResourceMapping | PartitionSpec | jax.sharding.Sharding | Rule | None"
"""A placement that is the same for every leaf that it is given for, or a rule, which decides for each."""
Placement: TypeAlias = object
"""A leaf placement, or a tree prefix of them. A prefix can be any tree, so no type is better."""


class Rule(abc.ABC):
    """The interface of a placement that decides for each leaf."""

    @abc.abstractmethod
    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        """Return a placement for the leaf, which may be another rule; None passes the leaf on.

        Arguments:
            leaf: its path, its value (abstract in a traced function), its shape, and its names if it has names.
            mesh: the mesh, if it is known.
        """

    def for_tree(self, tree: Any) -> Placement:
        """Return the placement for a tree: the rule itself, or a tree prefix of others."""
        return self

    def refusal(self, leaf: Leaf) -> str | None:
        """Return why the leaf is passed on, if that is an error."""
        return None

    def unused(self, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
        """Return the parts of the rule that apply to no leaf, each as its name and a message; for `lint_mapping`."""
        return []

    def answer(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        """Return the final answer for the leaf, from this rule or the rules that it hands the leaf to."""
        answer = self.place(leaf, mesh)
        return answer.answer(leaf, mesh) if isinstance(answer, Rule) else answer


def resolve(
    tree: Any, placement: Placement, mesh: AnyMesh | None, what: str, *, pads: bool = False
) -> tuple[list[Leaf], Any]:
    """Return the leaves of a tree, each with its partition spec, and the structure of the tree.

    Arguments:
        tree: any tree; its arrays may be abstract or traced.
        placement: the placement of the leaves.
        mesh: the mesh to check against. Without one, checks that need a mesh are skipped, and rules see the active
            mesh.
        what: the operation, for messages.
        pads: whether the caller can pad axes that their mesh axes do not divide, so that `uneven="pad"` allows them.

    >>> leaves, structure = axn.sharding.resolve({"w": jnp.ones((4, 2))}, jax.P("data"), None, "load")
    >>> leaves[0].path, leaves[0].spec
    ('w', P('data', None))
    """
    examined = examine(tree, placement, mesh, what, pads=pads)
    # Before the errors, which such a mapping may explain.
    _warn_if_unused(examined.given, mesh, what)
    if examined.problems:
        raise ValueError(list_problems(what, [problem for _, problem in examined.problems], mesh))
    _warn_if_unused(examined.answers, mesh, what)
    warn_if_not_told(examined.not_told, what)
    if examined.replicated:
        errors.warn(list_problems(what, examined.replicated, mesh))
    return examined.leaves, examined.structure


@dataclasses.dataclass(frozen=True, eq=False)
class PlacementCheck:
    """The result of `examine`."""

    leaves: list[Leaf]
    structure: Any
    given: list[tuple[LeafPlacement, Leaf]]
    """The placement of each leaf, which may be a rule, with the leaf as the rule sees it."""
    answers: list[tuple[LeafPlacement, Leaf]]
    """The answers of rules, except FSDP's rules, whose mappings are for other leaves too."""
    problems: list[tuple[str, str]]
    """Paths and messages."""
    not_told: list[Leaf]
    """Optimizer arrays that a mapping would shard, but whose sizes do not identify their axes."""
    replicated: list[str]
    """Messages about axes that are replicated because of `uneven="replicate"`."""


def examine(tree: Any, placement: Placement, mesh: AnyMesh | None, what: str, *, pads: bool = False) -> PlacementCheck:
    """Resolve a placement, and return its errors beside the leaves; the arguments are as for `resolve`."""
    leaves, structure = leaves_of(tree)
    placements = _placements_of_leaves(placement, tree, structure, what)
    # Each mapping is normalized once for all leaves.
    ready = {
        id(p): normalize_mapping(p, what) for p in {id(p): p for p, _ in placements}.values() if isinstance(p, Mapping)
    }
    active = active_mapping() or None  # without a placement, leaves have no spec
    rules_see = current_mesh() if mesh is None else mesh
    examined = PlacementCheck([], structure, [], [], [], [], [])
    uneven = pads_uneven() if pads else None
    replicates = active_uneven() == "replicate" and in_trace()
    for leaf, (given, depth) in zip(leaves, placements, strict=True):
        problems: list[str] = []
        # A rule gets the path from its own position, so that its answer for a model does not depend on the position of
        # the model in a tree.
        seen = dataclasses.replace(leaf, keys=leaf.keys[depth:]) if depth and isinstance(given, Rule) else leaf
        examined.given.append((given, seen))
        given = active if given is None else ready.get(id(given), given)
        if isinstance(given, Rule):
            rule, given = given, None if leaf.shape is None else given.answer(seen, rules_see)
            if not is_placement(given):
                raise TypeError(
                    f"{what}: {rule!r} gave {given!r} for {leaf.path}, which is not a placement. Return a resource "
                    "mapping, a PartitionSpec, a sharding, a rule, or None."
                )
            if given is None and leaf.shape is not None and (refusal := rule.refusal(seen)):
                problems.append(f"{leaf.path} {describe_leaf(leaf)}: {refusal}.")
            given = normalize_mapping(given, what) if isinstance(given, Mapping) else given
            # These answer with a whole mapping for each leaf, most of which is for other leaves.
            if not isinstance(rule, (ParameterOrComputeMapping, ComputeMappingOrParameterRule)):
                examined.answers.append((given, leaf))
        if replicates and mesh is not None and isinstance(given, Mapping):
            for name, size in zip(leaf.names or (), leaf.shape or (), strict=False):
                axes = mesh_axes(given.get(name))
                if all(a in mesh.shape for a in axes) and size % (shards := shards_here(axes, mesh)):
                    over = " x ".join(f"{a}={mesh.shape[a]}" for a in axes)
                    text = f"{name!r} is replicated, since {over} gives {shards} shards."
                    examined.replicated.append(f"{leaf.path} {describe_leaf(leaf)}: {text}")
                    given = {n: entry for n, entry in given.items() if n != name}
        own_mesh = None
        if isinstance(given, NamedSharding):
            kind = given.memory_kind
            if kind and isinstance(given.mesh, Mesh) and kind != given.mesh.devices.flat[0].default_memory().kind:
                raise ValueError(
                    f"{what}: a placement cannot choose the memory, but the sharding has memory kind {kind!r}. Use "
                    "jax.device_put to move an array there."
                )
            own_mesh = as_seen_here(given.mesh)
        spec = spec_of_leaf(leaf, given, mesh if own_mesh is None else own_mesh, problems, uneven)
        if isinstance(given, Mapping) and leaf.made_from and (problems or is_not_told(leaf, given)):
            examined.not_told.append(leaf)
            spec, problems = PartitionSpec(), []  # its names may be wrong
        # `dataclasses.replace` takes twice the time, which counts where nothing moves.
        placed = Leaf(leaf.keys, leaf.value, leaf.names, leaf.shape, spec, own_mesh, leaf.made_from)
        examined.leaves.append(placed)
        examined.problems.extend((leaf.path, problem) for problem in problems)
    return examined


# --- placements ---


@dataclasses.dataclass(frozen=True)
class ParameterOrComputeMapping(Rule):
    """Place parameters by the parameter mapping, and everything else by the compute mapping."""

    parameters: Mapping[str, Entry]
    compute: Mapping[str, Entry]

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> Mapping[str, Entry]:
        """Return the mapping that applies to a leaf."""
        stored = is_parameter(leaf.names or (), self.parameters, self.compute)
        return self._storage if stored else self.compute

    @functools.cached_property
    def _storage(self) -> Mapping[str, Entry]:
        """The mapping that parameters are stored by: see `storage_axes`."""
        return {**self.compute, **self.parameters}


@dataclasses.dataclass(frozen=True)
class ComputeMappingOrParameterRule(Rule):
    """Place leaves that the compute mapping shards, such as batches, by it; all others, the parameters, by a rule."""

    parameters: Rule
    compute: Mapping[str, Entry]

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return self.compute if any(self.compute.get(n) for n in leaf.names or ()) else self.parameters

    def refusal(self, leaf: Leaf) -> str | None:
        return self.parameters.refusal(leaf)  # the mapping passes nothing on


def is_placement(x: Any) -> TypeGuard[LeafPlacement]:
    """Return whether something is a single placement, rather than a tree prefix of placements."""
    return x is None or isinstance(x, (Rule, PartitionSpec, jax.sharding.Sharding)) or is_resource_mapping(x)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ByParameter:
    """The arguments of a call, or their placements: a dictionary would be read as a mapping of axes."""

    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(name), x) for name, x in self.values.items()], tuple(self.values)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> ByParameter:
        return cls(dict(zip(names, values, strict=True)))


def _placements_of_leaves(
    placement: Placement, tree: Any, structure: Any, what: str
) -> list[tuple[LeafPlacement, int]]:
    """Return the placement of each leaf, and its depth in the tree."""
    if is_placement(placement):
        placement = _for_tree(placement, tree)
    if is_placement(placement):
        return [(placement, 0)] * structure.num_leaves
    # Not by `jax.tree.broadcast`: in its result, a mapping would again be a tree.
    found: list[tuple[LeafPlacement, int]] = []

    def spread(path: Sequence[Any], p: LeafPlacement, below: Any) -> None:
        found.extend([(p, len(path))] * len(jax.tree.leaves(below)))

    try:
        placement = checked_prefix(placement, what)
        if any(isinstance(p, Rule) for p in jax.tree.leaves(placement, is_leaf=is_placement)):
            placement = checked_prefix(jax.tree.map(_for_tree, placement, tree, is_leaf=is_placement), what)
        numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
        jax.tree.map_with_path(spread, placement, numbered, is_leaf=is_placement)
    except ValueError as e:
        raise ValueError(f"{what}: the placement is not a prefix of the tree it places. {e}") from None
    return found


def checked_prefix(placement: Placement, what: str) -> Placement:
    """Check a tree prefix of placements, and unwrap the shardings that `match_sharding_rule` gives named arrays."""

    def checked(path: Any, p: Any) -> Placement:
        p = p.array if is_named_array(p) else p
        if not is_placement(p):
            shown = f"an array of shape {p.shape}" if isinstance(p, (jax.Array, np.ndarray)) else repr(p)
            where = f", for {path[-1].key!r}," if path and isinstance(path[-1], jax.tree_util.DictKey) else ""
            # Of the trees that contain it, one may be pairs of names.
            trees = itertools.accumulate(path, child_of, initial=placement)
            hint = next(filter(None, map(as_mapping, trees)), NO_SIZES if type(p) is int else "")
            raise TypeError(
                f"{what}: {shown}{where} is not a placement. Pass a resource mapping, such as {{'batch': 'data'}}, a "
                f"PartitionSpec, a sharding, a rule, or None.{hint}"
            )
        return p

    return jax.tree.map_with_path(checked, placement, is_leaf=lambda x: is_placement(x) or is_named_array(x))


def _for_tree(placement: LeafPlacement, tree: Any) -> Placement:
    return placement.for_tree(tree) if isinstance(placement, Rule) else placement


def shardings_in(placement: Placement) -> list[NamedSharding]:
    """Return the shardings of a placement, each of which has its own mesh."""
    return [p for p in jax.tree.leaves(placement, is_leaf=is_placement) if isinstance(p, NamedSharding)]


def present_sharding(x: Any) -> jax.sharding.Sharding | None:
    """Return the sharding that an array has; None if it has none, or is traced."""
    array = raw(x)
    return None if isinstance(array, Tracer) else getattr(array, "sharding", None)


def spec_of_leaf(
    leaf: Leaf, placement: LeafPlacement, mesh: AnyMesh | None, problems: list[str], uneven: bool | None = None
) -> PartitionSpec | None:
    """Return the spec of one leaf by a placement that is not a rule, and add its errors to the problems.

    Arguments:
        uneven: whether mesh axes need not divide the sizes; None if `uneven="pad"` could not allow that here.
    """
    if leaf.shape is None or (entries := entries_for(leaf, placement)) is None:
        return None
    names = leaf.names if isinstance(placement, Mapping) or isinstance(leaf.value, NamedArray) else None
    if len(entries) > len(leaf.shape) or (names is not None and len(names) != len(leaf.shape)):
        many = errors.counted(len(entries), "entry", "entries")
        problem = f"{PartitionSpec(*entries)} has {many} for an array of shape {leaf.shape}."
        if isinstance(leaf.value, NamedArray) and len(leaf.value.names) != len(leaf.shape):
            problem = errors.wrong_rank(leaf.value.names, leaf.shape)
        elif leaf.names is not None and len(leaf.names) != len(leaf.shape):
            problem = (
                f"its field names {errors.counted(len(leaf.names), 'axis', 'axes')} "
                f"{errors.describe_axes(leaf.names)}, but the array has shape {leaf.shape}. A stack of modules has one "
                "more axis: make the field a named array, which `axonym.vmap` stacks by name, or place this part of "
                "the tree by a partition spec."
            )
        problems.append(f"{leaf.path}: {problem}")
        return None
    spec, found = _checked_spec(names, leaf.shape, padded(entries, len(leaf.shape)), mesh, uneven)
    problems += [f"{leaf.path} {p}" for p in found]
    return spec


def entries_for(leaf: Leaf, placement: LeafPlacement) -> tuple[Entry, ...] | None:
    """Return the spec entries that a placement (not a rule) gives the axes of a leaf, or None if it gives none."""
    if isinstance(placement, PartitionSpec):
        return tuple(placement)
    if isinstance(placement, NamedSharding):
        return tuple(placement.spec)
    if isinstance(placement, jax.sharding.Sharding):
        raise TypeError(f"Expected a NamedSharding, got a {type(placement).__name__}: placing by name needs a mesh.")
    mapping: Mapping[str, Any] | None = placement if isinstance(placement, Mapping) else None
    return None if mapping is None or leaf.names is None else entries_by_name(leaf.names, mapping)


def check_entries(leaf: Leaf, entries: Sequence[Entry], mesh: AnyMesh | None) -> list[str]:
    """Return the errors of a spec's entries: mesh axes that are missing, used twice, or do not divide the sizes."""
    assert leaf.shape is not None
    return [f"{leaf.path} {p}" for p in _checked_spec(leaf.names, leaf.shape, tuple(entries), mesh)[1]]


_WAY_OUT = (
    "Resize it to a multiple of {shards} (axonym.sharding.round_axis_for_partitioning gives {size}), "
    "or map it elsewhere.",
    "Resize it to a multiple of {shards} (such as {size}), or choose another placement. A rule can replicate it "
    "instead: `rule.lenient()`.",
)
"""Advice about a size: of named arrays, and of raw ones."""


@functools.lru_cache(maxsize=4096)
def _checked_spec(
    names: Names | None,
    shape: tuple[int, ...],
    entries: tuple[Entry, ...],
    mesh: AnyMesh | None,
    uneven: bool | None = None,
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Return the spec of these entries, and its errors. Cached, as a model has many leaves with the same axes."""
    # All problems are collected, so that a user sees every one at once. Only errors read these names.
    problems = []
    taken: dict[str, str] = {}
    array = _describe_axes_or_shape(names, shape)
    called = [f"axis {n!r}" for n in names] if names is not None else [f"dimension {i}" for i in range(len(shape))]
    for name, size, entry in zip(called, shape, entries, strict=True):
        axes = [a for a in mesh_axes(entry) if a is not None]
        for axis in axes:
            if axis in taken:
                problems.append(
                    f"{array}: {taken[axis]} and {name} are both sharded over mesh axis {axis!r}, which an array can "
                    "use only once. Map one of them to another mesh axis or to None, or rename it here."
                )
            taken[axis] = name
        if mesh is None:  # a spec without a mesh is only checked for mesh axes that are used twice
            continue
        unknown = [a for a in axes if a not in mesh.shape]
        for axis in unknown:
            problems.append(
                f"{array}: {name} goes to mesh axis {axis!r}, which the mesh does not have."
                + errors.wrong_way_round({} if names is None else {names[called.index(name)]: axis}, mesh.axis_names)
                + errors.suggestion(axis, mesh.axis_names)
            )
        if not unknown and axes and size % (shards := shards_here(axes, mesh)):
            hint = _about_padding(axes, mesh, uneven)
            if uneven and not hint:
                continue
            problems.append(
                f"{array}: {errors.indivisible(name, size, _sizes_here(axes, mesh))} "
                + _WAY_OUT[names is None].format(shards=shards, size=-(-size // shards) * shards)
                + hint
            )
    return PartitionSpec(*entries), tuple(problems)


def _about_padding(axes: Sequence[str], mesh: AnyMesh, uneven: bool | None) -> str:
    """Return what to say about `uneven="pad"` where mesh axes do not divide a size; nothing if it is active and helps.

    Explicit mesh axes have no type for uneven shards, and beside Manual ones, XLA is not known to be right.
    """
    if uneven is None:
        return ""
    known = types_of(mesh)
    unfit = [a for a, kind in known.items() if kind == AxisType.Manual or (a in axes and kind != AxisType.Auto)]
    if uneven:
        fixed = " and ".join(f"{a!r} is {known[a].name}" for a in unfit)
        return f" `uneven='pad'` needs Auto mesh axes, but {fixed}." if unfit else ""
    where = "axonym.axis_mapping, shard, named_jit or fsdp"
    return "" if unfit else f" To keep the size, and store it padded, pass `uneven='pad'` to {where}."


def shards_here(axes: Sequence[str], mesh: AnyMesh) -> int:
    """Return the number of shards over mesh axes."""
    return math.prod(_sizes_here(axes, mesh).values())


def _sizes_here(axes: Sequence[str], mesh: AnyMesh) -> dict[str, int]:
    """Return the sizes of mesh axes that an array can be sharded over: along a manual one, it is one shard already."""
    manual = axes_of_type(mesh, AxisType.Manual)
    return {a: mesh.shape[a] for a in axes if a not in manual}


def drop_manual(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """Return the spec without the mesh axes that are manual here, as inside `shard_map`."""
    left = axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
    return spec if len(left) == len(mesh.axis_names) else restricted(spec, left)


# --- messages ---


def describe_leaf(leaf: Leaf) -> str:
    """Describe the axes of an array, or its shape if they have no names."""
    assert leaf.shape is not None
    return _describe_axes_or_shape(leaf.names, leaf.shape)


def _describe_axes_or_shape(names: Names | None, shape: Sequence[int]) -> str:
    return str(tuple(shape)) if names is None else errors.describe_axes(names, shape)


def list_problems(what: str, problems: Sequence[str], mesh: AnyMesh | None) -> str:
    """Return one message of all problems."""
    where = "" if mesh is None else f" on mesh {errors.describe_shape(mesh.shape)}"
    problems = tuple(dict.fromkeys(problems))
    if len(problems) == 1:
        return f"{what}{where}: {problems[0]}"
    lines = "".join(f"\n  {p}" for p in problems)
    return f"{what}{where}, {len(problems)} problems:{lines}"


def unused_in(placement: Placement, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Return the parts of a placement that apply to none of its leaves, each as its name and a message."""
    if isinstance(placement, Rule):
        return placement.unused(leaves)
    if not isinstance(placement, Mapping):
        return []
    return unused_names(normalize_mapping(placement), axes_of(leaves))


def axes_of(leaves: Iterable[Leaf]) -> set[str]:
    """Return the names of all axes of leaves, and of leaves that were made from them."""
    return {n for leaf in leaves for n in leaf.made_from or leaf.names or ()}


def unused_names(names: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """Return the names that are none of the known ones, each with a message."""
    return [
        (name, f"axis {name!r} is in the mapping but not in the tree.{errors.suggestion(name, known)}")
        for name in names
        if name not in known
    ]


def _warn_if_unused(placements: Sequence[tuple[LeafPlacement, Leaf]], mesh: AnyMesh | None, what: str) -> None:
    """Warn about a mapping that applies to no axis, which would otherwise go unnoticed."""
    # By the axes of a mapping, as a rule may give each leaf a mapping of its own: it applies if any leaf has an axis.
    placed: dict[frozenset[str], tuple[Mapping[Any, Any], list[Leaf]]] = {}
    for given, leaf in placements:
        if isinstance(given, Mapping) and leaf.shape is not None:
            key = frozenset(map(name_of, given))
            placed.setdefault(key, (given, []))[1].append(leaf)
    for mapping, its_leaves in placed.values():
        # A mapping often has more axes than one model. Only one that names no axis at all is surely a mistake.
        keys = [name_of(k) for k in mapping]
        known = axes_of(its_leaves)
        if keys and not known.intersection(keys):
            has = f"has {', '.join(sorted(map(repr, known)))}" if known else "has no named axes"
            hint = errors.suggestions(keys, known) if known else advise_paths(its_leaves, mapping.values(), mesh)
            turned = {name_of(k): v for k, v in mapping.items() if known.intersection(mesh_axes(v))}
            errors.warn(
                f"{what}: the tree has none of the mapping's axes {errors.quoted(keys)}; it {has}."
                f"{errors.wrong_way_round(turned, keys)}{hint}"
            )


def advise_paths(leaves: Sequence[Leaf], entries: Iterable[Any], mesh: AnyMesh | None) -> str:
    """Return a sentence that says how to place leaves without names: by path, with the two largest as examples."""
    largest = sorted((leaf for leaf in leaves if leaf.shape), key=lambda leaf: -math.prod(leaf.shape or ()))[:2]
    axis = next((a for entry in entries for a in mesh_axes(entry)), None)
    if axis is None or not largest:
        return ""
    shards = 1 if mesh is None else mesh.shape.get(axis, 1)

    def spec(leaf: Leaf) -> str:
        where = next((i for i, size in enumerate(leaf.shape or ()) if size % shards == 0), None)
        return "jax.P()" if where is None else f"jax.P({'None, ' * where}{axis!r})"

    if not largest[0].keys:
        return f" Place an array without names by position: pass `{spec(largest[0])}` instead."
    rules = [f"({'(^|/)' + re.escape(leaf.path) + '$'!r}, {spec(leaf)})" for leaf in largest]
    return (
        " Place arrays without names by path: pass "
        f"`axonym.sharding.TreePathShardingRule({', '.join(rules)}, ('.*', jax.P()))` instead."
    )


def mapping_of(placement: ResourceMapping | None) -> Mapping[str, Entry]:
    """Return the mapping argument, or else the active mapping."""
    if placement is None:
        return active_mapping()
    return normalize_mapping(placement)
