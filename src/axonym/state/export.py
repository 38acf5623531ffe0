"""Convert models to and from state dicts with the shapes that PyTorch's modules have.

A named layer can have several input or output axes; PyTorch's has one of each. Modules derived from
`ModuleWithStateDictSerialization` merge and split these axes in `flatten_for_export` and `unflatten_from_export`, which
run here on lazy arrays: loading reads only the shards that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..named_array import is_jax_array_like
from ..sharding.meshes import AnyMesh
from ..sharding.placement import Placement
from ..sharding.shard import to_host
from ..tree import scan_aware_map
from .layouts import WeightLayout, abstract_tree, load_packed
from .lazy_arrays import LazyArray, call_lazily, has_missing, read_all, with_abstract_arrays
from .load_context import TrackedStateDict
from .loading import from_state_dict, load_subtree, run_load
from .module import ModuleWithStateDictSerialization
from .naming import StateDict
from .saving import to_state_dict

T = TypeVar("T")


def to_torch_compatible_state_dict(
    tree: Any,
    *,
    flatten: bool = True,
    prefix: str | None = None,
    filter: bool | Callable[[Any], bool] = is_jax_array_like,
    layout: WeightLayout | None = None,
) -> StateDict:
    """Return the arrays of a tree by key, as NumPy arrays in the shapes that PyTorch uses.

    Several input or output axes of a layer are merged into one, and stacked layers get an entry each. Arrays on several
    hosts are gathered, so every host must call this function.

    Arguments:
        tree: a model, or any tree. Abstract arrays give abstract entries.
        flatten: whether to call the modules' `flatten_for_export`.
        prefix: a prefix for all keys.
        filter: the leaves to include: a function of a leaf, or a tree prefix of booleans.
        layout: the keys and arrangement of the entries, instead of what the modules declare.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> {key: x.shape for key, x in axn.state.to_torch_compatible_state_dict(layer).items()}
    {'weight': (6, 4), 'bias': (6,)}
    """

    def is_known(x: Any) -> bool:
        return isinstance(x, LazyArray) and not has_missing(x)

    tree = to_host(eqx.filter(tree, filter))
    if flatten or layout is not None:
        flat = call_lazily(flatten_modules_for_export if layout is None else layout.pack, tree)
        tree = with_abstract_arrays(jax.tree.map(lambda x: to_host(read_all(x)) if is_known(x) else x, flat))
    return to_state_dict(tree, prefix)


def from_torch_compatible_state_dict(
    tree: T,
    state_dict: Mapping[str, Any],
    *,
    unflatten: bool = True,
    prefix: str | None = None,
    placement: Placement = None,
    mesh: AnyMesh | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    layout: WeightLayout | None = None,
) -> T:
    """Load a tree from a state dict with the shapes that PyTorch uses.

    Arguments:
        tree, state_dict, prefix, placement, mesh, strict, ignore: as in `from_state_dict`.
        unflatten: whether the entries have the shapes that the modules' `flatten_for_export` gives.
        layout: the keys and arrangement of the entries, instead of what the modules declare. Entries that are the same
            as others can be missing.

    >>> import equinox as eqx
    >>> def init():
    ...     return axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> entries = {"weight": np.zeros((6, 4)), "bias": np.zeros(6)}
    >>> print(axn.state.from_torch_compatible_state_dict(eqx.filter_eval_shape(init), entries).weight)
    float32[heads=2, size=3, embed=4]
    """
    if not unflatten and layout is None:
        return from_state_dict(tree, state_dict, prefix, placement=placement, mesh=mesh, strict=strict, ignore=ignore)
    # The tree's own values are used only for keys that the state dict lacks; `run_load` takes them from `tree`.
    template = abstract_tree(tree)

    def load(entries: TrackedStateDict) -> T:
        if layout is not None:
            return load_packed(layout, template, entries, prefix)
        flat = with_abstract_arrays(call_lazily(flatten_modules_for_export, template))
        return call_lazily(unflatten_modules_from_export, load_subtree(flat, entries, prefix), template)

    return run_load(load, tree, state_dict, prefix, "from_torch_compatible_state_dict", placement, mesh, strict, ignore)


def flatten_modules_for_export(tree: T) -> T:
    """Apply `flatten_for_export` to every module of a tree, and to each layer of stacked layers.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> axn.state.flatten_modules_for_export([layer])[0].bias.ndim
    1
    """
    return _each_module(lambda module: module.flatten_for_export(), tree)


def unflatten_modules_from_export(tree: T, template: T) -> T:
    """Undo `flatten_modules_for_export`.

    Arguments:
        tree: the flattened tree.
        template: a tree with the axes that the result should have.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), {"heads": 2, "size": 3}, key=jax.random.key(0))
    >>> axn.state.unflatten_modules_from_export(axn.state.flatten_modules_for_export(layer), layer).bias.shape
    {'heads': 2, 'size': 3}
    """
    return _each_module(lambda module, like: module.unflatten_from_export(like), tree, template)


def _each_module(change: Callable[..., Any], tree: T, *others: Any) -> T:
    """Apply a function to every `ModuleWithStateDictSerialization` of a tree, from the outside in."""

    def at(x: Any, *others: Any) -> Any:
        return inside(change(x, *others), *others) if isinstance(x, ModuleWithStateDictSerialization) else x

    def inside(node: Any, *others: Any) -> Any:
        def is_module_below(x: Any) -> bool:
            return x is not node and isinstance(x, ModuleWithStateDictSerialization)

        return scan_aware_map(at, node, *others, is_leaf=is_module_below)

    if isinstance(tree, ModuleWithStateDictSerialization):
        return at(tree, *others)
    return inside(tree, *others)
