"""Convert trees to state dicts."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from .. import tree as named_trees
from ..axis import Axis
from ..named_array import NamedArray, is_jax_array_like, raw
from ..sharding.shard import to_host
from ..transforms.stacked_leaves import layer_of, layers_are_first
from .naming import StateDict, children, is_number, with_prefix


def to_state_dict(tree: Any, prefix: str | None = None) -> StateDict:
    """Return the arrays and numbers of a tree by key, as raw arrays.

    The key of an array is its path in the tree: field names, positions in sequences and keys of dictionaries, joined
    with dots. Modules with their own `to_state_dict` method write themselves. Leaves that are neither arrays nor
    numbers, such as functions, have no entry.

    Arguments:
        tree: any tree, such as a model or the state of an optimizer. Its arrays can be abstract.
        prefix: a prefix for all keys.

    >>> axn.state.to_state_dict({"layers": [axn.ones({"embed": 2})], "eps": 1e-5}, "model")
    {'model.eps': 1e-05, 'model.layers.0': Array([1., 1.], dtype=float32)}
    """
    if is_jax_array_like(tree) or is_number(tree):
        if prefix is None:
            raise ValueError("to_state_dict: an array on its own has no key in a state dict. Pass one as `prefix`.")
        return {prefix: raw(tree)}
    if isinstance(tree, NamedArray):
        return {}  # a placeholder
    if isinstance(tree, eqx.Module) and hasattr(tree, "to_state_dict"):
        return tree.to_state_dict(prefix)  # pyright: ignore[reportAttributeAccessIssue]
    return children_to_state_dict(tree, prefix)


def children_to_state_dict(tree: Any, prefix: str | None) -> StateDict:
    """Return the arrays and numbers below a node of a tree, by key."""
    if jax.tree_util.all_leaves([tree]):
        return {}
    state_dict: StateDict = {}
    for step, child in children(tree)[0]:
        found = to_state_dict(child, with_prefix(prefix, step))
        if twice := state_dict.keys() & found.keys():
            raise ValueError(
                f"to_state_dict: {type(tree).__name__} has two arrays with the key "
                f"{', '.join(map(repr, sorted(twice)))}. Look at its `_state_dict_key_map`."
            )
        state_dict |= found
    return state_dict


def stacked_to_state_dict(stacked: Any, layers: Axis, prefix: str | None = None, *, at_once: bool = False) -> StateDict:
    """Return the arrays of stacked layers with an entry for each layer, under its number: for `Stacked`.

    Arguments:
        stacked: the stacked layers. Their named arrays have the axis, or are shared by all layers; their raw arrays
            have it first.
        layers: the axis of the layers.
        prefix: a prefix for all keys.
        at_once: whether a module's own `to_state_dict` is called once, on the arrays of all layers with the layers
            first, instead of on each layer. Its numbers then have one entry for all layers.

    >>> stacked = {"scale": axn.ones({"layers": 2, "embed": 3})}
    >>> [(key, x.shape) for key, x in axn.state.stacked_to_state_dict(stacked, axn.Axis("layers", 2), "norm").items()]
    [('norm.0.scale', (3,)), ('norm.1.scale', (3,))]
    """
    if at_once and layers_are_first(stacked, layers):
        below, found = with_prefix(prefix, "") or "", {}
        for key, x in to_state_dict(stacked, prefix).items():
            if is_number(x) or not key.startswith(below):
                found[key] = x
            elif x.shape[:1] != (layers.size,):
                raise ValueError(f"to_state_dict: {key!r} has shape {x.shape}, which does not start with {layers}.")
            else:
                found |= stacked_to_state_dict({key.removeprefix(below): x}, layers, prefix)
        return found
    each = [named_trees.map(lambda x, i=i: layer_of(x, layers.name, i), stacked) for i in range(layers.size)]
    return children_to_state_dict(each, prefix)


def to_numpy_state_dict(tree: Any, prefix: str | None = None) -> StateDict:
    """Return the arrays of a tree by key, as NumPy arrays.

    Arrays on several hosts are gathered, so every host must call this function.

    >>> axn.state.to_numpy_state_dict({"weight": axn.ones({"embed": 2})})
    {'weight': array([1., 1.], dtype=float32)}
    """
    return to_state_dict(to_host(tree), prefix)
