"""Slice the arguments of stacked layers into the arguments of each layer, stack the results, and skip added layers.

The rules are as for `axonym.scan`: a named array with the layer axis is sliced along that axis, a raw array along its
first axis, and every layer gets the same scalars and other values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .. import tree as named_trees
from ..axis import Axis
from ..core import errors
from ..core.tree_spec import NUMBERS, is_key
from ..distribution.mesh_axes import entries_of, fits, mapped_on, mesh_around, mesh_axes, reshard, spec_of
from ..named_array import NamedArray, is_jax_array_like, raw, wrap, wrap_like
from ..ops.indexing import index
from ..ops.joining import stack
from ..ops.rearranging import rearrange
from ..ops.selection import where
from ..ops.shaping import unbind
from ..transforms import _mapped_axis
from ..transforms.stacked_leaves import as_leaf, as_named, layer_of, layers_at


def split_key(layers: Axis, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Split a single random key, passed as the keyword argument `key`, into one for each layer."""
    key: Any = kwargs.get("key")
    if isinstance(key, NamedArray) and not key.names:  # as `axn.scan` and `axn.vmap` give to their functions
        key = key.array
    if isinstance(key, (jax.Array, np.ndarray)) and (
        key.ndim == 0 if is_key(key) else key.dtype == np.uint32 and key.ndim == 1  # the result of `PRNGKey`
    ):
        key = jax.random.split(key, layers.size)
    return {**kwargs, "key": key} if "key" in kwargs else dict(kwargs)


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


def first_axis(x: Any) -> int | None:
    """Return the position of a raw array's layer axis, or None for scalars, for `axonym.vmap(default=...)`."""
    return 0 if x.ndim else None


