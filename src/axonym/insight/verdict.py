"""Judge a step: its limiting resource, its costliest transfers, suspicions with advice, and checks that passed.

Each check of `CHECKS` yields its findings, or else what to say if it has none. Texts and pages show these words.
"""

from __future__ import annotations

import dataclasses

from ..core.errors import describe_bytes
from ._checks_of_arguments import (
    check_copies,
    check_donation,
    check_kept,
    check_memory,
    check_states,
    check_stored,
)
from ._checks_of_mapping import check_mesh_axes, check_names, check_repeats
from ._checks_of_transfers import (
    check_activations,
    check_casts,
    check_conversions,
    check_loops,
    check_parameters,
    check_reasons,
    check_slices,
    check_sums,
)
from ._checks_of_work import check_work
from ._figures import Figures, needed_memory
from ._text import described_axes, described_seconds, phase_of
from .records import SMALL, WIDE, carried, from_lines, grouped, known_sent, why
from .suspicions import Found, Suspicion, percentage, repeated_share, share_sent

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


def verdict_of(report: Figures) -> Verdict:
    """Judge a report."""
    checks = [[*check(report)] for check in CHECKS]
    findings = [x for found in checks for x in found if isinstance(x, Suspicion)]
    findings.sort(key=lambda f: ("fix", "look", "note").index(f.severity))
    fine = tuple(x for found in checks for x in found[:1] if not isinstance(x, Suspicion))
    costliest, total = list[str](), known_sent(report.collectives)
    for group in grouped(report.collectives)[:_COSTLIEST]:
        if total and known_sent(group) / total >= SMALL:
            times, sizes = sum(c.times or 0 for c in group), {c.sent or 0 for c in group}
            size = describe_bytes(sizes.pop()) if len(sizes) == 1 else f"up to {describe_bytes(max(sizes))}"
            phases = " and ".join(dict.fromkeys(phase_of(c.phase) for c in group))
            costliest.append(
                f"{percentage(known_sent(group) / total)}: {group[0].kind} over {described_axes(group[0].axes)} of "
                f"{carried(group)}, {times} x {size}, {phases}{from_lines(group)}: {why(group)}"
            )
    return Verdict(*_binds(report), tuple(costliest), tuple(findings), fine)


def _binds(report: Figures) -> tuple[str, str]:
    """Say what binds, and explain it."""
    bounds, wasted = report.bounds, repeated_share(report)
    again = f"{percentage(wasted)} of the compute is repeated" if wasted >= SMALL else ""
    if bounds is None or not bounds.named() or not bounds.longest:  # no chip gives times
        if not report.collectives:
            return "Nothing is sent between devices.", f"{again}." if again else ""
        unknown = "No chip was given, so times are not known"
        if bounds is not None:
            unknown = "Times are not known, because they depend on values"
        sums = {axes: known_sent(found) for axes, found in report.by_axes().items()}
        most, size = max(sums.items(), key=lambda pair: pair[1])
        sent = report.total_sent()
        much = f"each device sends {describe_bytes(size)} over it" if size else "how much depends on values"
        share = f", {percentage(size / sent)} of all" if sent else ""
        advice = "" if bounds is not None else ' Pass a chip, such as chip="v5p", for times.'
        most_bytes = f"Most bytes go over {described_axes(most)}: {much}{share}.{advice}"
        return f"{unknown}{'; ' if again else ''}{again}.", most_bytes
    least = f"A step takes at least {described_seconds(bounds.longest)} on {bounds.chip}"
    held, about = needed_memory(report), ""
    if held is None and report.timeline is not None and report.timeline.held:
        held, about = report.timeline.peak, "about "
    if held is not None and bounds.capacity is not None and held > bounds.capacity:
        fits_not = f"This does not fit: {about}{describe_bytes(held)} of {describe_bytes(bounds.capacity)}."
        return fits_not, f"{least}. The table of the peak lists the arrays."
    if bounds.bottleneck == "compute" and bounds.compute is not None:
        if wasted >= SMALL:
            shared = described_seconds(bounds.compute * (1 - wasted))
            same = f"Several devices do the same work; shared, compute would take at least {shared}."
            return f"Compute binds, and {percentage(wasted)} of it is repeated.", f"{least}. {same}"
        more, others = f"{least}.", [(t, name) for name, t in bounds.named() if name != "compute"]
        if others:
            t, longest = max(others, key=lambda pair: pair[0])
            more += " Transfers and reads may hide behind it; if none does, a step takes at least "
            more += f"{described_seconds(sum(t for _, t in bounds.named()))}."
            more += f" The longest of it: {longest}, {described_seconds(t)}."
        return "Compute binds.", more
    if bounds.bottleneck == "memory":
        why_memory = "It is the time to read each argument and write each result once."
        return "Reading and writing memory binds.", f"{least}. {why_memory}"
    if bounds.compute:
        compute = described_seconds(bounds.compute)
        least += f", {bounds.longest / bounds.compute:.3g} times the compute ({compute})"
    if bounds.longest == bounds.host:
        return "Moving to the host binds.", f"{least}."
    axes = next(a for a, t in bounds.links.items() if t == bounds.longest)
    sentences = [least]
    if own := grouped([c for c in report.collectives if c.axes == axes]):
        what = f"{own[0][0].kind} of {carried(own[0])}{from_lines(own[0])}: {why(own[0])}"
        sentences.append(f"{percentage(share_sent(report, own[0]))} of all bytes sent: {what}")
    sentences += [again] if again else []
    return f"{bounds.bottleneck[0].upper()}{bounds.bottleneck[1:]} binds.", f"{'. '.join(sentences)}."


def check_stages(report: Figures) -> Found:
    """Say how long the stages of a pipeline wait."""
    if report.idle:
        cause = f"A stage of the pipeline waits in {percentage(report.idle)} of the time, by its schedule."
        yield Suspicion("note" if report.idle < WIDE else "look", cause, advice="more microbatches.")


def _certain(report: Figures) -> Found:
    if report.uncertain:
        yield Suspicion("note", f"The bytes sent may be off by {describe_bytes(report.uncertain)}.")


CHECKS = (
    check_names, check_mesh_axes, check_activations, check_work, check_repeats, check_memory, check_parameters,
    check_loops, check_slices, check_sums, check_stored, check_states, check_copies, check_conversions, check_casts,
    check_donation, check_kept, check_reasons, check_stages, _certain,
)  # fmt: skip
"""The checks, in the order in which findings of equal severity are listed."""
