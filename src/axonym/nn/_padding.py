"""Add layers, so that the stages of a pipeline divide their number, and skip the added layers.

The added layers are zeros and stay zeros: their gradients are zero, so sums over all layers, such as the norm of a
gradient, are the same as without them. A loop runs them too, since the devices of a pipeline run in lockstep, and does
not use their results. It computes with a copy of a real layer instead of zeros, by which a layer might divide, and
cuts off the derivatives of the copy, so that these cannot be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree as named_trees
from ..axis import Axis
from ..core.tree_spec import NUMBERS, is_key
from ..distribution.mesh_axes import entries_of, mesh_axes
from ..named_array import NamedArray, is_jax_array_like, raw, wrap_like
from ..ops.indexing import index
from ..ops.rearranging import rearrange
from ..ops.selection import where
from ..transforms.stacked_leaves import as_leaf, as_named, layers_at


def with_added(layers: Axis, padding: int, tree: Any) -> Any:
    """Add copies of the first layer's slice to each array that has a slice for each real layer only."""

    def longer(x: Any, position: int) -> Any:
        if x.shape[position] != layers.size:
            return x
        x = jnp.asarray(x)
        first = jax.lax.slice_in_dim(x, 0, 1, axis=position)
        return jnp.concatenate([x, *[first] * padding], position)

    return _map_layers(longer, layers, tree)


def without_added(layers: Axis, padding: int, results: Any, arguments: Any) -> Any:
    """Leave out the added layers of results, or set them to zero if an argument of the call has a slice for them."""

    def shorter(x: Any) -> Any:
        if layers_at(x, layers.name) is None:
            return x
        return as_leaf(x, index(as_named(x, layers.name), {layers.name: slice(layers.size)}))

    def has_added(x: Any) -> bool:
        position = layers_at(x, layers.name)
        return position is not None and raw(x).shape[position] == layers.size + padding

    # So a decoding loop, which passes caches on, can keep them sharded over the stages.
    given = any(map(has_added, named_trees.leaves(arguments)))
    return zeroed(layers, results) if given else named_trees.map(shorter, results)


def zeroed(layers: Axis, tree: Any) -> Any:
    """Set the added layers to zero, except random keys, which have no zero."""

    def with_zeros(x: Any, position: int) -> Any:
        return x if is_key(x) else _chosen(_numbers(x, position) < layers.size, x, 0)

    return _map_layers(with_zeros, layers, tree)


def filled(layers: Axis, tree: Any) -> Any:
    """Set the added layers to copies of the first layer, which have no derivative, except random keys."""

    def with_first(x: Any, position: int) -> Any:
        if is_key(x):
            return x
        numbers = _numbers(x, position)
        # A sum over devices sends one layer; a slice might gather all of them.
        reduce = jnp.max if x.dtype == bool else jnp.sum
        first = reduce(_chosen(numbers == 0, x, 0), position, keepdims=True).astype(x.dtype)
        return _chosen(numbers < layers.size, x, jax.lax.stop_gradient(first))

    return _map_layers(with_first, layers, tree)


def _map_layers(fn: Callable[[Any, int], Any], layers: Axis, tree: Any) -> Any:
    """Apply a function to each array that has the axis of the layers, and to the position of this axis."""

    def at(x: Any) -> Any:
        position = layers_at(x, layers.name)
        return x if position is None else wrap_like(fn(raw(x), position), x)

    return named_trees.map(at, tree)


def _chosen(condition: np.ndarray, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, jnp.asarray(y, x.dtype))


def _numbers(x: Any, position: int) -> np.ndarray:
    return np.arange(x.shape[position]).reshape([-1 if i == position else 1 for i in range(x.ndim)])


def skipping(fn: Callable[..., Any], layers: Axis, stacked: Any, outputs: bool) -> Callable[..., Any]:
    """Return a function that is also told whether a layer is real, and returns the carry of an added layer unchanged.

    Arguments:
        fn: the function, from a layer, a carry and further arguments to the next carry.
        layers: the axis of the layers.
        stacked: the stacked layers.
        outputs: whether the function also returns an output.
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
    return where(is_real, x, carry) if is_jax_array_like(x) and _type_of(x) == _type_of(carry) else x


def _type_of(x: Any) -> Any:
    """Return the names, the shape, the dtype and the sharding of an array; None for anything else."""
    if not is_jax_array_like(x):
        return None
    array = raw(x)
    names = x.names if isinstance(x, NamedArray) else None
    return names, array.shape, array.dtype, [mesh_axes(entry) for entry in entries_of(array)]
