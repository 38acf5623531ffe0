"""Make global arrays from the data that each process has loaded."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..axis import AxisSelector, name_of
from ..core import errors
from ..core.processes import checksum, fail_together, from_all_processes
from ..distribution.active_settings import pads_uneven
from ..distribution.mesh_axes import check_in_mesh, has_explicit
from ..named_array import raw, wrap_like
from .leaves import Leaf, leaves_of
from .mapping import Uneven, check_uneven
from .meshes import required_mesh, with_devices
from .placement import listed
from .shard import shard, without_cache


def from_process_local_data(
    tree: Any,
    axis: AxisSelector | int = 0,
    mesh_axes: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    *,
    uneven: Uneven = None,
) -> Any:
    """Make global arrays from the data that each process has loaded.

    The code is the same with one process and with many. Processes that hold the same part of the axis must load the
    same data, and all others different data: the first call for a mesh compares checksums, and reports mistakes.

    Arguments:
        tree: a tree of the arrays of this process, of the same shapes in every process.
        axis: the axis along which the parts are concatenated: a position, or an axis if the arrays are named.
        mesh_axes: the mesh axes that the axis is sharded over; all of them by default.
        mesh: the mesh; the active one by default.
        uneven: "pad" stores arrays padded if the mesh axes do not divide the axis: see `axonym.axis_mapping`. Only on
            devices of one process: the parts of several would each need padding of their own.

    >>> with axn.set_mesh(axn.make_mesh({"data": 2, "model": 1})):
    ...     axn.sharding.from_process_local_data(np.ones((4, 3)), mesh_axes="data").sharding.spec
    P('data', None)
    """
    what = "from_process_local_data"
    check_uneven(what, uneven)
    found = with_devices(required_mesh(what, mesh))
    if not isinstance(found, Mesh):
        raise TypeError(f"{what}: in a traced function the devices of the mesh are not known. Load data outside.")
    over = found.axis_names if mesh_axes is None else (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
    check_in_mesh(what, over, found)
    shards = len(_shards_here(found, over))
    leaves, structure = leaves_of(tree)
    loaded = [(leaf, np.asarray(without_cache(raw(leaf.value)))) for leaf in leaves]
    made, problems = [], []
    for leaf, x in loaded:
        shape = x.shape if leaf.names is None else errors.describe_axes(leaf.names, x.shape)
        position = _position(leaf, x.ndim, axis)
        if position is None:
            problems.append(f"{leaf.path} {shape} has no axis {axis!r} along which to join the parts.")
            continue
        sharding = NamedSharding(found, PartitionSpec(*(over if i == position else None for i in range(x.ndim))))
        if (one := _made(wrap_like(x, leaf.value), sharding, x.shape[position] % shards, uneven)) is not None:
            made.append(one)
        else:
            sizes = " x ".join(f"{a}={found.shape[a]}" for a in over)
            problems.append(
                f"{leaf.path} {shape}: {x.shape[position]} along axis {axis!r} cannot be sharded over {sizes}: "
                f"the devices of this process hold {shards} parts."
                + (
                    ""
                    if found.is_multi_process or has_explicit(found)
                    else " To keep the size, and store it padded, pass `uneven='pad'`."
                )
            )
    compared = jax.process_count() == 1 or (found, tuple(over)) in _COMPARED
    with contextlib.nullcontext() if compared else fail_together(what) as agree:
        # Raised in here: a process that raised it before would leave the others waiting in the comparison.
        if problems:
            raise ValueError(listed(what, problems, found))
        if agree is not None:
            agree({"arrays": "\n".join(f"{leaf.path} {x.dtype}{list(x.shape)}" for leaf, x in loaded)})
            if problem := _misread(found, over, loaded):
                raise ValueError(listed(what, [problem], found))
            _COMPARED.append((found, tuple(over)))
    return jax.tree.unflatten(structure, made)


def _made(x: Any, sharding: NamedSharding, left: int, uneven: Uneven) -> Any:
    """Return the global array, stored padded if elements are left over; None if it cannot be."""
    if not left:
        return wrap_like(jax.make_array_from_process_local_data(sharding, raw(x)), x)
    if (uneven or pads_uneven()) and not sharding.mesh.is_multi_process:
        return shard(x, sharding, uneven="pad")
    return None


# The meshes for which processes have compared their data: comparing each batch would make the devices wait.
_COMPARED: deque[tuple[Mesh, tuple[str, ...]]] = deque(maxlen=64)


def _misread(mesh: Mesh, mesh_axes: Sequence[str], loaded: Sequence[tuple[Leaf, np.ndarray]]) -> str | None:
    """Explain which data is equal in several processes but should differ, or the reverse."""
    # One exchange: of which part of the data the devices hold, whether it varies (zeros are equal everywhere), and of
    # checksums. Processes with the same part must have the same data, and processes with another part other data.
    part = zlib.crc32(repr(sorted(_shards_here(mesh, mesh_axes))).encode())
    sums = [checksum(x) for _, x in loaded]
    varies = any(x.size and (x != x.flat[0]).any() for _, x in loaded)
    rows = from_all_processes(np.array([part, varies, *sums], np.uint32))
    parts: dict[int, list[int]] = {}
    for process, row in enumerate(rows):
        parts.setdefault(int(row[0]), []).append(process)
    for processes in parts.values():
        for (leaf, _), values in zip(loaded, rows[processes, 2:].T, strict=True):
            if len(set(values)) > 1:
                return (
                    f"{leaf.path} differs between processes {', '.join(map(str, processes))}, whose devices hold the "
                    "same part of it: load the same data in each."
                )
    if len(parts) > 1 and rows[:, 1].any() and (rows[:, 2:] == rows[0, 2:]).all():
        return (
            "all processes loaded the same data, but each should load its own part. To place data that is the same "
            "everywhere, use axonym.shard."
        )
    return None


def _shards_here(mesh: Mesh, mesh_axes: Sequence[str]) -> set[tuple[int, ...]]:
    """Return the shards of an axis over these mesh axes that are on devices of this process."""
    here = [i for i, d in np.ndenumerate(mesh.devices) if d.process_index == jax.process_index()]
    dimensions = [mesh.axis_names.index(a) for a in mesh_axes]
    return {tuple([i[d] for d in dimensions]) for i in here}


def _position(leaf: Leaf, ndim: int, axis: Any) -> int | None:
    """Return the position of the axis in a leaf; None if the leaf lacks it."""
    if isinstance(axis, int):
        return axis % ndim if -ndim <= axis < ndim else None
    return leaf.names.index(name_of(axis)) if leaf.names and name_of(axis) in leaf.names else None
