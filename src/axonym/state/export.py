"""State dicts in the form that PyTorch's modules have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..jax_utils import is_jax_array_like
from ..sharding.meshes import AnyMesh
from ..sharding.placement import Placement
from ..sharding.shard import to_host
from ..tree import scan_aware_map
from .lazy import LazyArray, abstract, is_absent, lazy, rearranged, whole
from .loading import from_state_dict, loaded, run
from .module import ModuleWithStateDictSerialization
from .naming import StateDict
from .saving import to_state_dict
from .session import Reader

T = TypeVar("T")


def to_torch_compatible_state_dict(
    t: Any,
    *,
    flatten: bool = True,
    prefix: str | None = None,
    filter: bool | Callable[[Any], bool] = is_jax_array_like,
) -> StateDict:
    """The arrays of a tree by key, in the shapes that PyTorch has, as NumPy arrays.

    A layer with several axes in or out has one of each, and layers that are stacked are there one by one. Arrays that
    live on several hosts are gathered, so every host must call this.

    Arguments:
        t: a model, or any tree. Where its arrays are abstract, so are those of the result.
        flatten: whether modules are flattened by their `flatten_for_export`.
        prefix: what to put in front of all keys.
        filter: which leaves to take: a function of a leaf, or a tree prefix of booleans.

    >>> from axonym.state import to_torch_compatible_state_dict
    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> {key: x.shape for key, x in to_torch_compatible_state_dict(layer).items()}
    {'weight': (6, 4), 'bias': (6,)}
    """
    t = to_host(eqx.filter(t, filter))
    if flatten:
        t = jax.tree.map(_values, rearranged(flatten_modules_for_export, t))
    return to_state_dict(t, prefix)


def _values(x: Any) -> Any:
    if not isinstance(x, LazyArray):
        return x
    return abstract(x) if is_absent(x) else to_host(whole(x))


def from_torch_compatible_state_dict(
    t: T,
    state_dict: Mapping[str, Any],
    *,
    unflatten: bool = True,
    prefix: str | None = None,
    placement: Placement = None,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> T:
    """The tree with its arrays from a state dict in the form that PyTorch has: see `from_state_dict`.

    Arguments:
        t: a model, or any tree. Its arrays can be abstract.
        state_dict: arrays by key.
        unflatten: whether the entries are those of modules that were flattened by their `flatten_for_export`.
        prefix: where the tree stands in the state dict.
        placement: where the arrays go; the mapping in force by default.
        mesh: the mesh; that in force by default.
        strict: whether keys that are missing or unexpected are errors.
        ignore: patterns of keys that the state dict may have and the tree not.

    >>> import equinox as eqx
    >>> from axonym.state import from_torch_compatible_state_dict
    >>> def init():
    ...     return axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> entries = {"weight": np.zeros((6, 4)), "bias": np.zeros(6)}
    >>> print(from_torch_compatible_state_dict(eqx.filter_eval_shape(init), entries).weight)
    float32[heads=2, size=3, embed=4]
    """
    if not unflatten:
        return from_state_dict(t, state_dict, prefix, placement=placement, mesh=mesh, strict=strict, ignore=ignore)
    # The values of the tree are wanted only where the state dict has none.
    template = jax.tree.map(lambda x: abstract(lazy(x)) if is_jax_array_like(x) else x, t)

    def load(reader: Reader) -> T:
        flat = jax.tree.map(_as_abstract, rearranged(flatten_modules_for_export, template))
        return rearranged(unflatten_modules_from_export, loaded(flat, reader, prefix), template)

    return run(load, t, state_dict, prefix, "from_torch_compatible_state_dict", placement, mesh, strict, ignore)


def _as_abstract(x: Any) -> Any:
    return abstract(x) if isinstance(x, LazyArray) else x


def flatten_modules_for_export(t: T) -> T:
    """The tree with every module as its `flatten_for_export` gives it, those of stacked layers one by one.

    Arguments:
        t: a model, or any tree.

    >>> from axonym.state import flatten_modules_for_export
    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> flatten_modules_for_export([layer])[0].bias.ndim
    1
    """
    return _each_module(lambda module: module.flatten_for_export(), t)


def unflatten_modules_from_export(t: T, template: T) -> T:
    """The tree that `flatten_modules_for_export` flattened.

    Arguments:
        t: the flattened tree.
        template: a tree as it should be, for its axes.

    >>> from axonym.state import flatten_modules_for_export, unflatten_modules_from_export
    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> unflatten_modules_from_export(flatten_modules_for_export(layer), layer).bias.shape
    {'heads': 2, 'size': 3}
    """
    return _each_module(lambda module, like: module.unflatten_from_export(like), t, template)


def _each_module(change: Callable[..., Any], tree: T, *others: Any) -> T:
    """The tree with every module that has a form of its own changed, and then those inside of it."""

    def at(x: Any, *others: Any) -> Any:
        return inside(change(x, *others), *others) if isinstance(x, ModuleWithStateDictSerialization) else x

    def inside(node: Any, *others: Any) -> Any:
        def is_module_below(x: Any) -> bool:
            return x is not node and isinstance(x, ModuleWithStateDictSerialization)

        return scan_aware_map(at, node, *others, is_leaf=is_module_below)

    if isinstance(tree, ModuleWithStateDictSerialization):
        return at(tree, *others)
    return inside(tree, *others)
