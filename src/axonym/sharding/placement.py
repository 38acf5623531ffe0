"""From a placement and a tree to a partition spec for every leaf. There is no other way to compute a spec.

A *placement* says where the leaves of a tree go. It is one of

- a resource mapping: named arrays by their names, and raw arrays in Equinox modules by `field(axis_names=...)`;
- a `PartitionSpec` or a `NamedSharding`: every array below it, by position;
- None: the mapping in force;
- a tree prefix of these, so that parts of a tree are placed in different ways.

`resolve` works the specs out and checks all of them before anything moves: what it finds wrong is one error that lists
every offender by its path in the tree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _context, _errors
from .._context import Entry
from .._mesh import Names, mesh_axes
from ..array import NamedArray, is_named_array
from ..axis import name_of
from .mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from .meshes import AnyMesh, as_seen_here

Placement: TypeAlias = Any
"""A resource mapping, a partition spec, a sharding, None, or a tree prefix of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree, a named array counting as one, and where it goes."""

    keys: tuple[Any, ...]
    """Where it stands in the tree."""
    value: Any
    names: Names | None
    """The names of its axes, if it has names."""
    shape: tuple[int, ...] | None
    """None for what is not an array."""
    spec: PartitionSpec | None = None
    """Where it goes; None leaves it where it is."""
    mesh: AnyMesh | None = None
    """The mesh on which it goes there, where the placement is a sharding and so has one of its own."""

    @property
    def path(self) -> str:
        """Where it stands in readable form, as in `layers/0/weight`."""
        return jax.tree_util.keystr(self.keys, simple=True, separator="/") or "the array"


def resolve(tree: Any, placement: Placement, mesh: AnyMesh | None, what: str) -> tuple[list[Leaf], Any]:
    """The leaves of a tree, each with its partition spec, and the structure to put them together again.

    Arguments:
        tree: any tree; its arrays may be abstract or traced.
        placement: where the leaves go.
        mesh: the mesh to check against; None checks only what needs no mesh.
        what: the operation, for messages.
    """
    leaves, structure = leaves_of(tree)
    placements = _broadcast(placement, tree, structure, what)
    _warn_if_unused(placements, leaves, what)
    # Each mapping is made ready once, however many leaves it places.
    ready = {
        id(p): normalize_mapping(p, what) for p in {id(p): p for p in placements}.values() if isinstance(p, Mapping)
    }
    placed, problems = [], []
    for leaf, given in zip(leaves, placements, strict=True):
        given = ready.get(id(given), given)
        own_mesh = _mesh_of(given, what) if isinstance(given, NamedSharding) else None
        spec, found = _spec_of(leaf, given, mesh if own_mesh is None else own_mesh)
        problems += found
        placed.append(Leaf(leaf.keys, leaf.value, leaf.names, leaf.shape, spec, own_mesh))
    if problems:
        raise ValueError(_listed(what, problems, mesh))
    return placed, structure


# --- leaves ---


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """The leaves of a tree with their paths and names, and its structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named_array)
    return [_leaf(path, value, tree) for path, value in found], structure


def _leaf(path: Sequence[Any], value: Any, tree: Any) -> Leaf:
    keys = tuple(path)
    if isinstance(value, NamedArray):
        shape = getattr(value.array, "shape", None)
        return Leaf(keys, value, value.names if shape is not None else None, shape)
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return Leaf(keys, value, None, None)
    return Leaf(keys, value, _field_names(path, tree), tuple(value.shape))


def _field_names(path: Sequence[Any], tree: Any) -> Names | None:
    """The names that a field of an Equinox module gives its raw array, or each array of its list or dictionary."""
    last = max((i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)), default=None)
    if last is None:
        return None
    parent = tree
    for key in path[:last]:
        parent = _child(parent, key)
    if not isinstance(parent, eqx.Module):
        return None
    for field in dataclasses.fields(parent):
        if field.name == path[last].name:
            return field.metadata.get("axis_names")
    return None


def _child(parent: Any, key: Any) -> Any:
    match key:
        case jax.tree_util.GetAttrKey(name=name):
            return getattr(parent, name, None)
        case jax.tree_util.SequenceKey(idx=index):
            return parent[index]
        case jax.tree_util.DictKey(key=name):
            return parent[name]
        case _:
            return None


# --- placements ---


