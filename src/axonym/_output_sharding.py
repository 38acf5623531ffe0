"""The output sharding of an operation on Explicit mesh axes, inferred by name.

On an Explicit mesh, the sharding of an array is part of its type, and JAX refuses every operation whose output sharding
it cannot infer. Names make this possible: an output axis keeps the sharding of that axis in the operands; where they
disagree, or an axis is new, the active mapping decides. `infer_output_spec` infers the sharding, and
`call_with_output_sharding` applies it to any positional function: it calls the function directly if JAX can infer its
output sharding, and otherwise hands it to the partitioner together with the output sharding.

An axis that is split, merged or renamed has other names in the output. The operation then declares which of them are
its *successors*, which take over its mesh axes, major to minor. So no data moves whenever shards stay contiguous: if
`batch` is split into `(step, row)`, `step` takes over its mesh axes, and `row` takes those that do not divide `step`.

If its mesh axes do not divide the new size of an axis (a slice of a sharded axis, say), it comes out replicated: JAX
has no type for uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from . import _errors
from ._context import Entry, active_mapping, is_mapped
from ._mesh_axes import (
    NO_MESH,
    axes_of_type,
    entries_of,
    entry_of,
    explicit_mesh,
    mapped_on,
    mesh_axes,
    shard_count,
    spec_of,
)
from .axis import Names

Successors = Mapping[str, Names]
"""The output axes that take over the sharding of an operand's axis, major to minor. Where several axes are merged into
one, the mapping lists them in the order in which they are merged."""


def infer_output_spec(
    what: str,
    out_names: Names,
    out_shape: Sequence[int],
    operands: Sequence[tuple[Names, Sequence[Entry]]],
    mesh: Any,
    successors: Successors = MappingProxyType({}),
) -> PartitionSpec:
    """Infer the partition spec of an output: each axis keeps the sharding that it has in the operands.

    Arguments:
        operands: names and spec entries of each operand.
        successors: the output axes that take over the sharding of an operand's axis; by default the axis of that name.
    """
    sizes = dict(zip(out_names, out_shape, strict=True))
    mapping = {n: mapped_on(what, n, mesh, AxisType.Explicit) for n in sizes if n in active_mapping()}
    wanted: dict[str, list[Entry]] = {}
    for names, entries in operands:
        for name, entry in _asked(dict(zip(names, entries, strict=True)), sizes, mesh, successors).items():
            if entry not in wanted.setdefault(name, []):
                wanted[name].append(entry)
    seen = {n for names, _ in operands for n in names}
    chosen: dict[str, tuple[str, ...]] = {}
    for name in out_names:
        choices = wanted.get(name, [])
        if len(choices) > 1 and name not in mapping:
            raise ValueError(_disagreement(what, name, choices, mesh))
        if len(choices) == 1:
            # A resized axis is replicated if its mesh axes no longer divide it.
            chosen[name] = mesh_axes(choices[0]) if sizes[name] % shard_count(mesh, choices[0]) == 0 else ()
        else:
            chosen[name] = mapping.get(name, ()) if choices or name not in seen else ()
            if sizes[name] % shard_count(mesh, chosen[name]):
                raise ValueError(_indivisible(what, name, sizes[name], chosen[name], mesh))
    _settle_collisions(what, chosen, mapping, mesh)
    return spec_of(chosen.values())


def _settle_collisions(
    what: str, chosen: dict[str, tuple[str, ...]], mapping: Mapping[str, tuple[str, ...]], mesh: AbstractMesh
) -> None:
    """Assign each mesh axis to one axis: if several are sharded over it, to the one in the mapping."""
    for axis in mesh.axis_names:
        users = [n for n, axes in chosen.items() if axis in axes]
        if len(users) < 2:
            continue
        entitled = [n for n in users if axis in mapping.get(n, ())]
        if len(entitled) != 1:
            raise ValueError(_collision(what, axis, users, mesh, bool(entitled)))
        for n in users:
            if n not in entitled:
                chosen[n] = tuple(a for a in chosen[n] if a != axis)


def _asked(
    placed: Mapping[str, Entry], sizes: Mapping[str, int], mesh: AbstractMesh, successors: Successors
) -> Mapping[str, Entry]:
    """Return the sharding of each output axis that one operand implies."""
    asked = {n: entry for n, entry in placed.items() if entry is not None and n not in successors}
    inherited: dict[str, tuple[str, ...]] = {}
    for name, candidates in successors.items():
        left = [n for n in candidates if n in sizes]
        for axis in mesh_axes(placed.get(name)):
            while left and sizes[left[0]] % shard_count(mesh, (*inherited.get(left[0], ()), axis)):
                left.pop(0)
            if left:
                inherited[left[0]] = (*inherited.get(left[0], ()), axis)
    return asked | {n: entry_of(axes) for n, axes in inherited.items()}


def call_with_output_sharding(
    what: str,
    fn: Callable[..., Any],
    in_names: Sequence[Names],
    out_names: Names | tuple[Names, ...],
    arrays: Sequence[Any],
    *,
    native: bool = False,
    successors: Successors = MappingProxyType({}),
) -> Any:
    """Call a positional function so that it works on any mesh.

    Arguments:
        fn: the positional function, from arrays to an array or a tuple of arrays.
        native: whether JAX infers the output sharding of `fn` itself if the operands agree.
        successors: see `infer_output_spec`.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        around = None if native or not is_mapped() else explicit_mesh(arrays, sharded=False)
        return fn(*arrays) if around is None else _call_mapped(fn, arrays, around)
    several, specs = infer_output_specs(what, fn, in_names, out_names, arrays, mesh, successors)
    if native and not several and _agree(out_names, specs[0], _placed(in_names, arrays)):
        return fn(*arrays)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    placed = jax.sharding.auto_axes(
        lambda *xs: tuple(fn(*xs)) if several else fn(*xs),
        axes=axes_of_type(mesh, AxisType.Explicit),
        out_sharding=shardings if several else shardings[0],
    )
    return placed(*arrays)


