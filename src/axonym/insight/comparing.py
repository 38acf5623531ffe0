"""`compare`: the reports of one step under several mappings, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import describe_bytes
from ..core.html import Html, Words, code, element, folded, html, joined, over_of
from ..distribution.mesh_axes import AnyMesh
from ..sharding.meshes import Between
from ._figures import needed_memory
from ._report_page import crumb, mapping_line, navigation, section, verdict_card
from ._tables import Column, column_of, on_page, rows_of
from ._text import described_axes, described_seconds, in_order, markdown_table, written_number
from .chips import Chip
from .explaining import explain
from .page import Page
from .records import Collective, known_sent
from .report import Report

_CHANGES = 8
"""The largest number of differing transfers that are shown at once."""


def compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mappings: Mapping[str, Any],
    *,
    mesh: AnyMesh | None = None,
    by: str = "compiled",
    topology: str | None = None,
    between: Between = None,
    chip: Chip | str | None = None,
) -> Comparison:
    """Explain a step under several mappings, and compare the reports in one table.

    Arguments:
        fn: the function.
        args: its arguments, which may be abstract.
        mappings: by name, a `mapping` as in `explain`. For steps that are compiled already, make a `Comparison`.
        mesh, by, topology, between, chip: as in `explain`.

    >>> f = lambda x: axn.sum(x, "batch")
    >>> x = axn.ones({"batch": 8, "embed": 8})
    >>> mappings = {"data": {"batch": "data"}, "none": {"batch": None}}
    >>> comparison = axn.insight.compare(f, [x], mappings, mesh=axn.make_mesh({"data": -1}), by="partitioner")
    >>> comparison.reports["none"].total_sent()
    0
    """
    if not mappings:
        raise ValueError("compare: there is nothing to compare, since `mappings` is empty.")
    where: dict[str, Any] = {"mesh": mesh, "by": by, "topology": topology, "between": between, "chip": chip}
    return Comparison({name: explain(fn, *args, mapping=mapping, **where) for name, mapping in mappings.items()})


@dataclasses.dataclass(frozen=True)
class Comparison(Page):
    """The reports of one step under several mappings. Prints as a table, with the differences of each from the first.

    >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
    >>> print(axn.insight.compare(f, [x], {"a": {"batch": None}, "b": {"batch": None}}, by="partitioner"))
    |     | collectives | flops |
    | --- | ----------- | ----- |
    | a   | 0           | 0     |
    | b   | 0           | 0     |
    """

    reports: Mapping[str, Report]

    def differences(self, first: str, second: str) -> tuple[str, ...]:
        """List the exchanges that only the second report has (`+`), and the ones that only the first has (`-`).

        >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
        >>> axn.insight.compare(f, [x], {"a": {"batch": None}, "b": {}}, by="partitioner").differences("a", "b")
        ()
        """
        rows = rows_of(self._changes(first, second))
        return tuple(f"{size}  {what}{why and f': {why}'}" for size, what, why in rows)

    def _changes(self, first: str, second: str) -> list[Column]:
        """Return the table of the exchanges that only one report has: how often and how many bytes, what, and why."""
        before, after = (counted(self.reports[name].collectives) for name in (first, second))
        found = [
            (sign, rest, sent, *said)
            for sign, more, less in (("+", after, before), ("-", before, after))
            for said, (times, sent) in more.items()
            if (rest := times - less.get(said, (0, 0))[0]) > 0
        ]
        found.sort(key=lambda change: -change[1] * change[2])
        sizes = [f"{sign} {times} x {describe_bytes(sent)}" for sign, times, sent, _, _ in found]
        what, why = [c[3] for c in found], [c[4] for c in found]
        return [Column("times × bytes", sizes), Column("transfer", what), Column("why", why)]

    def change(self, first: str, second: str) -> str:
        """Say in a sentence how the time, the bytes sent and the memory differ between two mappings.

        >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
        >>> axn.insight.compare(f, [x], {"a": {"batch": None}, "b": {}}, by="partitioner").change("a", "b")
        'b, compared with a: each device sends 0 B instead of 0 B.'
        """
        before, after = self.reports[first], self.reports[second]
        said = []
        if before.bounds and after.bounds and before.bounds.named() and after.bounds.named():
            least = (described_seconds(r.bounds.longest) for r in (after, before) if r.bounds)
            said.append("a step takes at least {} instead of {}".format(*least))
        said.append(f"each device sends {_sent(after.collectives)} instead of {_sent(before.collectives)}")
        if before.memory and after.memory:
            held = (describe_bytes(m.total) for m in (after.memory, before.memory))
            said.append("keeps {} instead of {}".format(*held))
        return f"{second}, compared with {first}: {', and '.join(said)}."

    def __str__(self) -> str:
        columns = self._columns()
        parts = [markdown_table([c.title for c in columns], rows_of(columns))]
        first, *others = self.reports
        for other in others:
            if lines := self.differences(first, other):
                parts.append("\n".join([f"{self.change(first, other)}\n", *lines]))
        return "\n\n".join(parts)

    def _page(self) -> tuple[str, Html]:
        headline, changes = self._headline()
        first, *others = self.reports
        report = self.reports[first]
        words = Words(list(dict.fromkeys(a for r in self.reports.values() for a in r.mesh)), report.mapping)
        sections = {"bars": ("Side by side", on_page("side by side", self._columns(), words, turned=True))}
        for i, other in enumerate(others):
            sections[f"changes-{i}"] = (f"{other}, compared with {first}", _changes(self, first, other, words))
        each = [
            joined([element("h3", name), verdict_card(r, words, "h4"), mapping_line(r, words)])
            for name, r in self.reports.items()
        ]
        sections["verdicts"] = ("The verdicts", joined(each))
        lead = element("p", words.said(changes), class_="lead") if changes else None
        title = element("h1", words.said(headline))
        body = [
            crumb(report, words),
            element("section", title, lead, class_="card", aria_label="the comparison"),
            navigation({name: text for name, (text, _) in sections.items()}),
            *(section(text, inside, name=name) for name, (text, inside) in sections.items()),
        ]
        return f"{headline} {report.step}", joined(body)

    def _headline(self) -> tuple[str, str]:
        """Return the best mapping in a sentence, and how each differs from the first."""
        first, *others = self.reports
        changes = " ".join(self.change(first, other) for other in others)
        fitting = {n: r for n, r in self.reports.items() if not _too_large(r)}
        times = {n: r.bounds.longest for n, r in fitting.items() if r.bounds is not None and r.bounds.named()}
        sent = {n: size for n, r in fitting.items() if (size := r.total_sent()) is not None}
        if not fitting:
            return "None of the mappings fits.", changes
        if len(times) == len(fitting):
            best = min(times, key=lambda n: times[n])
            return f"{best} takes the least: at least {described_seconds(times[best])} a step.", changes
        if len(sent) == len(fitting):
            best = min(sent, key=lambda n: sent[n])
            return f"{best} sends the least: {describe_bytes(sent[best])} from each device.", changes
        return f"{len(self.reports)} mappings of {self.reports[first].step}.", changes

    def _columns(self) -> list[Column]:
        """Return the table, which has a row for each mapping."""
        reports = self.reports.values()
        links = in_order({a for r in reports for a in r.by_axes()})
        sums = {a: [known_sent(r.by_axes().get(a, ())) for r in reports] for a in links}
        most = max((n for sent in sums.values() for n in sent), default=0) or 1
        columns = [Column("", [*self.reports])]
        for a, sent in sums.items():
            cells = [_sent(r.by_axes().get(a, ())) for r in reports]
            columns.append(Column(f"sent over {described_axes(a)}", cells, [n / most for n in sent], a))
        columns.append(Column("collectives", ["not known" if (n := r.count()) is None else str(n) for r in reports]))
        memories = [r.memory for r in reports if r.memory is not None]
        if len(memories) == len(reports):
            columns.append(column_of("arguments", [m.arguments for m in memories], describe_bytes))
            columns.append(column_of("memory", [m.total for m in memories], describe_bytes))
        columns.append(column_of("flops", [r.flops for r in reports], written_number))
        bounds = [r.bounds for r in reports if r.bounds is not None and r.bounds.named()]
        if len(bounds) == len(reports):
            columns.append(column_of("at least", [b.longest for b in bounds], described_seconds))
            columns.append(Column("bottleneck", [b.bottleneck for b in bounds]))
        return columns


def counted(collectives: Sequence[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return how often each exchange runs, and the bytes it sends, by what it is and why."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for c in collectives:
        what = f"{c.kind} over {described_axes(c.axes)}, {c.phase or 'not differentiated'}, {c.array}"
        key = what + (f" in {c.operation}" if c.operation else ""), c.reason or ""
        found[key] = found.get(key, (0, 0))[0] + (1 if c.times is None else c.times), c.sent or 0
    return found


def _too_large(report: Report) -> bool:
    capacity = None if report.bounds is None else report.bounds.capacity
    held = needed_memory(report)
    return held is not None and capacity is not None and held > capacity


def _sent(collectives: Sequence[Collective]) -> str:
    totals = [c.mean_sent for c in collectives]
    unknown = "" if None not in totals else " at least"
    return describe_bytes(sum(t or 0 for t in totals)) + unknown


# --- the page ---


def _changes(comparison: Comparison, first: str, other: str, words: Words) -> Html:
    """Say how two mappings differ, and their transfers."""
    before, after = comparison.reports[first], comparison.reports[other]
    entries = [
        element("li", code(name), said, ": ", _entry(old, words), " → ", _entry(new, words))
        for said, old_mapping, new_mapping in (
            ("", before.mapping, after.mapping),
            (" of parameters", before.parameter_mapping or before.mapping, after.parameter_mapping or after.mapping),
        )
        for name in {**old_mapping, **new_mapping}
        if over_of(old := old_mapping.get(name)) != over_of(new := new_mapping.get(name))
        and not (said and (name, old, new) == (name, before.mapping.get(name), after.mapping.get(name)))
    ]
    mapped = joined([element("p", "In the mapping:"), element("ul", *entries)]) if entries else None
    columns = comparison._changes(first, other)
    if not columns[0].cells:
        return joined([mapped, element("p", "Both send the same.")])
    shown, rest = (
        [c._replace(cells=c.cells[part]) for c in columns] for part in (slice(_CHANGES), slice(_CHANGES, None))
    )
    title = element("h3", "Transfers added (+), and removed (-)")
    parts = [mapped, title, on_page("changes", shown, words)]
    if smaller := rest[0].cells:
        parts.append(folded(f"{len(smaller)} smaller", on_page("smaller changes", rest, words)))
    return joined(parts)


def _entry(entry: Any, words: Words) -> Html:
    return joined([words.axis(a) for a in over_of(entry)], "+") if over_of(entry) else html("not sharded")
