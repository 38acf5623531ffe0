"""Answer questions about mesh axes: which a name maps to, which an array is sharded over, their types and sizes.

All code that needs the mesh axes over which a name is sharded, their types, or the number of shards, uses this module.
So a missing key, a Manual mesh axis and an unconstrained entry mean the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..core import errors
from .active_settings import Entry, active_mapping, active_parameter_mapping

Axes: TypeAlias = tuple[str, ...]
"""Several mesh axes, the major one first."""
AnyMesh: TypeAlias = Mesh | AbstractMesh

# --- entries and specs ---


def mesh_axes(entry: Entry | Sequence[str]) -> Axes:
    """Return the mesh axes in an entry of a partition spec; an unconstrained entry has none."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: Sequence[str]) -> Entry:
    """Return the entry of a partition spec that shards an axis over some mesh axes, in JAX's form."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def spec_of(axes: Iterable[Sequence[str]]) -> PartitionSpec:
    """Return the partition spec that shards each axis over the given mesh axes."""
    return PartitionSpec(*map(entry_of, axes))


def padded(spec: Iterable[Entry], rank: int) -> tuple[Entry, ...]:
    """Return the entries of a spec, one for each axis of an array: the last axes may have none, and are replicated."""
    entries = tuple(spec)
    return (*entries, *(None,) * (rank - len(entries)))


def axes_in(spec: Iterable[Entry]) -> Axes:
    """Return the mesh axes in the entries of a spec, with repetitions."""
    return tuple(a for entry in spec for a in mesh_axes(entry))


def restricted(spec: Iterable[Entry], kept: Collection[str]) -> PartitionSpec:
    """Return the spec with only some of its mesh axes; unconstrained entries stay unconstrained."""
    return PartitionSpec(
        *(e if e is PartitionSpec.UNCONSTRAINED else entry_of([a for a in mesh_axes(e) if a in kept]) for e in spec)
    )


# --- meshes ---

NO_MESH = AbstractMesh((), ())


def current_mesh() -> AnyMesh | None:
    """Return the active mesh, set by `jax.set_mesh` or else by an older `with mesh:`; None if there is none.

    Inside a traced function the mesh has no devices; names need only its axes, sizes and types.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> with jax.set_mesh(mesh):
    ...     axn.current_mesh().axis_names
    ('data',)
    """
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    try:  # JAX exposes the mesh of `with mesh:` only through a constraint without a mesh
        # In a trace, the constraint would become part of the program, and a tracer has no sharding.
        with jax.ensure_compile_time_eval():
            probe = jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:
        return None
    sharding = probe.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def types_of(mesh: AnyMesh) -> dict[str, AxisType]:
    """Return the type of each mesh axis."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def axes_of_type(mesh: AnyMesh, *types: AxisType) -> Axes:
    """Return the mesh axes that have one of these types."""
    return tuple(a for a, t in types_of(mesh).items() if t in types)


def has_explicit(mesh: AnyMesh) -> bool:
    """Return whether any mesh axis is Explicit."""
    return AxisType.Explicit in mesh.axis_types


def has_manual(mesh: AnyMesh) -> bool:
    """Return whether any mesh axis is Manual."""
    return AxisType.Manual in mesh.axis_types


def shard_count(mesh: AnyMesh, entry: Entry | Sequence[str]) -> int:
    """Return the number of shards of an axis with this entry."""
    return math.prod(mesh.shape[a] for a in mesh_axes(entry))


def fits(spec: Iterable[Entry], shape: Sequence[int], mesh: AnyMesh) -> bool:
    """Return whether a spec fits: the mesh has its mesh axes, each is used once, and they divide the sizes."""
    entries = tuple(spec)
    used = axes_in(entries)
    known = all(a in mesh.shape for a in used) and len(set(used)) == len(used) and len(entries) == len(shape)
    return known and all(size % shard_count(mesh, e) == 0 for size, e in zip(shape, entries, strict=True))


# --- arrays ---


