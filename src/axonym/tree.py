"""The functions of `jax.tree`, with named arrays as leaves.

A named array is a tree with one leaf, its raw array. So everything that works on trees works on named arrays too:
`jax.tree.map`, optimizers and `equinox.partition` apply their function to the raw array and keep the names. The
functions here are for code that needs the names: to them, a named array is a leaf. They take the same arguments as in
`jax.tree`; `is_leaf` makes more values leaves.

>>> model = {"w": axn.ones({"embed": 2}), "b": jnp.zeros(3)}
>>> jax.tree.map(jnp.shape, model)["w"].array
(2,)
>>> axn.tree.map(lambda x: x.ndim, model)
{'b': 1, 'w': 1}
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp

from .axis import Axis, AxisSelector, name_of
from .core import errors, tree_spec
from .named_array import NamedArray, describe_array, is_named_array, resolve_axes, wrap
from .ops.broadcasting import broadcast_axis
from .ops.indexing import index
from .ops.joining import concatenate
from .ops.reductions import mean, std

__all__ = [
    "LayerStack",
    "flatten",
    "flatten_with_path",
    "hashable_combine",
    "hashable_partition",
    "leaves",
    "leaves_with_path",
    "map",
    "map_with_path",
    "maybe_rng_split",
    "resize_axis",
    "scan_aware_map",
    "structure",
    "unflatten",
]

IsLeaf: TypeAlias = Callable[[Any], bool] | None


def _or_named(is_leaf: IsLeaf) -> Callable[[Any], bool]:
    return is_named_array if is_leaf is None else lambda x: isinstance(x, NamedArray) or is_leaf(x)


# --- the functions of jax.tree ---


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply a function to every leaf, with named arrays as leaves.

    Arguments:
        fn: the function, from a leaf of each tree to a leaf of the result.
        tree: the first tree.
        *rest: more trees of the same structure, or of which it is a prefix.
        is_leaf: a function that returns True for other values that count as leaves.

    >>> axn.tree.map(lambda x: x.rename({"in": "out"}), [axn.ones({"in": 2})])
    [NamedArray(float32[out=2], [1. 1.])]
    """
    return jax.tree.map(fn, tree, *rest, is_leaf=_or_named(is_leaf))


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply a function to the path and the value of every leaf, with named arrays as leaves.

    >>> axn.tree.map_with_path(lambda path, x: jax.tree_util.keystr(path), {"w": axn.ones({"in": 2})})
    {'w': "['w']"}
    """
    return jax.tree.map_with_path(fn, tree, *rest, is_leaf=_or_named(is_leaf))


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, with named arrays as leaves, and its structure.

    >>> axn.tree.flatten([1, axn.ones({"in": 2})])
    ([1, NamedArray(float32[in=2], [1. 1.])], PyTreeDef([*, *]))
    """
    return jax.tree.flatten(tree, is_leaf=_or_named(is_leaf))


