"""Slice the leaves of stacked layers: a named array along the axis of the layers, a raw array along its first axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import tree as named_trees
from ..axis import Axis, names_without
from ..core.tree_spec import check_rank
from ..named_array import NamedArray, is_jax_array_like, raw, wrap
from ..ops.indexing import index


def layers_at(x: Any, name: str) -> int | None:
    """Return the position of the layer axis in a leaf of stacked layers, or None if all layers share the leaf."""
    if not is_jax_array_like(x):
        return None
    if isinstance(x, NamedArray):
        check_rank(x)
        return x.names.index(name) if name in x.names else None
    return 0 if x.shape else None


def layers_are_first(stacked: Any, layers: Axis) -> bool:
    """Return whether every array has the layer axis, first, and no layer has stacked layers of its own."""
    return all(
        layers_at(x, layers.name) == 0 and raw(x).shape[:1] == (layers.size,)
        if is_jax_array_like(x)
        else not isinstance(x, named_trees.LayerStack)
        for x in named_trees.leaves(stacked, is_leaf=lambda x: isinstance(x, named_trees.LayerStack))
    )


def as_named(x: Any, name: str) -> NamedArray:
    """Return a leaf that has the layer axis as a named array, whose other axes have names of their own if it is raw."""
    return x if isinstance(x, NamedArray) else wrap(x, (name, *(f"dimension {i}" for i in range(x.ndim - 1))))


def as_leaf(x: Any, part: NamedArray) -> Any:
    """Return a part of a leaf in the form of the leaf: raw if that is raw."""
    return part if isinstance(x, NamedArray) else part.array


def layer_of(x: Any, name: str, i: Any) -> Any:
    """Return one layer's slice of a leaf, or the leaf itself if all layers share it; the index can be traced."""
    position = layers_at(x, name)
    if position is None:  # a placeholder of a named array loses the name, too
        return (
            x if not isinstance(x, NamedArray) or is_jax_array_like(x) else wrap(x.array, names_without(x.names, name))
        )
    named = as_named(x, name)
    array, names = named.array, names_without(named.names, name)
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = array.shape[:position] + array.shape[position + 1 :]
        return as_leaf(x, wrap(jax.ShapeDtypeStruct(shape, array.dtype), names))
    if isinstance(array, np.ndarray):  # keep it in host memory
        return as_leaf(x, wrap(np.asarray(array[(slice(None),) * position + (i,)]), names))
    return as_leaf(x, index(named, {name: i}))
