"""The report of a step: its collectives, its memory and its flops. This is the object that `explain` returns."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.errors import counted, describe_bytes
from ..core.html import Html
from ._figures import Figures, total_sent
from ._report_page import report_page
from ._tables import held_columns, rows_of
from ._text import aligned, described_axes, described_mesh, described_seconds, phase_of, written_number
from .page import Page
from .records import (
    SMALL,
    Collective,
    alike,
    described_held,
    held_beside_arguments,
    known_sent,
    path_of,
    waited,
    without_numbers,
)  # fmt: skip
from .verdict import Verdict, verdict_of

_SHOWN = 8
"""How many arguments are written."""


@dataclasses.dataclass(frozen=True)
class Report(Figures, Page):
    """The report of a step on a mesh. Prints as Markdown, and can be written as JSON or a page.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> isinstance(report, axn.insight.Report)
    True
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, strings and numbers.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").to_dict()["by"]
        'partitioner'
        """
        # The rule of an operation says what follows from its axes.
        found = dataclasses.asdict(self, dict_factory=lambda pairs: {k: v for k, v in pairs if k != "rule"})
        if self.bounds is not None:
            found["bounds"]["links"] = [{"axes": list(a), "seconds": t} for a, t in self.bounds.links.items()]
            found["bounds"]["bottleneck"] = self.bounds.bottleneck
        return found

    def to_json(self) -> str:
        """Return the report in JSON.

        >>> '"flops": 0' in axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").to_json()
        True
        """
        return json.dumps(self.to_dict(), indent=1)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: the limiting resource, the costliest transfers, suspicions, and checks that passed.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> report.verdict.suspicious
        ()
        """
        return verdict_of(self)

    def __str__(self) -> str:
        verdict = self.verdict
        found = (f"- {fault}" for fault in verdict.suspicious if fault.severity != "note")
        faults = [textwrap.fill(fault, 100, subsequent_indent="  ", break_on_hyphens=False) for fault in found]
        title = f"{self.step} on {described_mesh(self.mesh, self.devices)} ({self.platform}, by={self.by!r})"
        nothing = "Nothing to fix or to look at was found." if verdict.fine else ""
        parts = [title, *filter(None, ["\n".join(faults) or nothing]), f"{verdict.binds} {verdict.explanation}".strip()]
        parts += [
            "\n".join([f"### {title}\n", *(f"- {line}" for line in lines)])
            for title, lines in self._sections()
            if lines
        ]
        parts.append("\n".join(f"- {line}" for line in (*self._figures(), *(f"note: {n}" for n in self.notes))))
        return "\n\n".join(parts)

    def _page(self) -> tuple[str, Html]:
        return report_page(self, [*self._figures()])

    def _headline(self) -> tuple[str, str]:
        return self.verdict.binds, self.verdict.explanation

    def _sections(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the title and the lines of each part that comes after what is to fix, and what binds."""
        verdict, total = self.verdict, known_sent(self.collectives)
        yield "the costliest transfers, with their shares of all bytes sent", verdict.costliest
        yield "usual, and costs memory or bytes", [str(x) for x in verdict.suspicious if x.severity == "note"]
        yield "checked, and fine", [", ".join(verdict.fine)] if verdict.fine else []
        for axes, found in self.by_axes().items():
            yield f"over {described_axes(axes)}: each device sends {_sent(found)}", _lines(found, total)
        sizes: dict[tuple[str, str, str, str], list[int]] = {}
        for x in self.placed:
            if x.copies > 1:
                over = f"over {described_axes(x.replicated_over or None)}"
                saved = f"{describe_bytes(x.bytes // x.copies)} each if sharded"
                sizes.setdefault((without_numbers(x.path), f"{x.copies} copies", over, saved), []).append(x.bytes)
        least = SMALL * sum(x.bytes for x in self.placed)
        ordered = sorted(sizes.items(), key=lambda pair: -sum(pair[1]))
        rows = [
            (path, f"{f'{len(n)} x ' if n[1:] else ''}{describe_bytes(sum(n) // len(n))}", *more)
            for (path, *more), n in ordered
            if sum(n) >= least
        ]
        if rest := ordered[len(rows) :]:
            rest_size = describe_bytes(sum(sum(n) for _, n in rest))
            rows.append((counted(len(rest), "smaller one"), rest_size, "-", "-", "-"))
        yield "arguments in several copies", aligned(rows)
        if (timeline := self.timeline) is not None:
            phase, others = timeline.phases[timeline.held.index(timeline.peak)], held_beside_arguments(timeline)
            again = {"": "", "recomputed": ", where the backward pass computes again"}
            title = f"at the peak{again.get(phase, f', in the {phase} pass')}"
            arguments = sum(h.bytes for h in timeline.at_peak) - sum(h.bytes for h in others)
            rows = rows_of(held_columns(others, timeline.peak, arguments))
            yield f"{title}: each device holds about {describe_bytes(timeline.peak)}", aligned(rows)

    def _figures(self) -> Iterable[str]:
        if self.between:
            sent = _by_content(self.chosen(over="slices"))
            each = [
                f"{describe_bytes(known_sent(cs))} of {what}, {counted(_times(cs), 'time')}"
                for what, cs in sent.items()
            ]
            within = known_sent(self.collectives) - known_sent([c for cs in sent.values() for c in cs])
            which = f"across slices ({', '.join(self.between)}), from each device: {'; '.join(each) or 'nothing'}"
            yield f"{which}; within slices: {describe_bytes(within)}"
        if any(c.beside is not None for c in self.collectives):
            # What nothing is computed beside is certain; how long devices wait is estimated.
            whole = None if self.computing is None else self.computing + sum(map(waited, self.collectives))
            rows, small = list[tuple[float, str]](), list[Collective]()
            for alone in (True, False):
                exposed = [c for c in self.collectives if (c.beside == 0 if alone else c.beside and c.waits)]
                for what, cs in _by_content(exposed).items():
                    if known_sent(cs) < SMALL * known_sent(self.collectives):
                        small += cs
                        continue
                    seconds = sum(map(waited, cs))
                    overlapped = "not overlapped" if alone else "partly overlapped"
                    about = "" if whole is None else f": about {described_seconds(seconds)}"
                    rows.append((seconds, f"{describe_bytes(known_sent(cs))} of {what}, {overlapped}{about}"))
            each = [row for _, row in sorted(rows, key=lambda row: -row[0])]
            each += [f"{describe_bytes(known_sent(small))} in smaller ones"] * bool(small)
            unknown = [c for c in self.collectives if c.beside is None]
            each += [f"{describe_bytes(known_sent(unknown))} that end in another turn of a loop"] * bool(unknown)
            of = "" if whole is None else f", by estimates of {described_seconds(whole)} in all"
            yield f"exposed{of}: {'; '.join(each) or 'nothing'}"
        if self.memory is not None:
            m = self.memory
            aliased = f", of which {describe_bytes(m.aliased)} in place of arguments" if m.aliased else ""
            yield (
                f"memory of each device: {describe_bytes(m.total)}: {describe_bytes(m.arguments)} of arguments, "
                f"{describe_bytes(m.results)} of results{aliased}, and {describe_bytes(m.temporaries)} of temporaries"
            )
        if self.arguments:
            largest = sorted(self.arguments.items(), key=lambda pair: -pair[1])
            each = [f"{name} {describe_bytes(size)}" for name, size in largest[:_SHOWN]]
            if rest := largest[_SHOWN:]:
                each.append(f"{counted(len(rest), 'other')} {describe_bytes(sum(size for _, size in rest))}")
            padding = 0 if self.memory is None else self.memory.arguments - sum(self.arguments.values())
            each += [f"padding {describe_bytes(padding)}"] if padding > 0 else []
            yield f"arguments on each device: {', '.join(each)}"
        if self.timeline is not None and self.timeline.kept_for_backward:
            yield f"kept for the backward pass, of the temporaries: {described_held(self.timeline.kept_for_backward)}"
        if self.temporaries:
            yield f"temporaries that are counted: {described_held(self.temporaries)}"
        if self.uncertain:
            yield f"the bytes sent may be off by {describe_bytes(self.uncertain)}"
        flops = "not known" if self.flops is None else written_number(self.flops)
        least = self.least_flops
        bound = "" if least in (None, self.flops) else f", and at least {written_number(least)}"
        each = [f"{phase_of(p)} {written_number(n)}" for p, n in self.computed.items() if n and self.flops is not None]
        passes = f" ({', '.join(each)})" if len(each) > 1 else ""
        yield f"flops of each device, in products and convolutions: {flops}{bound}{passes}"
        if self.bounds is not None and self.bounds.named():
            times = ", ".join(f"{name} {described_seconds(t)}" for name, t in self.bounds.named())
            yield f"least times on {self.bounds.chip}: {times}; bottleneck: {self.bounds.bottleneck}"


def _by_content(found: Iterable[Collective]) -> dict[str, list[Collective]]:
    """Group collectives by what they carry, and in which pass."""
    groups: dict[str, list[Collective]] = {}
    for c in found:
        is_gradient = c.phase == "backward" and "gather" not in c.kind
        what = ("gradients" if is_gradient else "parameters") if c.parameters else "other arrays"
        groups.setdefault(f"{what} ({phase_of(c.phase)})", []).append(c)
    return groups


def _lines(found: Sequence[Collective], total: int) -> list[str]:
    """Write collectives, largest bytes first, each with its reason. Those of less than 1% of a total are one."""
    large, small = alike(found, total)
    rows, reasons = list[Sequence[str]](), list[str]()
    for c, *more in large:
        times = "not known" if c.times is None else f"{'at most ' * bool(c.branches)}{_times([c, *more])}"
        sent = "not known" if c.sent is None else describe_bytes(c.sent)
        kind = c.kind if c.along_all else f"{c.kind} among {c.devices}"
        rows.append((f"{times} x {sent}", kind, phase_of(c.phase), c.array, path_of(c) or "-", str(c.source or "-")))
        reasons.append(f"\n      {c.operation or 'no named operation'}: {c.reason or 'not known'}")
    if rest := [c for group in small for c in group]:
        kinds = ", ".join(dict.fromkeys(c.kind for c in rest))
        size = f"{describe_bytes(known_sent(rest))} in all, {_times(rest)} times"
        rows.append((size, kinds, "-", "smaller ones", "-", "-"))
    return [f"{line}{why}" for line, why in zip(aligned(rows), [*reasons, ""], strict=False)]


def _times(found: Sequence[Collective]) -> int:
    return sum(c.times or 0 for c in found)


def _sent(found: Sequence[Collective]) -> str:
    """Write the bytes that a device sends, and the least if conditionals decide."""
    sent, fewest = (total_sent(found, least=which) for which in (False, True))
    if sent is None:
        return f"at least {describe_bytes(known_sent(found))}, and more that depends on values"
    return describe_bytes(sent) + ("" if sent == fewest else f", and at least {describe_bytes(fewest or 0)}")