def _call_mapped(fn: Callable[..., Any], arrays: Sequence[Any], mesh: AbstractMesh) -> Any:
    """Call a function of unsharded arrays that is mapped over an axis, which may be sharded.

    The types of the arrays do not have that axis. For some functions, such as a look-up by mapped indices in an array
    that is not mapped, JAX cannot infer the sharding of the result, but it adds the axis to one that it is given.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(fn, axes=axes_of_type(mesh, AxisType.Explicit), out_sharding=everywhere)(*arrays)


def infer_output_specs(
    what: str,
    fn: Callable[..., Any],
    in_names: Sequence[Names],
    out_names: Any,
    arrays: Sequence[Any],
    mesh: Any,
    successors: Successors,
) -> tuple[bool, list[PartitionSpec]]:
    """Return whether a positional function has several outputs, and the partition spec of each."""
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    with jax.sharding.use_abstract_mesh(NO_MESH):  # otherwise arrays that `fn` creates would be on the mesh
        shapes = jax.eval_shape(fn, *abstract)
    several = isinstance(shapes, (tuple, list))
    each = zip(out_names, shapes, strict=True) if several else ((out_names, shapes),)
    operands = _placed(in_names, arrays)
    return several, [infer_output_spec(what, names, s.shape, operands, mesh, successors) for names, s in each]


def _placed(in_names: Sequence[Names], arrays: Sequence[Any]) -> list[tuple[Names, tuple[Entry, ...]]]:
    return [(names, entries_of(x)) for names, x in zip(in_names, arrays, strict=True)]


def _agree(out_names: Any, spec: PartitionSpec, operands: Sequence[tuple[Names, Sequence[Entry]]]) -> bool:
    """Return whether each operand is sharded like the output, and no new axis of the output is sharded."""
    want = dict(zip(out_names, spec, strict=True))
    pairs = [(n, e) for names, entries in operands for n, e in zip(names, entries, strict=True)]
    new = want.keys() - {n for n, _ in pairs}
    return all(want.get(n, e) == e for n, e in pairs) and all(want[n] is None for n in new)


def _disagreement(what: str, name: str, choices: Sequence[Entry], mesh: AbstractMesh) -> str:
    return (
        f"{what}: the operands shard axis {name!r} over different mesh axes of "
        f"{_errors.describe_shape(mesh.shape)}, so the sharding of the result is ambiguous. Set it with "
        + " or ".join(f"`axonym.axis_mapping({{{name!r}: {c!r}}}, merge=True)`" for c in choices)
        + ", or place the operands alike first with `axonym.shard`."
    )


def _collision(what: str, axis: str, users: Sequence[str], mesh: AbstractMesh, both_mapped: bool) -> str:
    listed = " and ".join(repr(n) for n in users)
    wanted = None if both_mapped else axis
    return (
        f"{what}: axes {listed} of the result would both be sharded over mesh axis {axis!r} of "
        f"{_errors.describe_shape(mesh.shape)}. Say which one is{' not' if both_mapped else ''} with "
        + " or ".join(f"`axonym.axis_mapping({{{n!r}: {wanted!r}}}, merge=True)`" for n in users)
        + ", or place an operand differently first with `axonym.shard`."
    )


def _indivisible(what: str, name: str, size: int, axes: Sequence[str], mesh: AbstractMesh) -> str:
    over = " x ".join(f"{a}={mesh.shape[a]}" for a in axes)
    return (
        f"{what}: the active mapping shards axis {name!r} over mesh axes {over}, which do not divide its size "
        f"{size}. Resize the axis, or map it to None."
    )
