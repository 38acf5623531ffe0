"""The events of a traced step, by name: its arrays, and the operations that may communicate under a mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ..core.source_lines import Frame
from . import _scopes

Dims = tuple[tuple[str | None, int], ...]
"""The axes of an array: for each, its name (or None) and size."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in the trace."""

    dims: Dims
    dtype: np.dtype
    origin: int
    """A number that is the same for an array and for its copies in other layouts."""
    base: Dims
    """Its axes before broadcasting added any."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.base if n is not None)

    @property
    def has_names(self) -> bool:
        """Whether an axis has a name, also one that broadcasting added."""
        return any(n is not None for n, _ in self.dims)


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """The place of an operation in the step, and how often it runs."""

    scope: str
    operation: _scopes.ScopedOperation | None
    phase: str
    times: int | None
    in_branch: bool
    within: int
    """The number of the function or loop body."""
    recomputes: bool
    """Whether this body recomputes values for the backward pass."""
    frames: tuple[Frame, ...]
    avoidable: bool = False
    """Whether a compiler may omit the operation: its operands are constants, or it was computed before."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over some axes of the operands: by a product, a reduction, or an update of a table."""

    place: Occurrence
    result: Value
    summed: Dims
    axes: Dims
    """The axes of all operands."""
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
    """An operation whose communication is known only if some axes are not sharded."""

    place: Occurrence
    what: str
    names: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Together:
    """Axes of one array, which must be sharded over different mesh axes."""

    place: Occurrence
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """An array whose axes get other names."""

    place: Occurrence
    before: Dims
    after: Dims
    whole: bool
    """Whether the renamed axes must not be sharded at all."""
    by_size: bool = False
    """Whether equal sizes leave open which axes are renamed; then each possibility is an event."""


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """The gradient of a per-device operation, which JAX sums over all mesh axes that it is not sharded over."""

    place: Occurrence
    result: Value


Event = Sum | Lookup | Use | Open | Together | Renamed | PerDevice


@dataclasses.dataclass(frozen=True)
class NamedTrace:
    """A traced step, by name."""

    name: str
    events: tuple[Event, ...]
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    kept: tuple[Value, ...]
    """The arrays that loops of the forward pass keep for the backward pass."""
    unnamed: int
    """The number of products with operands that have axes without names."""
    uncounted: tuple[str, ...]
    """The primitives whose flops are not known."""
    grouped: bool
    """Whether the step has grouped products. Their flops are counted as if each row were in one group."""
    exchanged: frozenset[str]
    """The axes of experts, along which rows are exchanged."""
    joined: Mapping[str, tuple[str, ...]]
    """For each axis made by joining several, the names of these; each device joins its own shards."""


class NotKnown(ValueError):
    """Raised if the cost of a step under a mapping cannot be computed from its names."""

    def __init__(self, message: str, reason: str = "", alike: Mapping[str, int] = MappingProxyType({})):
        super().__init__(message)
        self.reason = reason or message
        self.alike = alike
        """The sharded axes that are refused only because others have the same size, which it gives."""
