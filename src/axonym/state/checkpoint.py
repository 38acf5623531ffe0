"""Distributed checkpoints with Orbax.

Every process writes its own parts of the arrays, and reads what it needs, also on another mesh or under another mapping
than they were written. Beside the arrays stands what they are called: the axes of each are compared when it is
restored, and an array whose axes were in another order is put into the order that is wanted.

Orbax is an optional dependency, `axonym[checkpoint]`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..array import NamedArray, wrap
from ..jax_utils import is_jax_array_like
from ..ops.rearranging import rearrange
from ..sharding.meshes import AnyMesh, current_mesh, with_devices
from ..sharding.placement import Leaf, Placement, leaves_of, listed
from .naming import described, is_number, same_kind
from .placing import has_values, no_value, shardings_of
from .session import Session

T = TypeVar("T")

_UNFINISHED = ".orbax-checkpoint-tmp"


def save_checkpoint(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree to a checkpoint, which is a folder.

    The folder appears when it is complete, and is never written again: a run that is killed while it saves has its
    last checkpoint still. So every checkpoint has a name of its own, such as the number of the step; see
    `latest_checkpoint`. Where there are several processes, all must call this.

    Arguments:
        path: the folder, which must not be there yet.
        tree: any tree, such as a model, an optimiser's state and the number of the step. What is neither an array nor a
            number is left out.

    >>> import tempfile
    >>> from axonym.state import restore_checkpoint, save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/100", {"w": axn.ones({"embed": 2}), "step": 100})
    ...     restore_checkpoint(f"{folder}/100", {"w": axn.zeros({"embed": 2}), "step": 0})
    {'step': 100, 'w': NamedArray(float32[embed=2], [1. 1.])}
    """
    orbax = _orbax("save_checkpoint")
    path = _full(path)
    arrays, about = {}, {}
    for leaf in leaves_of(tree)[0]:
        key = _key(leaf)
        if key in about:
            raise ValueError(
                f"save_checkpoint: two leaves of the tree are called {key!r}; rename a key of a dictionary."
            )
        array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
        if is_number(array):
            about[key] = {"number": [array.real, array.imag] if isinstance(array, complex) else array}
        elif is_jax_array_like(array):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise TypeError(f"save_checkpoint: {leaf.path} has no values, only a shape and a dtype.")
            about[key] = _about(leaf, array)
            arrays[key] = jax.random.key_data(array) if _is_key(array) else jnp.asarray(array)
    if _there(path):
        raise FileExistsError(
            f"save_checkpoint: {path} is there already. Checkpoints are not overwritten, so that one that was complete "
            "stays; give each a name of its own, such as the number of the step."
        )
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        parts = {"arrays": orbax.args.PyTreeSave(arrays)} if arrays else {}
        checkpointer.save(path, args=orbax.args.Composite(about=orbax.args.JsonSave(about), **parts))


def restore_checkpoint(
    path: str | os.PathLike[str],
    template: T,
    placement: Placement = None,
    *,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> T:
    """A tree from a checkpoint.

    Every array has the axes and the dtype that it has in the template, and goes where the placement says, or else where
    the array of the template is placed, whatever mesh it was on when it was written. Every device reads its own part.
    Arrays of which neither says anything, such as random keys and the counters of an optimiser, are whole on every
    device of the mesh.

    Arguments:
        path: the folder.
        template: a tree like the one that was written. Its arrays can be abstract.
        placement: where the arrays go; the mapping in force by default.
        mesh: the mesh; that in force by default.
        strict: whether it is an error if the checkpoint lacks something, or has something that the template does not.
            If not, what is missing stays as it is in the template.
        ignore: patterns of keys that the checkpoint may have and the template not, with `*` for anything.

    >>> import tempfile
    >>> from axonym.state import restore_checkpoint, save_checkpoint
    >>> mesh = axn.make_mesh({"data": -1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/1", {"w": axn.ones({"embed": 16})})
    ...     template = {"w": jax.eval_shape(lambda: axn.zeros({"embed": 16}))}
    ...     restored = restore_checkpoint(f"{folder}/1", template, {"embed": "data"}, mesh=mesh)
    >>> restored["w"].array.sharding.spec
    P('data',)
    """
    orbax = _orbax("restore_checkpoint")
    path = _full(path)
    if not _there(path):
        raise FileNotFoundError(f"restore_checkpoint: there is no complete checkpoint {path}.")
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        about = checkpointer.restore(path, args=orbax.args.Composite(about=orbax.args.JsonRestore()))["about"]
        stored = _as_stored(template, about, strict, ignore)
        leaves = shardings_of(stored, template, placement, mesh, "restore_checkpoint")
        otherwise = _otherwise(mesh, [sharding for _, _, sharding in leaves if sharding is not None])
        wanted = {}
        for leaf, _, sharding in leaves:
            if leaf.shape is not None and "shape" in about.get(_key(leaf), {}):
                array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
                data = jax.eval_shape(jax.random.key_data, array) if _is_key(array) else array
                on = otherwise if sharding is None else sharding
                wanted[_key(leaf)] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=on)
        arrays = {}
        if wanted:
            how = orbax.checkpoint_utils.construct_restore_args(wanted)
            restore = orbax.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
            arrays = checkpointer.restore(path, args=orbax.args.Composite(arrays=restore))["arrays"]
    results = [_restored(leaf, mine, about.get(_key(leaf)), arrays) for leaf, mine, _ in leaves]
    return jax.tree.unflatten(jax.tree.structure(template, is_leaf=lambda x: isinstance(x, NamedArray)), results)


