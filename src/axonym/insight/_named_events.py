"""Record a traced step as events, by name: its arrays, and the operations that may communicate under a mapping."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.source_lines import Frame, frames_of
from ..distribution.active_settings import REPORTED, Entry
from ..distribution.mesh_axes import Axes
from . import _scopes
from ._flops import Branches

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

Lies = tuple[tuple[str, Entry], ...]
"""The entries of a mapping by which an array lies."""

BY_REPORT: Lies = ((REPORTED, None),)
"""The mapping that the report is for."""

Dims = tuple[tuple[str | None, int], ...]
"""The name (or None) and the size of each axis of an array."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that the traced step uses."""

    dims: Dims
    dtype: np.dtype
    origin: int
    """A number that identifies the array; copies in other layouts, such as a transpose, have the same number."""
    base: Dims
    """The axes that the array had before it was broadcast."""
    depth: int = 0
    """How many of the loops around it change it, from the outermost."""
    by: Lies = BY_REPORT
    """The mapping by which it lies."""

    @functools.cached_property  # plans ask for it again and again
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.base if n is not None)

    @functools.cached_property
    def may_be_sharded(self) -> bool:
        """Return whether a mapping may shard an axis of the array, as far as the trace knows."""
        own = {part for n in self.names for part in n.split("*")}
        return bool(own) and any(n == REPORTED or (n in own and entry is not None) for n, entry in self.by)

    def called(self, dims: Dims) -> Value:
        """Return the array with other names; its axes from before a broadcast keep their own."""
        if dims == self.dims:
            return self
        return dataclasses.replace(self, dims=dims, base=dims if self.base == self.dims else self.base)


def short_dtype(dtype: Any) -> str:
    """Return a dtype as XLA writes it, such as `bf16`."""
    kind = {"f": "f", "i": "s", "u": "u", "c": "c"}.get(dtype.kind)
    if kind is not None:
        return f"{kind}{8 * dtype.itemsize}"
    return "pred" if dtype.kind == "b" else dtype.name.replace("float", "f")


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """The place of an operation in the step, and how often it runs."""

    scope: str = ""
    times: int | None = 1
    """None if values decide."""
    turns: tuple[int | None, ...] = ()
    """How often each of the loops around it runs its body, from the outermost."""
    branches: Branches = ()
    within: int = 0
    """The number of the function or loop body that contains the operation."""
    recomputes: bool = False
    """True if that function or loop body recomputes values for the backward pass."""
    eqns: tuple[JaxprEqn, ...] = ()
    """Its equation, and those that call the functions around it."""
    avoidable: bool = False
    """True if a compiler may omit the operation, since its operands are constants or it repeats an earlier one."""
    dispatch: _scopes.ScopedOperation | None = None
    """The dispatch of rows that the equation is part of, in place of its own operation."""
    counted_as: str | None = None
    """The phase that it counts for, if its scope says another one."""
    by: Lies = BY_REPORT
    """The mapping by which its results lie."""

    def inside(self, eqn: JaxprEqn) -> Occurrence:
        """Return the place of an equation here, which operations in it share."""
        scope = "/".join(part for part in (self.scope, str(eqn.source_info.name_stack)) if part)
        return dataclasses.replace(self, scope=scope, eqns=(eqn, *self.eqns))

    def hoisted(self, operands: Sequence[Value]) -> Occurrence:
        """Return the place where a compiler runs an operation: outside of the loops that do not change its operands."""
        depth = max((x.depth for x in operands), default=0)
        if depth == len(self.turns):
            return self
        return dataclasses.replace(self, times=_product(self.turns[:depth]))

    @property
    def kept_inside(self) -> int:
        """Return how much more often it runs if the compiler leaves it in all loops around it, as far as known."""
        inside = _product(self.turns)
        return 0 if inside is None or self.times is None else inside - self.times

    @functools.cached_property
    def operation(self) -> _scopes.ScopedOperation | None:
        return self.dispatch or _scopes.operation(self.scope)

    @functools.cached_property
    def phase(self) -> str:
        return _scopes.phase(self.scope) if self.counted_as is None else self.counted_as

    @functools.cached_property
    def frames(self) -> Sequence[Frame]:
        """The lines of Python that it comes from, from the innermost."""
        return [frame for eqn in self.eqns for frame in frames_of(eqn)]


def _product(turns: Sequence[int | None]) -> int | None:
    known = [n for n in turns if n is not None]
    return math.prod(known) if len(known) == len(turns) else None


