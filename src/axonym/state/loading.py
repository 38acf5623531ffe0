"""From a state dict to a tree.

The tree says what is wanted, and its arrays may be abstract. First the entries of the state dict are matched with its
leaves, without reading them; what does not fit is one error. Then every device is given its part of every array.
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
from ..array import NamedArray, wrap
from ..axis import Axis
from ..jax_utils import is_jax_array_like
from ..ops.rearranging import rearrange
from ..sharding.meshes import AnyMesh
from ..sharding.placement import Placement
from ..sharding.shard import in_trace
from .lazy import Absent, Entry, LazyArray, Stack, is_absent, lazy, whole
from .naming import children, described, is_number, layers_at, same_kind, with_prefix, without
from .placing import placed
from .session import Reader, Session, current_session, under_way, with_options

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
    """The tree with its arrays and numbers from a state dict.

    Every array has the shape and the dtype that it has in the tree, whose arrays can be abstract, as
    `equinox.filter_eval_shape` makes them. It is put where the placement says, and each device is given its own part:
    of an entry that can be sliced without being read, as those of `axonym.state.load_state_dict` can, no more than one
    part is in memory at a time. What the placement says nothing about goes where the array of the tree is placed.

    Modules with a method `from_state_dict` of their own load themselves. What is neither an array nor a number is
    taken from the tree, and so is a number that the state dict does not have.

    Arguments:
        tree: any tree, such as a model.
        state_dict: arrays by key: of NumPy, JAX, or anything that has a shape and a dtype and can be sliced.
        prefix: where the tree stands in the state dict.
        placement: where the arrays go; the mapping in force by default.
        mesh: the mesh; that in force by default.
        strict: whether keys that are missing, and keys below the prefix that the tree does not have, are errors. If
            not, arrays that are missing stay as they are in the tree. A shape that does not fit is always an error.
        ignore: patterns of keys that the state dict may have and the tree not, with `*` for anything.

    >>> from axonym.state import from_state_dict
    >>> model = {"embed": axn.zeros({"vocab": 2, "embed": 2}), "scale": 1.0}
    >>> from_state_dict(model, {"embed": np.ones((2, 2)), "old": np.ones(3)}, ignore=["old"])["embed"]
    NamedArray(float32[vocab=2, embed=2], [[1. 1.] [1. 1.]])
    """

    def load(reader: Reader) -> T:
        return loaded(tree, reader, prefix)

    return run(load, tree, state_dict, prefix, "from_state_dict", placement, mesh, strict, ignore)


def run(
    load: Callable[[Reader], T],
    tree: T,
    state_dict: Mapping[str, Any],
    prefix: str | None,
    what: str,
    placement: Placement = None,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> T:
    """Load a tree or, while another is being loaded, a part of that.

    Arguments:
        load: gives the tree with lazy arrays.
        tree: what is to be loaded, for what the state dict does not have.
        state_dict: the state dict.
        prefix: where the tree stands in it.
        what: the operation, for messages.
        placement: where the arrays go.
        mesh: the mesh.
        strict: whether all keys must match.
        ignore: patterns of keys that need not.
    """
    outer = current_session()
    session = outer or Session(what, strict, ignore)
    wants_lazy = outer is not None and outer.lazy
    options = {"lazy": True, "strict": session.strict and strict, "ignore": (*session.ignore, *ignore)}
    with under_way(session), with_options(session, **options):
        reader = session.reads(state_dict)
        result = load(reader)
        if reader is not state_dict:
            session.left_over(reader.unused(prefix))
        if wants_lazy:
            return result
        session.check()
        return placed(result, tree, placement, mesh, what)


def lazy_loading(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a method `from_state_dict` that leaves the arrays it is given as they are.

    While a model is loaded, such a method sees arrays that are not read yet. Any other is given real ones, so that it
    can compute with them.

    Arguments:
        method: the method, of a module, a state dict and a prefix.

    >>> import equinox as eqx
    >>> from axonym.state import from_state_dict, lazy_loading
    >>> class Wrapped(eqx.Module):
    ...     inner: axn.NamedArray
    ...     @lazy_loading
    ...     def from_state_dict(self, state_dict, prefix=None):
    ...         return Wrapped(from_state_dict(self.inner, state_dict, prefix))
    >>> from_state_dict({"w": Wrapped(axn.zeros({"x": 2}))}, {"w": np.ones(2)})["w"].inner
    NamedArray(float32[x=2], [1. 1.])
    """

    @functools.wraps(method)
    def from_state_dict(self: Any, state_dict: Mapping[str, Any], prefix: str | None = None) -> T:
        return run(lambda reader: method(self, reader, prefix), self, state_dict, prefix, "from_state_dict")

    vars(from_state_dict)["_leaves_arrays_lazy"] = True
    return from_state_dict


