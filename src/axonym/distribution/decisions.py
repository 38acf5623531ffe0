"""The terms of a decision: where the axes of an array lie, and what devices exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from .active_settings import Entry
from .mesh_axes import Axes, is_parameter, mapped_axes, storage_axes


class PlacedAxes(NamedTuple):
    """The axes of an array, and the mesh axes that each is sharded over."""

    names: Sequence[str | None]
    over: Sequence[Axes]


class PartialSum(NamedTuple):
    """A sum over devices of the parts that each of them computed."""

    kind: Literal["all-reduce", "reduce-scatter"]
    axes: Axes
    """The mesh axes along which devices have the parts."""
    onto: str | None = None
    """The axis of the sum that a reduce-scatter shards, if it is one axis."""


class ColumnExchange(NamedTuple):
    """A look-up of all rows in each shard of the columns, after which columns are exchanged for rows."""

    axes: Axes
    """The mesh axes that shard the columns of the table, and rows of the indices."""
    column: str
    row: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """The distribution of an operation on several operands."""

    operands: Sequence[PlacedAxes]
    """The placements of the operands when the operation begins."""
    gathers: Mapping[int, Sequence[Axes]]
    """For each operand that is a parameter, the mesh axes over which each of its axes is all-gathered."""
    sums: Sequence[PartialSum]
    result: PlacedAxes


class Undecided(ValueError):
    """Raised if names and mappings do not determine how an operation is distributed."""


class Mappings:
    """A compute and a parameter mapping on a mesh, and what they say about names.

    Arguments:
        mesh: the size of each mesh axis.
        compute: the mapping by which arrays are sharded where they are used.
        storage: the mapping by which parameters are stored.
    """

    def __init__(self, mesh: Mapping[str, int], compute: Mapping[str, Entry], storage: Mapping[str, Entry]):
        self.mesh, self.compute, self.storage = mesh, compute, storage

    def used(self, name: str | None) -> Axes:
        """Return the mesh axes that an axis is sharded over where it is used."""
        return () if name is None else mapped_axes(name, self.compute)

    def stored(self, name: str | None) -> Axes:
        """Return the mesh axes that an axis of a parameter is sharded over between uses."""
        return () if name is None else storage_axes(name, self.storage, self.compute)

    def is_stored(self, names: Iterable[str | None]) -> bool:
        """Return whether an array with these axes is a parameter, and so lies where it is stored."""
        return is_parameter([n for n in names if n is not None], self.storage, self.compute)

    def gathered(self, name: str | None) -> Axes:
        """Return the mesh axes over which an axis of a parameter is all-gathered before use."""
        return tuple(a for a in self.stored(name) if a not in self.used(name))

    def extra(self, names: Iterable[str | None]) -> Axes:
        """Return the mesh axes over which a parameter is all-gathered before use."""
        return distinct(a for n in names for a in self.gathered(n))

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of devices along some mesh axes."""
        count = 1
        for a in axes:
            count *= self.mesh[a]
        return count


def distinct(axes: Iterable[str]) -> Axes:
    """Return each mesh axis once, in order."""
    return tuple(dict.fromkeys(axes))