def flatten_with_path(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves of a tree with their paths, with named arrays as leaves, and its structure.

    >>> found, structure = axn.tree.flatten_with_path({"w": axn.ones({"in": 2})})
    >>> [jax.tree_util.keystr(path) for path, leaf in found], structure
    (["['w']"], PyTreeDef({'w': *}))
    """
    return jax.tree.flatten_with_path(tree, is_leaf=_or_named(is_leaf))


def unflatten(treedef: Any, leaves: Iterable[Any]) -> Any:
    """Build a tree from a structure and leaves.

    >>> axn.tree.unflatten(axn.tree.structure({"w": axn.ones({"in": 2})}), ["instead"])
    {'w': 'instead'}
    """
    return jax.tree.unflatten(treedef, leaves)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """Return the leaves of a tree, with named arrays as leaves.

    >>> axn.tree.leaves({"w": axn.ones({"in": 2}), "n": 3})
    [3, NamedArray(float32[in=2], [1. 1.])]
    """
    return jax.tree.leaves(tree, is_leaf=_or_named(is_leaf))


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None) -> list[tuple[Any, Any]]:
    """Return the leaves of a tree with their paths, with named arrays as leaves.

    >>> [(jax.tree_util.keystr(path), x.shape) for path, x in axn.tree.leaves_with_path({"w": axn.ones({"in": 2})})]
    [("['w']", {'in': 2})]
    """
    return jax.tree.leaves_with_path(tree, is_leaf=_or_named(is_leaf))


def structure(tree: Any, is_leaf: IsLeaf = None) -> Any:
    """Return the structure of a tree, with named arrays as leaves.

    >>> axn.tree.structure({"w": axn.ones({"in": 2})})
    PyTreeDef({'w': *})
    """
    return jax.tree.structure(tree, is_leaf=_or_named(is_leaf))


# --- stacked layers ---


class LayerStack(abc.ABC):
    """A module of stacked layers, whose arrays have one more axis than the arrays of a single layer.

    A subclass defines `map_layers`, with which `scan_aware_map` applies a function to each layer.

    >>> import dataclasses, equinox as eqx
    >>> class Stack(eqx.Module, axn.tree.LayerStack):
    ...     weight: axn.NamedArray
    ...     def map_layers(self, fn, *others):
    ...         mapped = axn.vmap(fn, "layers")(self.weight, *(o.weight for o in others))
    ...         return dataclasses.replace(self, weight=mapped)
    >>> stack = Stack(axn.ones({"layers": 3, "embed": 2}))
    >>> axn.tree.scan_aware_map(lambda w: w / w.sum(), stack).weight["layers", 0]
    NamedArray(float32[embed=2], [0.5 0.5])
    """

    @abc.abstractmethod
    def map_layers(self, fn: Callable[..., Any], *others: Any) -> Any:
        """Apply a function to each layer, and return the module with the results.

        Arguments:
            fn: the function, from a layer of this and of each other module to a layer.
            *others: modules of the same structure.

        >>> class Numbers(axn.tree.LayerStack):
        ...     def map_layers(self, fn, *others):
        ...         return [fn(1), fn(2)]
        >>> Numbers().map_layers(lambda layer: layer * 10)
        [10, 20]
        """

    def added_layers(self) -> tuple[Axis, int] | None:
        """Return the axis of the layers and the number of added layers behind them, or None if there are none.

        Checkpoints leave out the added layers.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> axn.nn.Stacked.init(Layers, axn.nn.LayerNorm, divisible_by=4)(Embed).added_layers()
        (Axis(name='layers', size=3), 1)
        """
        return None


def scan_aware_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply a function to every leaf, and to each layer's slice of the leaves of stacked layers.

    The leaves that the function gets from a `LayerStack` do not have the axis along which the layers are stacked; with
    nested stacks, they have neither axis. Without stacks, this is `map`. `is_leaf` can make a stack a leaf.

    >>> axn.tree.scan_aware_map(lambda x: x * 2, [axn.ones({"in": 2})])
    [NamedArray(float32[in=2], [2. 2.])]
    """

    def at(x: Any, *others: Any) -> Any:
        if isinstance(x, LayerStack) and not (is_leaf and is_leaf(x)):
            return x.map_layers(functools.partial(scan_aware_map, fn, is_leaf=is_leaf), *others)
        return fn(x, *others)

    return map(at, tree, *rest, is_leaf=lambda x: isinstance(x, LayerStack) or bool(is_leaf and is_leaf(x)))


# --- resizing an axis ---

_STD_OF_TRUNCATED = 0.8796256610342398
"""The standard deviation of a standard normal distribution truncated at -2 and 2."""


def resize_axis(tree: Any, old_axis: AxisSelector, new_size: int, key: jax.Array | None = None) -> Any:
    """Resize an axis in every named array of a tree that has it.

    A shorter axis keeps the first elements. In a longer one, the new elements are the mean of the old ones or, with a
    key, samples of a truncated normal distribution with their mean and standard deviation. So a vocabulary can grow by
    embeddings that are like the others. Integer arrays cannot grow.

    If a module also stores the axis in a static field, that field keeps the old axis.

    Arguments:
        old_axis: the axis. If it has a size, every array must have that size.
        key: a random key for the new elements; None makes all of them the mean.

    >>> axn.tree.resize_axis({"w": axn.arange(axn.Axis("vocab", 3)) * 1.0}, "vocab", 5)
    {'w': NamedArray(float32[vocab=5], [0. 1. 2. 1. 1.])}
    """
    found, treedef = flatten_with_path(tree)
    name = name_of(old_axis)
    # In a partitioned tree, a named array can hold a placeholder, which is left unchanged.
    having = [
        i
        for i, (_, x) in enumerate(found)
        if isinstance(x, NamedArray) and name in x.names and hasattr(x.array, "shape")
    ]
    if not having:
        known = dict.fromkeys(n for _, x in found if isinstance(x, NamedArray) for n in x.names)
        raise ValueError(errors.missing_axes("resize_axis", [name], list(known)))
    keys = maybe_rng_split(key, len(having))
    resized = [x for _, x in found]
    for i, k in zip(having, keys, strict=True):
        path, x = found[i]
        (axis,) = resolve_axes(x.names, jnp.shape(x.array), old_axis, "resize_axis")
        if new_size > axis.size and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"resize_axis: {_path_of(path)} is {describe_array(x)}: axis {name!r} of an integer array cannot grow "
                f"to {new_size}, since the new elements are means. Resize that array yourself, for example with "
                "`axonym.pad`."
            )
        if new_size > axis.size == 0:
            raise ValueError(
                f"resize_axis: axis {name!r} of {_path_of(path)} {describe_array(x)} has no elements, whose mean the "
                "new ones would be. Make the array anew."
            )
        if new_size <= axis.size:
            resized[i] = x if new_size == axis.size else index(x, {name: slice(new_size)})
            continue
        filled = broadcast_axis(mean(x, axis), axis.resize(new_size - axis.size))
        if k is not None:
            shape = tuple(a.size for a in filled.axes)
            noise = wrap(jax.random.truncated_normal(k, -2, 2, shape, x.dtype), filled.names)
            filled = filled + noise * (std(x, axis) / _STD_OF_TRUNCATED)
        resized[i] = concatenate([x, filled], name)
    return unflatten(treedef, resized)