def _session() -> Session:
    session = current_session()
    assert session is not None
    return session


# --- one node of the tree ---


def loaded(tree: Any, reader: Mapping[str, Any], prefix: str | None) -> Any:
    """A part of the tree, with lazy arrays."""
    if is_jax_array_like(tree):
        return _array(tree, reader, prefix)
    if is_number(tree):
        return tree if prefix is None or prefix not in reader else _number(tree, reader[prefix], prefix)
    if isinstance(tree, NamedArray):
        return tree  # a placeholder
    method = getattr(type(tree), "from_state_dict", None) if isinstance(tree, eqx.Module) else None
    if method is None:
        return loaded_children(tree, reader, prefix)
    session = _session()
    with with_options(session, lazy=hasattr(method, "_leaves_arrays_lazy")):
        return method(tree, reader, prefix)


def loaded_children(tree: Any, reader: Mapping[str, Any], prefix: str | None) -> Any:
    """A node of the tree, whose children are loaded one by one."""
    if jax.tree_util.all_leaves([tree]):
        return tree  # such as a function
    found, structure = children(tree)
    return jax.tree.unflatten(structure, [loaded(child, reader, with_prefix(prefix, step)) for step, child in found])


def _number(tree: Any, entry: Any, key: str) -> Any:
    if isinstance(entry, Tracer):
        return entry  # in a compiled function its value is not known
    array, kind = np.asarray(entry), type(tree)
    given = array.item() if array.size == 1 else described(array)
    try:
        value = kind(given)
    except (OverflowError, TypeError, ValueError):
        value = None
    if value is not None and (value == given or value != value):  # not cut off; or it is NaN
        return value
    _session().misfits.append(f"{key!r} is {given}, but in the tree it is a number, {kind.__name__}.")
    return tree


def _array(tree: Any, reader: Mapping[str, Any], key: str | None) -> Any:
    if isinstance(tree, NamedArray):
        return wrap(_entry(tree.array, tree, reader, key), tree.names)
    return _entry(tree, tree, reader, key)


def _entry(array: Any, tree: Any, reader: Mapping[str, Any], key: str | None) -> LazyArray:
    session = _session()
    if key is None:
        raise ValueError(f"{session.what}: an array on its own has no key in a state dict. Pass its key as `prefix`.")
    shape, dtype = tuple(array.shape), array.dtype
    absent = Absent(shape, dtype)
    if key not in reader:
        session.lacks(key, described(tree))
        return absent
    found = _known(reader[key])
    if tuple(found.shape) != shape:
        session.misfits.append(f"{key!r} has shape {tuple(found.shape)}, but in the tree it is {described(tree)}.")
        return absent
    if not same_kind(found.dtype, dtype):
        session.misfits.append(f"{key!r} has dtype {found.dtype}, but in the tree it is {described(tree)}.")
        return absent
    return Entry(found, dtype)


