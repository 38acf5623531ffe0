"""What a traced step does, by name: its arrays, and the operations for which a mapping may exchange something."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from . import _scopes
from ._hlo import Frame

Dims = tuple[tuple[str | None, int], ...]
"""The axes of an array, each with its name, or None if it has none, and its size."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in the trace."""

    dims: Dims
    dtype: np.dtype
    origin: int
    """The same number for an array and for what is the same array in another layout."""
    base: Dims
    """Its axes before any were added by broadcasting."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.base if n is not None)


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """Where in the step an operation is, and how often it runs."""

    scope: str
    operation: _scopes.ScopedOperation | None
    phase: str
    times: int | None
    in_branch: bool
    within: int
    """The number of the function or loop body."""
    recomputes: bool
    """Whether this body computes values again for the backward pass."""
    frames: tuple[Frame, ...]
    avoidable: bool = False
    """True if a compiler may leave the operation out: its operands are constants, or it was computed before."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A result that is summed over some axes of the operands: by a product, a reduction, or an update of a table."""

    place: Occurrence
    result: Value
    summed: Dims
    axes: Dims
    """Those of all operands."""
    flops: bool
    """Whether it is a product."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A look-up of rows in a table."""

    place: Occurrence
    table: Value
    indices: Value
    result: Value
    rows: tuple[str | None, int]
    backward: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of an operand by an operation that gathers parameters."""

    place: Occurrence
    operand: Value
    others: frozenset[str]
    """The axes of the other operands."""


@dataclasses.dataclass(frozen=True)
class Open:
    """An operation that is exact only if some axes are not sharded."""

    place: Occurrence
    what: str
    names: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Together:
    """Axes of one array, which cannot be sharded in any way."""

    place: Occurrence
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """An array whose axes have other names from here on."""

    place: Occurrence
    before: Dims
    after: Dims
    whole: bool
    """Whether the axes that are renamed may not be sharded at all."""
    by_size: bool = False
    """Whether equal sizes leave open which axes are renamed; then each possibility is an event."""


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """The gradient of an operation per device, which JAX sums over all mesh axes that it is not sharded over."""

    place: Occurrence
    result: Value


Event = Sum | Lookup | Use | Open | Together | Renamed | PerDevice


@dataclasses.dataclass(frozen=True)
class NamedTrace:
    """What a traced step does, by name."""

    name: str
    events: tuple[Event, ...]
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    kept: tuple[Value, ...]
    """What the loops of the forward pass keep for the backward pass."""
    unnamed: int
    """How many products have operands with axes that have no names."""
    uncounted: tuple[str, ...]
    """The primitives whose flops are not known."""
    grouped: bool
    """Whether the step has grouped products. Their flops are counted as if each row were in one group."""
    exchanged: frozenset[str]
    """The axes of experts, along which rows are exchanged."""
    joined: Mapping[str, tuple[str, ...]]
    """The names of axes that several axes were joined to, which each device does with its shards of them."""


class NotKnown(ValueError):
    """The names of a step do not tell what it does under a mapping."""

    def __init__(self, message: str, reason: str = "", alike: Mapping[str, int] = MappingProxyType({})):
        super().__init__(message)
        self.reason = reason or message
        self.alike = alike
        """The sharded axes that are refused only because others have the same size, which it gives."""
