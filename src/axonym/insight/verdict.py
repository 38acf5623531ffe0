"""Judge a step: its limiting resource, its costliest transfers, suspicions with advice, and checks that passed.

Texts and pages show the words that are made here and in `_suspicions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ..core.errors import describe_bytes
from ._figures import Figures, needed_memory
from ._suspicions import CHECKS, Suspicion, repeated_share
from ._text import described_axes, described_seconds, phase_of
from ._transfer_groups import SMALL, carried, from_lines, grouped, known_sent, percentage, why
from .cost_model import Bounds

_COSTLIEST = 3
"""The number of transfers in a verdict."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The summary of a report: limits, costliest transfers, suspicions with advice, and checks that passed.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> report.verdict.binds
    'Nothing is sent between devices.'
    """

    binds: str
    """The resource that limits the step, in a sentence."""
    explanation: str
    costliest: tuple[str, ...]
    """The three costliest transfers, each with its share, its array, the path of the parameter, the reason and line."""
    suspicious: tuple[Suspicion, ...]
    """The suspicions, the most severe first."""
    fine: tuple[str, ...]
    """The checks that found nothing."""

    def sections(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the title and the lines of each part that comes after what is to fix, and what binds.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> [title for title, _ in report.verdict.sections()]
        []
        """
        if self.costliest:
            yield "the costliest transfers, with their shares of all bytes sent", self.costliest
        if notes := [str(finding) for finding in self.suspicious if finding.severity == "note"]:
            yield "usual, and costs memory or bytes", notes
        if self.fine:
            yield "checked, and fine", [", ".join(self.fine)]


def verdict_of(report: Figures) -> Verdict:
    """Judge a report."""
    checks = [[*check(report)] for check in CHECKS]
    findings = [x for found in checks for x in found if isinstance(x, Suspicion)]
    fine = tuple(x for found in checks for x in found[:1] if not isinstance(x, Suspicion))
    order = ("fix", "look", "note")
    binds, explanation = _binds(report)
    return Verdict(
        binds,
        explanation,
        tuple(_costliest(report)),
        tuple(sorted(findings, key=lambda f: order.index(f.severity))),
        fine,
    )


# --- what binds ---


def _binds(report: Figures) -> tuple[str, str]:
    """Say what binds, and explain it."""
    bounds, wasted = report.bounds, repeated_share(report)
    again = f"{percentage(wasted)} of the compute is repeated" if wasted >= SMALL else ""
    if bounds is None or not bounds.named() or not bounds.longest:
        return _without_times(report, again)
    least = f"A step takes at least {described_seconds(bounds.longest)} on {bounds.chip}"
    held, about = needed_memory(report), ""
    if held is None and report.timeline is not None and report.timeline.held:
        held, about = report.timeline.peak, "about "
    if held is not None and bounds.capacity is not None and held > bounds.capacity:
        return (
            f"This does not fit: {about}{describe_bytes(held)} of {describe_bytes(bounds.capacity)}.",
            f"{least}. The table of the peak lists the arrays.",
        )
    if bounds.bottleneck == "compute" and bounds.compute is not None:
        return _compute_binds(bounds, bounds.compute, least, wasted)
    if bounds.bottleneck == "memory":
        return (
            "Reading and writing memory binds.",
            f"{least}. It is the time to read each argument and write each result once.",
        )
    if bounds.compute:
        times = f"{bounds.longest / bounds.compute:.3g} times the compute ({described_seconds(bounds.compute)})"
        least = f"{least}, {times}"
    if bounds.longest == bounds.host:
        return "Moving to the host binds.", f"{least}."
    axes = next(a for a, t in bounds.links.items() if t == bounds.longest)
    over = [c for c in report.collectives if c.axes == axes]
    sentences = [least]
    if own := grouped(over):
        what = f"{own[0][0].kind} of {carried(own[0])}{from_lines(own[0])}: {why(own[0])}"
        share = known_sent(own[0]) / max(1, known_sent(report.collectives))
        sentences.append(f"{percentage(share)} of all bytes sent: {what}")
    sentences += [again] if again else []
    return f"{bounds.bottleneck[0].upper()}{bounds.bottleneck[1:]} binds.", f"{'. '.join(sentences)}."


def _without_times(report: Figures, again: str) -> tuple[str, str]:
    """Say how much is sent where no chip gives times."""
    if not report.collectives:
        return "Nothing is sent between devices.", f"{again}." if again else ""
    given = report.bounds is not None
    why = "Times are not known, because they depend on values" if given else "No chip was given, so times are not known"
    sums = {axes: known_sent(found) for axes, found in report.by_axes().items()}
    most, size = max(sums.items(), key=lambda pair: pair[1])
    sent = report.total_sent()
    much = f"each device sends {describe_bytes(size)} over it" if size else "how much depends on values"
    share = f", {percentage(size / sent)} of all" if sent else ""
    advice = "" if given else ' Pass a chip, such as chip="v5p", for times.'
    return (
        f"{why}{'; ' if again else ''}{again}.",
        f"Most bytes go over {described_axes(most)}: {much}{share}.{advice}",
    )


def _compute_binds(bounds: Bounds, compute: float, least: str, wasted: float) -> tuple[str, str]:
    if wasted >= SMALL:
        shared = described_seconds(compute * (1 - wasted))
        return (
            f"Compute binds, and {percentage(wasted)} of it is repeated.",
            f"{least}. Several devices do the same work; shared, compute would take at least {shared}.",
        )
    others = [(name, t) for name, t in bounds.named() if name != "compute"]
    more = f"{least}."
    if others:
        longest = max(others, key=lambda pair: pair[1])
        more += " Transfers and reads may hide behind it; if none does, a step takes at least "
        more += f"{described_seconds(sum(t for _, t in bounds.named()))}."
        more += f" The longest of it: {longest[0]}, {described_seconds(longest[1])}."
    return "Compute binds.", more


def _costliest(report: Figures) -> Iterator[str]:
    total = known_sent(report.collectives)
    for group in grouped(report.collectives)[:_COSTLIEST]:
        if total and known_sent(group) / total >= SMALL:
            times, sizes = sum(c.times or 0 for c in group), {c.sent or 0 for c in group}
            size = describe_bytes(sizes.pop()) if len(sizes) == 1 else f"up to {describe_bytes(max(sizes))}"
            phases = " and ".join(dict.fromkeys(phase_of(c.phase) for c in group))
            yield (
                f"{percentage(known_sent(group) / total)}: {group[0].kind} over {described_axes(group[0].axes)} of "
                f"{carried(group)}, {times} x {size}, {phases}{from_lines(group)}: {why(group)}"
            )