def _otherwise(mesh: AnyMesh | None, known: list[Any]) -> Any:
    """Where arrays go that nothing places: to all devices of the mesh, so that a step can take them with the others."""
    mesh = current_mesh() if mesh is None else mesh
    meshes = [*([] if mesh is None else [with_devices(mesh)]), *(sharding.mesh for sharding in known)]
    for one in meshes:
        if isinstance(one, Mesh):
            return NamedSharding(one, PartitionSpec())
    return SingleDeviceSharding(jax.local_devices()[0])


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint in a folder whose name ends with the highest number; None if there is none.

    Checkpoints that were not finished do not count.

    Arguments:
        folder: the folder that has the checkpoints.

    >>> import pathlib, tempfile
    >>> from axonym.state import latest_checkpoint, save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         save_checkpoint(f"{folder}/{step}", {"step": step})
    ...     pathlib.Path(latest_checkpoint(folder)).name
    '10'
    """
    _orbax("latest_checkpoint")
    from etils import epath  # comes with Orbax, and knows the storage of clouds

    found: list[tuple[int, str]] = []
    directory = epath.Path(folder)
    for child in directory.iterdir() if directory.exists() else ():
        number = re.search(r"\d+$", child.name)
        if number and _UNFINISHED not in child.name and child.is_dir():
            found.append((int(number[0]), str(child)))
    return max(found)[1] if found else None


def _orbax(what: str) -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise ImportError(f"{what} needs Orbax, which is optional: install axonym[checkpoint].") from e
    return orbax.checkpoint


def _full(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    return path if "://" in path else str(Path(path).absolute())


def _there(path: str) -> bool:
    from etils import epath

    return epath.Path(path).exists()


# --- what is written beside the arrays ---


def _key(leaf: Leaf) -> str:
    return jax.tree_util.keystr(leaf.keys, simple=True, separator=".") or "array"


def _about(leaf: Leaf, array: Any) -> dict[str, Any]:
    names = leaf.value.names if isinstance(leaf.value, NamedArray) else None
    about = {"axes": names, "shape": list(array.shape), "dtype": str(array.dtype)}
    return about | ({"key": str(jax.random.key_impl(array))} if _is_key(array) else {})


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


# --- matching and putting together ---


def _as_stored(template: Any, about: Mapping[str, Any], strict: bool, ignore: Sequence[str]) -> Any:
    """The template with abstract arrays, whose axes are in the order in which they were written."""
    session = Session("restore_checkpoint", strict, ignore, source="checkpoint", keys=list(about))
    leaves, structure = leaves_of(template)
    found, problems = [], []
    for leaf in leaves:
        key, x = _key(leaf), leaf.value
        entry = about.get(key)
        found.append(x)
        if is_number(x) and (entry is None or "number" not in entry):
            session.lacks(key, f"a number, {type(x).__name__}")
        if not is_jax_array_like(x):
            continue
        if entry is None or "number" in entry:
            session.lacks(key, described(x))
            if not has_values(x):
                problems.append(no_value(key))
        elif misfit := _misfit(x, entry):
            session.misfits.append(f"{key!r} {misfit}, but in the tree it is {described(x)}.")
        else:
            found[-1] = _abstract(x, entry)
    keys = {_key(leaf) for leaf in leaves}
    session.left_over(key for key in about if key not in keys)
    session.check()
    if problems:
        raise ValueError(listed("restore_checkpoint", problems, None))
    return jax.tree.unflatten(structure, found)


def _misfit(x: Any, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with what was written for an array."""
    names, shape, dtype = entry["axes"], entry["shape"], entry["dtype"]
    if isinstance(x, NamedArray) and names is not None:
        if dict(zip(names, shape, strict=True)) != x.shape:
            return f"has axes ({', '.join(f'{n}={s}' for n, s in zip(names, shape, strict=True))})"
    elif list(x.shape if not isinstance(x, NamedArray) else x.array.shape) != shape:
        return f"has shape {tuple(shape)}"
    same = dtype == str(x.dtype) if _is_key(x) or "key" in entry else same_kind(jnp.dtype(dtype), x.dtype)
    return None if same else f"has dtype {dtype}"


def _abstract(x: Any, entry: Mapping[str, Any]) -> Any:
    struct = jax.ShapeDtypeStruct(tuple(entry["shape"]), x.dtype)
    return wrap(struct, tuple(entry["axes"] or x.names)) if isinstance(x, NamedArray) else struct


def _restored(leaf: Leaf, mine: Any, entry: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> Any:
    """A leaf of the result."""
    if entry is None:
        return mine
    if is_number(mine) and "number" in entry:
        value = entry["number"]
        return complex(*value) if isinstance(value, list) else type(mine)(value)
    if not is_jax_array_like(mine):
        return mine
    array = arrays[_key(leaf)]
    if _is_key(mine):
        array = jax.random.wrap_key_data(array, impl=entry["key"])
    if not isinstance(mine, NamedArray):
        return array
    restored = wrap(array, leaf.value.names)
    return restored if restored.names == mine.names else rearrange(restored, mine.names)
