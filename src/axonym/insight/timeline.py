"""The memory of a device over the course of a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.errors import counted, describe_bytes
from ..core.source_lines import Source
from ._text import Section, aligned, phase_of

_SHOWN = 8
"""How many rows of arrays are written."""


@dataclasses.dataclass(frozen=True)
class HeldArray:
    """Arrays that a device holds at the peak, grouped if everything known about them is the same.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> [(held.kind, held.array) for held in report.timeline.at_peak]
    [('argument', 'f32[4]'), ('result', 'f32[batch=4]')]
    """

    kind: str
    """`argument`, `result` or `temporary`."""
    array: str
    """The array as it is on each device, with the names of its axes if they are known."""
    count: int
    bytes: int
    """The bytes of all of them together."""
    phase: str
    """When they are made: `forward`, `backward` or `recomputed`; empty if they are not differentiated."""
    operation: str
    """The named operation that makes them, or else the name that JAX or the compiler has for it."""
    source: Source | None


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """The memory of each device over the course of a step, from when each array is made and last used.

    The compiler puts arrays into one block, which can have gaps, and may let some share memory in ways that this does
    not know. In the tests, the peak differs from the compiler's own figure by less than a tenth of the temporaries.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> report.timeline.peak
    32
    """

    held: tuple[int, ...]
    """The bytes that each device holds at each instruction, in the order in which they run. Loops run once."""
    phases: tuple[str, ...]
    """The phase of each instruction."""
    at_peak: tuple[HeldArray, ...]
    """The arrays that are held at the peak, the largest first."""
    kept_for_backward: tuple[HeldArray, ...] = ()
    """The arrays that the forward pass makes and the backward pass uses, when they take most memory, the largest first.
    Arguments and results are not among them."""

    @property
    def peak(self) -> int:
        """Return the most bytes that each device holds at any time.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> report.timeline.peak == max(report.timeline.held)
        True
        """
        return max(self.held)

    def _section(self) -> Section:
        """Return the arrays at the peak, with one row for all arguments."""
        phase = self.phases[self.held.index(self.peak)]
        when = {"": "", "recomputed": ", where the backward pass computes again"}.get(phase, f", in the {phase} pass")
        title = f"at the peak{when}: each device holds about {describe_bytes(self.peak)}"
        arguments, others = arguments_and_others(self)
        rows = [("arguments", describe_bytes(arguments), "-", "-", "-")]
        for h in others[:_SHOWN]:
            times = f"{h.count} x " if h.count > 1 else ""
            size = f"{times}{describe_bytes(h.bytes // h.count)}"
            rows.append((h.array, size, phase_of(h.phase), str(h.source or "-"), h.operation))
        if rest := others[_SHOWN:]:
            count = sum(h.count for h in rest)
            rows.append((counted(count, "smaller one"), describe_bytes(sum(h.bytes for h in rest)), "-", "-", "-"))
        return title, aligned(rows)


def arguments_and_others(timeline: MemoryTimeline) -> tuple[int, list[HeldArray]]:
    """Return the bytes of arguments at the peak, and the other arrays."""
    others = [h for h in timeline.at_peak if h.kind != "argument"]
    return sum(h.bytes for h in timeline.at_peak) - sum(h.bytes for h in others), others


def together(arrays: Iterable[HeldArray]) -> tuple[HeldArray, ...]:
    """Count identical arrays, and return the largest first."""
    counts = Counter(arrays).items()
    rows = (dataclasses.replace(one, count=count, bytes=count * one.bytes) for one, count in counts)
    return tuple(sorted(rows, key=lambda h: -h.bytes))


def described_held(held: Sequence[HeldArray]) -> str:
    """Describe some arrays: the bytes of all, and the largest."""
    rows = [f"{f'{h.count} x ' if h.count > 1 else ''}{h.array}" for h in held]
    rest = sum(h.count for h in held[3:])
    more = f", and {rest} smaller" if rest else ""
    return f"{describe_bytes(sum(h.bytes for h in held))}: {', '.join(rows[:3])}{more}"
