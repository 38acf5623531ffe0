"""`shard`: shard a tree by a placement, outside and inside jit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..axis import Names
from ..core import errors
from ..core.jax_versions import INLINE, is_about_devices
from ..core.parameter_names import by_parameter, parameter_names
from ..core.processes import checksum, fail_together
from ..core.tree_spec import is_key
from ..distribution import axis_marks
from ..distribution.active_settings import REPORTED, active_mapping, active_parameter_mapping
from ..distribution.axis_marks import is_marking
from ..distribution.mesh_axes import axes_in, entry_of, mesh_axes, padded, reshard, types_of
from ..distribution.operation_scope import operation_scope
from ..distribution.padded_array import PaddedArray, is_padded, padded_array, stored, with_padding
from ..named_array import NamedArray, is_named_array, raw, wrap_like
from .leaves import Leaf, leaves_of
from .mapping import Uneven, as_mapping, check_direction, is_resource_mapping, normalize_mapping, uneven_here
from .meshes import AnyMesh, as_seen_here, current_mesh, in_trace, with_devices
from .moving import copied_to_host, from_each_process, move_to_sharding, program_to, renew_if_empty
from .placement import (
    ByParameter,
    Placement,
    Rule,
    checked_prefix,
    describe_leaf,
    drop_manual,
    is_placement,
    resolve,
    shardings_in,
    shards_here,
    spec_of_leaf,
)

R = TypeVar("R")
T = TypeVar("T")


def shard(tree: T, placement: Placement = None, mesh: AnyMesh | None = None, *, uneven: Uneven = None) -> T:
    """Shard every array of a tree by a placement.

    Outside jit this moves data, unless the array already has the sharding. Inside jit it constrains the partitioner
    (Auto mesh axes) or reshards (Explicit ones). Inside `shard_map`, manual mesh axes are ignored. Abstract arrays get
    their sharding; leaves that are not arrays are returned as they are.

    Arguments:
        tree: named arrays, raw arrays, models, optimizer states, ...
        placement: a resource mapping, a `PartitionSpec`, a `NamedSharding`, a rule, or a tree prefix of these. By
            default the active mapping.
        mesh: the mesh; by default the active one.
        uneven: what to do with arrays whose axes their mesh axes do not divide: see `axonym.axis_mapping`. "pad" stores
            them padded.

    >>> x, mesh = axn.ones({"batch": 16, "embed": 4}), axn.make_mesh({"data": -1})
    >>> with axn.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
    ...     x = axn.shard(x)
    >>> x.array.sharding.spec
    P('data', None)
    """
    with uneven_here("shard", uneven):
        return _shard_leaves(tree, placement, mesh, "shard", warn=True)


def unshard(tree: T, placement: Placement = None, mesh: AnyMesh | None = None) -> T:
    """Replicate every array of a tree, or only the axes that a placement shards.

    With a placement, this undoes `shard`: each axis that the placement shards becomes replicated, and all others keep
    the sharding they have. So you can gather arrays that were sharded only for storage, and keep their other sharding.

    Arguments:
        tree: the tree to replicate.
        placement: the placement to undo: a resource mapping, a rule, or any other. By default all shardings; the
            active mapping is ignored.
        mesh: the mesh; the active one by default.

    >>> mesh = axn.make_mesh({"fsdp": 2, "model": 2})
    >>> x = axn.shard(axn.ones({"embed": 16, "mlp": 4}), {"embed": "fsdp", "mlp": "model"}, mesh)
    >>> axn.unshard(x, mesh=mesh).array.sharding.spec
    P(None, None)
    >>> axn.unshard(x, {"embed": "fsdp"}, mesh).array.sharding.spec
    P(None, 'model')
    """
    if placement is None:
        return _shard_leaves(tree, PartitionSpec(), mesh, "unshard", warn=True)
    return _shard_leaves(tree, placement, mesh, "unshard", warn=True, undo=True)


def to_host(tree: T) -> T:
    """Copy every array of a tree to host memory, as NumPy arrays without padding.

    Arrays on several hosts are gathered first, so every host must call this, with trees of the same arrays.

    >>> type(axn.to_host(axn.ones({"batch": 2})).array).__name__
    'ndarray'
    """

    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    arrays = [stored(x) for x in leaves if isinstance(stored(x), jax.Array)]
    spread = any(not isinstance(x, Tracer) and not x.is_fully_addressable for x in arrays)
    with fail_together("to_host") if spread else contextlib.nullcontext(lambda same: None) as agree:
        if any(isinstance(x, Tracer) for x in arrays):
            raise TypeError("to_host: a traced array has no values to copy; call it outside of jit.")
        if any(map(is_key, arrays)):
            raise TypeError("to_host: NumPy has no arrays of random keys; convert them with jax.random.key_data first.")
        if any(x.is_deleted() for x in arrays):
            raise RuntimeError("to_host: an array was deleted, as by a donation.")
        if spread:  # gathers are paired by their order, so every process must have every array
            agree({"arrays on several hosts": "\n".join(str(x.aval) for x in arrays if not x.is_fully_addressable)})
        copied = [copied_to_host(stored(x)) if isinstance(stored(x), jax.Array) else x for x in leaves]
        whole = [x.sliced(c) if isinstance(x, PaddedArray) else c for x, c in zip(leaves, copied, strict=True)]
        return jax.tree.unflatten(structure, whole)


def shard_quietly(tree: T, placement: Placement, what: str) -> T:
    """Shard a tree as `shard` does; without a placement or a mesh, return it as it is, without a warning.

    `what` names the operation in errors.

    >>> axn.sharding.shard_quietly(jnp.ones(2), jax.P("data"), "load").sharding.is_fully_replicated
    True
    """
    return _shard_leaves(tree, placement, None, what, warn=False)


def store(tree: T, placement: Placement, what: str) -> T:
    """Shard the results of a compiled function: as `shard_quietly` does, but arrays with uneven axes are padded.

    >>> from axonym.sharding.shard import store
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})), axn.axis_mapping({"x": "data"}, uneven="pad"):
    ...     jax.eval_shape(lambda: store(axn.ones({"x": 3}), None, "store")).array.array.shape
    (4,)
    """
    return _shard_leaves(tree, placement, None, what, warn=False, pads=True)


def shard_arguments(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placement: Placement,
    what: str,
    static: Sequence[int] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shard the arguments of a call, except at static positions. Errors name the parameters.

    Pass one placement for all arguments, a tuple with one for each positional parameter, or a dictionary by parameter.
    Arguments without one keep their sharding.
    """
    names = parameter_names(fn, len(args), kwargs)
    fixed = {i if i >= 0 else i + len(args) for i in static}
    positional = [name for i, name in enumerate(names) if i not in fixed]
    values = {**dict(zip(names, args, strict=True)), **kwargs}
    if is_placement(placement):
        chosen = dict.fromkeys([*positional, *kwargs], placement)
    elif isinstance(placement, Mapping):
        if any(type(p) is int for p in placement.values()):
            normalize_mapping(placement, what)  # raises the error
        if unknown := [name for name in placement if name not in values]:
            raise ValueError(
                f"{what}: {errors.quoted(unknown)} is not an argument of the call, which has "
                f"{', '.join(values)}.{errors.suggestions(unknown, values)}"
            )
        chosen = dict(placement)
    elif isinstance(placement, Sequence) and not isinstance(placement, str):
        if hint := as_mapping(placement):
            raise TypeError(f"{what}: {placement!r} is a {type(placement).__name__} of pairs, not a mapping.{hint}")
        chosen = by_parameter(what, fn, placement, static)
        if missing := [name for name in positional if name not in chosen]:
            raise ValueError(
                f"{what}: {errors.counted(len(placement), 'placement')}, and none for {', '.join(missing)}. Give "
                "one for each positional argument; None leaves an argument to the active mapping."
            )
        chosen = {name: p for name, p in chosen.items() if name in values}
    else:
        raise TypeError(
            f"{what}: expected a placement, or a tuple or dictionary with one for each argument, got {placement!r}."
        )
    given = ByParameter({name: values[name] for name in chosen})
    placed = values | _shard_leaves(given, ByParameter(chosen), None, what, warn=False, arguments=True).values
    return tuple([placed[name] for name in names]), {name: placed[name] for name in kwargs}


Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def call_on_mesh(
    what: str,
    call: Callable[[Any, Any], R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    place: Callable[[Any, Any], Arguments] | None,
    placement: Placement,
) -> R:
    """Call a jitted function that shards its arguments inside, also with arguments on other devices.

    `jax.jit` refuses arguments on devices outside the mesh. Then they are moved, and the function is called again:
    `place` shards the arguments as the function does inside, by a placement that may have its own mesh.
    """
    try:
        return call(args, kwargs)
    except ValueError as refusal:
        around = current_mesh()
        meshes = [*(s.mesh for s in shardings_in(placement)), None if around is None else with_devices(around)]
        mesh = next((m for m in meshes if isinstance(m, Mesh)), None)
        if not is_about_devices(refusal) or in_trace() or mesh is None:
            raise
        refused = refusal
    devices = list(mesh.devices.flat)

    def elsewhere(x: Any) -> bool:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return isinstance(x, Tracer)
        has = x.sharding
        found = has.mesh.devices.flat if isinstance(has, NamedSharding) and isinstance(has.mesh, Mesh) else devices
        return has.device_set != set(devices) or list(found) != devices

    def on_mesh(x: Any) -> Any:
        return move_to_sharding(x, NamedSharding(mesh, PartitionSpec())) if elsewhere(x) else x

    if place is None:
        leaves = leaves_of((args, kwargs))[0]
        wrong = [leaf for leaf in leaves if elsewhere(x := raw(leaf.value)) and getattr(x, "committed", True)]
        if not wrong:
            raise refused
        path = dataclasses.replace(wrong[0], keys=wrong[0].keys[1:]).path
        lies = errors.counted(len(raw(wrong[0].value).devices()), "device")
        raise ValueError(
            f"{what}: argument {path} {describe_leaf(wrong[0])} lies on {lies}, and the mesh "
            f"{errors.describe_shape(mesh.shape)} has others. Say how arguments are sharded, by `in_placement` of "
            "axonym.named_jit, shard them before by axonym.shard, or restore them there: "
            "axonym.state.restore_checkpoint takes a placement and a mesh."
        ) from refused
    # The devices of a tracer in an eager transform are not known, and it cannot be constrained on other devices.
    arguments = jax.tree.map(lambda x: on_mesh(x) if isinstance(x, Tracer) else x, (args, kwargs))
    return call(*jax.tree.map(on_mesh, place(*arguments)))


def _shard_leaves(
    tree: T,
    placement: Placement,
    mesh: AnyMesh | None,
    what: str,
    warn: bool,
    undo: bool = False,
    pads: bool = False,
    arguments: bool = False,
) -> T:
    if warn and is_marking() and current_mesh() is None and _is_by_name(placement, mesh) and not undo:
        return _with_placement_marks(tree, placement, what)
    if placement is None and not active_mapping():
        if warn:
            errors.warn(
                f"{what}: no mapping is active, so nothing was placed. Use axonym.axis_mapping, or pass a placement."
            )
        return tree
    if mesh is not None:
        other = [s.mesh for s in shardings_in(placement) if s.mesh != mesh]
        if other:
            raise ValueError(f"{what}: the placement has a sharding on {other[0]}, but the mesh passed is {mesh}.")
        mesh = as_seen_here(mesh)
    else:
        mesh = current_mesh()
    if mesh is not None and not undo and _are_in_place(tree, placement, mesh, what):
        return tree
    if mesh is None and not shardings_in(placement):
        checked_prefix(placement, what)
        if warn:
            warn_without_mesh(what, placement, tree, ", or pass it as `mesh`")
        return tree
    if placement is None and mesh is not None:
        check_direction(what, active_mapping(), mesh)
    leaves, structure = resolve(tree, placement, mesh, what, pads=True)
    if undo:  # replicate the axes that the placement shards, and leave the others unconstrained
        gathered = [[None if mesh_axes(e) else PartitionSpec.UNCONSTRAINED for e in leaf.spec or ()] for leaf in leaves]
        leaves = [
            leaf if leaf.spec is None else dataclasses.replace(leaf, spec=PartitionSpec(*entries))
            for leaf, entries in zip(leaves, gathered, strict=True)
        ]
    if jax.process_count() > 1 and not in_trace():
        _check_same(leaves, mesh, what)
    return jax.tree.unflatten(
        structure, [_place_leaf(leaf, leaf.mesh or mesh, what, pads, arguments) for leaf in leaves]
    )


def _is_by_name(placement: Placement, mesh: AnyMesh | None) -> bool:
    return mesh is None and (placement is None or is_resource_mapping(placement))


def _with_placement_marks(tree: T, placement: Any, what: str) -> T:
    """Mark where the arrays of a tree lie from here on, in a trace that follows names and has no mesh."""
    mapping = normalize_mapping(placement, what) if placement is not None else active_mapping() or {REPORTED: None}
    leaves, structure = leaves_of(tree)
    placed = list[Any]()
    for leaf in leaves:
        x = raw(leaf.value)
        if isinstance(x, Tracer) and leaf.names is not None:
            with jax.named_scope(operation_scope("shard", (leaf.names,), leaf.names, (x,))):
                placed.append(wrap_like(axis_marks.placed(x, leaf.names, mapping), leaf.value))
        else:
            placed.append(leaf.value)
    return jax.tree.unflatten(structure, placed)


def _are_in_place(tree: Any, placement: Placement, mesh: AnyMesh, what: str) -> bool:
    """Return whether all leaves of a tree are eager named arrays where a mapping, or the active one, puts them.

    Layers ask at every call, so answers are cached by names, sizes and sharding.
    """
    leaves = [tree] if isinstance(tree, NamedArray) else jax.tree.leaves(tree, is_leaf=is_named_array)
    for x in leaves:
        if not isinstance(x, NamedArray) or not isinstance(x.array, jax.Array) or isinstance(x.array, Tracer):
            return False
        mapping = active_mapping() if placement is None else placement
        # If a mapping names no axis, `resolve` warns about that.
        if not isinstance(mapping, Mapping) or (placement is not None and mapping.keys().isdisjoint(x.names)):
            return False
        try:
            known = with_devices(mesh), x.names, x.array.shape, x.array.sharding
            if not _lies_by(what, tuple(mapping.items()), *known):
                return False
        except TypeError:  # an entry that is a list has no hash
            return False
    return bool(leaves)


@functools.lru_cache(maxsize=4096)
def _lies_by(
    what: str, entries: tuple[tuple[Any, Any], ...], mesh: AnyMesh, names: Names, shape: tuple[int, ...], has: Any
) -> bool:
    """Return whether an array already has the sharding that a mapping gives it, with no error to report."""
    if not isinstance(has, NamedSharding) or len(names) != len(shape):
        return False
    if not is_resource_mapping(mapping := dict(entries)):
        return False
    mapping = normalize_mapping(mapping, what)
    if not mesh.shape.keys().isdisjoint(mapping):  # from mesh axes to axes, perhaps: that is an error
        return False
    leaf = Leaf((), None, names, shape)
    spec = spec_of_leaf(leaf, mapping, mesh, problems := [])
    return spec is not None and not problems and _has_spec(has, spec, mesh, len(shape))


def warn_without_mesh(what: str, placements: Any, tree: Any, otherwise: str = "") -> None:
    """Warn that nothing of a tree is sharded because no mesh is active."""
    known = {n for leaf in leaves_of(tree)[0] for n in leaf.names or ()}
    mapping = {k: v for m in _mappings_in(placements) for k, v in m.items()}
    turned = {} if known.isdisjoint(axes_in(mapping.values())) else {k: v for k, v in mapping.items() if k not in known}
    hint = errors.wrong_way_round(turned, turned)
    axes = dict.fromkeys(turned if hint else _axes_of(placements), 1)
    sizes = {axis: size if i else -1 for i, (axis, size) in enumerate(axes.items())} or {"data": -1}
    errors.warn(
        f"{what}: no mesh is active, so nothing is sharded.{hint} Activate a mesh around the call: "
        f"`with jax.set_mesh(axonym.make_mesh({sizes})):`{otherwise}."
    )


def needs_mesh(placements: Any) -> bool:
    """Return whether placements or the active mappings shard something, and none of them brings a mesh."""
    rules = any(isinstance(p, Rule) for p in jax.tree.leaves(placements, is_leaf=is_placement))
    return (rules or bool(_axes_of(placements))) and not shardings_in(placements)


def _axes_of(placements: Any) -> tuple[str, ...]:
    """Return the mesh axes that placements and the active mappings mention, except in rules."""
    specs = [p for p in _placements_in(placements) if isinstance(p, PartitionSpec)]
    return axes_in([e for m in _mappings_in(placements) for e in m.values()] + [e for spec in specs for e in spec])


def _mappings_in(placements: Any) -> list[dict[str, Any]]:
    """Return the active mappings, and the mappings among placements."""
    found = [active_mapping(), active_parameter_mapping(), *_placements_in(placements)]
    return [normalize_mapping(p) for p in found if isinstance(p, Mapping)]


def _placements_in(placements: Any) -> list[Any]:
    return jax.tree.leaves(placements, is_leaf=is_placement)


def _check_same(leaves: Sequence[Leaf], mesh: AnyMesh | None, what: str) -> None:
    """Check that arrays are equal in all processes, if each has its own and they become one global array."""
    lines = []
    for leaf in leaves:
        x = raw(leaf.value)
        target = leaf.mesh or mesh
        if leaf.spec is None or target is None:
            continue
        found = with_devices(target)
        if isinstance(found, Mesh) and not isinstance(x, Tracer):
            # Else some process would wait for another, which is not there.
            processes = {d.process_index for d in found.devices.flat}
            if _is_local(x):
                reached = processes == {jax.process_index()} or len(processes) == jax.process_count()
            else:
                reached = not isinstance(x, jax.Array) or x.sharding.device_set == set(found.devices.flat)
            if not reached:
                raise ValueError(
                    f"{what}: {leaf.path} cannot go to mesh {errors.describe_shape(found.shape)}, with devices of "
                    f"process {', '.join(map(str, sorted(processes)))} of {jax.process_count()}. Use axonym.transfer, "
                    "which copies between processes."
                )
        if _is_local(x) and _spans_processes(target):
            values = jax.random.key_data(x) if is_key(x) else x
            lines.append(f"{leaf.path} {x.dtype}{list(x.shape)} with checksum {checksum(values):08x}")
    if lines:
        with fail_together(what) as agree:
            agree({"arrays": "\n".join(lines)})


def _is_local(x: Any) -> bool:
    """Return whether an array with values belongs to this process alone."""
    return isinstance(x, np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable
    )


def _spans_processes(mesh: AnyMesh) -> bool:
    found = with_devices(mesh)
    return isinstance(found, Mesh) and found.is_multi_process


def _place_leaf(leaf: Leaf, mesh: AnyMesh | None, what: str, pads: bool, argument: bool) -> Any:
    if leaf.spec is None or mesh is None or leaf.shape is None:
        return leaf.value
    x = raw(leaf.value)
    put: Callable[..., Any] = _put_array
    if isinstance(x, PaddedArray):
        put = functools.partial(_put_padded, leaf, pads)
    elif (shape := padded_shape(leaf.shape, leaf.spec, mesh)) != leaf.shape:
        put = functools.partial(_put_uneven, leaf, pads)
        if argument and isinstance(x, Tracer):
            # Else XLA may shard an argument of the program over a part of a mesh axis, which JAX cannot read. Calls
            # from other traced functions replicate it too, though they need not: JAX keeps their programs.
            sizes = zip(padded(leaf.spec, len(shape)), shape, leaf.shape, strict=True)
            x = _constrain_array(x, PartitionSpec(*(e if a == b else None for e, a, b in sizes)), mesh, what)
    if isinstance(x, Tracer) and leaf.names is not None:
        with jax.named_scope(operation_scope("shard", (leaf.names,), leaf.names, (x,))):
            return wrap_like(put(x, leaf.spec, mesh, what), leaf.value)
    return wrap_like(put(x, leaf.spec, mesh, what), leaf.value)


def padded_shape(shape: Sequence[int], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """Return the shape of an array with the padding that a spec needs."""
    counts = [shards_here(mesh_axes(entry), mesh) for entry in padded(spec, len(shape))]
    return tuple(-(-size // n) * n for size, n in zip(shape, counts, strict=True))


def _put_padded(leaf: Leaf, pads: bool, x: Any, spec: PartitionSpec, mesh: AnyMesh, what: str) -> Any:
    """Shard an array that is stored padded."""
    assert leaf.shape is not None
    has = None if isinstance(x.array, Tracer) else x.sharding
    spec = _without_unconstrained(spec, has)
    shape = padded_shape(leaf.shape, spec, mesh)
    if not isinstance(has, NamedSharding) or not isinstance(x.array, jax.Array) or in_trace():
        y = x.unpadded()
    elif x.array.shape == shape and _has_spec(has, spec, mesh, x.ndim) and _on_devices_of(mesh, has):
        return x
    else:
        stays = has.mesh == with_devices(mesh)
        target = NamedSharding(has.mesh, spec if stays else PartitionSpec())
        with jax.set_mesh(NO_DEVICES):
            y = program_to(target, shape if stays else leaf.shape, leaf.shape)(x.array)
        if stays and shape != leaf.shape:
            return padded_array(y, leaf.shape)
    return _put_array(y, spec, mesh, what) if shape == leaf.shape else _put_uneven(leaf, pads, y, spec, mesh, what)


def _put_uneven(leaf: Leaf, pads: bool, x: Any, spec: PartitionSpec, mesh: AnyMesh, what: str) -> Any:
    """Shard an array with uneven axes: store it padded, or constrain it for a compiled function to compute with."""
    assert leaf.shape is not None
    inside = in_trace() and not isinstance(x, jax.ShapeDtypeStruct)
    if isinstance(x, Tracer) and not inside:
        raise ValueError(
            f"{what}: {leaf.path} {describe_leaf(leaf)} is stored padded outside of compiled functions, where nothing "
            "computes with it, so it has no derivative there either. Differentiate in a function compiled by "
            "axonym.named_jit."
        )
    if inside:
        x = _constrain_array(x, spec, mesh, what)
        if not pads:
            return x
    with contextlib.nullcontext() if inside else jax.set_mesh(NO_DEVICES):
        x = with_padding(x, padded_shape(leaf.shape, spec, mesh))
    return padded_array(_put_array(x, spec, mesh, what), leaf.shape)


NO_DEVICES = Mesh(np.empty((), object), ())
"""The active mesh while an array is cut or padded that may be on devices outside of the mesh it goes to."""


def _put_array(x: Any, spec: PartitionSpec, mesh: AnyMesh, what: str) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        spec = _without_unconstrained(spec, x.sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec), weak_type=x.weak_type)
    if isinstance(x, Tracer):
        return _constrain_array(x, spec, mesh, what)
    has = x.sharding if isinstance(x, jax.Array) else None
    if isinstance(has, NamedSharding) and _has_spec(has, spec, mesh, x.ndim) and _on_devices_of(mesh, has):
        return x
    if in_trace():
        return _constrain_array(x, spec, mesh, what)
    spec = _without_unconstrained(spec, has)
    if jax.process_count() > 1 and _is_local(x) and _spans_processes(mesh):
        return from_each_process(x, NamedSharding(with_devices(mesh), spec))
    x = renew_if_empty(x)
    found = with_devices(mesh)
    if isinstance(found, AbstractMesh):
        raise ValueError(
            f"{what}: mesh {errors.describe_shape(found.shape)} is abstract: it has no devices to move arrays to. "
            "Activate a mesh with devices, as in `with jax.set_mesh(mesh):`, or pass one."
        )
    return move_to_sharding(x, NamedSharding(found, spec))


def _without_unconstrained(spec: PartitionSpec, has: Any) -> PartitionSpec:
    """Replace the unconstrained entries of a spec by the array's current ones."""
    if PartitionSpec.UNCONSTRAINED not in spec:
        return spec
    own = padded(has.spec if isinstance(has, NamedSharding) else (), len(spec))
    return PartitionSpec(*(o if e is PartitionSpec.UNCONSTRAINED else e for e, o in zip(spec, own, strict=False)))


@functools.lru_cache(maxsize=4096)
def _has_spec(sharding: NamedSharding, spec: PartitionSpec, mesh: AnyMesh, ndim: int) -> bool:
    """Return whether an array already has a sharding. Comparing is far cheaper than asking JAX to move nothing."""
    same_mesh = (sharding.mesh.abstract_mesh if isinstance(mesh, AbstractMesh) else sharding.mesh) == mesh
    has, wanted = ([*map(mesh_axes, padded(s, ndim))] for s in (sharding.spec, spec))
    return same_mesh and has == wanted


def _on_devices_of(mesh: AnyMesh, sharding: NamedSharding) -> bool:
    """Return whether a sharding is on the devices of a mesh of its shape; true if the mesh hides its devices."""
    found = with_devices(mesh)
    return isinstance(found, AbstractMesh) or found == sharding.mesh


def _constrain_array(x: Any, spec: PartitionSpec, mesh: AnyMesh, what: str) -> Any:
    passed = mesh != jax.sharding.get_abstract_mesh()
    spec = drop_manual(spec, mesh)
    types = types_of(mesh)
    kinds = set(types.values())
    if AxisType.Explicit in kinds:
        spec = _without_unconstrained(spec, jax.typeof(x).sharding)
    if AxisType.Manual in kinds:
        if kinds == {AxisType.Manual} or all(entry is None for entry in spec):
            return x
        if AxisType.Explicit in kinds and AxisType.Auto in kinds:
            raise ValueError(
                f"{what}: the mesh {types} mixes Manual, Explicit and Auto axes here, where JAX versions disagree "
                "about the meaning of a constraint. Make all axes that are not Manual the same type."
            )
    if passed and AxisType.Explicit in kinds and jax.sharding.get_abstract_mesh().empty:
        if jax.typeof(x).sharding.mesh.empty:
            raise ValueError(
                f"{what}: a mesh with Explicit axes cannot be passed inside jit, since the arrays traced there "
                "are not on it. Activate it outside: `with jax.set_mesh(mesh): ...`."
            )
    return _make_constraint(spec, mesh, passed)(x)


@functools.lru_cache(maxsize=4096)
def _make_constraint(spec: PartitionSpec, mesh: AnyMesh, passed: bool) -> Callable[[Any], jax.Array]:
    """Make a jitted function that constrains an array to a spec.

    It is jitted so that it also works on tracers of eager transformations, where JAX has no rule that distinguishes the
    axes of a spec from axes that `vmap` adds.
    """
    types = types_of(mesh)

    def over_auto(entry: Any) -> Any:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return entry
        axes = [a for a in mesh_axes(entry) if types[a] == AxisType.Auto]
        if axes and len(axes) != len(mesh_axes(entry)):
            raise ValueError(
                f"shard: JAX cannot shard one axis over mesh axes of different types: {entry}, {types}. Use mesh axes "
                "of one type."
            )
        return entry_of(axes) or PartitionSpec.UNCONSTRAINED

    def constrain(x):
        wanted = PartitionSpec(*map(over_auto, spec))
        if AxisType.Explicit in types.values():
            x = reshard(x, spec, mesh)
        if AxisType.Auto not in types.values():
            return x
        # XLA moves a conversion to the other side of an exchange, and so would send four bytes for one.
        is_small = x.dtype.itemsize == 1 and x.dtype != bool
        x = jax.lax.optimization_barrier(x) if is_small else x
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, wanted) if passed else wanted)
        return jax.lax.optimization_barrier(x) if is_small else x

    return jax.jit(constrain, inline=INLINE)
