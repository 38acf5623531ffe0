"""Make meshes of TPUs that this machine does not have, for which XLA can still compile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..distribution.mesh_axes import AnyMesh

_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Values that the TPU compiler would otherwise request from a machine with TPUs, and wait for; and permission for other
processes to load it, too. None affects compiled programs. It reads them on first use; they stay in the environment."""


def on_topology(mesh: AnyMesh | None, topology: str) -> Mesh:
    """Return a mesh with the axes of another one and the devices of a TPU topology, such as `v5e:4x4`."""
    if mesh is None:
        raise ValueError(
            f"explain: a mesh is needed for the topology {topology!r}: pass `mesh`, which needs no devices."
        )
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]  # only to see if it exists
    except ImportError as e:
        raise ImportError(f"{e}. Compiling for TPUs needs their compiler: install axonym[tpu-plan].") from e
    from jax.experimental import topologies

    if jax.default_backend() != "tpu":
        for name, value in _MACHINE.items():
            os.environ.setdefault(name, value)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, NotImplementedError) as e:
        raise ValueError(f"explain: the TPU compiler cannot be asked for the topology {topology!r}: {e}") from e
    if len(devices) != mesh.size:
        raise ValueError(
            f"explain: the topology {topology!r} has {len(devices)} devices and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}. Make them equal."
        )
    return with_axes_of(mesh, devices)


def with_axes_of(mesh: AnyMesh, devices: Sequence[Any]) -> Mesh:
    """Return a mesh of these devices with the axes of another one."""
    return Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def moved_to(mesh: Mesh, tree: Any) -> Any:
    """Replace the arrays of a tree by abstract ones with the same shardings, but on this mesh."""

    def moved(x: Any) -> Any:
        if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return x
        sharding = x.sharding
        if isinstance(sharding, NamedSharding):
            if sharding.mesh.shape != mesh.shape:
                raise ValueError(
                    f"explain: an argument is on the mesh {dict(sharding.mesh.shape)}, and the step is explained on "
                    f"{dict(mesh.shape)}. Give the arguments without placements, or on that mesh."
                )
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(moved, tree)