@dataclasses.dataclass(frozen=True)
class Sum:
    """An operation that sums over some axes of its operands: a product, a reduction, or an update of a table."""

    place: Occurrence
    result: Value
    summed: Dims
    axes: Dims
    """The axes of all operands together."""
    flops: int
    """The flops of the operation on all devices together, if it is a product or a convolution."""
    narrow: bool = False
    """True if its operands have at most 8 bits, which chips multiply faster."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """An operation that looks up rows of a table, or, with `backward`, the gradient of one."""

    place: Occurrence
    table: Value
    indices: Value
    result: Value
    rows: tuple[str | None, int]
    backward: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation that uses an operand, and all-gathers it if it is a parameter."""

    place: Occurrence
    operand: Value
    others: frozenset[str]
    """The axes of the other operands."""
    intermediate: bool
    """True if the named operation made the operand itself, from operands that it had gathered."""


@dataclasses.dataclass(frozen=True)
class Open:
    """An operation whose communication names determine only if some axes are not sharded."""

    place: Occurrence
    what: str
    names: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Together:
    """Several axes of one array: a mapping must not shard two of them over the same mesh axis."""

    place: Occurrence
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """An operation that gives axes of an array other names, which a mapping may shard differently."""

    place: Occurrence
    before: Dims
    after: Dims
    whole: bool
    """True if the renamed axes must be replicated, even if both names are sharded alike."""


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """The gradient of a per-device operation: JAX sums it over all mesh axes that do not shard it."""

    place: Occurrence
    result: Value


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """An array that goes to the memory of the host, or comes from there."""

    place: Occurrence
    array: Value


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """An exchange between devices by an operation along an axis, if it is sharded: see `axis_marks.exchanged`."""

    place: Occurrence
    value: Value
    """The elements of a halo, the total of a shard, or the whole array of which each device exchanges its shard."""
    what: str
    along: str
    details: tuple[Any, ...] = ()
    """For look-ups, the axis of the places, and how far they reach, or None."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """An array that is placed by another mapping than it lies by, or is used with others that lie by that mapping."""

    place: Occurrence
    value: Value
    by: Lies
    asked: bool
    """True if the step asks for it, by `axonym.shard` or as a result."""


Event = Sum | Lookup | Use | Open | Together | Renamed | PerDevice | Exchanged | Offloaded | Placed


@dataclasses.dataclass(frozen=True)
class NamedTrace:
    """A traced step, with a name for each axis: its arrays and its events."""

    name: str
    events: tuple[Event, ...]
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    kept: tuple[tuple[Value, Occurrence], ...]
    """The arrays that loops of the forward pass keep on the device for the backward pass, each with its loop."""
    parts: tuple[Value, ...]
    """The arrays of which a reshape cut an axis, such as a batch into microbatches: mesh axes must divide the rest."""
    slices: Mapping[int, int]
    """For each slice that a loop takes, by its number, the number of the array that it is of."""
    unnamed: int
    """The number of products with operands that have axes without names."""
    uncounted: tuple[str, ...]
    """The primitives whose flops are not known."""
    grouped: bool
    """Whether the step has grouped products. Their flops are counted as if each row were in one group."""
    exchanged: frozenset[str]
    """The axes of experts, along which rows are exchanged."""
    spliced: bool
    """True if only products have sharding constraints, as `axonym.names.distribute` adds them."""
    joined: Mapping[str, tuple[str, ...]]
    """For each axis made by joining several axes, the names of those axes; each device joins its own shards."""
    matrices: Mapping[str, Axes | None]
    """For the axis of matrices that an optimizer shares out, the mesh axes over which it does; None for all."""
    parameters: frozenset[frozenset[str]] = frozenset()
    """The axes of each array of the model, if it is known which are."""

    def over_matrices(self, mesh: Mapping[str, int]) -> dict[str, Axes]:
        """Return the mesh axes over which an optimizer shares out matrices, as an entry of a mapping.

        A state of matrices, which is an argument, has the axis too, and lies by the mapping.
        """
        given = {n for x in self.arguments for n in x.names}
        return {n: tuple(mesh) if over is None else over for n, over in self.matrices.items() if n not in given}

    @property
    def sized(self) -> tuple[Value, ...]:
        """Return the arrays of which mesh axes must divide each axis."""
        return (*self.arguments, *self.parts)


class NotKnown(ValueError):
    """Raised if the cost of a step under a mapping cannot be computed from its names."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason or message
