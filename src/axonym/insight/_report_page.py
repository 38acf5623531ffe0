"""The page of a report: its verdict, the costliest transfers, passes, memory, arguments, and transfers as rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._display import array_picture, array_tree
from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, bar, code, element, folded, html, joined, listed, picture, stacked
from ._arguments import PlacedArgument
from ._figures import needed_memory, total_sent
from ._tables import Column, column_of, held_columns, on_page
from ._text import described_axes, described_seconds, phase_of, short_operation, written_number
from .records import (
    SMALL,
    Collective,
    HeldArray,
    MemoryTimeline,
    alike,
    grouped,
    held_beside_arguments,
    known_sent,
    path_of,
    waited,
    why,
)  # fmt: skip
from .suspicions import repeated_share

Report: TypeAlias = Any
"""A report: its module uses this one, and imports point one way."""

_MADE = {
    "names": "by names: nothing was compiled",
    "partitioner": "partitioned for {}, and not compiled to the end",
    "compiled": "compiled for {}",
}
_PHASES = {"forward": "var(--pale)", "recomputed": "var(--mid)", "backward": "var(--fill)"}
_BINS = 240
"""How many steps the picture of the memory has."""
_SMALLER = 60
"""The number of rows of less than 1% that are written."""


def report_page(report: Report, figures: Sequence[str]) -> tuple[str, Html]:
    """Return the title and the body of the page of a report; `figures` are the lines at the end of its text."""
    words, verdict = Words(report.mesh, report.mapping), report.verdict
    transfers = _Transfers(report, words)
    sections = {
        "phases": ("Passes", _phases(report, words)),
        "memory": ("Memory", _memory(report, words)),
        "arguments": ("Arguments", _arguments(report, words)),
        "transfers": ("All transfers", transfers.all()),
        "how": ("How it was made", joined([element("p", words.said(f)) for f in (*figures, *report.notes)])),
    }
    shown = {name: section for name, section in sections.items() if section[1]}
    wrong, findings = sum(found.severity == "fix" for found in verdict.suspicious), list[Html]()
    for found in verdict.suspicious:
        parts = [element("p", element("b", words.said(found.cause)))]
        if found.consequences:
            parts.append(element("p", element("b", "So: "), words.said(" ".join(found.consequences))))
        if found.advice:
            parts.append(element("p", element("b", "Try: "), words.said(found.advice)))
        severity = element("b", found.severity, class_=found.severity)
        findings.append(element("div", severity, element("div", *parts), class_="item finding"))
    title = "Suspicious" + (f": {wrong} to fix" if wrong else "" if findings else ": nothing")
    fine = f"Checked, and fine: {', '.join(verdict.fine)}." if verdict.fine else "Nothing else could be checked."
    suspicious = section(title, *findings, element("p", words.said(fine), class_="small item"))
    body = joined(
        [
            crumb(report, words),
            verdict_card(report, words),
            mapping_line(report, words),
            element("div", transfers.costliest(), suspicious, class_="two"),
            navigation({name: title for name, (title, _) in shown.items()}),
            *(section(title, inside, name=name) for name, (title, inside) in shown.items()),
        ]
    )
    return f"{verdict.binds} {report.step}", body


# --- what other pages show too ---


def section(title: str, *children: str, name: str | None = None) -> Html:
    return element("section", element("h2", title), *children, id=name)


def navigation(titles: Mapping[str, str]) -> Html:
    links = [element("a", title, href=f"#{name}") for name, title in titles.items()]
    return element("nav", *links, aria_label="sections")


def crumb(report: Report, words: Words) -> Html:
    """Name the step, the devices, and how the report was made."""
    made = _MADE.get(report.by, f"by {report.by}").format(report.platform)
    devices = report.devices or math.prod(report.mesh.values())
    mesh = words.mesh(report.mesh) if report.devices is None else "mesh axes are not known"
    chips = f"{devices} × {report.bounds.chip}" if report.bounds is not None else counted(devices, "device")
    parts = [element("b", report.step), chips, mesh, element("span", made, class_="soft")]
    return element("p", joined(parts, " · "), class_="crumb")


def verdict_card(report: Report, words: Words, heading: str = "h1") -> Html:
    """Write what binds, its explanation, and the bounds as bars on one axis."""
    verdict, bounds = report.verdict, report.bounds
    fix = any(found.severity == "fix" for found in verdict.suspicious)
    good = not verdict.suspicious and bounds is not None and bool(bounds.named()) and bounds.bottleneck == "compute"
    said = "Bytes that each device sends in a call." if report.collectives else ""
    if bounds is not None and bounds.named():
        total = described_seconds(sum(t for _, t in bounds.named()))
        said = (
            f"Lower bounds at the published rates of {bounds.chip}: a step takes at least the longest, which binds, "
            f"and their sum, {total}, if nothing overlaps. Compute counts products and convolutions."
        )
    return element(
        "section",
        element(heading, words.said(verdict.binds)),
        element("p", words.said(verdict.explanation), class_="lead"),
        element("ul", *_bars(report, words), class_="bars"),
        element("p", said, class_="small"),
        class_=f"card{' fix' if fix else ' good' if good else ''}",
        aria_label="the verdict",
    )


def _bars(report: Report, words: Words) -> Iterator[Html]:
    bounds = report.bounds

    def row(name: str, number: str, filled: Html, kind: str | None = None) -> Html:
        return element("li", element("span", name), element("span", number, class_="num"), filled, class_=kind)

    if bounds is not None and bounds.named():
        axes = {f"sending over {described_axes(a)}": a for a in bounds.links}
        for name, t in bounds.named():
            badge = element("span", "binds", class_="badge") if name == bounds.bottleneck else None
            title, kind = html(name), ""
            if name in axes:
                title, kind = joined(["sending over ", words.axes(axes[name])]), words.color(axes[name])
            elif name == "memory":
                title, kind = html("reading arguments, writing results"), "mid"
            share = t / (bounds.longest or 1)
            filled = bar(share, kind)
            if name == "compute" and (wasted := repeated_share(report)) >= SMALL:  # a part of it is hatched
                once = element("i", style=f"width:{100 * share * (1 - wasted):.3g}%")
                said = element("b", f"{described_seconds(t * wasted)} repeated")
                again = element("i", said, class_="again", style=f"width:{100 * share * wasted:.3g}%")
                filled = element("span", once, again, class_="bar")
            yield row(joined([title, badge]), described_seconds(t), filled)
    else:
        sums = {axes: known_sent(found) for axes, found in report.by_axes().items()}
        for axes, sent in sums.items():
            filled = bar(sent / max(1, *sums.values()), words.color(axes))
            yield row(joined(["sent over ", words.axes(axes)]), describe_bytes(sent), filled)
    if report.memory is not None and (capacity := None if bounds is None else bounds.capacity):
        least, held = " at least" if report.by == "names" else "", needed_memory(report) or 0
        of = element("small", f"{describe_bytes(held)} of {describe_bytes(capacity)}")
        yield row(joined([f"memory{least} ", of]), percent(held / capacity), bar(held / capacity), "of")


def mapping_line(report: Report, words: Words) -> Html:
    """Write the mapping in one line."""
    stored = {n: over for n, over in report.parameter_mapping.items() if report.mapping.get(n) != over}
    parts = [
        joined([said, words.entries(mapping)])
        for said, mapping in (("The mapping: ", report.mapping), ("parameters are stored by ", stored))
        if any(mapping.values())
    ]
    return element("p", joined(parts, " and "), class_="mapping small") if parts else html("")


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.0095 else f"{100 * share:.0f}%"


# --- the passes ---


def _phases(report: Report, words: Words) -> Html:
    """Return a table of the flops in each pass, and of the bytes sent over each set of mesh axes."""
    flops = report.computed if report.flops else {}
    by_axes = report.by_axes()
    phases = [
        phase
        for phase in ("forward", "recomputed", "backward", "optimizer", "")
        if flops.get(phase) or known_sent([c for c in report.collectives if c.phase == phase])
    ]
    sent = {a: [known_sent([c for c in found if c.phase == p]) for p in phases] for a, found in by_axes.items()}
    most = max((n for row in sent.values() for n in row), default=0)
    columns = [Column("", [phase_of(p) for p in phases])]
    if flops:
        computed = [flops.get(p, 0) for p in phases]
        columns.append(column_of("computed", computed, lambda n: f"{written_number(n)} flops", most=report.flops))
    columns += [column_of(f"sent over {described_axes(a)}", row, describe_bytes, a, most) for a, row in sent.items()]
    return on_page("passes", columns, words) if phases else html("")


# --- memory ---


def _memory(report: Report, words: Words) -> Html:
    memory, timeline = report.memory, report.timeline
    parts = []
    if memory is not None:
        capacity = report.bounds.capacity if report.bounds is not None else None
        held = needed_memory(report) or 0
        of = f" of {describe_bytes(capacity)} ({percent(held / capacity)})" if capacity else ""
        least = " at least, by names" if report.by == "names" else ""
        kinds = (("arguments", ""), ("results", "mid"), ("temporaries", "temporary"))
        sizes = (memory.arguments, held - memory.arguments - memory.temporaries, memory.temporaries)
        each = listed([f"{describe_bytes(n)} of {kind}" for (kind, _), n in zip(kinds, sizes, strict=True)])
        parts.append(element("p", element("b", describe_bytes(held)), f"{of}{least}: ", each, "."))
        whole = max(capacity or 0, held, 1)
        parts.append(stacked((n / whole, kind) for (_, kind), n in zip(kinds, sizes, strict=True)))
        known = {"if no result takes the place of an argument": memory.total}
        if timeline is not None and timeline.held:
            known["at the peak of the step, with each array from when it is made to its last use"] = timeline.peak
        for what, n in known.items():
            if n != held:
                by = f", {describe_bytes(abs(n - held))} {'more' if n > held else 'less'}"
                parts.append(element("p", f"{describe_bytes(n)} {what}{by}.", class_="small"))
    if timeline is not None and timeline.held:
        others = held_beside_arguments(timeline)
        arguments = sum(h.bytes for h in timeline.at_peak) - sum(h.bytes for h in others)
        title = f"Held at the peak, beside {describe_bytes(arguments)} of arguments"
        parts += [_over_the_step(timeline, arguments), *_held(title, others, timeline.peak, words)]
    elif memory is not None:
        if report.temporaries:
            parts += _held("The temporaries that are counted", report.temporaries, memory.temporaries, words)
        parts.append(element("p", "Over the course of the step, by='compiled' on CPUs shows it.", class_="small"))
    return joined(parts)


def _over_the_step(timeline: MemoryTimeline, arguments: int) -> Html:
    """Draw the memory over the course of a step: in each place, the most of its instructions."""
    count = min(_BINS, len(timeline.held))
    edges = [len(timeline.held) * i // count for i in range(count + 1)]
    heights = [max(timeline.held[a:b]) for a, b in itertools.pairwise(edges)]
    phases = [timeline.phases[a] for a in edges[:-1]]
    left, top, width, height = 80, 24, 1040, 180
    base, step, scale = top + height, width / count, height / (timeline.peak or 1)

    def text(said: str, x: float, y: float, anchor: str = "end", kind: str | None = None) -> Html:
        return element("text", said, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=kind)

    steps = "".join(f"V{base - n * scale:.1f}h{step:.2f}" for n in heights)
    most = heights.index(max(heights))
    peak, phase = left + step * (most + 0.5), phase_of(phases[most])
    at, side = base - arguments * scale, -8 if most > count / 2 else 8
    parts = [
        element("path", d=f"M{left} {base}{steps}V{base}z", fill="var(--mid)", opacity="0.6"),
        element("path", d=f"M{left} {at:.1f}h{width}", stroke="var(--soft)", stroke_dasharray="4 4"),
        element("path", d=f"M{peak:.1f} {top - 6}V{base}", stroke="var(--fix)", stroke_width="2"),
        text(f"peak, {phase}", peak + side, top - 8, "end" if side < 0 else "start", "strong"),
        text(describe_bytes(timeline.peak), left - 8, top + 5),
        text(describe_bytes(arguments), left - 8, at + 4) if at - top > 20 and base - at > 16 else None,
        text("0", left - 8, base + 4),
    ]
    place = float(left)
    for one, run in itertools.groupby(phases):
        long = step * len(list(run))
        size = {"x": f"{place:.1f}", "y": base + 4, "width": f"{long:.1f}", "height": 10}
        parts.append(element("rect", **size, fill=_PHASES.get(one, "var(--bg)"), stroke="var(--line)"))
        parts.append(text(phase_of(one), place + long / 2, base + 30, "middle") if long > 70 else None)
        place += long
    label = f"Memory over the course of the step: at most {describe_bytes(timeline.peak)}, in {phase}"
    return picture(label, left + width, base + 36, *filter(None, parts))


def _held(title: str, others: Sequence[HeldArray], whole: int, words: Words) -> list[Html]:
    """Return the table of some arrays below its title; the bars are shares of a whole."""
    *columns, by = held_columns(others, whole)
    by = by._replace(cells=[short_operation(operation) for operation in by.cells])
    return [element("h3", title), on_page(title.partition(",")[0].lower(), [*columns, by], words)]


# --- arguments ---


def _arguments(report: Report, words: Words) -> Html:
    if not report.placed:
        return html("")
    total = sum(x.bytes for x in report.placed)
    said = (
        f"Bytes on each device, {describe_bytes(total)} in all. An axis that is sharded over a mesh axis has its "
        "color, and so have the cuts between shards; filled is what the first device holds."
    )

    def described(x: PlacedArgument) -> Html:
        along = f" along {described_axes(x.replicated_over)}" if x.replicated_over else ""
        copies = element("span", f"{x.copies} copies{along}", class_="badge") if x.copies > 1 else None
        return joined([array_picture(x.sizes, x.over, report.mesh), words.placed(x.axes, x.sizes, x.over), copies])

    tree = array_tree(report.placed, described, "report.to_json() has them")
    return joined([tree, element("p", said, class_="small")])


# --- transfers ---


class _Transfers:
    """The transfers of a report, the ones of repeated layers together."""

    def __init__(self, report: Report, words: Words):
        self._report, self._words = report, words
        self._total = known_sent(report.collectives)
        self._large, self._small = alike(report.collectives, self._total)
        self._found = [*self._large, *self._small]

    def costliest(self) -> Html:
        """Write the lines of the verdict, each with a bar, its bytes and its time."""
        items = list[Html]()
        # The verdict has a line for each of the first groups.
        for line, found in zip(self._report.verdict.costliest, grouped(self._report.collectives), strict=False):
            share, _, rest = line.partition(": ")
            reason, sent = why(found), known_sent(found)
            what = rest.removesuffix(f": {reason}")
            number = joined([describe_bytes(sent), self._time(found)], " · ")
            top = [element("b", share), bar(sent / max(1, self._total), self._words.color(found[0].axes))]
            said = [
                element("p", *top, element("span", number, class_="num soft"), class_="top"),
                element("p", self._words.said(what), ":" if what != rest else None),
                element("p", self._words.said(reason), class_="soft") if what != rest else None,
            ]
            items.append(element("div", *said, class_="item"))
        link = element("a", f"All {counted(len(self._found), 'transfer')}", href="#transfers")
        after = joined([f"{describe_bytes(self._total)} are sent by each device in a call. ", link])
        after = after if self._found else "Nothing is sent."
        return section("The costliest transfers", *items, element("p", after, class_="small"))

    def all(self) -> Html:
        """Write all transfers as rows that open, the ones of less than 1% folded together."""
        if not self._found:
            return html("")
        rows, small = [self._row(x) for x in self._large], self._small
        if small:
            inside = [self._row(x) for x in small[:_SMALLER]]
            if rest := small[_SMALLER:]:
                inside.append(element("p", f"and {len(rest)} smaller: report.to_json() has them", class_="small flat"))
            title = f"{len(small)} of less than 1% each: {describe_bytes(sum(map(known_sent, small)))} in all"
            rows.append(folded(title, *inside, class_="rest"))
        label = element("label", "Filter ", element("input", id="filter", type="search", placeholder="all-gather mlp"))
        return joined([element("p", label, hidden=True, data_scripted=True), element("div", *rows, class_="rows")])

    def _row(self, found: Sequence[Collective]) -> Html:
        c, sent = found[0], known_sent(found)
        known = all(c.total_sent is not None for c in found)
        share = sent / max(1, self._total)
        times = [c.times for c in found if c.times is not None]
        often = str(sum(times)) if len(times) == len(found) else "some"
        each = "some bytes" if c.sent is None else describe_bytes(c.sent)
        size = f"{often} × {each} = {describe_bytes(sent) if known else 'depends on values'}"
        name = short_operation(c.operation or "")
        what = joined([" in the backward pass of " if c.phase == "backward" else " in ", code(name)]) if name else None
        if c.parameters:
            gradient = "the gradient of " if c.kind in ("all-reduce", "reduce-scatter") else ""
            what = joined([f" of {gradient}", code(path_of(c))])
        row = element(
            "span",
            element("b", percent(share) if known else "?"),
            bar(share, self._words.color(c.axes)),
            element("span", element("b", c.kind), " over ", self._words.axes(c.axes), what),
            element("span", phase_of(c.phase), class_="small"),
            code(str(c.source)) if c.source else element("span", "no line", class_="small"),
            class_="row",
        )
        details: dict[str, str] = {
            "why": self._words.said(c.reason or "not known"),
            "array": joined([self._words.array(c.array), " on each device"]),
            "sent": joined([size, self._time(found), f"among {c.devices} devices"], ", "),
        }
        if c.beside is not None:
            overlapped = "partly overlapped" if c.beside else "not overlapped"
            hidden = "no: computing hides it" if c.beside else overlapped
            seconds = sum(map(waited, found))
            details["exposed"] = f"{overlapped}, about {described_seconds(seconds)}" if seconds else hidden
        details["operation"] = code(c.operation) if c.operation else "no named operation"
        listed = element("dl", *(part for k, v in details.items() for part in (element("dt", k), element("dd", v))))
        return folded(row, listed)

    def _time(self, found: Sequence[Collective]) -> str | None:
        """Return the time of a transfer: its share of the time of all over its mesh axes."""
        bounds, axes = self._report.bounds, found[0].axes
        known = [c for c in self._report.collectives if c.axes == axes and c.total_sent is not None]
        # The bound has the branches that send least.
        whole = total_sent(known, least=True)
        if bounds is None or axes not in bounds.links or found[0].branches or not whole:
            return None
        return described_seconds(bounds.links[axes] * known_sent(found) / whole)