def _known(x: Any) -> Any:
    """An entry of a state dict as an array whose dtype NumPy knows."""
    if isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype):
        return x
    try:
        return np.asarray(x)
    except TypeError:
        if not hasattr(x, "__dlpack__"):
            raise
        return np.asarray(jnp.from_dlpack(x))  # PyTorch gives NumPy no bfloat16


# --- layers that are stacked ---


def stacked_from_state_dict(stacked: T, layers: Axis, state_dict: Mapping[str, Any], prefix: str | None = None) -> T:
    """A module that is many layers as one, from a state dict that has each layer on its own: for `Stacked`.

    Each layer is loaded as if it stood by itself, under its number, and the arrays are put together without being read.

    Arguments:
        stacked: the layers as one. Their named arrays have the axis, or are shared by all; their raw arrays have it
            first.
        layers: the axis of the layers.
        state_dict: a state dict that a method with `lazy_loading` was given.
        prefix: where the layers stand in it.

    >>> import dataclasses, equinox as eqx
    >>> from axonym.state import from_state_dict, lazy_loading, stacked_from_state_dict
    >>> class Layers(eqx.Module):
    ...     stacked: axn.NamedArray
    ...     @lazy_loading
    ...     def from_state_dict(self, state_dict, prefix=None):
    ...         stacked = stacked_from_state_dict(self.stacked, axn.Axis("layers", 2), state_dict, prefix)
    ...         return dataclasses.replace(self, stacked=stacked)
    >>> layers = Layers(axn.zeros({"layers": 2, "embed": 2}))
    >>> from_state_dict(layers, {"0": np.zeros(2), "1": np.ones(2)}).stacked
    NamedArray(float32[layers=2, embed=2], [[0. 0.] [1. 1.]])
    """
    found, structure = named_trees.flatten_with_path(stacked)
    layer = jax.tree.unflatten(structure, [_layer_of(x, layers.name) for _, x in found])
    loaded_layers = [from_state_dict(layer, state_dict, with_prefix(prefix, str(i))) for i in range(layers.size)]
    columns = zip(*map(named_trees.leaves, loaded_layers), strict=True)
    results = []
    for (path, x), parts in zip(found, columns, strict=True):
        if layers_at(x, layers.name) is None and not _all_equal(parts):
            where = with_prefix(prefix, f"*.{jax.tree_util.keystr(path, simple=True, separator='.')}")
            shared = described(x) if is_jax_array_like(x) else x
            _session().misfits.append(f"{where!r} differs among the layers, but in the tree they share one, {shared}.")
        results.append(_stacked(x, parts, layers.name))
    return jax.tree.unflatten(structure, results)


def _layer_of(x: Any, name: str) -> Any:
    """What one layer has of a leaf, as far as its shape and dtype go."""
    position = layers_at(x, name)
    if position is None:
        return x
    array = x.array if isinstance(x, NamedArray) else x
    shape = tuple(array.shape)
    part = jax.ShapeDtypeStruct(shape[:position] + shape[position + 1 :], array.dtype)
    return wrap(part, without(x.names, name)) if isinstance(x, NamedArray) else part


def _all_equal(parts: Sequence[Any]) -> bool:
    """Whether what the layers share is the same for all of them; in a compiled function it is taken to be."""
    arrays: list[Any] = [part.array if isinstance(part, NamedArray) else part for part in parts]
    first, *others = arrays
    if is_number(first):
        return all(other == first for other in others)
    if not isinstance(first, LazyArray) or any(map(is_absent, (first, *others))) or in_trace():
        return True
    return all(np.array_equal(whole(other), whole(first), equal_nan=True) for other in others)


def _stacked(x: Any, parts: Sequence[Any], name: str) -> Any:
    position = layers_at(x, name)
    if position is None:
        return parts[0]
    if not isinstance(x, NamedArray):
        return Stack(tuple(map(lazy, parts)), position)
    names = without(x.names, name)
    parts = [part if part.names == names else rearrange(part, names) for part in parts]
    return wrap(Stack(tuple(lazy(part.array) for part in parts), position), x.names)