@dataclasses.dataclass(frozen=True)
class ByRole:
    """Two mappings, one for parameters and one for everything else.

    A parameter has an axis that the first mapping splits in a way of its own, and none that the second one splits over
    the same mesh axis: that would be a batch of something.
    """

    parameters: Mapping[str, Entry]
    rest: Mapping[str, Entry]

    def of(self, leaf: Leaf) -> Mapping[str, Entry]:
        """The mapping that places a leaf."""
        at_rest, at_work = (
            {n: mesh_axes(mapping.get(n)) for n in leaf.names or ()} for mapping in (self.parameters, self.rest)
        )
        own = {a for n, axes in at_rest.items() if n in self.parameters and axes != at_work[n] for a in axes}
        batch = {a for n, axes in at_work.items() if n not in self.parameters or axes == at_rest[n] for a in axes}
        return self.parameters if own and not own & batch else self.rest


def is_placement(x: Any) -> bool:
    """Whether something is a placement by itself, rather than a tree prefix of placements."""
    return (
        x is None
        or isinstance(x, ByRole)
        or isinstance(x, (PartitionSpec, jax.sharding.Sharding))
        or is_resource_mapping(x)
    )


def _broadcast(placement: Placement, tree: Any, structure: Any, what: str) -> list[Any]:
    """The placement of each leaf."""
    if is_placement(placement):
        return [placement] * structure.num_leaves
    try:
        # A placement is wrapped so that one that is itself a tree (a mapping) counts as a leaf.
        wrapped = jax.tree.map(_Wrapped, placement, is_leaf=is_placement)
        spread = jax.tree.broadcast(wrapped, jax.tree.unflatten(structure, range(structure.num_leaves)))
    except ValueError as e:
        raise ValueError(f"{what}: the placement is not a prefix of the tree it places. {e}") from None
    return [w.placement if isinstance(w, _Wrapped) else w for w in jax.tree.leaves(spread, is_leaf=_is_wrapped)]


class _Wrapped:
    def __init__(self, placement: Any):
        self.placement = placement


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, _Wrapped)


def shardings_in(placement: Placement) -> list[NamedSharding]:
    """The shardings of a placement, each of which brings its own mesh."""
    found = jax.tree.leaves(placement, is_leaf=is_placement)
    return [p for p in found if isinstance(p, NamedSharding)]


def _mesh_of(sharding: NamedSharding, what: str) -> AnyMesh:
    mesh = sharding.mesh
    kind = sharding.memory_kind
    if kind is not None and isinstance(mesh, Mesh) and kind != mesh.devices.flat[0].default_memory().kind:
        raise ValueError(
            f"{what}: a placement says which devices hold what, not in which memory, but the sharding has memory kind "
            f"{kind!r}. Use jax.device_put to move an array there."
        )
    return as_seen_here(mesh)


def _spec_of(leaf: Leaf, placement: Any, mesh: AnyMesh | None) -> tuple[PartitionSpec | None, list[str]]:
    """The spec of one leaf, and what is wrong with it."""
    if leaf.shape is None:
        return None, []
    if placement is None:
        placement = _context.mapping_in_force()
        if placement is None:
            return None, []
    if isinstance(placement, ByRole):
        placement = placement.of(leaf)
    if isinstance(placement, PartitionSpec):
        entries = tuple(placement)
        leaf = _by_position(leaf)
    elif isinstance(placement, NamedSharding):
        entries = tuple(placement.spec)
        leaf = _by_position(leaf)
    elif isinstance(placement, jax.sharding.Sharding):
        raise TypeError(f"A placement is a NamedSharding, not a {type(placement).__name__}: names need a mesh.")
    elif leaf.names is None:
        return None, []
    else:
        entries = tuple(placement.get(n) for n in leaf.names)
    assert leaf.shape is not None
    if len(entries) > len(leaf.shape) or (leaf.names is not None and len(leaf.names) != len(leaf.shape)):
        return None, [_wrong_rank(leaf, entries)]
    entries += (None,) * (len(leaf.shape) - len(entries))
    spec, problems = _checked(leaf.names, leaf.shape, entries, mesh)
    return spec, [f"{leaf.path} {p}" for p in problems]


def _by_position(leaf: Leaf) -> Leaf:
    """A raw array is placed by position whether or not its field names its axes."""
    return leaf if isinstance(leaf.value, NamedArray) else dataclasses.replace(leaf, names=None)


def check_entries(leaf: Leaf, entries: Sequence[Entry], mesh: AnyMesh | None) -> list[str]:
    """What is wrong with the entries of a spec: mesh axes that are not there or taken twice, sizes not divisible."""
    assert leaf.shape is not None
    return [f"{leaf.path} {p}" for p in _checked(leaf.names, leaf.shape, tuple(entries), mesh)[1]]


