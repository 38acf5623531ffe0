"""Find and make meshes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ..distribution.mesh_axes import AnyMesh, current_mesh, has_manual

Between: TypeAlias = str | Sequence[str] | Mapping[str, int] | None
"""The mesh axes that cross slices: a name, several in order, or how many slices lie along each."""


def required_mesh(what: str, mesh: AnyMesh | None) -> AnyMesh:
    """Return the mesh argument, or else the active mesh, which must exist."""
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is None:
        raise ValueError(f"{what}: no mesh is active. Use jax.set_mesh, or pass a mesh.")
    return mesh


def with_devices(mesh: AnyMesh) -> AnyMesh:
    """Return the active mesh with its devices, if they can be known: not in a traced function."""
    if not isinstance(mesh, AbstractMesh):
        return mesh
    try:
        active = jax.sharding.get_mesh()
    except ValueError:  # a function is being traced, or transformed eagerly
        probe = jax.device_put(np.float32(0), PartitionSpec())
        if isinstance(probe, Tracer):
            return mesh
        active = probe.sharding.mesh
    return active if active.abstract_mesh == mesh else mesh


def in_trace() -> bool:
    """Return whether a program is being traced, so that even constants become part of it."""
    # An operation without operands is staged only by the trace around it. Outside of one, this moves a number, where
    # `jax.lax.full` would be compiled for each mesh and each mapping.
    return isinstance(jax.device_put(np.float32(0)), Tracer)


def as_seen_here(mesh: AnyMesh) -> AnyMesh:
    """Return a mesh as the code around sees it: inside `shard_map`, some or all of its axes are manual."""
    around = jax.sharding.get_abstract_mesh()
    return around if has_manual(around) and around.shape == mesh.shape else mesh


@contextlib.contextmanager
def set_mesh(mesh: AnyMesh) -> Iterator[AnyMesh]:
    """Activate a mesh in a with-block, as `jax.set_mesh` does, even a mesh without devices.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> with axn.set_mesh(mesh):
    ...     axn.current_mesh().shape["data"]
    1
    """
    enter = jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)
    with enter:
        yield mesh


def make_mesh(
    sizes: dict[str, int] | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    explicit: bool | str | Sequence[str] = False,
    devices: Sequence[Any] | None = None,
    between: Between = None,
) -> Mesh:
    """Make a mesh over the devices of all processes.

    A slice is a machine of CPUs, a machine or rack of GPUs, or a slice of TPUs; between slices is a slower network. One
    mesh axis crosses it, or a few, and the devices along all others are in one slice.

    Arguments:
        sizes: sizes by mesh axis, in order. One of them can be -1, for as many devices as the others leave.
        names: the mesh axes, if `sizes` is only a sequence.
        explicit: True makes all axes Explicit, so that shardings are part of types; names make only these Explicit.
            The others are Auto.
        devices: the devices to use; all of them by default.
        between: the mesh axes that cross slices: a name, several that share the number of slices in this order, or a
            dictionary of how many slices lie along each. By default it is the first whose size this number divides. In
            one slice nothing is to be done.

    >>> axn.make_mesh({"data": -1, "model": 2}).shape["model"]
    2
    """
    by_name = dict(sizes) if isinstance(sizes, dict) else dict(zip(names or (), sizes, strict=True))
    devices = list(jax.devices() if devices is None else devices)
    by_name = full_sizes(by_name, len(devices), "make_mesh")
    chosen = (explicit,) if isinstance(explicit, str) else by_name if explicit is True else (explicit or ())
    if unknown := set(chosen) - set(by_name):
        raise ValueError(
            f"make_mesh: explicit has {', '.join(sorted(unknown))}; the mesh axes are {', '.join(by_name)}."
        )
    kinds = tuple(AxisType.Explicit if n in chosen else AxisType.Auto for n in by_name)
    grid = arranged_devices(by_name, devices[: math.prod(by_name.values())], between, "make_mesh")
    return Mesh(grid, tuple(by_name), axis_types=kinds)


def slices_along(mesh: Mesh) -> dict[str, int]:
    """Return the mesh axes that cross slices, as `between` of `make_mesh`: with how many slices lie along each.

    >>> axn.sharding.slices_along(axn.make_mesh({"data": -1}))
    {}
    """
    numbers = np.vectorize(_slice_of, otypes=[int])(mesh.devices)
    lines = {a: np.moveaxis(numbers, i, 0).reshape(mesh.shape[a], -1) for i, a in enumerate(mesh.axis_names)}
    return {a: n for a, x in lines.items() if (n := len(np.unique(x, axis=0))) > 1}


def arranged_devices(sizes: Mapping[str, int], devices: Sequence[Any], between: Between, what: str) -> np.ndarray:
    """Return devices as a mesh of these sizes has them: slices along some axes, and neighbours near to each other."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(_slice_of(device), []).append(device)
    along = _checked_between(sizes, between, slices, what)
    outer = [along.get(n, 1) for n in sizes]
    inner = [size // k for size, k in zip(sizes.values(), outer, strict=True)]
    grid = np.empty([k for pair in zip(outer, inner, strict=True) for k in pair], dtype=object)
    for at, (_, own) in zip(np.ndindex(*outer), sorted(slices.items()), strict=True):
        names, kinds = tuple(map(str, range(len(inner)))), (AxisType.Auto,) * len(inner)
        try:
            placed = jax.make_mesh(tuple(inner), names, axis_types=kinds, devices=own).devices
        except NotImplementedError:  # axes that share a dimension of a torus
            placed = mesh_utils.create_device_mesh(inner, own, allow_split_physical_axes=True)
        grid[tuple(i for k in at for i in (k, slice(None)))] = placed
    return grid.reshape(list(sizes.values()))


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _checked_between(
    sizes: Mapping[str, int], between: Between, slices: Mapping[int, Sequence[Any]], what: str
) -> dict[str, int]:
    """Return how many slices lie along mesh axes."""
    names = [between] if isinstance(between, str) else list(between or ())
    if unknown := [n for n in names if n not in sizes]:
        raise ValueError(f"{what}: between has {', '.join(unknown)}; the mesh axes are {', '.join(sizes)}.")
    if (count := len(slices)) == 1:
        return {}
    lengths = sorted({len(own) for own in slices.values()})
    found = (
        f"{what}: the devices lie in {count} slices of {' or '.join(map(str, lengths))} devices (a slice is a machine "
        "of CPUs, a machine or rack of GPUs, or a slice of TPUs)"
    )
    if len(lengths) > 1:
        raise ValueError(f"{found}, and a mesh needs as many devices of each: pass `devices`, or start more processes.")
    out = f"Name axes that share them, as in between={tuple(sizes)[:2]!r}, or choose other sizes."
    if between is None and not (names := [n for n, size in sizes.items() if size % count == 0][:1]):
        raise ValueError(f"{found}, and no mesh axis of {dict(sizes)} is a multiple of {count}. {out}")
    along, left = {}, count
    for n in names:
        along[n] = between[n] if isinstance(between, Mapping) else math.gcd(left, sizes[n])
        left //= max(along[n], 1)
    if math.prod(along.values()) != count or any(k < 1 or sizes[n] % k for n, k in along.items()):
        raise ValueError(
            f"{found}, which cannot be divided by between={between!r} along the sizes {dict(sizes)}. {out}"
        )
    return along


def full_sizes(sizes: Mapping[str, int], available: int, what: str) -> dict[str, int]:
    """Return the sizes of mesh axes, where -1 becomes as many devices as the others leave."""
    for name in sizes:
        if not isinstance(name, str):
            raise TypeError(f"{what}: a mesh axis has a name, such as 'data', got {name!r}.")
        if name != name.encode(errors="replace").decode():  # JAX would raise an error in its own words
            raise ValueError(f"{what}: the name of a mesh axis has no lone surrogates, got {name!a}.")
    unknown = [n for n, s in sizes.items() if s == -1]
    known = math.prod(int(s) for s in sizes.values() if s != -1)
    if len(unknown) > 1:
        raise ValueError(f"{what}: only one size can be left open, got {', '.join(unknown)}.")
    if unknown and available % known:
        raise ValueError(f"{what}: {available} devices cannot be divided by {known}, the sizes of {dict(sizes)}.")
    if known > available:
        raise ValueError(
            f"{what}: {dict(sizes)} needs {known} devices; there are {available}. On CPUs, "
            f"`jax.config.update('jax_num_cpu_devices', {known})` before anything else simulates them."
        )
    return {n: available // known if s == -1 else s for n, s in sizes.items()}
