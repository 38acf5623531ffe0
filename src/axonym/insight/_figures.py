"""The figures of a step: what it sends, keeps in memory and computes. A report describes and judges them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from ..core.source_lines import Source
from ..distribution.active_settings import Entry
from . import cost_model
from ._arguments import PlacedArgument
from ._flops import least as fewest
from ._text import in_order
from .chips import Chip
from .cost_model import Bounds, Multiplication, Part, Sent
from .records import AvoidableWork, Collective, HeldArray, MemoryTimeline, RepeatedWork


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that each device holds, by the compiler's own account.

    >>> axn.insight.Memory(arguments=8, results=4, aliased=0, temporaries=0).arguments
    8
    """

    arguments: int
    results: int
    aliased: int
    """The bytes of results that overwrite donated arguments."""
    temporaries: int
    """The block for all arrays that live only during the call, as small as the compiler could make it."""

    @property
    def total(self) -> int:
        """Return the bytes that a device holds during the call.

        >>> axn.insight.Memory(arguments=8, results=4, aliased=4, temporaries=2).total
        10
        """
        return self.arguments + self.results - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a step on a mesh."""

    step: str
    platform: str
    mesh: Mapping[str, int]
    by: str
    """The tier that made the report: `compiled`, `partitioner` or `names`."""
    collectives: tuple[Collective, ...]
    memory: Memory | None
    """None where nothing was compiled to the end."""
    flops: int | None
    """Floating-point operations of each device in products and convolutions; None if that is not known. It is an
    estimate if the step has conditionals: each branch is taken to run equally often."""
    bounds: Bounds | None
    notes: tuple[str, ...]
    uncertain: int = 0
    """The error of the bytes that each device sends, beyond the notes; 0 for a compiled step, which is exact."""
    timeline: MemoryTimeline | None = None
    """The memory of each device over the course of the step; None if the program was not compiled for CPUs."""
    arguments: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The bytes of each argument of the step on each device, by the name of its parameter, without the padding that
    compilers for some devices add."""
    placed: tuple[PlacedArgument, ...] = ()
    """The arrays in the arguments, and where they lie, as far as known."""
    repeated: tuple[RepeatedWork, ...] = ()
    """The products of which several devices compute the same part, in the order of the step."""
    mapping: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    """The compute mapping of the step."""
    parameter_mapping: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    """The mapping that parameters are stored by, if it is another."""
    placed_by_rule: bool = False
    """True if a rule places parameters, in place of a mapping."""
    axes: tuple[str, ...] = ()
    """The names of the axes of all arrays in the step."""
    least_flops: int | None = None
    """The flops if each conditional takes the branch with the fewest. Bounds on time are made of these."""
    updated: tuple[str, ...] = ()
    """The paths of the arguments of which the step returns an update, or the gradient."""
    undonated: tuple[str, ...] | None = None
    """The paths of the arguments that are not donated although results may take their place; None if not known."""
    devices: int | None = None
    """The number of devices, if their mesh is not known."""
    computed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The flops of each phase: `forward`, `recomputed`, `backward`, `optimizer`, or empty for the rest."""
    narrow: bool = False
    """True if products have operands of 16 bits or less, which programs for CPUs convert to 32."""
    idle: float = 0.0
    """The share of the time in which a stage waits, by the schedule of a pipeline."""
    avoidable: tuple[AvoidableWork, ...] = ()
    """Products that could be left out, as far as a program tells."""
    cast: tuple[str, str, Source | None] | None = None
    """The dtype of gradients, and the larger one to which a line converts them before devices add them up."""
    temporaries: tuple[HeldArray, ...] = ()
    """By names: the temporaries that are counted, the largest first. Otherwise the timeline has those at the peak."""
    between: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The mesh axes that cross slices, and how many slices lie along each."""
    computing: float | None = None
    """Compiled for a topology: about how many seconds a device computes, by the cycles that the compiler estimates."""

    def total_sent(
        self, over: str | None = None, kind: str | None = None, phase: str | None = None, least: bool = False
    ) -> int | None:
        """Return the bytes that each device sends in a call; None if that depends on values.

        It is an estimate if the step has conditionals: each branch is taken to run equally often.

        Arguments:
            over: only collectives along this mesh axis, alone or with others; or `"slices"`, for the bytes that go to
                other slices, as `between` of `explain` says.
            kind: only collectives of this kind.
            phase: only collectives of this phase.
            least: whether each conditional takes the branch that sends least, as in bounds on time.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").total_sent()
        0
        """
        return total_sent(self.chosen(over, kind, phase), least)

    def chosen(self, over: str | None = None, kind: str | None = None, phase: str | None = None) -> list[Collective]:
        """Return the collectives that `total_sent` adds up; over slices, with the bytes that go to other slices.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").chosen()
        []
        """
        of_kind = [c for c in self.collectives if kind in (None, c.kind) and phase in (None, c.phase)]
        if over == "slices" and over not in self.mesh:
            crossing = ((c, self._sent_to_other_slices(c)) for c in of_kind)
            return [dataclasses.replace(c, sent=sent) for c, sent in crossing if sent != 0]
        return [c for c in of_kind if over is None or over in (c.axes or ())]

    def _sent_to_other_slices(self, c: Collective) -> int | None:
        """Return the bytes that a device sends to other slices each time, if devices exchange within slices first."""
        slices = c.slices or math.prod(self.between.get(a, 1) for a in c.axes or self.between)
        if slices == 1 or c.sent is None or c.axes is None:
            return None if slices > 1 else 0
        slices = min(slices, c.devices)
        if c.kind in ("all-gather", "all-reduce", "reduce-scatter"):
            return -(-c.sent * (slices - 1) // (c.devices - 1))
        if "all-to-all" in c.kind:
            return -(-c.sent * c.devices * (slices - 1) // (slices * (c.devices - 1)))
        return c.sent

    def count(self, kind: str | None = None) -> int | None:
        """Return how many collectives run in a call, one with several arrays once; None if values decide.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").count("all-gather")
        0
        """
        times = [c.times for c in self.collectives if kind in (None, c.kind) and c.place[0] == 0]
        return None if None in times else sum(n or 0 for n in times)

    def by_axes(self) -> dict[tuple[str, ...] | None, tuple[Collective, ...]]:
        """Return the collectives by the mesh axes that they run over.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").by_axes()
        {}
        """
        keys = in_order({c.axes for c in self.collectives})
        return {key: tuple(c for c in self.collectives if c.axes == key) for key in keys}


def needed_memory(report: Figures) -> int | None:
    """Return the least bytes that a device has to hold; None where they are not known.

    A step that is compiled here donates nothing of its own. Its results are taken to be the arguments of the next call,
    in whose place they are.
    """
    memory = report.memory
    if memory is None:
        return None
    # Programs for CPUs hold many arrays in 32 bits that the step computes in 16 bits.
    less = memory.temporaries // 2 if report.platform == "cpu" and report.narrow else 0
    if report.undonated is not None:
        return memory.total - less
    return max(memory.arguments, memory.results) + memory.temporaries - less


def bounds_on(chip: Chip, exchanges: Iterable[Collective], memory: Memory | None, flops: int | None) -> Bounds:
    """Return lower bounds on the time of a step of which the topology is not known.

    Arguments:
        flops: the least flops, without products of 8 bits, which chips compute at other rates.
    """
    sent = tuple(
        # An all-reduce sends the bytes of two passes.
        Sent(kind, e.axes, e.total_sent / (2 if kind == "all-reduce" else 1), "sending", branches=e.branches)
        for e in exchanges
        for kind in [e.made or e.kind]
        if e.axes and e.total_sent is not None
    )
    products = () if flops is None else (Multiplication(flops, 1),)
    touched = 0 if memory is None else memory.arguments + memory.results
    found = cost_model.bounds([Part(1, products, sent)], cost_model.least_rates(chip), chip, touched)
    unknown: dict[str, None] = {"compute": None} if flops is None else {}
    return dataclasses.replace(found, **unknown, **({"memory": None} if memory is None else {}))


def total_sent(found: Sequence[Collective], least: bool = False) -> int | None:
    """Add up what collectives send: the mean of branches, or the least; None if it depends on values."""
    if any(c.total_sent is None for c in found):
        return None
    if least:
        return fewest((c.branches, "sent", c.total_sent or 0) for c in found)["sent"]
    return sum(c.mean_sent or 0 for c in found)
