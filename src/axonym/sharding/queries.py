"""Answer questions about a mapping: how an axis is sharded, and which shardings a placement gives a tree."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh_axes import entries_by_name, mesh_axes, shard_count
from ..array import NamedArray, wrap
from ..axis import Axis, AxisSelection, AxisSelector, name_of, selectors
from .mapping import PhysicalAxisSpec, ResourceMapping
from .meshes import AnyMesh, required_mesh, with_devices
from .placement import Leaf, Placement, check_mesh_axes, mapping_of, resolve


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
    """Return the number of shards of an axis; None if the mapping replicates it.

    Arguments:
        axis: a logical axis.
        mapping: the mapping; by default the active one.
        mesh: the mesh; by default the active one.

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
    """Return the partition spec of an array with these axes.

    Arguments:
        axis: the axes, in order.
        mapping: the mapping; by default the active one.

    >>> axn.sharding.pspec_for_axis(("batch", "embed"), {"batch": "data"})
    P('data', None)
    """
    return PartitionSpec(*entries_by_name(map(name_of, selectors(axis)), mapping_of(mapping)))


def sharding_for_axis(
    axis: AxisSelection, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None
) -> NamedSharding:
    """Return the sharding of an array with these axes. Sizes are checked if they are known.

    Arguments:
        axis: the axes, in order.
        mapping: the mapping; by default the active one.
        mesh: the mesh; by default the active one.

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
                f"sharding_for_axis: {' and '.join(map(repr, users))} both go to mesh axis {mesh_axis!r}; one array "
                "can use a mesh axis once. Map one of them elsewhere, or to None."
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
    specs = [_existing(leaf) if leaf.spec is None and preserve_existing_shardings else leaf.spec for leaf in leaves]
    return jax.tree.unflatten(structure, specs)


def infer_resource_partitions(
    tree: Any,
    placement: Placement = None,
    preserve_existing_shardings: bool = True,
    mesh: AnyMesh | None = None,
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
        spec = _existing(leaf) if leaf.spec is None and preserve_existing_shardings else leaf.spec
        return None if spec is None else NamedSharding(leaf.mesh or mesh, spec)

    return jax.tree.unflatten(structure, [sharding(leaf) for leaf in leaves])


def _existing(leaf: Leaf) -> PartitionSpec | None:
    array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def round_axis_for_partitioning(
    axis: Axis, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None
) -> Axis:
    """Enlarge an axis until its mesh axes divide the size.

    Arguments:
        axis: a logical axis.
        mapping: the mapping; by default the active one.
        mesh: the mesh; by default the active one.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> axn.sharding.round_axis_for_partitioning(axn.Axis("vocab", 7), {"vocab": "data"}, mesh)
    Axis(name='vocab', size=8)
    """
    if mapping_of(mapping).get(axis.name) is None:
        return axis
    shards = physical_axis_size(axis, mapping, mesh) or 1
    return axis.resize(-(-axis.size // shards) * shards)