@functools.lru_cache(maxsize=4096)
def _checked(
    names: Names | None, shape: tuple[int, ...], entries: tuple[Entry, ...], mesh: AnyMesh | None
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """The spec of these entries, and what is wrong with it. Most leaves of a model are like others, so it is kept."""
    problems = []
    taken: dict[str, str] = {}
    array = _errors.describe_axes(names, shape) if names is not None else str(shape)
    called = names if names is not None else tuple(f"dimension {i}" for i in range(len(shape)))
    for name, size, entry in zip(called, shape, entries, strict=True):
        axes = [a for a in mesh_axes(entry) if a is not None] if entry is not PartitionSpec.UNCONSTRAINED else []
        for axis in axes:
            if axis in taken:
                problems.append(
                    f"{array}: axes {taken[axis]!r} and {name!r} both go to mesh axis {axis!r}; one array can use a "
                    "mesh axis once. Map one of them elsewhere, or to None."
                )
            taken[axis] = name
        if mesh is None:
            continue
        unknown = [a for a in axes if a not in mesh.shape]
        for axis in unknown:
            problems.append(
                f"{array}: axis {name!r} goes to mesh axis {axis!r}, which the mesh does not have."
                + _errors.suggestion(axis, mesh.axis_names)
            )
        if not unknown and axes:
            manual = set(getattr(mesh, "manual_axes", ()))
            parts = math.prod(mesh.shape[a] for a in axes if a not in manual)
            if size % parts:
                over = " x ".join(f"{a}={mesh.shape[a]}" for a in axes)
                problems.append(
                    f"{array}: axis {name!r} of size {size} cannot be split over {over}: {size} is not a multiple of "
                    f"{parts}. Make it one (axonym.partitioning.round_axis_for_partitioning gives "
                    f"{-(-size // parts) * parts}), or map it elsewhere."
                )
    return PartitionSpec(*entries), tuple(problems)


def drop_manual(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """The spec without the mesh axes that the surrounding code handles by hand, as inside `shard_map`."""
    manual = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Manual}
    if not manual:
        return spec
    entries = []
    for entry in spec:
        left = tuple(a for a in mesh_axes(entry) if a not in manual)
        entries.append(left[0] if len(left) == 1 else left or None)
    return PartitionSpec(*entries)


# --- words ---


def _wrong_rank(leaf: Leaf, entries: Sequence[Entry]) -> str:
    assert leaf.shape is not None
    if isinstance(leaf.value, NamedArray) and len(leaf.value.names) != len(leaf.shape):
        return f"{leaf.path}: {_errors.wrong_rank(leaf.value.names, leaf.shape)}"
    if leaf.names is not None and len(leaf.names) != len(leaf.shape):
        return (
            f"{leaf.path}: its field names {len(leaf.names)} axes {_errors.describe_axes(leaf.names)}, but the array "
            f"has shape {leaf.shape}. A stack of modules has an axis more: make the field a named array, which "
            "`axonym.vmap` stacks by name, or place this part of the tree by a partition spec."
        )
    return f"{leaf.path}: {PartitionSpec(*entries)} has {len(entries)} entries for an array of shape {leaf.shape}."


def _listed(what: str, problems: Sequence[str], mesh: AnyMesh | None) -> str:
    where = "" if mesh is None else f" on mesh {_errors.describe_shape(mesh.shape)}"
    if len(problems) == 1:
        return f"{what}{where}: {problems[0]}"
    lines = "".join(f"\n  {p}" for p in dict.fromkeys(problems))
    return f"{what}{where}, {len(problems)} problems:{lines}"


def _warn_if_unused(placements: Sequence[Any], leaves: Sequence[Leaf], what: str) -> None:
    """A mapping given by hand of which nothing applies is a mistake that would otherwise go unseen."""
    placed: dict[int, tuple[Mapping[Any, Any], list[Leaf]]] = {}
    for given, leaf in zip(placements, leaves, strict=True):
        if isinstance(given, Mapping) and leaf.shape is not None:
            placed.setdefault(id(given), (given, []))[1].append(leaf)
    for mapping, its_leaves in placed.values():
        keys = [name_of(k) for k in mapping]
        known = {n for leaf in its_leaves for n in leaf.names or ()}
        if keys and not known.intersection(keys):
            hints = "".join(_errors.suggestion(k, known) for k in keys)
            has = f"has {', '.join(sorted(map(repr, known)))}" if known else "has no named axes"
            warnings.warn(
                f"{what}: none of the axes {', '.join(map(repr, keys))} of the mapping is an axis of the tree, which "
                f"{has}.{hints}",
                stacklevel=5,
            )


def mapping_of(placement: ResourceMapping | None) -> Mapping[str, Entry]:
    """A mapping given by hand, or the one in force."""
    if placement is None:
        return _context.mapping_in_force() or {}
    return normalize_mapping(placement)
