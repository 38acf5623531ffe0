"""Restore distributed checkpoints with Orbax, and find the latest one.

Every process writes its own shards of the arrays and reads the shards it needs. A checkpoint can be restored on another
mesh or under another mapping than it was written with. The checkpoint also stores each array's axis names: restoring
compares them with the template's and transposes arrays whose axes are in another order. It also stores checksums, so
that no damaged value is ever loaded.

Orbax is an optional dependency, `axonym[checkpoint]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.processes import fail_together
from ..core.tree_spec import is_key
from ..named_array import raw
from ..sharding.leaves import is_placed_whole
from ..sharding.mapping import Uneven, check_uneven, uneven_here
from ..sharding.meshes import AnyMesh, current_mesh, with_devices
from ..sharding.placement import Placement
from ._checkpoint_entries import as_stored, key_of, restored_leaf, stored_entries
from .checkpoint_saves import UNFINISHED, orbax_path, require_orbax
from .file_checksums import CHECKSUMS, as_folder, damage_of, listed_damage
from .sharded_reading import shardings_of, stored_shape

T = TypeVar("T")


@fail_together("restore_checkpoint")
def restore_checkpoint(
    path: str | os.PathLike[str],
    template: T,
    placement: Placement = None,
    *,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    verify: bool = True,
    uneven: Uneven = None,
) -> T:
    """Load a tree from a checkpoint.

    Every array gets the axes and the dtype of its counterpart in the template. Its sharding comes from the placement,
    or else from the template's array, whatever mesh the checkpoint was written on. Every device reads only its own
    shard. Arrays without a sharding from either, such as random keys and the counters of an optimizer, are replicated
    over the mesh.

    Arguments:
        path: the folder.
        template: a tree with the structure of the saved one. Its arrays can be abstract.
        placement: the placement of the arrays; by default the active mapping.
        mesh: the mesh; by default the active one.
        strict: whether missing and unexpected keys are errors. If not, leaves that are missing from the checkpoint keep
            their value in the template.
        ignore: patterns of keys that may be in the checkpoint but not in the template, with `*` for anything.
        verify: whether to refuse a checkpoint that differs from what was written, or has lost its checksums.
        uneven: "pad" stores arrays padded whose axes their mesh axes do not divide: see `axonym.axis_mapping`. The
            files have true sizes in any case.

    >>> import tempfile
    >>> mesh = axn.make_mesh({"data": -1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_checkpoint(f"{folder}/1", {"w": axn.ones({"embed": 16})})
    ...     template = {"w": jax.eval_shape(lambda: axn.zeros({"embed": 16}))}
    ...     restored = axn.state.restore_checkpoint(f"{folder}/1", template, {"embed": "data"}, mesh=mesh)
    >>> restored["w"].array.sharding.spec
    P('data',)
    """
    check_uneven("restore_checkpoint", uneven, replicates=False)
    orbax = require_orbax("restore_checkpoint")
    folder = as_folder(path)
    path = str(folder)
    if not _is_complete(folder):
        raise FileNotFoundError(f"restore_checkpoint: {path} is not a complete checkpoint.")
    if verify and (damage := damage_of(folder, jax.process_index(), jax.process_count())):
        others = (other for _, other in sorted(_complete_checkpoints(folder.parent), reverse=True) if other != folder)
        intact = next((other for other in others if not damage_of(other)), None)
        last = f"The last checkpoint beside it that is not damaged is {intact}."
        last = "No other checkpoint beside it is known to be intact." if intact is None else last
        raise ValueError(f"restore_checkpoint: {path} is damaged: {listed_damage(damage)}. {last}")
    about = stored_entries(folder)
    stored = as_stored(template, about, strict, ignore)
    with uneven_here("restore_checkpoint", uneven):
        leaves = shardings_of(stored, template, placement, mesh, "restore_checkpoint")
    replicated = _replicated_sharding(mesh, [sharding for _, _, sharding in leaves if sharding is not None])
    wanted, with_added = {}, set[str]()
    for leaf, _, sharding in leaves:
        # Orbax knows neither named arrays nor typed keys: it reads raw arrays, of which `restored_leaf` makes them.
        if leaf.shape is not None and "shape" in about.get(key_of(leaf), {}):
            array = raw(leaf.value)
            data = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
            target = replicated if sharding is None else sharding
            # Orbax would wrap integers that do not fit.
            is_integer = jnp.issubdtype(data.dtype, jnp.integer) and not is_key(array)
            entry = about[key_of(leaf)]
            dtype = entry.get("stored", entry["dtype"] if is_integer else data.dtype)
            dtype = jax.dtypes.canonicalize_dtype(dtype)
            shape = stored_shape(leaf.shape, sharding)
            shape_of_data = (*shape, *data.shape[len(shape) :])
            wanted[key_of(leaf)] = jax.ShapeDtypeStruct(shape_of_data, dtype, sharding=target)
            if list(shape) != entry["shape"]:
                with_added.add(key_of(leaf))
    arrays = {
        key: jax.make_array_from_callback(x.shape, x.sharding, lambda index, x=x: np.zeros(x.shape, x.dtype)[index])
        for key, x in wanted.items()
        if not math.prod(x.shape)  # they have no files
    }
    wanted = {key: x for key, x in wanted.items() if key not in arrays}
    if wanted:
        restore_args = orbax.checkpoint_utils.construct_restore_args(wanted)
        for key in with_added:  # Orbax fills them up with zeros
            restore_args[key] = dataclasses.replace(restore_args[key], strict=False)
        restore = orbax.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
        arrays |= _read_arrays(orbax, path, restore)
    results = [restored_leaf(leaf, mine, about.get(key_of(leaf)), arrays) for leaf, mine, _ in leaves]
    return jax.tree.unflatten(jax.tree.structure(template, is_leaf=is_placed_whole), results)


def _read_arrays(orbax: Any, path: str, what: Any) -> dict[str, jax.Array]:
    """Read arrays without the barriers of Orbax, which a process that fails would not reach."""
    alone = orbax.options.MultiprocessingOptions(active_processes={jax.process_index()})

    class Reads(orbax.type_handlers.ArrayHandler):
        async def deserialize(self, *args: Any, **kwargs: Any) -> Any:
            """Wait for all reads if one fails: TensorStore would print a traceback for each that ends later."""
            before = asyncio.all_tasks()
            try:
                return await super().deserialize(*args, **kwargs)
            except Exception:
                if left := asyncio.all_tasks() - before:
                    await asyncio.wait(left, timeout=60)
                raise

    registry = orbax.type_handlers.create_type_handler_registry((jax.Array, Reads()))
    handler = orbax.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone)
    try:
        return handler.restore(orbax_path(as_folder(path) / "arrays"), args=what)
    except jax.errors.JaxRuntimeError:  # too little memory
        raise
    except Exception as e:  # Orbax and TensorStore have their own errors, with everything they know about an array
        cause: BaseException = e
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = re.split(r" \[\w+(?:\[\d+\])?='|\n", f"{type(cause).__name__}: {cause}")[0]
        raise ValueError(f"restore_checkpoint: {path} cannot be read: {reason.removesuffix('.')}.") from None


def _replicated_sharding(mesh: AnyMesh | None, known: list[Any]) -> Any:
    """Return the replicated sharding for arrays that have none, so that a step can use them with the others."""
    mesh = current_mesh() if mesh is None else mesh
    meshes = [None if mesh is None else with_devices(mesh), *(sharding.mesh for sharding in known)]
    found = (NamedSharding(one, PartitionSpec()) for one in meshes if isinstance(one, Mesh))
    return next(found, SingleDeviceSharding(jax.local_devices()[0]))


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint whose name ends with the highest number, or None if there is none.

    Checkpoints that were not finished do not count, nor does anything else in the folder. A later folder that is empty
    or has lost a part is an error, rather than a reason to take the one before it.

    Arguments:
        folder: the folder with the checkpoints.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         axn.state.save_checkpoint(f"{folder}/{step}", {"step": step})
    ...     pathlib.Path(axn.state.latest_checkpoint(folder)).name
    '10'
    """
    require_orbax("latest_checkpoint")
    number, latest = max(_complete_checkpoints(as_folder(folder)), default=(-1, None))
    for other, child in _numbered_folders(as_folder(folder)):
        inside = {part.name for part in child.iterdir()} if other > number and child.is_dir() else {"another folder"}
        if not inside or inside & {"about", "arrays", CHECKSUMS}:
            before = "there is none before it" if latest is None else f"the last complete one is {latest}"
            raise ValueError(f"latest_checkpoint: {child} is no complete checkpoint: it has no about/; {before}.")
    return None if latest is None else str(latest)


def _complete_checkpoints(folder: Any) -> list[tuple[int, Any]]:
    """Return the complete checkpoints in a folder whose names end with a number, each with that number."""
    return [(number, child) for number, child in _numbered_folders(folder) if _is_complete(child)]


def _numbered_folders(folder: Any) -> list[tuple[int, Any]]:
    """Return what has a name that ends with a number, and is not being written."""
    found = [(re.search(r"[0-9]+$", child.name), child) for child in folder.iterdir()] if folder.is_dir() else []
    return [(int(number[0]), child) for number, child in found if number and UNFINISHED not in child.name]


def _is_complete(folder: Any) -> bool:
    return UNFINISHED not in folder.name and (folder / "about").is_dir()
