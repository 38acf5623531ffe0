"""Describe a collective: what devices exchange, how many bytes they send, and the user's line that needs it."""

from __future__ import annotations

import dataclasses

from ..core.errors import describe_bytes
from ..core.source_lines import Source
from ._branches import Branches, mean
from ._text import described_axes


@dataclasses.dataclass(frozen=True)
class Collective:
    """An array that is exchanged between devices, by one instruction of a compiled program.

    >>> f = lambda x: jax.lax.with_sharding_constraint(x.sum(), jax.sharding.PartitionSpec())
    >>> x = jax.ShapeDtypeStruct((8,), "float32")
    >>> mesh = axn.make_mesh({"data": -1})
    >>> collectives = axn.insight.explain(f, x, mesh=mesh, by="partitioner").collectives
    >>> all(isinstance(c, axn.insight.Collective) for c in collectives)
    True
    """

    kind: str
    """As XLA calls it: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, ..."""
    axes: tuple[str, ...] | None
    """The mesh axes along which the devices of a group differ; None if the mesh is not known."""
    devices: int
    """How many devices exchange data with each other."""
    along_all: bool
    """Whether a group has all devices along these mesh axes, rather than some."""
    times: int | None
    """How often it runs in a call; None if that depends on values."""
    branches: Branches
    """The branches of conditionals around it, each by the number of its conditional, of how many it is one, and which
    one."""
    array: str
    """The array as it is on each device: the result of an `all-gather` or `all-to-all`, the operand of the others. With
    the names of its axes if they are known."""
    place: tuple[int, int]
    """The index of the array among the arrays that the instruction carries, from 0, and their number."""
    size: int
    """The bytes of its result on each device, each time."""
    sent: int | None
    """The bytes that each device sends at least, each time; None if that depends on values."""
    phase: str
    """`forward`, `backward` or `recomputed`; empty for everything else, such as an optimizer's update."""
    operation: str | None
    """The named operation that it belongs to, with the axes of its operands and results; None if there is none."""
    named_axes: tuple[str, ...]
    """The axes of the operands and results of that operation."""
    gathered: tuple[str, ...]
    """The named axes that an `all-gather` makes complete on each device, as far as known."""
    moved: tuple[str, ...]
    """The named axis along which an `all-to-all` trades shards for shards along another axis, as far as known."""
    stored: tuple[str, ...]
    """The named axes of the array that the parameter mapping shards over these mesh axes, if it is a parameter."""
    of_indices: bool
    """Whether the array holds the indices of a look-up, which are small beside the values."""
    reason: str | None
    """The reason for it, in names; None if it is not known."""
    source: Source | None
    """The line of the user's code that it comes from."""
    scope: str
    """The scopes around it, as JAX writes them."""
    parameters: tuple[str, ...] = ()
    """The paths of the arguments of which it carries one, or the gradient of one; empty if it is none, or not known."""
    slices: int | None = None
    """How many slices the devices that exchange data are in, if the program says it."""
    converted: str | None = None
    """The smaller dtype to which the step converts the array after a placement gathers it, if it does."""

    @property
    def total_sent(self) -> int | None:
        """Return the bytes that each device sends in a call that takes its branch; None if values decide.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [c.total_sent for c in report.collectives]
        []
        """
        return None if self.sent is None or self.times is None else self.sent * self.times

    @property
    def in_branch(self) -> bool:
        """Return whether it runs only if a condition has a certain value.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [c.in_branch for c in report.collectives]
        []
        """
        return bool(self.branches)

    @property
    def mean_sent(self) -> int | None:
        """Return the bytes that each device sends in a call if each branch of a conditional runs equally often.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [c.mean_sent for c in report.collectives]
        []
        """
        return None if self.total_sent is None else mean(self.total_sent, self.branches)

    def __str__(self) -> str:
        times = "some" if self.times is None else str(self.times)
        sent = "some bytes" if self.sent is None else describe_bytes(self.sent)
        text = f"{self.kind} over {described_axes(self.axes)} of {self.array}, {times} x {sent}"
        text += f", {self.phase}" if self.phase else ""
        text += f", at {self.source}" if self.source else ""
        text += f", in {self.operation}" if self.operation else ""
        return f"{text}: {self.reason or 'why is not known'}"


def sent_by(kind: str, given: int, count: int) -> int | None:
    """Return the least bytes that a device sends to the others of its group, for operands of `given` bytes."""
    if kind == "all-gather":
        return given * (count - 1)
    if kind == "all-reduce":
        return 2 * given * (count - 1) // count
    if kind in ("reduce-scatter", "all-to-all"):
        return given * (count - 1) // count
    return given if kind in ("collective-permute", "collective-broadcast") else None
