"""Find the leaves of a tree, and the names of their axes.

A named array has its own names. A raw array gets those that `field(axis_names=...)` gives in an Equinox module, or
`with_partitioning` in Flax. The states of an optimizer have arrays with the names of a parameter but other axes: the
sizes of the tree's axes tell which.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..axis import Names
from ..core import errors
from ..core.jax_versions import followed_by
from ..distribution.mesh_axes import AnyMesh
from ..distribution.padded_array import PaddedArray, is_padded
from ..named_array import NamedArray


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree, with named arrays as leaves, and its sharding.

    >>> leaf = axn.sharding.Leaf((jax.tree_util.DictKey("w"),), axn.ones({"embed": 2}), ("embed",), (2,))
    >>> leaf.path, leaf.names
    ('w', ('embed',))
    """

    keys: tuple[Any, ...]
    """The path in the tree."""
    value: Any
    names: Names | None
    """The names of the axes, if there are any."""
    shape: tuple[int, ...] | None
    """The shape; None for a leaf that is not an array."""
    spec: PartitionSpec | None = None
    """The partition spec; None keeps the present sharding."""
    mesh: AnyMesh | None = None
    """The mesh of the sharding, if the placement is a sharding."""
    made_from: Names | None = None
    """The names of the array that an optimizer made this one from, if its axes differ; see `_name_axes_left`."""

    @property
    def path(self) -> str:
        """Return the path in readable form, as in `layers/0/weight`.

        >>> axn.sharding.Leaf((jax.tree_util.SequenceKey(0),), 1, None, None).path
        '0'
        """
        return jax.tree_util.keystr(self.keys, simple=True, separator="/") or "the array"


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of a tree with their paths and names, and its structure.

    >>> leaves, structure = axn.sharding.leaves_of({"w": axn.ones({"embed": 2})})
    >>> leaves[0].path, leaves[0].names
    ('w', ('embed',))
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_placed_whole)
    leaves = [_make_leaf(path, value, tree) for path, value in found]
    return _name_axes_left(leaves), structure


def is_placed_whole(x: Any) -> bool:
    """Return whether something is a padded array, or a named array that an optimizer has not filled with several.

    Shampoo, for example, keeps two matrices for each matrix.
    """
    if not isinstance(x, NamedArray):
        return is_padded(x)
    return hasattr(x.array, "shape") or not any(hasattr(part, "shape") for part in jax.tree.leaves(x.array))


def _make_leaf(path: Sequence[Any], value: Any, tree: Any) -> Leaf:
    keys = tuple(path)
    if isinstance(value, NamedArray):
        shape = getattr(value.array, "shape", None)
        if shape is None:
            return Leaf(keys, value, None, None)
        x = value.array
        # Under `jax.vmap`, an array lacks an axis only here.
        is_mapped = isinstance(x, Tracer) and getattr(followed_by(x), "shape", x.shape) != x.shape
        other = len(shape) != len(value.names) and not is_mapped
        return Leaf(keys, value, value.names, shape, made_from=value.names if other else None)
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct, PaddedArray)):
        return Leaf(keys, value, None, None)
    parents = parent_nodes(path, tree)
    around = next((p for p in parents if isinstance(p, NamedArray)), None)
    names = _field_names(path, parents) if around is None else around.names
    return Leaf(keys, value, names, tuple(value.shape), made_from=None if around is None else around.names)


# --- names of fields ---


def parent_nodes(path: Sequence[Any], tree: Any) -> list[Any]:
    """Return the nodes that contain a leaf, from the root, as far as a name of a field may be among their keys."""
    last = max((i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)), default=-1)
    return [*itertools.accumulate(path[:last], child_of, initial=tree)] if last >= 0 else []


def _field_names(path: Sequence[Any], parents: Sequence[Any]) -> Names | None:
    """Return the names that a field of an Equinox module has for its raw array, list or dictionary of arrays."""
    if not parents:
        return None
    parent, last = parents[-1], len(parents) - 1
    if hasattr(type(parent), "get_metadata") or hasattr(type(parent), "get_partition_spec"):
        return _names_by_flax(parent)
    if not dataclasses.is_dataclass(parent):  # Equinox modules are dataclasses
        return None
    for field in dataclasses.fields(parent):
        if field.name == path[last].name:
            return field.metadata.get("axis_names")
    return None


def _names_by_flax(box: Any) -> Names | None:
    """Return the names from `with_partitioning`: in a Flax NNX variable, or a Linen `Partitioned`.

    An axis without a name (None in Flax) is `_` here, which no mapping contains.
    """
    names = box.get_metadata().get("out_sharding") if hasattr(type(box), "get_metadata") else box.names
    if not isinstance(names, (tuple, list, PartitionSpec)) or not all(isinstance(n, str | None) for n in names):
        return None  # None, or shardings and mesh axes, which are not names
    return tuple("_" if n is None else n for n in names)


