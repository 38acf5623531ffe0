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
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core import errors
from ..core.processes import fail_together
from ..core.tree_spec import is_key
from ..distribution.padded_array import padded_array
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap, wrap_like
from ..ops.rearranging import rearrange
from ..sharding.leaves import Leaf, is_placed_whole, leaves_of
from ..sharding.mapping import Uneven, check_uneven, uneven_here
from ..sharding.meshes import AnyMesh, current_mesh, with_devices
from ..sharding.placement import Placement, list_problems
from .checkpoint_saves import UNFINISHED, added_layers_of, key_of, orbax_path, require_orbax
from .file_checksums import CHECKSUMS, as_folder, damage_of, listed_damage
from .load_context import LoadContext
from .naming import converted_number, is_number, require_representable, same_kind
from .sharded_reading import has_values, no_value, shardings_of, stored_shape

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
    # Arrays that have no sharding are replicated, so that a step can use them with the others.
    own = current_mesh() if mesh is None else mesh
    meshes = [None if own is None else with_devices(own), *(s.mesh for _, _, s in leaves if s is not None)]
    concrete = (NamedSharding(one, PartitionSpec()) for one in meshes if isinstance(one, Mesh))
    replicated = next(concrete, SingleDeviceSharding(jax.local_devices()[0]))
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


def stored_entries(folder: Any) -> dict[str, Any]:
    """Read the entries of a checkpoint; refuse a file that `entry_of` cannot have written."""
    try:
        found: dict[str, Any] = json.loads((folder / "about" / "metadata").read_bytes())
        wrong = [key for key, entry in found.items() if not _is_entry(entry)]
        if not wrong:
            return found
        reason = f"has no right entry for {wrong[0]!r}"
    except (ValueError, AttributeError, RecursionError):
        reason = "is no table of arrays"
    except OSError as e:
        reason = f"cannot be opened: {e.strerror}"
    raise ValueError(f"restore_checkpoint: {folder} cannot be read: about/metadata {reason}.")


def _is_entry(entry: Any) -> bool:
    try:
        if "number" in entry:
            number = entry["number"] if type(entry["number"]) is list else [entry["number"], 0]  # of a complex one, two
            return len(number) == 2 and all(type(x) in (bool, int, float) for x in number)
        names, shape, dtype = entry["axes"], entry["shape"], entry["dtype"]
        if "key" in entry:
            known = dtype == str(jax.eval_shape(lambda: jax.random.key(0, impl=entry["key"])).dtype)
        else:
            known = all(type(entry[k]) is str and jnp.dtype(entry[k]) for k in entry.keys() & {"dtype", "stored"})
        if names is not None:
            known = known and len({*names}) == len(names) == len(shape) and all(type(name) is str for name in names)
        return bool(known) and all(type(size) is int and size >= 0 for size in shape)
    except Exception:  # of JAX, for words that are no dtype or no kind of key
        return False


# --- matching a checkpoint with a template ---


def as_stored(template: Any, about: Mapping[str, Any], strict: bool, ignore: Sequence[str]) -> Any:
    """Return the template with abstract arrays that have their axes in the stored order."""
    context = LoadContext("restore_checkpoint", strict, ignore, source="checkpoint", keys=list(about))
    leaves, structure = leaves_of(template)
    found, problems = [], []
    for leaf in leaves:
        key, x = key_of(leaf), leaf.value
        entry = about.get(key)
        found.append(x)  # the template's own value, unless the checkpoint has an array in its place
        if is_number(x):
            if entry is None or "number" not in entry:
                context.add_missing(key, f"a number, {type(x).__name__}")
            elif converted_number(type(x), _stored_number(entry)) is None:
                context.misfits.append(
                    f"{key!r} is {_stored_number(entry)}, but in the tree it is a number, {type(x).__name__}."
                )
            continue
        if not is_jax_array_like(x):
            continue
        if entry is None or "number" in entry:
            context.add_missing(key, describe_array(x))
            if not has_values(x):
                problems.append(no_value(key))
        elif misfit := _describe_misfit(x, entry, added := added_layers_of(leaf, template)):
            context.misfits.append(f"{key!r} {misfit}, but in the tree it is {describe_array(x)}.")
        else:  # in the stored order, and with the layers that are added in the tree
            names = entry["axes"] if isinstance(x, NamedArray) else None
            more = added if names is None else [dict(zip(x.names, added, strict=True))[n] for n in names]
            shape = tuple(size + n for size, n in zip(entry["shape"], more, strict=True))
            struct = jax.ShapeDtypeStruct(shape, x.dtype)
            names = x.names if names is None and isinstance(x, NamedArray) else names
            found[-1] = struct if names is None else wrap(struct, tuple(names))
    keys = {key_of(leaf) for leaf in leaves}
    context.add_unexpected(key for key in about if key not in keys)
    context.raise_problems()
    if problems:
        raise ValueError(list_problems("restore_checkpoint", problems, None))
    return jax.tree.unflatten(structure, found)


def _describe_misfit(x: Any, entry: Mapping[str, Any], added: Sequence[int]) -> str | None:
    """Describe how a stored array differs from the template's, or return None."""
    names, shape, dtype = entry["axes"], entry["shape"], entry["dtype"]
    own = [size - n for size, n in zip(raw(x).shape, added, strict=True)]
    if isinstance(x, NamedArray) and names is not None:
        if len(x.names) != len(own) or dict(zip(names, shape, strict=True)) != dict(zip(x.names, own, strict=True)):
            return f"has axes {errors.describe_axes(names, shape)}"
    elif own != shape:
        return f"has shape {tuple(shape)}"
    same = dtype == str(x.dtype) if is_key(x) or "key" in entry else same_kind(jnp.dtype(dtype), x.dtype)
    return None if same else f"has dtype {dtype}"


def _stored_number(entry: Mapping[str, Any]) -> Any:
    value = entry["number"]
    return complex(*value) if isinstance(value, list) else value


def restored_leaf(leaf: Leaf, mine: Any, entry: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> Any:
    """Return a leaf of the restored tree."""
    if entry is None:
        return mine
    if is_number(mine) and "number" in entry:
        return converted_number(type(mine), _stored_number(entry))
    if not is_jax_array_like(mine):
        return mine
    array = arrays[key_of(leaf)]
    if is_key(mine):
        array = jax.random.wrap_key_data(array, impl=entry["key"])
    elif array.dtype != (dtype := jax.dtypes.canonicalize_dtype(mine.dtype)):
        require_representable(f"restore_checkpoint: {leaf.path}", array, dtype)
        array = array.astype(dtype)
    assert leaf.shape is not None
    shape = leaf.shape
    if isinstance(mine, NamedArray) and leaf.value.names != mine.names:
        sizes = dict(zip(leaf.value.names, shape, strict=True))
        array, shape = rearrange(wrap(array, leaf.value.names), mine.names).array, tuple(sizes[n] for n in mine.names)
    return wrap_like(array if array.shape == shape else padded_array(array, shape), mine)


# --- folders ---


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