# --- static and dynamic parts ---


def hashable_partition(tree: Any, filter_spec: Any) -> tuple[Any, Any]:
    """Partition a tree as `equinox.partition` does, into dynamic leaves and a hashable static part.

    >>> import equinox as eqx
    >>> dynamic, static = axn.tree.hashable_partition({"w": axn.ones({"in": 2}), "fn": jnp.tanh}, eqx.is_array)
    >>> dynamic
    {'fn': None, 'w': NamedArray(float32[in=2], [1. 1.])}
    >>> hash(static) == hash(static)
    True
    """
    import equinox as eqx

    dynamic, static = eqx.partition(tree, filter_spec)
    _, spec = tree_spec.flatten_arrays(static, (), named=False)
    leaves = jax.tree.leaves_with_path(static)
    wrong = [f"{_path_of(path)} ({type(x).__name__})" for path, x in leaves if not tree_spec.is_hashable(x)]
    if wrong:
        raise TypeError(f"hashable_partition: {', '.join(wrong)} cannot be hashed, so it cannot be static.")
    return dynamic, spec


def _path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the tree"


def hashable_combine(dynamic: Any, static: Any) -> Any:
    """Undo `hashable_partition`.

    >>> import equinox as eqx
    >>> parts = axn.tree.hashable_partition({"w": axn.ones({"in": 2}), "n": 3}, eqx.is_array)
    >>> axn.tree.hashable_combine(*parts)
    {'n': 3, 'w': NamedArray(float32[in=2], [1. 1.])}
    """
    import equinox as eqx

    return eqx.combine(dynamic, static.unflatten())


# --- keys ---


@overload
def maybe_rng_split(key: None, num: int = 2) -> list[None]: ...
@overload
def maybe_rng_split(key: jax.Array, num: int = 2) -> jax.Array: ...
@overload
def maybe_rng_split(key: jax.Array | None, num: int = 2) -> jax.Array | list[None]: ...
def maybe_rng_split(key: jax.Array | None, num: int = 2) -> jax.Array | list[None]:
    """Split a random key, or return a list of None if there is no key. A single key is returned unsplit.

    >>> axn.tree.maybe_rng_split(None, 2)
    [None, None]
    >>> first, second = axn.tree.maybe_rng_split(jax.random.key(0))
    """
    if key is None:
        return [None] * num
    return key[None] if num == 1 else jax.random.split(key, num)
