"""The figures of a step: what it sends, keeps in memory and computes. A report describes and judges them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..distribution.active_settings import Entry
from ._arguments import PlacedArgument
from ._branches import Branches, least as fewest
from ._text import described_axes, in_order
from .chips import Chip
from .collectives import Collective
from .cost_model import least_passes
from .repeating import RepeatedWork
from .timeline import MemoryTimeline


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
class Bounds:
    """Lower bounds on the time of a call on a chip, in seconds. A step takes at least the longest of them.

    >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={("data",): 5e-4}).bottleneck
    'memory'
    """

    chip: str
    compute: float | None
    memory: float | None
    """If each argument is read once and each result written once."""
    links: Mapping[tuple[str, ...], float]
    """For each set of mesh axes, sending over it with all links of a chip."""
    capacity: int | None = None
    """The bytes of memory of the chip."""

    @property
    def bottleneck(self) -> str:
        """Return which of the bounds is the longest; `not known` if there is none.

        >>> axn.insight.Bounds("v5e", compute=None, memory=None, links={("data",): 5e-4}).bottleneck
        'sending over data'
        """
        return max(self.named(), key=lambda pair: pair[1], default=("not known", 0.0))[0]

    @property
    def longest(self) -> float:
        """Return the longest of the bounds; 0 if there is none.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={}).longest
        0.002
        """
        return max((t for _, t in self.named()), default=0.0)

    def named(self) -> list[tuple[str, float]]:
        """Return each bound with its name.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=None, links={("data",): 5e-4}).named()
        [('compute', 0.001), ('sending over data', 0.0005)]
        """
        pairs = [("compute", self.compute), ("memory", self.memory)]
        links = [(f"sending over {described_axes(axes)}", t) for axes, t in self.links.items()]
        return [(name, t) for name, t in pairs if t is not None] + links


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

    def total_sent(
        self, over: str | None = None, kind: str | None = None, phase: str | None = None, least: bool = False
    ) -> int | None:
        """Return the bytes that each device sends in a call; None if that depends on values.

        It is an estimate if the step has conditionals: each branch is taken to run equally often.

        Arguments:
            over: only collectives along this mesh axis, alone or with others.
            kind: only collectives of this kind.
            phase: only collectives of this phase.
            least: whether each conditional takes the branch that sends least, as in bounds on time.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").total_sent()
        0
        """
        chosen = [
            c
            for c in self.collectives
            if (over is None or over in (c.axes or ())) and kind in (None, c.kind) and phase in (None, c.phase)
        ]
        return total_sent(chosen, least)

    def count(self, kind: str | None = None) -> int | None:
        """Return how many collectives run in a call, one with several arrays once; None if values decide.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").count("all-gather")
        0
        """
        return _sum([c.times for c in self.collectives if kind in (None, c.kind) and c.place[0] == 0])

    def by_axes(self) -> dict[tuple[str, ...] | None, tuple[Collective, ...]]:
        """Return the collectives by the mesh axes that they run over.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").by_axes()
        {}
        """
        keys = in_order({c.axes for c in self.collectives})
        return {key: tuple(c for c in self.collectives if c.axes == key) for key in keys}


def needed_memory(report: Figures) -> int | None:
    """Return the bytes that a device has to hold; None where they are not known.

    A step that is compiled here donates nothing of its own. Its results are taken to be the arguments of the next call,
    in whose place they are.
    """
    memory = report.memory
    if memory is None or report.undonated is not None:
        return None if memory is None else memory.total
    return max(memory.arguments, memory.results) + memory.temporaries


class Sending(Protocol):
    """An exchange: its kind, the mesh axes that it runs over, its bytes in a call, and the branches around it."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...] | None: ...
    @property
    def total_sent(self) -> int | None: ...
    @property
    def branches(self) -> Branches: ...


def bounds_on(chip: Chip, exchanges: Iterable[Sending], memory: Memory | None, flops: int | None) -> Bounds:
    """Return lower bounds on the time of a step; conditionals send as little as they can.

    Arguments:
        flops: the least flops, without products of 8 bits, which chips compute at other rates.
    """
    sent = [
        # The bytes of an all-reduce are those of two passes.
        (e.branches, e.axes, e.total_sent * least_passes(e.kind, chip) // (2 if e.kind == "all-reduce" else 1))
        for e in exchanges
        if e.axes and e.total_sent is not None
    ]
    touched = None if memory is None else memory.arguments + memory.results
    return Bounds(
        chip=chip.name,
        compute=None if flops is None else flops / chip.flops,
        memory=None if touched is None else touched / chip.memory_bandwidth,
        links={axes: size / chip.link_bandwidth for axes, size in fewest(sent).items()},
        capacity=chip.memory,
    )


def total_sent(found: Sequence[Collective], least: bool = False) -> int | None:
    """Add up what collectives send: the mean of branches, or the least; None if it depends on values."""
    if any(c.total_sent is None for c in found):
        return None
    if least:
        return fewest((c.branches, "sent", c.total_sent or 0) for c in found)["sent"]
    return sum(c.mean_sent or 0 for c in found)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None
