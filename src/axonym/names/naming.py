"""Name the axes of the arrays of a tree, and read the names back."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from ..core import errors
from ..named_array import NamedArray, is_named_array, raw
from ..sharding.leaves import leaves_of
from ._sources import LeafNames, Root, given_to_tree, named_leaves, written

T = TypeVar("T")


def names_of(tree: Any) -> Any:
    """Return the names of a tree's arrays, as a tree that `names=` takes: `"batch embed"` in the place of each array.

    The names come from named arrays, Flax's metadata and annotations of fields. An axis without a name is `_`,
    and a leaf without names is None. Names that a string cannot hold, such as `"my axis"`, are in a tuple.

    >>> names = axn.names.names_of({"w": axn.ones({"embed": 2, "hidden": 3}), "b": jnp.ones(3)})
    >>> names
    {'b': None, 'w': 'embed hidden'}
    >>> axn.names.name({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, names)["w"].names
    ('embed', 'hidden')
    """
    found, structure = _names_of_leaves(tree, None)
    return jax.tree.unflatten(structure, [None if x.names is None else written(x.names) for x in found])


def name(tree: T, names: Any = None) -> T:
    """Turn raw arrays of a tree into named arrays.

    Arguments:
        tree: a tree; a part that nothing names stays as it is.
        names: a tree prefix of strings such as `"batch embed"`, or a dictionary from patterns of paths to such strings.
            By default, the names that the tree itself has in Flax's metadata and annotations of fields.

    >>> params = {"mlp": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> axn.names.name(params, {"kernel": "embed hidden", "bias": "hidden"})["mlp"]["kernel"].names
    ('embed', 'hidden')
    """
    found, structure = _names_of_leaves(tree, names)
    leaves = [leaf.value for leaf in leaves_of(tree)[0]]
    for i, (leaf, (own, _)) in enumerate(zip(leaves_of(tree)[0], found, strict=True)):
        if own and not isinstance(leaf.value, NamedArray):
            if None in own:
                raise ValueError(
                    f"name: {leaf.path} has an axis without a name in {errors.describe_axes(n or '_' for n in own)}; a "
                    "named array has a name for each."
                )
            leaves[i] = NamedArray(leaf.value, tuple(n for n in own if n is not None))
    return jax.tree.unflatten(structure, leaves)


def unname(tree: Any) -> Any:
    """Turn the named arrays of a tree into raw arrays, which keep their sharding: the inverse of `name`.

    With `name` and `shard`, this places parameters of code without names, such as before the first step, or after
    `restore_checkpoint`.

    >>> params = {"kernel": jnp.ones((2, 8))}
    >>> named = axn.names.name(params, {"kernel": "embed hidden"})
    >>> params = axn.names.unname(axn.shard(named, {"hidden": "model"}, axn.make_mesh({"model": 4})))
    >>> params["kernel"].sharding.spec
    P(None, 'model')
    """
    return jax.tree.map(raw, tree, is_leaf=is_named_array)


def _names_of_leaves(tree: Any, names: Any) -> tuple[list[LeafNames], Any]:
    """Return the names of each leaf, where a named array is a leaf, and the structure with those leaves."""
    root = Root("", (), tree)
    return named_leaves(tree, [root], dict(given_to_tree(names, root))), leaves_of(tree)[1]