def explicit_mesh(arrays: Sequence[Any], *, sharded: bool = True) -> AbstractMesh | None:
    """Return the mesh of the operands if one of them is sharded over its Explicit axes, else None.

    With `sharded=False`, it is enough that one of them is on a mesh with such axes.
    """
    for x in arrays:
        sharding = jax.typeof(x).sharding
        if (not sharded or any(entry is not None for entry in sharding.spec)) and has_explicit(sharding.mesh):
            return sharding.mesh
    return None


def mesh_around(arrays: Sequence[Any] = ()) -> AnyMesh:
    """Return the mesh of operands on Explicit mesh axes, or else the active mesh, which is empty if there is none."""
    return explicit_mesh(arrays) or current_mesh() or NO_MESH


def entries_of(x: Any) -> tuple[Entry, ...]:
    """Return the entries of the partition spec of a traced array, one for each axis."""
    return tuple(jax.typeof(x).sharding.spec)


def reshard(x: jax.Array, spec: Iterable[Entry], mesh: AnyMesh) -> jax.Array:
    """Reshard an array over Explicit mesh axes to a spec; return the same array if it has that sharding."""
    wanted = restricted(spec, axes_of_type(mesh, AxisType.Explicit))
    return x if entries_of(x) == tuple(wanted) else jax.sharding.reshard(x, NamedSharding(mesh, wanted))


def replicate_along(x: jax.Array, which: Sequence[bool], mesh: AnyMesh) -> jax.Array:
    """Replicate an array along some of its axes; the others keep their sharding."""
    x = reshard(x, (None if w else e for w, e in zip(which, entries_of(x), strict=True)), mesh)
    if AxisType.Auto not in mesh.axis_types:
        return x
    if isinstance(x, Tracer):
        entries = (None if w else PartitionSpec.UNCONSTRAINED for w in which)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
    if not isinstance(x.sharding, NamedSharding):  # under `jax.disable_jit`, on one device
        return x
    entries = zip(which, padded(x.sharding.spec, x.ndim), strict=True)
    spec = PartitionSpec(*(None if w else e for w, e in entries))
    return jax.device_put(x, NamedSharding(x.sharding.mesh, spec))


# --- names ---


def entries_by_name(names: Iterable[str], mapping: Mapping[str, Entry] | None = None) -> tuple[Entry, ...]:
    """Return the entries of a mapping, the active one by default, for some axes; axes that it lacks are replicated."""
    known = active_mapping() if mapping is None else mapping
    return tuple(known.get(n) for n in names)


def mapped_axes(name: str, mapping: Mapping[str, Entry] | None = None) -> Axes:
    """Return the mesh axes over which a mapping, the active one by default, shards an axis."""
    return mesh_axes(entries_by_name((name,), mapping)[0])


def storage_axes(
    name: str, parameters: Mapping[str, Entry] | None = None, mapping: Mapping[str, Entry] | None = None
) -> Axes:
    """Return the storage sharding of an axis of parameters; the mappings are by default the active ones."""
    stored = active_parameter_mapping() if parameters is None else parameters
    return mesh_axes(stored[name]) if name in stored else mapped_axes(name, mapping)


def is_parameter(
    names: Iterable[str], parameters: Mapping[str, Entry] | None = None, mapping: Mapping[str, Entry] | None = None
) -> bool:
    """Return whether an array with these axes is a parameter; the mappings are by default the active ones.

    A parameter has an axis whose storage sharding differs from its compute sharding, and no other axis that is sharded
    over the same mesh axes: that would be a batch of something.
    """
    both = [(storage_axes(n, parameters, mapping), mapped_axes(n, mapping)) for n in names]
    own = {a for stored, used in both if stored != used for a in stored}
    return bool(own) and own.isdisjoint(a for stored, used in both if stored == used for a in used)


def check_mesh_axes(what: str, mapping: Mapping[str, Entry], mesh: AnyMesh) -> None:
    """Check that the mesh has all mesh axes of a mapping."""
    for name, entry in mapping.items():
        for mesh_axis in mesh_axes(entry):
            if mesh_axis not in mesh.shape:
                raise ValueError(errors.unknown_mesh_axis(what, name, mesh_axis, mesh))


