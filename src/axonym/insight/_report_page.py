"""The page of a report: its verdict, then the phases, the memory, the arguments and all transfers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._display import array_picture, array_tree
from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, bar, code, element, html, joined, listed, picture, stacked, table
from ._arguments import PlacedArgument
from ._figures import needed_memory
from ._suspicions import Suspicion, repeated_share
from ._text import described_axes, described_seconds, phase_of, short_operation, written_number
from ._transfer_groups import SMALL, known_sent
from ._transfer_rows import Transfers, percent
from .records import HeldArray, MemoryTimeline, arguments_and_others

Report: TypeAlias = Any
"""A report: its module uses this one, and imports point one way."""

_MADE = {
    "names": "by names: nothing was compiled",
    "partitioner": "partitioned for {}, and not compiled to the end",
    "compiled": "compiled for {}",
}
_AT_PEAK = 6
_PHASES = {"forward": "var(--pale)", "recomputed": "var(--mid)", "backward": "var(--fill)"}
_BINS = 240
"""How many steps the picture of the memory has."""


def report_page(report: Report, figures: Sequence[str], source: bool) -> tuple[str, Html]:
    """Return the title and the body of the page of a report; `figures` are the lines at the end of its text."""
    words = Words(report.mesh, report.mapping)
    transfers = Transfers(report, words, source)
    sections = {
        "phases": ("Passes", _phases(report, words)),
        "memory": ("Memory", _memory(report, words)),
        "arguments": ("Arguments", _arguments(report, words)),
        "transfers": ("All transfers", transfers.all()),
        "how": ("How it was made", joined([element("p", words.said(f)) for f in (*figures, *report.notes)])),
        "lines": ("Lines", transfers.lines()),
    }
    shown = {name: section for name, section in sections.items() if section[1]}
    body = joined(
        [
            crumb(report, words),
            verdict_card(report, words),
            mapping_line(report, words),
            element("div", transfers.costliest(), _suspicious(report, words), class_="two"),
            navigation({name: title for name, (title, _) in shown.items()}),
            *(section(title, inside, name=name) for name, (title, inside) in shown.items()),
        ]
    )
    return f"{report.verdict.binds} {report.step}", body


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
    return element(
        "section",
        element(heading, words.said(verdict.binds)),
        element("p", words.said(verdict.explanation), class_="lead"),
        element("ul", *_bars(report, words), class_="bars"),
        element("p", _said_of_bars(report), class_="small"),
        class_=f"card{' fix' if fix else ' good' if good else ''}",
        aria_label="the verdict",
    )


def _bound(name: str, report: Report, words: Words) -> tuple[Html, str]:
    """Return the name of a bound, and the kind of its bar."""
    axes = {f"sending over {described_axes(a)}": a for a in report.bounds.links}
    if name in axes:
        return joined(["sending over ", words.axes(axes[name])]), words.color(axes[name])
    return (html("reading arguments, writing results"), "mid") if name == "memory" else (html(name), "")


def _bars(report: Report, words: Words) -> Iterator[Html]:
    bounds, memory = report.bounds, report.memory
    if bounds is not None and bounds.named():
        for name, t in bounds.named():
            badge = element("span", "binds", class_="badge") if name == bounds.bottleneck else None
            title, kind = _bound(name, report, words)
            filled = bar(t / (bounds.longest or 1), kind)
            if name == "compute" and (wasted := repeated_share(report)) >= SMALL:
                filled = _partly_repeated(t, wasted, bounds.longest)
            yield _bar_row(joined([title, badge]), described_seconds(t), filled)
    else:
        sums = {axes: known_sent(found) for axes, found in report.by_axes().items()}
        for axes, sent in sums.items():
            filled = bar(sent / max(1, *sums.values()), words.color(axes))
            yield _bar_row(joined(["sent over ", words.axes(axes)]), describe_bytes(sent), filled)
    if memory is not None:
        capacity = None if bounds is None else bounds.capacity
        least = " at least" if report.by == "names" else ""
        of = f" of {describe_bytes(capacity)}" if capacity else ""
        held = needed_memory(report) or 0
        name = joined([f"memory{least} ", element("small", f"{describe_bytes(held)}{of}")])
        if capacity:
            yield _bar_row(name, percent(held / capacity), bar(held / capacity), "of")


def _bar_row(name: str, number: str, filled: Html, kind: str | None = None) -> Html:
    return element("li", element("span", name), element("span", number, class_="num"), filled, class_=kind)


def _partly_repeated(t: float, wasted: float, longest: float) -> Html:
    """Return a bar of which a part is hatched."""
    share = t / (longest or 1)
    once = element("i", style=f"width:{100 * share * (1 - wasted):.3g}%")
    said = element("b", f"{described_seconds(t * wasted)} repeated")
    again = element("i", said, class_="again", style=f"width:{100 * share * wasted:.3g}%")
    return element("span", once, again, class_="bar")


def _said_of_bars(report: Report) -> str:
    bounds = report.bounds
    if bounds is None or not bounds.named():
        return "Bytes that each device sends in a call." if report.collectives else ""
    total = described_seconds(sum(t for _, t in bounds.named()))
    return (
        f"Lower bounds at the published rates of {bounds.chip}: a step takes at least the longest, which binds, "
        f"and their sum, {total}, if nothing overlaps. Compute counts products and convolutions."
    )


def mapping_line(report: Report, words: Words) -> Html:
    """Write the mapping in one line."""
    stored = {n: over for n, over in report.parameter_mapping.items() if report.mapping.get(n) != over}
    parts = [
        joined([said, words.entries(mapping)])
        for said, mapping in (("The mapping: ", report.mapping), ("parameters are stored by ", stored))
        if any(mapping.values())
    ]
    return element("p", joined(parts, " and "), class_="mapping small") if parts else html("")


# --- suspicions ---


def _suspicious(report: Report, words: Words) -> Html:
    verdict = report.verdict
    wrong = sum(found.severity == "fix" for found in verdict.suspicious)
    title = "Suspicious" + (f": {wrong} to fix" if wrong else "" if verdict.suspicious else ": nothing")
    fine = f"Checked, and fine: {', '.join(verdict.fine)}." if verdict.fine else "Nothing else could be checked."
    return element(
        "section",
        element("h2", title),
        *(_finding(found, words) for found in verdict.suspicious),
        element("p", words.said(fine), class_="small item"),
    )


def _finding(found: Suspicion, words: Words) -> Html:
    parts = [element("p", element("b", words.said(found.cause)))]
    if found.consequences:
        parts.append(element("p", element("b", "So: "), words.said(" ".join(found.consequences))))
    if found.advice:
        parts.append(element("p", element("b", "Try: "), words.said(found.advice)))
    severity = element("b", found.severity, class_=found.severity)
    return element("div", severity, element("div", *parts), class_="item finding")


# --- the passes ---


def _phases(report: Report, words: Words) -> Html:
    """Return a table of the flops in each pass, and of the bytes sent over each set of mesh axes."""
    phases = ("forward", "recomputed", "backward", "optimizer", "")
    sums = {
        phase: {axes: known_sent([c for c in found if c.phase == phase]) for axes, found in report.by_axes().items()}
        for phase in phases
    }
    most = max((n for row in sums.values() for n in row.values()), default=0) or 1
    flops = {phase: report.computed.get(phase, 0) for phase in phases} if report.flops else {}
    header = ["", *(["computed"] if flops else []), *(joined(["sent over ", words.axes(a)]) for a in report.by_axes())]
    rows = [
        [
            phase_of(phase),
            *([_measured(f"{written_number(flops[phase])} flops", flops[phase] / report.flops)] if flops else []),
            *(_measured(describe_bytes(n), n / most, words.color(a)) for a, n in row.items()),
        ]
        for phase, row in sums.items()
        if any(row.values()) or flops.get(phase)
    ]
    return table("passes", header, rows) if rows else html("")


def _measured(number: str, share: float, kind: str = "") -> Html:
    return element("span", element("span", number, class_="num"), bar(share, kind), class_="cell")


# --- memory ---


def _memory(report: Report, words: Words) -> Html:
    memory, timeline = report.memory, report.timeline
    parts = []
    if memory is not None:
        capacity = report.bounds.capacity if report.bounds is not None else None
        held = needed_memory(report) or 0
        of = f" of {describe_bytes(capacity)} ({percent(held / capacity)})" if capacity else ""
        least = " at least, by names" if report.by == "names" else ""
        replace = ", if results take the place of arguments" if held != memory.total else ""
        kinds = (("arguments", ""), ("results", "mid"), ("temporaries", "temporary"))
        sizes = (memory.arguments, held - memory.arguments - memory.temporaries, memory.temporaries)
        each = listed([f"{describe_bytes(n)} of {kind}" for (kind, _), n in zip(kinds, sizes, strict=True)])
        parts.append(element("p", element("b", describe_bytes(held)), f"{of}{least}: ", each, f"{replace}."))
        whole = max(capacity or 0, held, 1)
        parts.append(stacked((n / whole, kind) for (_, kind), n in zip(kinds, sizes, strict=True)))
    if timeline is not None and timeline.held:
        arguments, others = arguments_and_others(timeline)
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


def _held(title: str, others: Sequence[HeldArray], whole: int, words: Words) -> Iterator[Html]:
    """Yield the table of some arrays; the bars are shares of a whole."""
    rows: list[Sequence[str]] = []
    for h in others[:_AT_PEAK]:
        times = f"{h.count} × " if h.count > 1 else None
        rows.append(
            (
                _measured(describe_bytes(h.bytes), h.bytes / (whole or 1)),
                joined([times, words.array(h.array)]),
                phase_of(h.phase),
                short_operation(h.operation or "no named operation"),
                code(str(h.source)) if h.source else "-",
            )
        )
    if rest := others[_AT_PEAK:]:
        size = sum(h.bytes for h in rest)
        smaller = f"{sum(h.count for h in rest)} smaller"
        rows.append((_measured(describe_bytes(size), size / (whole or 1)), smaller, "", "", ""))
    yield element("h3", title)
    yield table(title.partition(",")[0].lower(), ("bytes", "array on each device", "made in", "by", "line"), rows)


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
