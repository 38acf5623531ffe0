"""Answer questions about a placement: the sharding of an axis or a tree, and its mistakes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..axis import Axis, AxisSelection, AxisSelector, name_of, selectors
from ..core import errors
from ..distribution.active_settings import active_mapping
from ..distribution.mesh_axes import axes_in, check_mesh_axes, entries_by_name, mesh_axes, shard_count
from ..named_array import raw, wrap
from .leaves import Leaf, leaves_of
from .mapping import PhysicalAxisSpec, ResourceMapping, normalize_mapping
from .meshes import AnyMesh, current_mesh, required_mesh, with_devices
from .placement import Placement, describe_leaf, examine, is_placement, mapping_of, present_sharding, resolve, unused_in


def physical_axis_name(axis: AxisSelector, mapping: ResourceMapping | None = None) -> PhysicalAxisSpec | None:
    """Return the mesh axis, or mesh axes, that an axis is sharded over; None if it is replicated.

    Arguments:
        axis: a logical axis.
        mapping: the mapping; by default the active one.

    >>> axn.sharding.physical_axis_name("batch", {"batch": "data"})
    'data'
    """
    return mapping_of(mapping).get(name_of(axis))


def physical_axis_size(
    axis: AxisSelector, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None
) -> int | None:
    """Return the number of shards of an axis on the mesh, the active one by default; None if it is replicated.

    >>> axn.sharding.physical_axis_size("batch", {"batch": "data"}, axn.make_mesh({"data": 2}))
    2
    """
    entry = mapping_of(mapping).get(name_of(axis))
    if entry is None:
        return None
    mesh = required_mesh("physical_axis_size", mesh)
    check_mesh_axes("physical_axis_size", {name_of(axis): entry}, mesh)
    return shard_count(mesh, entry)


def pspec_for_axis(axis: AxisSelection, mapping: ResourceMapping | None = None) -> PartitionSpec:
    """Return the partition spec that the mapping, the active one by default, gives an array with these axes, in order.

    >>> axn.sharding.pspec_for_axis(("batch", "embed"), {"batch": "data"})
    P('data', None)
    """
    return PartitionSpec(*entries_by_name(map(name_of, selectors(axis)), mapping_of(mapping)))


def sharding_for_axis(
    axis: AxisSelection, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None
) -> NamedSharding:
    """Return the sharding of an array with these axes, in order. Sizes are checked if they are known.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> axn.sharding.sharding_for_axis(("batch", "embed"), {"batch": "data"}, mesh).spec
    P('data', None)
    """
    mesh = required_mesh("sharding_for_axis", mesh)
    spec = pspec_for_axis(axis, mapping)
    found = selectors(axis)
    entries = dict(zip(map(name_of, found), spec, strict=True))
    check_mesh_axes("sharding_for_axis", entries, mesh)
    for mesh_axis in mesh.axis_names:
        if len(users := [n for n, entry in entries.items() if mesh_axis in mesh_axes(entry)]) > 1:
            raise ValueError(
                f"sharding_for_axis: {' and '.join(map(repr, users))} are both sharded over mesh axis {mesh_axis!r}, "
                "which an array can use only once. Map one of them to another mesh axis or to None."
            )
    if all(isinstance(s, Axis) for s in found):
        shape = tuple(s.size for s in found if isinstance(s, Axis))
        abstract = wrap(jax.ShapeDtypeStruct(shape, "float32"), tuple(name_of(s) for s in found))
        resolve(abstract, spec, mesh, "sharding_for_axis")
    return NamedSharding(mesh, spec)


def pspec_for(tree: Any, placement: Placement = None, preserve_existing_shardings: bool = True) -> Any:
    """Return the partition spec that every leaf would get, as a tree; None for leaves that are not placed.

    Arguments:
        tree: any tree.
        placement: the placement of the leaves; by default the active mapping.
        preserve_existing_shardings: raw arrays without names keep the spec they have; otherwise they get none.

    >>> axn.sharding.pspec_for({"w": axn.ones({"embed": 2})}, {"embed": "model"})
    {'w': P('model',)}
    """
    leaves, structure = resolve(tree, placement, None, "pspec_for")
    return jax.tree.unflatten(structure, [_spec_of(leaf, preserve_existing_shardings) for leaf in leaves])


def infer_resource_partitions(
    tree: Any, placement: Placement = None, preserve_existing_shardings: bool = True, mesh: AnyMesh | None = None
) -> Any:
    """Return the sharding that every leaf would get, as a tree; None for leaves that are not placed.

    Arguments:
        tree: any tree.
        placement: the placement of the leaves; by default the active mapping.
        preserve_existing_shardings: raw arrays without names keep the sharding they have.
        mesh: the mesh; by default the active one.

    >>> mesh = axn.make_mesh({"model": 2})
    >>> tree = {"w": axn.ones({"embed": 2})}
    >>> axn.sharding.infer_resource_partitions(tree, {"embed": "model"}, mesh=mesh)["w"].spec
    P('model',)
    """
    mesh = with_devices(required_mesh("infer_resource_partitions", mesh))
    leaves, structure = resolve(tree, placement, mesh, "infer_resource_partitions")

    def sharding(leaf: Leaf) -> Any:
        spec = _spec_of(leaf, preserve_existing_shardings)
        return None if spec is None else NamedSharding(leaf.mesh or mesh, spec)

    return jax.tree.unflatten(structure, [sharding(leaf) for leaf in leaves])


def _spec_of(leaf: Leaf, preserve_existing: bool) -> PartitionSpec | None:
    sharding = present_sharding(leaf.value) if leaf.spec is None and preserve_existing else None
    return sharding.spec if isinstance(sharding, NamedSharding) else leaf.spec


def round_axis_for_partitioning(
    axis: Axis, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None
) -> Axis:
    """Enlarge an axis until its mesh axes, by the mapping and the mesh that are active by default, divide the size.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> axn.sharding.round_axis_for_partitioning(axn.Axis("vocab", 7), {"vocab": "data"}, mesh)
    Axis(name='vocab', size=8)
    """
    if mapping_of(mapping).get(axis.name) is None:
        return axis
    shards = physical_axis_size(axis, mapping, mesh) or 1
    return axis.resize(-(-axis.size // shards) * shards)


# --- lint ---

Kind = Literal["unused", "problem", "replicated"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake, or possible mistake, in a mapping.

    >>> axn.sharding.Finding("unused", "embd", "axis 'embd' ...").kind
    'unused'
    """

    kind: Kind
    """'unused': a key that names no axis of the tree, or a pattern found in no path; 'problem': an
    array that `shard` would refuse; 'replicated': a large array that is replicated."""
    where: str
    """The key, the pattern, or the path in the tree."""
    message: str


