"""The memory of a device over the course of a step, and pictures of it and of the bytes that are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..core.errors import counted, describe_bytes
from ..core.source_lines import Source
from ._text import Section, described_axes, phase_of
from .collectives import Collective

CollectivesByAxes: TypeAlias = Mapping[tuple[str, ...] | None, Sequence[Collective]]
"""Collectives by the mesh axes that they run over; None if the mesh is not known."""

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
        """Return the table of the arrays at the peak, with one row for all arguments."""
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
        return title, ("array", "bytes", "when", "line", "operation"), rows


def arguments_and_others(timeline: MemoryTimeline) -> tuple[int, list[HeldArray]]:
    """Return the bytes of arguments at the peak, and the other arrays."""
    others = [h for h in timeline.at_peak if h.kind != "argument"]
    return sum(h.bytes for h in timeline.at_peak) - sum(h.bytes for h in others), others


def described_held(held: Sequence[HeldArray]) -> str:
    """Describe some arrays: the bytes of all, and the largest."""
    rows = [f"{f'{h.count} x ' if h.count > 1 else ''}{h.array}" for h in held]
    rest = sum(h.count for h in held[3:])
    more = f", and {rest} smaller" if rest else ""
    return f"{describe_bytes(sum(h.bytes for h in held))}: {', '.join(rows[:3])}{more}"


def draw(timeline: MemoryTimeline | None, sent: CollectivesByAxes, figure: Any) -> Any:
    """Draw the memory of a device over the course of a step, and the bytes it sends over each set of mesh axes."""
    if figure is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError("Report.draw needs Matplotlib: pip install 'axonym[plot]'.") from e
        figure = Figure(figsize=(9, 4), layout="constrained")
    parts = [part for part, wanted in (("memory", timeline is not None), ("sent", bool(sent))) if wanted]
    places = dict(zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True)) if parts else {}
    if timeline is not None:
        _draw_memory(places["memory"], timeline)
    if sent:
        _draw_sent(places["sent"], sent)
    return figure


_COLORS = {"forward": "C0", "backward": "C1", "recomputed": "C2", "": "0.6"}
"""Colors of phases."""


def _draw_memory(axes: Any, timeline: MemoryTimeline) -> None:
    """Draw the bytes at each instruction, in the color of its phase; a line marks the bytes of arguments."""
    scale, unit = _unit(timeline.peak)
    at = range(len(timeline.held))
    for phase in dict.fromkeys(timeline.phases):
        heights = [n / scale if p == phase else 0 for n, p in zip(timeline.held, timeline.phases, strict=True)]
        axes.fill_between(at, heights, step="mid", color=_COLORS[phase], label=phase_of(phase), linewidth=0)
    style = {"color": "black", "linestyle": "--", "linewidth": 0.8}
    axes.axhline(arguments_and_others(timeline)[0] / scale, label="arguments at the peak", **style)
    axes.set(xlabel="instruction", ylabel=f"held by each device ({unit})", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _draw_sent(axes: Any, found: CollectivesByAxes) -> None:
    """Draw a bar for each set of mesh axes, with a part for each kind of collective."""
    kinds = list(dict.fromkeys(c.kind for same in found.values() for c in same))
    sums = {kind: [sum(c.mean_sent or 0 for c in s if c.kind == kind) for s in found.values()] for kind in kinds}
    scale, unit = _unit(max(map(sum, zip(*sums.values(), strict=True))))
    below: Sequence[float] = [0.0] * len(found)
    for i, (kind, values) in enumerate(sums.items()):
        heights = [v / scale for v in values]
        axes.bar([described_axes(a) for a in found], heights, bottom=below, color=f"C{i}", label=kind)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set(xlabel="over", ylabel=f"sent by each device ({unit})")
    axes.legend(frameon=False, fontsize=8)


def _unit(largest: int) -> tuple[int, str]:
    return next(((2**p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**p), (1, "B"))