def check_sizes(what: str, layers: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise an error unless the size of the layer axis of each argument is the number of layers."""
    leaves, _ = _mapped_axis.flatten((args, dict(kwargs)))
    positions = [layers_at(leaf, layers.name) for leaf in leaves]
    sizes = [None if at is None else raw(leaf).shape[at] for leaf, at in zip(leaves, positions, strict=True)]
    if all(size in (None, layers.size) for size in sizes):
        return
    found = zip(_mapped_axis.argument_paths(args, dict(kwargs)), leaves, sizes, strict=True)
    wrong = {path: (leaf, size) for path, leaf, size in found if size not in (None, layers.size)}
    sides = [*((path, size) for path, (_, size) in wrong.items()), ("the layers", layers.size)]
    unnamed = [path for path, (leaf, _) in wrong.items() if not isinstance(leaf, NamedArray)]
    hint = f" Raw arrays are sliced along their first axis: {', '.join(unnamed)}. Name their axes." if unnamed else ""
    raise ValueError(errors.size_mismatch(what, layers.name, sides) + hint)


# --- slicing ---


def unstack(what: str, layers: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the arguments of a call for each layer."""
    check_sizes(what, layers, args, kwargs)
    leaves, structure = _mapped_axis.flatten((args, dict(kwargs)))
    parts: list[Sequence[Any]] = []
    for leaf in leaves:
        x = _as_stacked(layers, leaf)
        if x is not None and isinstance(x.array, jax.Array):
            parts.append([as_leaf(leaf, part) for part in unbind(x, layers.name)])
        else:
            parts.append([layer_of(leaf, layers.name, i) for i in range(layers.size)])
    return [jax.tree.unflatten(structure, [of_leaf[i] for of_leaf in parts]) for i in range(layers.size)]


def check_index(what: str, layers: Axis, i: Any) -> Any:
    """Return the index of a layer; count a static one from the front, and raise an error if it is out of range."""
    if not isinstance(i, (int, np.integer)):
        return i
    if not -layers.size <= i < layers.size:
        raise IndexError(f"{what}: layer {i} is out of range for {layers.size} layers.")
    return int(i) % layers.size


def _as_stacked(layers: Axis, leaf: Any) -> NamedArray | None:
    """Return a leaf that has a layer axis as a named array, or None if every layer gets the same leaf."""
    return None if layers_at(leaf, layers.name) is None else as_named(leaf, layers.name)


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
    kinds = [
        f"{jax.typeof(x.array).dtype}{errors.describe_axes(x.names, jnp.shape(x.array))}"
        if isinstance(x, NamedArray)
        else f"raw {x.dtype}{tuple(x.shape)}"
        if _mapped_axis.is_array(x)
        else repr(x)
        for x in leaves
    ]
    raise TypeError(f"{what}: the results of the layers cannot be stacked: {', '.join(dict.fromkeys(kinds))}.")


# --- added layers ---
#
# Layers are added so that the stages of a pipeline divide their number. They are zeros and stay zeros: their gradients
# are zero, so sums over all layers, such as the norm of a gradient, are the same as without them. A loop runs them too,
# since the devices of a pipeline run in lockstep, and does not use their results. It computes with a copy of a real
# layer instead of zeros, by which a layer might divide, and cuts off the derivatives of the copy, so that these cannot
# be NaN.


def with_added(layers: Axis, padding: int, tree: Any) -> Any:
    """Add copies of the first layer's slice to each array that has a slice for each real layer only."""
    if not padding:
        return tree

    def longer(x: Any, position: int) -> Any:
        if x.shape[position] != layers.size:
            return x
        x = jnp.asarray(x)
        first = jax.lax.slice_in_dim(x, 0, 1, axis=position)
        return jnp.concatenate([x, *[first] * padding], position)

    return _map_layers(longer, layers, tree)


def without_added(layers: Axis, padding: int, results: Any, arguments: Any) -> Any:
    """Leave out the added layers of results, or set them to zero if an argument of the call has a slice for them."""
    if not padding:
        return results
    # So a decoding loop, which passes caches on, can keep them sharded over the stages.
    given = [(x, layers_at(x, layers.name)) for x in named_trees.leaves(arguments)]
    if any(position is not None and raw(x).shape[position] == layers.size + padding for x, position in given):
        return zeroed(layers, padding, results)

    def shorter(x: Any) -> Any:
        stacked = _as_stacked(layers, x)
        return x if stacked is None else as_leaf(x, index(stacked, {layers.name: slice(layers.size)}))

    return named_trees.map(shorter, results)


def zeroed(layers: Axis, padding: int, tree: Any) -> Any:
    """Set the added layers to zero, except random keys, which have no zero."""

    def with_zeros(x: Any, position: int) -> Any:
        return x if is_key(x) else _chosen_values(_layer_numbers(x, position) < layers.size, x, 0)

    return _map_layers(with_zeros, layers, tree) if padding else tree


def filled(layers: Axis, padding: int, tree: Any) -> Any:
    """Set the added layers to copies of the first layer, which have no derivative, except random keys."""

    def with_first(x: Any, position: int) -> Any:
        if is_key(x):
            return x
        numbers = _layer_numbers(x, position)
        # A sum over devices sends one layer; a slice might gather all of them.
        reduce = jnp.max if x.dtype == bool else jnp.sum
        first = reduce(_chosen_values(numbers == 0, x, 0), position, keepdims=True).astype(x.dtype)
        return _chosen_values(numbers < layers.size, x, jax.lax.stop_gradient(first))

    return _map_layers(with_first, layers, tree) if padding else tree


def _map_layers(fn: Callable[[Any, int], Any], layers: Axis, tree: Any) -> Any:
    """Apply a function to each array that has the axis of the layers, and to the position of this axis."""

    def at(x: Any) -> Any:
        position = layers_at(x, layers.name)
        return x if position is None else wrap_like(fn(raw(x), position), x)

    return named_trees.map(at, tree)


def _chosen_values(condition: np.ndarray, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, jnp.asarray(y, x.dtype))


def _layer_numbers(x: Any, position: int) -> np.ndarray:
    return np.arange(x.shape[position]).reshape([-1 if i == position else 1 for i in range(x.ndim)])


def skipping(fn: Callable[..., Any], layers: Axis, stacked: Any, outputs: bool) -> Callable[..., Any]:
    """Return a function that is also told whether a layer is real, and returns the carry of an added layer unchanged.

    The function goes from a layer, a carry and further arguments to the next carry, and an output if it has `outputs`.
    """
    per_layer = [layers_at(x, layers.name) is not None for x in named_trees.leaves(stacked)]

    def fn_or_carry(layer: Any, carry: Any, *args: Any, is_real: Any, **kwargs: Any) -> Any:
        is_real = raw(is_real)

        def cut_off(x: Any) -> Any:
            if not is_jax_array_like(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            return where(is_real, x, jax.tree.map(jax.lax.stop_gradient, x))

        # `filled` has cut off what each layer has of its own, and a loop would store a copy of all layers.
        leaves, structure = named_trees.flatten(layer)
        shared = [x if own else cut_off(x) for x, own in zip(leaves, per_layer, strict=True)]
        layer = named_trees.unflatten(structure, shared)
        args, kwargs = named_trees.map(cut_off, (args, kwargs))
        result = fn(layer, named_trees.map(cut_off, carry), *args, **kwargs)
        if outputs and not (isinstance(result, tuple) and len(result) == 2):  # the loop says so
            return result
        following = result[0] if outputs else result
        if named_trees.structure(following) == named_trees.structure(carry):  # if not, the loop says so
            following = named_trees.map(lambda x, y: _if_real(is_real, x, y), following, carry)
        return (following, result[1]) if outputs else following

    return fn_or_carry


def _if_real(is_real: Any, x: Any, carry: Any) -> Any:
    """Return the next value of a part of a carry, or the carry in an added layer.

    A value of another type is returned in any case: the loop says so, or starts again with a carry of that type.
    """
    x = jnp.asarray(x) if isinstance(x, NUMBERS) else x
    if isinstance(x, NamedArray) and isinstance(carry, NamedArray) and {*x.names} == {*carry.names}:
        x = rearrange(x, carry.names)
    if not (is_jax_array_like(x) and is_jax_array_like(carry)):
        return x
    own, other = (
        (getattr(y, "names", None), y.shape, y.dtype, [*map(mesh_axes, entries_of(raw(y)))]) for y in (x, carry)
    )
    return where(is_real, x, carry) if own == other else x
