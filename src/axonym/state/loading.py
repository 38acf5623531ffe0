"""Load state dicts into trees.

The tree, whose arrays can be abstract, gives the structure, shapes and dtypes. Its leaves are first matched with the
entries of the state dict, which are not read yet; one error lists everything that does not fit. Then every device reads
its own shard of every array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import tree as named_trees
from ..axis import Axis, names_without
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap_like
from ..ops.rearranging import rearrange
from ..sharding.meshes import AnyMesh, in_trace
from ..sharding.placement import Placement
from ..transforms.stacked_leaves import layer_of, layers_are_first, layers_at
from .lazy_arrays import LazyArray, LazyEntry, MissingArray, abstract, as_lazy, has_missing, read_all, stack_lazily
from .load_context import AllLayers, LoadContext, TrackedStateDict, activate, active_load
from .naming import children, converted_number, is_number, same_kind, with_prefix
from .sharded_reading import read_sharded

T = TypeVar("T")


def from_state_dict(
    tree: T,
    state_dict: Mapping[str, Any],
    prefix: str | None = None,
    *,
    placement: Placement = None,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> T:
    """Load the arrays and numbers of a tree from a state dict.

    Every array gets the shape and the dtype of its counterpart in the tree, whose arrays can be abstract, as
    `equinox.filter_eval_shape` makes them. Its sharding comes from the placement, or else from the tree's array. Every
    device reads its own shard: of entries that can be sliced without being read, such as the entries that
    `axonym.state.load_state_dict` returns, no more than one shard at a time is in host memory.

    Modules with their own `from_state_dict` method load themselves. Leaves that are neither arrays nor numbers come
    from the tree, and so do numbers that the state dict does not have.

    Arguments:
        tree: any tree, such as a model.
        state_dict: arrays by key: of NumPy, JAX, or anything that has a shape and a dtype and can be sliced.
        prefix: the prefix of the tree's keys in the state dict.
        placement: the placement of the arrays; by default the active mapping.
        mesh: the mesh; by default the active one.
        strict: whether missing keys, and keys below the prefix that the tree does not have, are errors. If not, arrays
            that are missing from the state dict keep their value in the tree. A wrong shape is always an error.
        ignore: patterns of keys that may be in the state dict but not in the tree, with `*` for anything.

    >>> model = {"embed": axn.zeros({"vocab": 2, "embed": 2}), "scale": 1.0}
    >>> axn.state.from_state_dict(model, {"embed": np.ones((2, 2)), "old": np.ones(3)}, ignore=["old"])["embed"]
    NamedArray(float32[vocab=2, embed=2], [[1. 1.] [1. 1.]])
    """
    load = functools.partial(load_subtree, tree, prefix=prefix)
    return run_load(load, tree, state_dict, prefix, "from_state_dict", placement, mesh, strict, ignore)


def run_load(
    load: Callable[[TrackedStateDict], T],
    tree: T,
    state_dict: Mapping[str, Any],
    prefix: str | None,
    what: str,
    placement: Placement = None,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> T:
    """Load a tree or, during another load, a subtree of the tree that is being loaded.

    `load` returns the tree with lazy arrays. The other arguments are the same as in `from_state_dict`.
    """
    outer = active_load()
    context = outer or LoadContext(what, strict, ignore)
    wants_lazy = outer is not None and outer.lazy  # before `activate` changes it
    options = {"lazy": True, "strict": context.strict and strict, "ignore": (*context.ignore, *ignore)}
    with activate(context, **options):
        entries = context.track(state_dict)
        result = load(entries)
        if entries is not state_dict:
            context.add_unexpected(entries.unused(prefix))
        if wants_lazy:
            return result
        context.raise_problems()
        return read_sharded(result, tree, placement, mesh, what)


def lazy_loading(method: Callable[..., T]) -> Callable[..., T]:
    """Mark a `from_state_dict` method as one that does not compute with the arrays it loads.

    During a load, such a method gets lazy arrays, which are not read yet. Other methods get JAX arrays, which they can
    compute with.

    Arguments:
        method: the method, of a module, a state dict and a prefix.

    >>> import equinox as eqx
    >>> class Wrapped(eqx.Module):
    ...     inner: axn.NamedArray
    ...     @axn.state.lazy_loading
    ...     def from_state_dict(self, state_dict, prefix=None):
    ...         return Wrapped(axn.state.from_state_dict(self.inner, state_dict, prefix))
    >>> axn.state.from_state_dict({"w": Wrapped(axn.zeros({"x": 2}))}, {"w": np.ones(2)})["w"].inner
    NamedArray(float32[x=2], [1. 1.])
    """

    @functools.wraps(method)
    def from_state_dict(self: Any, state_dict: Mapping[str, Any], prefix: str | None = None) -> T:
        return run_load(lambda entries: method(self, entries, prefix), self, state_dict, prefix, "from_state_dict")

    vars(from_state_dict)["_leaves_arrays_lazy"] = True
    return from_state_dict


def active_context() -> LoadContext:
    """Return the active load, which there must be."""
    context = active_load()
    assert context is not None
    return context


# --- one node of the tree ---


def load_subtree(tree: Any, entries: Mapping[str, Any], prefix: str | None) -> Any:
    """Return a subtree with lazy arrays in place of its own."""
    if is_jax_array_like(tree):
        return wrap_like(_entry_of(tree, entries, prefix), tree)
    if is_number(tree):
        return tree if prefix is None or prefix not in entries else _loaded_number(tree, entries[prefix], prefix)
    if isinstance(tree, NamedArray):
        return tree  # a placeholder
    method = getattr(type(tree), "from_state_dict", None) if isinstance(tree, eqx.Module) else None
    if method is None:
        return load_children(tree, entries, prefix)
    context = active_context()
    with activate(context, lazy=hasattr(method, "_leaves_arrays_lazy")):
        return method(tree, entries, prefix)


def load_children(tree: Any, entries: Mapping[str, Any], prefix: str | None) -> Any:
    """Return a node of the tree, with each child loaded under its own key."""
    if jax.tree_util.all_leaves([tree]):
        return tree  # such as a function
    found, structure = children(tree)
    return jax.tree.unflatten(
        structure, [load_subtree(child, entries, with_prefix(prefix, step)) for step, child in found]
    )


def _loaded_number(tree: Any, entry: Any, key: str) -> Any:
    if isinstance(entry, AllLayers):
        found = [_loaded_number(tree, entry.entries[k], k) if k in entry.entries else tree for k in entry.keys]
        if not all_equal(found):
            active_context().misfits.append(
                f"{entry.name!r} differs among the layers, but in the tree all share {tree}."
            )
        return found[0]
    if isinstance(entry, Tracer):
        return entry  # the value is not known while tracing
    array, kind = np.asarray(entry), type(tree)
    given = array.item() if array.size == 1 else describe_array(array)
    if (value := converted_number(kind, given)) is not None:
        return value
    active_context().misfits.append(f"{key!r} is {given}, but in the tree it is a number, {kind.__name__}.")
    return tree


def _entry_of(tree: Any, entries: Mapping[str, Any], key: str | None) -> LazyArray:
    context = active_context()
    if key is None:
        raise ValueError(f"{context.what}: an array on its own has no key in a state dict. Pass its key as `prefix`.")
    shape, dtype = tuple(raw(tree).shape), tree.dtype
    absent = MissingArray(shape, dtype)
    if key not in entries:
        context.add_missing(key, describe_array(tree))
        return absent
    if isinstance(entry := entries[key], AllLayers):
        layer = jax.ShapeDtypeStruct(shape[1:], dtype)
        return stack_lazily([_entry_of(layer, entry.entries, k) for k in entry.keys], 0)
    found = _known_entry(entry)
    misfit = "" if same_kind(found.dtype, dtype) else f"dtype {found.dtype}"
    misfit = misfit if tuple(found.shape) == shape else f"shape {tuple(found.shape)}"
    if misfit:
        context.misfits.append(f"{key!r} has {misfit}, but in the tree it is {describe_array(tree)}.")
        return absent
    return LazyEntry(found, dtype, repr(key))


def _known_entry(x: Any) -> Any:
    """Convert an entry of a state dict to an array with a NumPy dtype."""
    if isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype):
        return x
    try:
        return np.asarray(x)
    except TypeError:
        if not hasattr(x, "__dlpack__"):
            raise
        return np.asarray(jnp.from_dlpack(x))  # PyTorch cannot convert bfloat16 to NumPy


# --- stacked layers ---


def stacked_from_state_dict(
    stacked: T,
    layers: Axis,
    state_dict: Mapping[str, Any],
    prefix: str | None = None,
    *,
    padding: int = 0,
    at_once: bool = False,
) -> T:
    """Load stacked layers from a state dict that has an entry for each layer: for `Stacked`.

    Each layer is loaded separately, under its number, and the arrays are stacked without being read.

    Arguments:
        stacked: the stacked layers. Their named arrays have the axis, or are shared by all layers; their raw arrays
            have it first.
        layers: the axis of the layers.
        state_dict: the state dict that a `lazy_loading` method was called with.
        prefix: the prefix of the layers' keys in the state dict.
        padding: the number of added layers at the end, which are zeros.
        at_once: whether a module's own `from_state_dict` is called once, with entries that have the layers first,
            instead of for each layer. Layers that contain stacked layers, or arrays that all share, load one by one.

    >>> import dataclasses, equinox as eqx
    >>> class Layers(eqx.Module):
    ...     stacked: axn.NamedArray
    ...     @axn.state.lazy_loading
    ...     def from_state_dict(self, state_dict, prefix=None):
    ...         stacked = axn.state.stacked_from_state_dict(self.stacked, axn.Axis("layers", 2), state_dict, prefix)
    ...         return dataclasses.replace(self, stacked=stacked)
    >>> layers = Layers(axn.zeros({"layers": 2, "embed": 2}))
    >>> axn.state.from_state_dict(layers, {"0": np.zeros(2), "1": np.ones(2)}).stacked
    NamedArray(float32[layers=2, embed=2], [[0. 0.] [1. 1.]])
    """
    if at_once and not padding and layers_are_first(stacked, layers):
        return _load_at_once(stacked, layers, state_dict, prefix)
    found, structure = named_trees.flatten_with_path(stacked)
    shapes = jax.tree.map(lambda x: abstract(as_lazy(x)) if is_jax_array_like(x) else x, stacked)
    layer = named_trees.map(lambda x: layer_of(x, layers.name, 0), shapes)
    loaded_layers = [from_state_dict(layer, state_dict, with_prefix(prefix, str(i))) for i in range(layers.size)]
    columns = zip(*map(named_trees.leaves, loaded_layers), strict=True)
    results = []
    for (path, x), parts in zip(found, columns, strict=True):
        if (position := layers_at(x, layers.name)) is None:
            if not all_equal(parts):
                where = with_prefix(prefix, f"*.{jax.tree_util.keystr(path, simple=True, separator='.')}")
                shared = describe_array(x) if is_jax_array_like(x) else x
                active_context().misfits.append(
                    f"{where!r} differs among the layers, but in the tree all share {shared}."
                )
            results.append(parts[0])
            continue
        if isinstance(x, NamedArray):
            names = names_without(x.names, layers.name)
            parts = [raw(part if part.names == names else rearrange(part, names)) for part in parts]
        arrays = [*map(as_lazy, parts)]
        zeros = as_lazy(np.broadcast_to(np.zeros((), arrays[0].dtype), arrays[0].shape))
        results.append(wrap_like(stack_lazily([*arrays, *[zeros] * padding], position), x))
    return jax.tree.unflatten(structure, results)


def _load_at_once(stacked: T, layers: Axis, state_dict: Mapping[str, Any], prefix: str | None) -> T:
    """Load stacked layers from a state dict in which `h.0.weight` and `h.1.weight` are one entry, `h.weight`."""
    context, below = active_context(), with_prefix(prefix, "") or ""
    entries, at_once = context.track(state_dict), TrackedStateDict({})
    surplus: list[tuple[str, str]] = []
    for key, entry in entries.data.items():
        number, _, rest = key.removeprefix(below).partition(".")
        if not (key.startswith(below) and number.isdecimal() and rest):
            at_once.data.setdefault(key, entry)
            continue
        keys = [f"{below}{i}.{rest}" for i in range(layers.size)]
        at_once.data[below + rest] = AllLayers(entries, f"{below}*.{rest}", keys)
        if int(number) >= layers.size:
            surplus.append((below + rest, key))
    found_missing = {*context.missing}
    loaded = from_state_dict(stacked, at_once, prefix)
    entries.used.update(key for key in at_once.used if not isinstance(at_once.data.get(key), AllLayers))
    for key in [k for k in context.missing if k not in found_missing and k not in entries and k.startswith(below)]:
        if not key.removeprefix(below).partition(".")[0].isdecimal():
            wanted = context.missing.pop(key)
            context.missing.update({f"{below}{i}.{key.removeprefix(below)}": wanted for i in range(layers.size)})
    if context.strict and "*" in context.ignore:  # entries that the tree lacks, but not layers of entries that it has
        context.misfits += [
            f"{key!r} is one layer too many: {layers}." for whole, key in surplus if whole in at_once.used
        ]
    return loaded


def all_equal(parts: Sequence[Any]) -> bool:
    """Return whether a leaf that layers share is equal in all of them; while tracing, assume that it is."""
    arrays: list[Any] = [raw(part) for part in parts]
    first, *others = arrays
    if is_number(first):
        return all(other == first for other in others)
    if not isinstance(first, LazyArray) or any(map(has_missing, (first, *others))) or in_trace():
        return True
    return all(np.array_equal(read_all(other), read_all(first), equal_nan=True) for other in others)
