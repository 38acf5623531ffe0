"""The report of a step: its collectives, its memory and its flops. This is the object that `explain` returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.errors import counted, describe_bytes
from ..core.html import Html
from ._figures import Figures, total_sent
from ._report_page import report_page
from ._text import (
    Section,
    aligned,
    described_axes,
    described_mesh,
    described_seconds,
    phase_of,
    written_number,
)
from ._transfer_groups import SMALL, known_sent, path_of, waited, without_numbers
from .page import Page
from .records import Collective, described_held
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
        found = dataclasses.asdict(self)
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
        faults = [f"- {found}" for found in verdict.suspicious if found.severity != "note"]
        title = f"{self.step} on {described_mesh(self.mesh, self.devices)} ({self.platform}, by={self.by!r})"
        nothing = "Nothing to fix or to look at was found." if verdict.fine else ""
        parts = [title, *filter(None, ["\n".join(faults) or nothing]), f"{verdict.binds} {verdict.explanation}".strip()]
        for title, lines in (*verdict.sections(), *self._sections()):
            parts.append("\n".join([f"### {title}\n", *(f"- {line}" for line in lines)]))
        parts.append("\n".join(f"- {line}" for line in (*self._figures(), *(f"note: {n}" for n in self.notes))))
        return "\n\n".join(parts)

    def _page(self, source: bool) -> tuple[str, Html]:
        return report_page(self, [*self._figures()], source)

    def _headline(self) -> tuple[str, str]:
        return self.verdict.binds, self.verdict.explanation

    def _sections(self) -> Iterator[Section]:
        """Yield the bytes sent over each set of mesh axes, copies, and the arrays in memory at the peak, in lines."""
        total = known_sent(self.collectives)
        for axes, found in self.by_axes().items():
            yield f"over {described_axes(axes)}: each device sends {_sent(found)}", _lines(found, total)
        yield from self._copies()
        if self.timeline is not None:
            yield self.timeline._section()

    def _copies(self) -> Iterator[Section]:
        """Yield the arguments of which several devices have the same shard."""
        sizes: dict[tuple[str, int, str, str], tuple[int, int]] = {}
        for x in self.placed:
            if x.copies > 1:
                over = f"over {described_axes(x.replicated_over or None)}"
                saved = f"{describe_bytes(x.bytes // x.copies)} each if sharded"
                key = without_numbers(x.path), x.copies, over, saved
                sizes[key] = sizes.get(key, (0, 0))[0] + x.bytes, sizes.get(key, (0, 0))[1] + 1
        total = sum(x.bytes for x in self.placed)
        ordered = sorted(sizes.items(), key=lambda pair: -pair[1][0])
        shown = [(key, size) for key, size in ordered if size[0] >= SMALL * total]
        rows = [
            (path, f"{f'{n} x ' if n > 1 else ''}{describe_bytes(size // n)}", f"{copies} copies", over, saved)
            for (path, copies, over, saved), (size, n) in shown
        ]
        if rest := ordered[len(shown) :]:
            rows.append(
                (counted(len(rest), "smaller one"), describe_bytes(sum(n for _, (n, _) in rest)), "-", "-", "-")
            )
        if rows:
            yield "arguments in several copies", aligned(rows)

    def _figures(self) -> Iterable[str]:
        if self.between:
            yield self._across_slices()
        if any(c.beside is not None for c in self.collectives):
            yield self._exposed()
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

    def _exposed(self) -> str:
        """Say what nothing is computed beside, which is certain, and how long devices wait, which is estimated."""
        whole = None if self.computing is None else self.computing + sum(map(waited, self.collectives))
        rows, small = [], list[Collective]()
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
        return f"exposed{of}: {'; '.join(each) or 'nothing'}"

    def _across_slices(self) -> str:
        """Say what each device sends to other slices, and what stays within."""
        sent = _by_content(self.chosen(over="slices"))
        each = [
            f"{describe_bytes(known_sent(cs))} of {what}, {counted(sum(c.times or 0 for c in cs), 'time')}"
            for what, cs in sent.items()
        ]
        within = known_sent(self.collectives) - known_sent([c for cs in sent.values() for c in cs])
        return (
            f"across slices ({', '.join(self.between)}), from each device: {'; '.join(each) or 'nothing'}; "
            f"within slices: {describe_bytes(within)}"
        )


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
    merged: dict[Any, list[Collective]] = {}
    for c in found:
        merged.setdefault((_cells_of(c), c.times is None, c.in_branch), []).append(c)
    rows, small = list[tuple[int, Sequence[str], str]](), list[Collective]()
    for (cells, unknown, in_branch), same in merged.items():
        if all(c.total_sent is not None for c in same) and known_sent(same) < SMALL * total:
            small += same
            continue
        times = "not known" if unknown else f"{'at most ' * in_branch}{_times(same)}"
        # In a loop of unknown length, the bytes of one iteration decide the order.
        weight = sum(c.total_sent or c.sent or 0 for c in same)
        sent, *others, why = cells
        rows.append((weight, (f"{times} x {sent}", *others), why))
    rows.sort(key=lambda row: -row[0])
    if small:
        kinds = ", ".join(dict.fromkeys(c.kind for c in small))
        size = f"{describe_bytes(known_sent(small))} in all, {_times(small)} times"
        rows.append((0, (size, kinds, "-", "smaller ones", "-", "-"), ""))
    return [
        f"{line}{f'{chr(10)}      {why}' if why else ''}"
        for line, (*_, why) in zip(aligned([cells for _, cells, _ in rows]), rows, strict=True)
    ]


def _cells_of(c: Collective) -> tuple[str, ...]:
    """Return the words for a collective that differs from others only in how often it runs."""
    return (
        "not known" if c.sent is None else describe_bytes(c.sent),
        c.kind if c.along_all else f"{c.kind} among {c.devices}",
        phase_of(c.phase),
        c.array,
        path_of(c) or "-",
        "-" if c.source is None else str(c.source),
        f"{c.operation or 'no named operation'}: {c.reason or 'not known'}",
    )


def _times(found: Sequence[Collective]) -> int:
    return sum(c.times or 0 for c in found)


def _sent(found: Sequence[Collective]) -> str:
    """Write the bytes that a device sends, and the least if conditionals decide."""
    sent, fewest = (total_sent(found, least=which) for which in (False, True))
    if sent is None:
        return f"at least {describe_bytes(known_sent(found))}, and more that depends on values"
    return describe_bytes(sent) + ("" if sent == fewest else f", and at least {describe_bytes(fewest or 0)}")
