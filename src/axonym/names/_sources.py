"""The names of arguments: a stand-in."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ..core.tree_spec import PROGRAM_ARRAYS
from ..sharding.placement import leaves_of


class LeafNames(NamedTuple):
    names: tuple[str | None, ...] | None
    source: str


def names_of_leaves(fn: Any, args: Any, kwargs: Any, names: Any) -> list[LeafNames]:
    trees = (*args, *(kwargs[k] for k in sorted(kwargs)))
    if names is None or isinstance(names, str):
        names = (names,) * len(trees)
    found = []
    for tree, own in zip(trees, (*names, *(None,) * len(trees)), strict=False):
        flat = [x for x in leaves_of(tree)[0] if x.shape is not None]
        structure = jax.tree.structure(own, is_leaf=lambda x: x is None or isinstance(x, str))
        parts = structure.flatten_up_to(tree)
        mine = jax.tree.leaves(own, is_leaf=lambda x: x is None or isinstance(x, str))
        spread = [
            n
            for n, part in zip(mine, parts, strict=True)
            for y in jax.tree.leaves(part)
            if isinstance(y, PROGRAM_ARRAYS)
        ]
        for leaf, n in zip(flat, spread, strict=True):
            given = None if n is None else tuple(None if w == "_" else w for w in n.split())
            found.append(LeafNames(given if given is not None else leaf.names, "names="))
    return found
