"""Find and make meshes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ..distribution.mesh_axes import AnyMesh, current_mesh, has_manual


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
) -> Mesh:
    """Make a mesh over the devices of all processes.

    Arguments:
        sizes: sizes by mesh axis, in order. One of them can be -1, for as many devices as the others leave.
        names: the mesh axes, if `sizes` is only a sequence.
        explicit: True makes all axes Explicit, so that shardings are part of types; names make only these Explicit.
            The others are Auto.
        devices: the devices to use; all of them by default.

    >>> axn.make_mesh({"data": -1, "model": 2}).shape["model"]
    2
    """
    by_name = dict(sizes) if isinstance(sizes, dict) else dict(zip(names or (), sizes, strict=True))
    by_name = full_sizes(by_name, jax.device_count() if devices is None else len(devices), "make_mesh")
    chosen = (explicit,) if isinstance(explicit, str) else by_name if explicit is True else (explicit or ())
    if unknown := set(chosen) - set(by_name):
        raise ValueError(
            f"make_mesh: explicit has {', '.join(sorted(unknown))}; the mesh axes are {', '.join(by_name)}."
        )
    kinds = tuple(AxisType.Explicit if n in chosen else AxisType.Auto for n in by_name)
    return jax.make_mesh(tuple(by_name.values()), tuple(by_name), axis_types=kinds, devices=devices)


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
        raise ValueError(f"{what}: {dict(sizes)} needs {known} devices; there are {available}.")
    return {n: available // known if s == -1 else s for n, s in sizes.items()}