@dataclasses.dataclass(frozen=True)
class MappingReport:
    """The findings of `lint_mapping`. Prints as text; true if there are any findings.

    >>> bool(axn.lint_mapping(axn.ones({"x": 2}), {"x": None}, axn.make_mesh({"data": 2})))
    False
    """

    findings: tuple[Finding, ...]
    arrays: int

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __iter__(self):
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        arrays = errors.counted(self.arrays, "array")
        if not self.findings:
            return f"{arrays}, nothing found."
        lines = "".join(f"\n  {f.kind}: {f.message}" for f in self.findings)
        return f"{arrays}, {errors.counted(len(self.findings), 'finding')}:{lines}"


def lint_mapping(
    tree: Any, placement: Placement = None, mesh: AnyMesh | None = None, *, large: int = 1 << 20
) -> MappingReport:
    """Find everything that is wrong or suspicious in a mapping, or another placement, for a model on a mesh.

    Arguments:
        tree: a model; its arrays may be abstract, as `jax.eval_shape` gives them.
        placement: a resource mapping, a rule, a `PartitionSpec`, a sharding, or a tree prefix of these. By default the
            active mapping.
        mesh: the mesh; the active one by default.
        large: report replicated arrays of at least this many bytes.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> print(axn.lint_mapping({"w": axn.ones({"embed": 4})}, {"embd": "data"}, mesh))
    1 array, 1 finding:
      unused: axis 'embd' is in the mapping but not in the tree. Did you mean 'embed'?
    >>> rule = axn.sharding.TreePathShardingRule(("norms", jax.P()), (".*", jax.P("data")))
    >>> print(axn.lint_mapping({"norm": jnp.ones(4)}, rule, mesh))
    1 array, 1 finding:
      unused: pattern 'norms' is found in no path of the tree. Did you mean 'norm'?
    """
    mesh = mesh if mesh is not None else current_mesh()
    arrays = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    try:
        examined = examine(tree, placement, mesh, "lint_mapping", pads=True)
    except ValueError as problem:  # it cannot be applied leaf by leaf
        return MappingReport((Finding("problem", "the placement", str(problem)),), len(arrays))
    given: dict[int, tuple[Placement, list[Leaf]]] = {}
    if is_placement(placement):
        given[id(placement)] = placement, []
    for of_leaf, leaf in examined.given:
        _, its_leaves = given.setdefault(id(of_leaf), (of_leaf, []))
        its_leaves += [leaf] if leaf.shape is not None else []
    findings: list[Finding] = []
    for part, its_leaves in given.values():
        part = active_mapping() if part is None else part
        mapping = normalize_mapping(part) if isinstance(part, Mapping) else {}
        for name, message in unused_in(part, its_leaves):
            findings.append(Finding("unused", name, message))
            lacking = () if mesh is None else (a for a in mesh_axes(mapping.get(name)) if a not in mesh.shape)
            for a in lacking:
                findings.append(Finding("problem", name, errors.unknown_mesh_axis("lint_mapping", name, a, mesh)))
    findings += [Finding("problem", path, problem) for path, problem in examined.problems]
    wrong = {path for path, _ in examined.problems}
    for leaf in examined.leaves:
        own = leaf.mesh or mesh
        if leaf.path in wrong or leaf.shape is None or own is None or _leaf_bytes(leaf) < large:
            continue
        if (devices := math.prod(own.shape.values())) > 1 and shard_count(own, axes_in(leaf.spec or ())) == 1:
            size = errors.describe_bytes(_leaf_bytes(leaf))
            text = f"{leaf.path} {describe_leaf(leaf)}, {size}, is replicated on {devices} devices."
            findings.append(Finding("replicated", leaf.path, text))
    return MappingReport(tuple(findings), len(arrays))


def _leaf_bytes(leaf: Leaf) -> int:
    array = raw(leaf.value)
    return math.prod(leaf.shape or ()) * array.dtype.itemsize
