"""The entries of a checkpoint, one for each leaf of a tree, and how they are matched with a template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import errors
from ..core.tree_spec import is_key
from ..distribution.padded_array import padded_array, stored
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap, wrap_like
from ..ops.rearranging import rearrange
from ..sharding.leaves import Leaf, child_of, leaves_of
from ..sharding.placement import list_problems
from ..tree import LayerStack
from .load_context import LoadContext
from .naming import converted_number, is_number, require_representable, same_kind
from .sharded_reading import has_values, no_value


def key_of(leaf: Leaf) -> str:
    """Return the name of a leaf in a checkpoint."""
    return jax.tree_util.keystr(leaf.keys, simple=True, separator=".") or "array"


def added_layers_of(leaf: Leaf, tree: Any) -> tuple[int, ...]:
    """Return for each axis of an array the number of added layers at its end."""
    shape = leaf.shape or ()
    added, names, stacks = [0] * len(shape), leaf.names or (), 0
    is_named = len(names) == len(shape) and isinstance(leaf.value, NamedArray)
    # Not down to the leaf: it is no stack, and Flax warns if the value of a variable is looked up.
    for node in itertools.accumulate(leaf.keys[:-1], child_of, initial=tree):
        if not isinstance(node, LayerStack):
            continue
        if found := node.added_layers():
            axis, number = found
            position = stacks  # raw arrays have the axes of the stacks around them first, from the outside in
            if is_named:
                position = names.index(axis.name) if axis.name in names else len(shape)
            if shape[position : position + 1] == (axis.size + number,):
                added[position] = number
        stacks += 1
    return tuple(added)


def entry_of(leaf: Leaf, array: Any, added: Sequence[int]) -> dict[str, Any]:
    """Return the entry of an array: everything that is stored about it besides its values."""
    names = leaf.value.names if isinstance(leaf.value, NamedArray) else None
    names = None if leaf.made_from else names  # the names belong to another array
    shape = [size - n for size, n in zip(array.shape, added, strict=True)]
    about = {"axes": names, "shape": shape, "dtype": str(array.dtype)}
    return about | ({"key": str(jax.random.key_impl(stored(array)))} if is_key(array) else {})


def entries_and_arrays(tree: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Return by keys the entries of leaves, and the arrays as they are written; check that all can be stored."""
    arrays, about = {}, {}
    for leaf in leaves_of(tree)[0]:
        key = key_of(leaf)
        if key in about:
            raise ValueError(
                f"save_checkpoint: two leaves of the tree have the key {key!r}; rename a key of a dictionary."
            )
        array = raw(leaf.value)
        if is_number(array):
            about[key] = {"number": [array.real, array.imag] if isinstance(array, complex) else array}
        elif is_jax_array_like(array):
            if isinstance(stored(array), jax.ShapeDtypeStruct):
                raise TypeError(f"save_checkpoint: {leaf.path} has no values, only a shape and a dtype.")
            if not isinstance(stored(array), jax.Array):
                require_representable(f"save_checkpoint: {leaf.path}", array, array.dtype)
            about[key] = entry_of(leaf, array, added_layers_of(leaf, tree))
            array = stored(array)
            try:  # arrays of NumPy, which may be changed while files are written, are copied
                data = array if isinstance(array, jax.Array) else jnp.array(array)
            except TypeError:
                text = f"save_checkpoint: {leaf.path} has the dtype {array.dtype}, which JAX does not have."
                raise TypeError(text) from None
            data = jax.random.key_data(data) if is_key(data) else data
            if (wider := stored_as(data.dtype)) != data.dtype:
                about[key]["stored"], data = wider.name, data.astype(wider)
            if data.size:  # Orbax refuses empty arrays, and the shape of one says everything about it
                arrays[key] = data
    return about, arrays


def stored_as(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that an array is written with: a wider one, which has all its values, if files lack its own."""
    import tensorstore  # which Orbax uses

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
        return np.dtype(np.float16)
    return dtype


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
        else:
            found[-1] = _abstract_array(x, entry, added)
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


def _abstract_array(x: Any, entry: Mapping[str, Any], added: Sequence[int]) -> Any:
    """Return an abstract array with the axes in the stored order, and with the layers that are added in the tree."""
    names = entry["axes"] if isinstance(x, NamedArray) else None
    more = added if names is None else [dict(zip(x.names, added, strict=True))[n] for n in names]
    struct = jax.ShapeDtypeStruct(tuple(size + n for size, n in zip(entry["shape"], more, strict=True)), x.dtype)
    return wrap(struct, x.names if names is None else tuple(names)) if isinstance(x, NamedArray) else struct


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
