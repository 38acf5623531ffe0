"""Mesh axes, and the entries of partition specs that name them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ._context import Entry


def explicit_mesh(arrays: Sequence[Any]) -> AbstractMesh | None:
    """The mesh of the operands if one of them is split over Explicit axes of it, else None."""
    for x in arrays:
        sharding = jax.typeof(x).sharding
        if any(entry is not None for entry in sharding.spec) and AxisType.Explicit in sharding.mesh.axis_types:
            return sharding.mesh
    return None


def entries_of(x: Any) -> tuple[Entry, ...]:
    """The entries of the partition spec of a traced array, one for each axis."""
    return tuple(jax.typeof(x).sharding.spec)


def mesh_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes an entry of a partition spec names; one that is left open names none."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: Sequence[str]) -> Entry:
    """The entry of a partition spec that splits an axis over some mesh axes, as JAX writes it."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def spec_of(axes: Iterable[Sequence[str]]) -> PartitionSpec:
    """The partition spec that splits each axis over some mesh axes."""
    return PartitionSpec(*map(entry_of, axes))


def parts(mesh: AbstractMesh, entry: Entry) -> int:
    """Into how many parts an entry splits an axis."""
    return math.prod(mesh.shape[a] for a in mesh_axes(entry))
