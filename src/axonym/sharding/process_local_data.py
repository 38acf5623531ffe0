"""Make global arrays from the data that each process has loaded."""

from __future__ import annotations

import contextlib
import functools
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
from ..distribution.mesh_axes import check_in_mesh, has_explicit, shard_count
from ..distribution.padded_array import PaddedArray, padded_array, with_padding
from ..named_array import raw, wrap_like
from .leaves import Leaf, leaves_of
from .mapping import Uneven, check_uneven
from .meshes import required_mesh, with_devices
from .moving import without_cache
from .placement import list_problems
from .shard import padded_shape


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
        uneven: "pad" stores arrays padded if the mesh axes do not divide the axis: see `axonym.axis_mapping`. It needs
            Auto mesh axes, and processes that hold all rows, as a single one does.

    >>> with axn.set_mesh(axn.make_mesh({"data": 2, "model": 1})):
    ...     axn.sharding.from_process_local_data(np.ones((4, 3)), mesh_axes="data").sharding.spec
    P('data', None)
    """
    what = "from_process_local_data"
    check_uneven(what, uneven, replicates=False)
    found = with_devices(required_mesh(what, mesh))
    if not isinstance(found, Mesh):
        raise TypeError(f"{what}: in a traced function the devices of the mesh are not known. Load data outside.")
    over = found.axis_names if mesh_axes is None else (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
    check_in_mesh(what, over, found)
    shards = len(_shards_here(found, over))
    can_pad = shards == shard_count(found, over) and not has_explicit(found)
    leaves, structure = leaves_of(tree)
    loaded = [(leaf, np.asarray(without_cache(raw(leaf.value)))) for leaf in leaves]
    made, problems = [], []
    for leaf, x in loaded:
        shape = x.shape if leaf.names is None else errors.describe_axes(leaf.names, x.shape)
        position = None
        if isinstance(axis, int):
            position = axis % x.ndim if -x.ndim <= axis < x.ndim else None
        elif leaf.names and name_of(axis) in leaf.names:
            position = leaf.names.index(name_of(axis))
        if position is None:
            problems.append(f"{leaf.path} {shape} has no axis {axis!r} along which to join the parts.")
            continue
        sharding = NamedSharding(found, PartitionSpec(*(over if i == position else None for i in range(x.ndim))))
        if not x.shape[position] % shards:
            made.append(functools.partial(jax.make_array_from_process_local_data, sharding, x))
        elif can_pad and (uneven or pads_uneven()):
            made.append(functools.partial(_padded_rows, x, sharding))
        else:
            sizes = " x ".join(f"{a}={found.shape[a]}" for a in over)
            hint = (
                "`uneven='pad'` needs Auto mesh axes, and a process that holds all rows; load a multiple of the parts."
            )
            hint = "To keep the size, and store it padded, pass `uneven='pad'`." if can_pad else hint
            problems.append(
                f"{leaf.path} {shape}: {x.shape[position]} along axis {axis!r} cannot be sharded over {sizes}: the "
                f"devices of this process hold {shards} parts. {hint}"
            )
    compares = jax.process_count() > 1 and (found, tuple(over)) not in _COMPARED
    with fail_together(what) if compares else contextlib.nullcontext() as agree:
        # Raised in here: a process that raised it before would leave the others waiting in the comparison.
        if problems:
            raise ValueError(list_problems(what, problems, found))
        if agree is not None:
            agree({"arrays": "\n".join(f"{leaf.path} {x.dtype}{list(x.shape)}" for leaf, x in loaded)})
            if problem := _misread_data(found, over, loaded):
                raise ValueError(list_problems(what, [problem], found))
            _COMPARED.append((found, tuple(over)))
    return jax.tree.unflatten(
        structure, [wrap_like(make(), leaf.value) for (leaf, _), make in zip(loaded, made, strict=True)]
    )


def _padded_rows(x: np.ndarray, sharding: NamedSharding) -> PaddedArray:
    """Make an array that is stored padded, of rows that its mesh axes do not divide."""
    rows = with_padding(x, padded_shape(x.shape, sharding.spec, sharding.mesh))
    return padded_array(jax.make_array_from_process_local_data(sharding, rows), x.shape)


# The meshes for which processes have compared their data: comparing each batch would make the devices wait.
_COMPARED: deque[tuple[Mesh, tuple[str, ...]]] = deque(maxlen=64)


def _misread_data(mesh: Mesh, mesh_axes: Sequence[str], loaded: Sequence[tuple[Leaf, np.ndarray]]) -> str | None:
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