def check_in_mesh(what: str, axes: Iterable[str], mesh: AnyMesh) -> None:
    """Check that the mesh has some mesh axes that a user named."""
    if unknown := [a for a in axes if a not in mesh.shape]:
        raise ValueError(
            f"{what}: mesh {errors.describe_shape(mesh.shape)} has no axis {errors.quoted(unknown)}."
            + errors.suggestions(unknown, mesh.axis_names)
        )


def check_mapped(what: str, names: Iterable[str]) -> None:
    """Check that the active mesh has all mesh axes over which the active mapping shards some axes."""
    mapping = active_mapping()
    mapped = {n: mapping[n] for n in names if n in mapping} if mapping else {}
    mesh = current_mesh() if any(mapped.values()) else None
    if mesh is not None:
        check_mesh_axes(what, mapped, mesh)


def mapped_on(what: str, name: str, mesh: AnyMesh, *types: AxisType) -> Axes:
    """Return the mesh axes of some types over which the active mapping shards an axis; all must be in the mesh.

    There are none without a mesh.
    """
    if mesh.empty:
        return ()
    found, known = mapped_axes(name), types_of(mesh)
    check_mesh_axes(what, {name: found}, mesh)
    return tuple(a for a in found if known[a] in types)


def sharded_over(what: str, names: Iterable[str], x: Any, mesh: AnyMesh, *types: AxisType) -> tuple[Axes, ...]:
    """Return the mesh axes that each axis of an operand is sharded over.

    Explicit mesh axes come from its type, mesh axes of the given types from the active mapping.
    """
    explicit = axes_of_type(mesh, AxisType.Explicit)
    return tuple(
        (*(a for a in mesh_axes(entry) if a in explicit), *mapped_on(what, name, mesh, *types))
        for name, entry in zip(names, entries_of(x), strict=True)
    )


def evenly_sharded(
    what: str,
    names: Iterable[str],
    x: jax.Array,
    along: Collection[str] | None = None,
    *,
    beside: Sequence[jax.Array] = (),
    fill: Any = None,
) -> jax.Array:
    """Shard an array evenly along some axes, all by default, along which XLA then scatters correctly.

    If elements are scattered, as in the gradient of a look-up, and an axis of theirs is sharded unevenly over some of
    several mesh axes, XLA scatters padding too. On Auto mesh axes, no type shows where an array lies, and its axes may
    have other names where it was placed. So sizes decide: an axis that all mesh axes together divide is left as it is.
    Any other lies where the active mapping has it, padded with `fill` to a size that its mesh axes divide. It is
    replicated without such a value, or if the mapping lacks it.

    Arguments:
        beside: other operands, which lie on a mesh where `x` may be a constant.
    """
    meshes = (jax.typeof(y).sharding.mesh for y in (x, *beside))
    mesh = next((m for m in meshes if not m.empty), None) or current_mesh() or NO_MESH
    auto, explicit = axes_of_type(mesh, AxisType.Auto), axes_of_type(mesh, AxisType.Explicit)
    total = shard_count(mesh, auto)
    if total < 2 or sum(mesh.shape[a] > 1 for a in (*auto, *explicit)) < 2:
        return x
    entries: list[Any] = []
    shape: list[int] = []
    for name, size, entry in zip(names, x.shape, entries_of(x), strict=True):
        over, used = mapped_on(what, name, mesh, AxisType.Auto), axes_in(entries)
        count = shard_count(mesh, over)
        if entry is not None or size % total == 0 or (along is not None and name not in along):
            entries.append(PartitionSpec.UNCONSTRAINED)
        else:
            size = size if fill is None else -(-size // count) * count
            entries.append(entry_of(over) if size % count == 0 and not {*over} & {*used} else None)
        shape.append(size)
    if all(entry is PartitionSpec.UNCONSTRAINED for entry in entries):
        return x
    if tuple(shape) != x.shape:
        added = [(0, new - size, 0) for new, size in zip(shape, x.shape, strict=True)]
        x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), added)
    spec = PartitionSpec(*entries)
    unset = jax.sharding.get_abstract_mesh().empty
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec) if unset else spec)