def child_of(parent: Any, key: Any) -> Any:
    """Return the child of a node at a key of a path, or None for a key of another kind."""
    match key:
        case jax.tree_util.GetAttrKey(name=name):
            return getattr(parent, name, None)
        case jax.tree_util.SequenceKey(idx=index):
            return parent[index]
        case jax.tree_util.DictKey(key=name):
            return parent[name]
        case _:
            return None


# --- arrays of optimizers ---


def _name_axes_left(leaves: list[Leaf]) -> list[Leaf]:
    """Name the axes of arrays that an optimizer made from others, where their sizes identify them.

    Such an array has the names of a parameter but other axes, for example the axes that are left after a mean. Its
    axes are in the order of the names; an axis that could have several of the names, or none, gets the name `_`, which
    no mapping contains. So does the axis of a one-element array in place of a larger array with the same names and key.
    """
    ones = [leaf for leaf in leaves if leaf.names and leaf.shape == (1,)]
    if not ones and not any(leaf.made_from for leaf in leaves):
        return leaves
    sizes: dict[str, set[int]] = {}
    larger = set()
    for leaf in leaves:
        if not leaf.made_from and len(leaf.names or ()) == len(leaf.shape or ()) and leaf.shape != (1,):
            larger.add((leaf.keys[-1:], leaf.names))
            for name, size in zip(leaf.names or (), leaf.shape or (), strict=True):
                sizes.setdefault(name, set()).add(size)

    def named(leaf: Leaf) -> Leaf:
        if leaf.made_from and leaf.shape is not None:
            known = {size for n in leaf.made_from for size in sizes.get(n, ())}
            if len(leaf.shape) > len(leaf.made_from) and not known.issuperset(leaf.shape):
                # A data loader or a positional function has added an axis: to place the array is an error.
                return dataclasses.replace(leaf, made_from=None)
            return dataclasses.replace(leaf, names=_names_left(leaf.made_from, leaf.shape, sizes))
        stands_for_larger = leaf.shape == (1,) and (leaf.keys[-1:], leaf.names) in larger
        return dataclasses.replace(leaf, names=("_",)) if stands_for_larger else leaf

    return [named(leaf) for leaf in leaves]


def _names_left(names: Names, shape: Sequence[int], sizes: Mapping[str, Collection[int]]) -> Names:
    """Name each axis of a shape, in the order of the names, so that as many sizes as possible match.

    Where equally good assignments disagree, an axis becomes `_`.
    """
    best: tuple[int, int] = (0, 0)
    assignments: list[tuple[str, ...]] = []
    # An axis of size 1 may be left of any sum, so its size tells nothing. A name of unknown size fits every size.
    fits = [[i for i, n in enumerate(names) if size != 1 and size in sizes.get(n, (size,))] for size in shape]
    for chosen in itertools.product(*([*f, None] for f in fits)):
        used = [i for i in chosen if i is not None]
        # Optimizers sum over axes and add some, but they do not transpose.
        if used == sorted(set(used)):
            # First, that many axes have names; then, that these are of known sizes.
            merit = len(used), sum(names[i] in sizes for i in used)
            assignment = tuple("_" if i is None else names[i] for i in chosen)
            assignments = [*assignments, assignment] if merit == best else [assignment] if merit > best else assignments
            best = max(best, merit)
    if len({tuple(n for n in names if n != "_") for names in assignments}) == 1:  # as of a square for one axis
        return assignments[0]
    return tuple(n[0] if len(set(n)) == 1 else "_" for n in zip(*assignments, strict=True))


def is_not_told(leaf: Leaf, mapping: Mapping[str, Any]) -> bool:
    """Return whether a mapping would shard an array of an optimizer if its axes were known."""
    unknown = set(leaf.names or ()) == {"_"} and math.prod(leaf.shape or ()) > 1
    return unknown and any(mapping.get(n) for n in leaf.made_from or ())


def warn_if_not_told(leaves: Sequence[Leaf], what: str) -> None:
    """Warn about arrays of an optimizer that are replicated because their sizes do not identify their axes."""
    found = [f"{x.path} of shape {x.shape}, made from {errors.describe_axes(x.made_from or ())}" for x in leaves]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        errors.warn(
            f"{what}: these arrays of an optimizer or a positional function are replicated, because their sizes do not "
            f"identify their axes: {'; '.join(found[:3])}{more}. Place them in one tree with the parameters, or by "
            "path with axonym.sharding.TreePathShardingRule."
        )
