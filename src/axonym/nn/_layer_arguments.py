"""Slice the arguments of stacked layers into the arguments of each layer, and stack the results.

The rules are as for `axonym.scan`: a named array with the layer axis is sliced along that axis, a raw array along its
first axis, and every layer gets the same scalars and other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ..axis import Axis
from ..core import errors
from ..core.tree_spec import is_key
from ..distribution.mesh_axes import fits, mapped_on, mesh_around, reshard, spec_of
from ..named_array import NamedArray, is_named_array, raw, wrap
from ..ops.joining import stack
from ..ops.shaping import unbind
from ..transforms import _mapped_axis
from ..transforms.stacked_leaves import as_leaf, as_named, layer_of, layers_at


def split_key(layers: Axis, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Split a single random key, passed as the keyword argument `key`, into one for each layer."""
    key: Any = kwargs.get("key")
    return {**kwargs, "key": jax.random.split(key, layers.size)} if _is_single_key(key) else dict(kwargs)


def shard_keys(what: str, layers: Axis, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the keys of the layers over Explicit mesh axes by the active mapping.

    There, a device makes the layers whose keys it has, where on Auto mesh axes the sharding of the result decides.
    """
    keys: Any = _as_stacked(layers, kwargs.get("key"))
    if keys is None:
        return dict(kwargs)
    mesh = mesh_around((keys.array,))
    over = mapped_on(what, layers.name, mesh, AxisType.Explicit)
    spec = spec_of(over if n == layers.name else () for n in keys.names)
    if not over or not fits(spec, keys.array.shape, mesh):
        return dict(kwargs)  # if they do not fit, neither do the layers, and the error is about these
    return {**kwargs, "key": as_leaf(kwargs["key"], wrap(reshard(keys.array, spec, mesh), keys.names))}


def _is_single_key(key: Any) -> bool:
    if not isinstance(key, (jax.Array, np.ndarray)):
        return False
    if is_key(key):
        return key.ndim == 0
    return key.dtype == np.uint32 and key.ndim == 1  # the result of `jax.random.PRNGKey`


def first_axis(x: Any) -> int | None:
    """Return the position of a raw array's layer axis, or None for scalars, for `axonym.vmap(default=...)`."""
    return 0 if x.ndim else None


def check_sizes(what: str, layers: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise an error unless the size of the layer axis of each argument is the number of layers."""
    leaves, _ = _mapped_axis.flatten((args, dict(kwargs)))
    sizes = [_size(layers, leaf) for leaf in leaves]
    if all(size in (None, layers.size) for size in sizes):
        return
    found = zip(_mapped_axis.argument_paths(args, dict(kwargs)), leaves, sizes, strict=True)
    wrong = {path: (leaf, size) for path, leaf, size in found if size not in (None, layers.size)}
    sides = [*((path, size) for path, (_, size) in wrong.items()), ("the layers", layers.size)]
    raw = [path for path, (leaf, _) in wrong.items() if not isinstance(leaf, NamedArray)]
    hint = f" Raw arrays are sliced along their first axis: {', '.join(raw)}. Name their axes." if raw else ""
    raise ValueError(errors.size_mismatch(what, layers.name, sides) + hint)


# --- slicing ---


def unstack(what: str, layers: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the arguments of a call for each layer."""
    check_sizes(what, layers, args, kwargs)
    leaves, structure = _mapped_axis.flatten((args, dict(kwargs)))
    parts = [_each_layer(layers, leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, [of_leaf[i] for of_leaf in parts]) for i in range(layers.size)]


def check_index(what: str, layers: Axis, i: Any) -> Any:
    """Return the index of a layer; count a static one from the front, and raise an error if it is out of range."""
    if not isinstance(i, (int, np.integer)):
        return i
    if not -layers.size <= i < layers.size:
        raise IndexError(f"{what}: layer {i} is out of range for {layers.size} layers.")
    return int(i) % layers.size


def take_layer(layers: Axis, tree: Any, i: Any) -> Any:
    """Return one layer of a tree of stacked arrays; its index can be traced."""
    return jax.tree.map(lambda x: layer_of(x, layers.name, i), tree, is_leaf=is_named_array)


def _as_stacked(layers: Axis, leaf: Any) -> NamedArray | None:
    """Return a leaf that has a layer axis as a named array, or None if every layer gets the same leaf."""
    return None if layers_at(leaf, layers.name) is None else as_named(leaf, layers.name)


def _size(layers: Axis, leaf: Any) -> int | None:
    """Return the size of a leaf's layer axis, or None if there is none."""
    position = layers_at(leaf, layers.name)
    return None if position is None else raw(leaf).shape[position]


def _each_layer(layers: Axis, leaf: Any) -> Sequence[Any]:
    """Return the slice of a leaf for each layer."""
    x = _as_stacked(layers, leaf)
    if x is not None and isinstance(x.array, jax.Array):
        return [as_leaf(leaf, part) for part in unbind(x, layers.name)]
    return [layer_of(leaf, layers.name, i) for i in range(layers.size)]


# --- stacking ---


def stack_results(what: str, layers: Axis, results: Sequence[Any], *, numbers: bool) -> Any:
    """Stack the results of the layers into one tree, layer axis first; `numbers`: also stack Python numbers."""
    flat = [_mapped_axis.flatten(result) for result in results]
    structure = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != structure:
            raise TypeError(
                f"{what}: all layers must return trees of one structure, but layer 0 returned {structure} and layer "
                f"{i} {other}."
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(structure, [_stack_leaves(what, layers, leaves, numbers) for leaves in columns])


def _stack_leaves(what: str, layers: Axis, leaves: Sequence[Any], numbers: bool) -> Any:
    if all(isinstance(x, NamedArray) and _mapped_axis.is_array(x.array) for x in leaves):
        return stack(leaves, layers)
    if all(
        _mapped_axis.is_array(x) or (numbers and isinstance(x, (bool, int, float, complex, np.generic))) for x in leaves
    ):
        ranks = {jnp.ndim(x) for x in leaves}
        if len(ranks) == 1:
            names = tuple(f"dimension {i}" for i in range(ranks.pop()))
            return stack([wrap(x, names) for x in map(jnp.asarray, leaves)], layers).array
    elif not any(isinstance(x, NamedArray) or _mapped_axis.is_array(x) for x in leaves):
        if all(type(x) is type(leaves[0]) and x == leaves[0] for x in leaves):
            return leaves[0]
    kinds = ", ".join(dict.fromkeys(map(_described, leaves)))
    raise TypeError(f"{what}: the results of the layers cannot be stacked: {kinds}.")


def _described(x: Any) -> str:
    if isinstance(x, NamedArray):
        return str(jax.typeof(x.array).dtype) + errors.describe_axes(x.names, jnp.shape(x.array))
    return f"raw {x.dtype}{tuple(x.shape)}" if _mapped_axis.is_array(x) else repr(x)
