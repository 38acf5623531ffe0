"""Store more layers than there are, so that the stages of a pipeline divide their number, and skip the others.

The added layers are zeros and stay zeros: their gradients are zero, so sums over all layers, such as the norm of a
gradient, are the same as without them. A loop runs them too, since the devices of a pipeline run in lockstep, and does
not use what they compute. It computes with a copy of a real layer instead of zeros, by which a layer might divide, and
cuts off their derivatives, so that these cannot be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree as named_trees
from ..axis import Axis
from ..named_array import is_jax_array_like, raw, wrap_like
from ..ops.indexing import index
from ..ops.selection import where
from ..transforms.stacked_leaves import as_leaf, as_named, layers_at


def lengthened(layers: Axis, padding: int, tree: Any) -> Any:
    """Append copies of the first layer's slice to each array that has a slice for each layer, but none for others."""

    def longer(x: Any, position: int) -> Any:
        if x.shape[position] != layers.size:
            return x
        x = jnp.asarray(x)
        first = jax.lax.slice_in_dim(x, 0, 1, axis=position)
        return jnp.concatenate([x, *[first] * padding], position)

    return _map_layers(longer, layers, tree)


def shortened(layers: Axis, tree: Any) -> Any:
    """Leave out the added layers."""

    def shorter(x: Any) -> Any:
        if layers_at(x, layers.name) is None:
            return x
        return as_leaf(x, index(as_named(x, layers.name), {layers.name: slice(layers.size)}))

    return named_trees.map(shorter, tree)


def zeroed(layers: Axis, tree: Any) -> Any:
    """Set the added layers to zero."""
    return _map_layers(lambda x, position: _chosen(_numbers(x, position) < layers.size, x, 0), layers, tree)


def filled(layers: Axis, tree: Any) -> Any:
    """Set the added layers to copies of the first one, which have no derivative."""

    def with_first(x: Any, position: int) -> Any:
        numbers = _numbers(x, position)
        # A sum over devices sends one layer; a slice might gather all of them.
        first = jnp.max if x.dtype == bool else jnp.sum
        first = first(_chosen(numbers == 0, x, 0), position, keepdims=True).astype(x.dtype)
        return _chosen(numbers < layers.size, x, jax.lax.stop_gradient(first))

    return _map_layers(with_first, layers, tree)


def _map_layers(fn: Callable[[Any, int], Any], layers: Axis, tree: Any) -> Any:
    """Apply a function to each array that has the axis of the layers, and to the position of this axis."""

    def at(x: Any) -> Any:
        position = layers_at(x, layers.name)
        return x if position is None else wrap_like(fn(raw(x), position), x)

    return named_trees.map(at, tree)


def _chosen(condition: np.ndarray, x: Any, y: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.where(condition, x, jnp.asarray(y, x.dtype))


def _numbers(x: Any, position: int) -> np.ndarray:
    return np.arange(x.shape[position]).reshape([-1 if i == position else 1 for i in range(x.ndim)])


def skipping(fn: Callable[..., Any], layers: Axis, stacked: Any, outputs: bool) -> Callable[..., Any]:
    """Return a function of a layer that returns its carry unchanged for an added one.

    Arguments:
        fn: the function, from a layer, a carry and further arguments to the next carry.
        layers: the axis of the layers.
        stacked: the stacked layers.
        outputs: whether the function also returns an output.
    """
    per_layer = [layers_at(x, layers.name) is not None for x in named_trees.leaves(stacked)]

    def fn_or_carry(layer: Any, carry: Any, is_real: Any, *args: Any, **kwargs: Any) -> Any:
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
        following = result[0] if outputs else result
        if named_trees.structure(following) == named_trees.structure(carry):  # if not, the loop says so
            following = named_trees.map(lambda x, y: where(is_real, x, y), following, carry)
        return (following, *result[1:]) if outputs else following

    return fn_or_carry
