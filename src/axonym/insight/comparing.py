"""`compare`: the reports of one step under several mappings, side by side."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import describe_bytes
from ..core.html import Html
from ..distribution.mesh_axes import AnyMesh
from ._comparison_page import comparison_page
from ._figures import needed_memory
from ._text import aligned, described_axes, described_seconds, in_order, markdown_table, written_number
from .chips import Chip
from .collectives import Collective
from .explaining import explain
from .page import Page
from .report import Report


def compare(
    fn: Callable[..., Any] | None,
    args: Sequence[Any],
    mappings: Mapping[str, Any],
    *,
    mesh: AnyMesh | None = None,
    by: str = "compiled",
    topology: str | None = None,
    chip: Chip | str | None = None,
) -> Comparison:
    """Explain a step under several mappings, and compare the reports in one table.

    Arguments:
        fn: the function. None if each entry of `mappings` is a step.
        args: its arguments, which may be abstract.
        mappings: by name, a `mapping` as in `explain`, or a step that is compiled already.
        mesh, by, topology, chip: as in `explain`.

    >>> f = lambda x: axn.sum(x, "batch")
    >>> x = axn.ones({"batch": 8, "embed": 8})
    >>> mappings = {"data": {"batch": "data"}, "none": {"batch": None}}
    >>> comparison = axn.insight.compare(f, [x], mappings, mesh=axn.make_mesh({"data": -1}), by="partitioner")
    >>> comparison.reports["none"].total_sent()
    0
    """
    if not mappings:
        raise ValueError("compare: there is nothing to compare, since `mappings` is empty.")
    reports = {}
    for name, mapping in mappings.items():
        if callable(mapping):
            reports[name] = explain(mapping, *args, mesh=mesh, by=by, topology=topology, chip=chip)
        elif fn is None:
            raise TypeError(f"compare: without a step, each entry is a step, but {name!r} is a mapping.")
        else:
            reports[name] = explain(fn, *args, mapping=mapping, mesh=mesh, by=by, topology=topology, chip=chip)
    return Comparison(reports)


@dataclasses.dataclass(frozen=True)
class Comparison(Page):
    """The reports of one step under several mappings. Prints as a table, with the differences of each from the first.

    >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
    >>> print(axn.insight.compare(f, [x], {"a": {"batch": None}, "b": {"batch": None}}, by="partitioner"))
       collectives  flops
    a  0            0
    b  0            0
    """

    reports: Mapping[str, Report]

    def differences(self, first: str, second: str) -> tuple[str, ...]:
        """List the exchanges that only the second report has (`+`), and the ones that only the first has (`-`).

        >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
        >>> axn.insight.compare(f, [x], {"a": {"batch": None}, "b": {}}, by="partitioner").differences("a", "b")
        ()
        """
        before, after = (counted(self.reports[name].collectives) for name in (first, second))
        lines = []
        for sign, more, less in (("+", after, before), ("-", before, after)):
            for key, (times, sent, text) in more.items():
                rest = times - less.get(key, (0, 0, ""))[0]
                if rest > 0:
                    lines.append((rest * sent, f"{sign} {rest} x {describe_bytes(sent)}  {text}"))
        return tuple(line for _, line in sorted(lines, key=lambda pair: -pair[0]))

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

    def to_markdown(self) -> str:
        """Return the table in Markdown.

        >>> f, x = lambda x: x * 2, axn.ones({"batch": 8})
        >>> print(axn.insight.compare(f, [x], {"a": {"batch": None}}, by="partitioner").to_markdown())
        |  | collectives | flops |
        | --- | --- | --- |
        | a | 0 | 0 |
        """
        header, *rows = self._table()
        return markdown_table(header, rows)

    def __str__(self) -> str:
        parts = ["\n".join(aligned(self._table()))]
        first, *others = self.reports
        for other in others:
            if lines := self.differences(first, other):
                parts.append("\n".join([self.change(first, other), *(f"  {line}" for line in lines)]))
        return "\n\n".join(parts)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def _page(self, source: bool) -> tuple[str, Html]:
        return comparison_page(self, *self._headline())

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

    def _table(self) -> list[list[str]]:
        """Return the lines of the table, of which the first is its header."""
        reports = self.reports.values()
        columns: list[tuple[str, Callable[[Report], str]]] = [
            (f"sent over {described_axes(a)}", lambda r, a=a: _sent(r.by_axes().get(a, ())))
            for a in in_order({a for r in reports for a in r.by_axes()})
        ]
        columns.append(("collectives", lambda r: _or_unknown(r.count(), str)))
        if all(r.memory is not None for r in reports):
            columns.append(("arguments", lambda r: describe_bytes(r.memory.arguments if r.memory else 0)))
            columns.append(("memory", lambda r: describe_bytes(r.memory.total if r.memory else 0)))
        columns.append(("flops", lambda r: _or_unknown(r.flops, written_number)))
        if all(r.bounds is not None and r.bounds.named() for r in reports):
            columns.append(("at least", lambda r: described_seconds(r.bounds.longest) if r.bounds else ""))
            columns.append(("bottleneck", lambda r: r.bounds.bottleneck if r.bounds else ""))
        return [["", *(title for title, _ in columns)]] + [
            [name, *(cell(report) for _, cell in columns)] for name, report in self.reports.items()
        ]


def counted(collectives: Sequence[Collective]) -> dict[str, tuple[int, int, str]]:
    """Return how often each exchange runs, the bytes it sends, and its description, by this description."""
    found: dict[str, tuple[int, int, str]] = {}
    times = collections.Counter[str]()
    for c in collectives:
        text = f"{c.kind} over {described_axes(c.axes)}, {c.phase or 'not differentiated'}, {c.array}"
        text += f" in {c.operation}" if c.operation else ""
        text += f": {c.reason}" if c.reason else ""
        times[text] += 1 if c.times is None else c.times
        found[text] = times[text], c.sent or 0, text
    return found


def _too_large(report: Report) -> bool:
    capacity = None if report.bounds is None else report.bounds.capacity
    held = needed_memory(report)
    return held is not None and capacity is not None and held > capacity


def _sent(collectives: Sequence[Collective]) -> str:
    totals = [c.mean_sent for c in collectives]
    unknown = "" if None not in totals else " at least"
    return describe_bytes(sum(t or 0 for t in totals)) + unknown


def _or_unknown(value: int | None, written: Callable[[int], str]) -> str:
    return "not known" if value is None else written(value)
