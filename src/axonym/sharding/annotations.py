"""Annotations: named values in a program, whose placement is set from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax

from ..core import errors
from ..distribution import active_settings
from .mapping import ActiveSettings, normalize_mapping
from .placement import Placement, is_placement
from .shard import shard_quietly

T = TypeVar("T")


class HashablePlacement:
    """A placement that can be hashed, so that it can be part of jit's cache key."""

    __slots__ = ("_key", "placement")

    def __init__(self, placement: Placement):
        self.placement = placement
        leaves, structure = jax.tree.flatten(placement, is_leaf=is_placement)
        mappings = (frozenset(normalize_mapping(p).items()) if isinstance(p, Mapping) else p for p in leaves)
        self._key = structure, tuple(mappings)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashablePlacement) and self._key == other._key

    def __repr__(self) -> str:
        return repr(self.placement)


def hashable_annotations(annotations: Mapping[str, Placement]) -> dict[str, HashablePlacement]:
    """Return the placements of annotations in a form that can be hashed."""
    return {name: HashablePlacement(p) for name, p in annotations.items()}


def sharding_annotations(annotations: Mapping[str, Placement], *, merge: bool = False) -> ActiveSettings:
    """Set the placements of annotated values, in a with-block or as a decorator.

    Arguments:
        annotations: from the names of annotations to placements.
        merge: whether to keep the placements that are active around it for other names.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> with axn.set_mesh(mesh), axn.sharding.sharding_annotations({"hidden": jax.P("data")}):
    ...     axn.sharding.with_sharding_annotation(jnp.ones(2), "hidden").sharding.spec
    P('data',)
    """
    new = hashable_annotations(annotations)

    def settings(outer: active_settings.Settings | None) -> active_settings.Settings | None:
        kept = outer.annotations if merge and outer is not None else {}
        return active_settings.changed(outer, annotations={**kept, **new})

    return ActiveSettings("sharding_annotations", settings)


def current_annotations() -> dict[str, Placement] | None:
    """Return the active placements of annotated values by name, or None.

    >>> with axn.sharding.sharding_annotations({"hidden": jax.P("data")}):
    ...     axn.sharding.current_annotations()
    {'hidden': P('data',)}
    """
    settings = active_settings.active_settings()
    annotations = {} if settings is None else settings.annotations
    return {name: kept.placement for name, kept in annotations.items() if isinstance(kept, HashablePlacement)} or None


def with_sharding_annotation(tree: T, name: str) -> T:
    """Annotate a value with a name, so that the innermost `named_jit` or `sharding_annotations` places it.

    If none of them has the name, the value stays as it is.

    >>> axn.sharding.with_sharding_annotation(jnp.ones(2), "hidden").shape
    (2,)
    """
    settings = active_settings.active_settings()
    annotations = {} if settings is None else settings.annotations
    kept = annotations.get(name)
    if isinstance(kept, HashablePlacement):
        return shard_quietly(tree, kept.placement, f"with_sharding_annotation {name!r}")
    if hint := errors.suggestion(name, annotations):
        errors.warn(f"with_sharding_annotation: no annotation {name!r} is active.{hint}")
    return tree
