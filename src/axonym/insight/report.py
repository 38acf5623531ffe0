"""The report of a step: its collectives, its memory and its flops. This is the object that `explain` returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.errors import counted, describe_bytes
from ..core.html import Html
from ._figures import Figures, total_sent
from ._parameters import without_numbers
from ._report_page import report_page
from ._text import (
    Section,
    aligned,
    described_axes,
    described_mesh,
    described_seconds,
    markdown_table,
    phase_of,
    rich_table,
    written_number,
    written_table,
)
from ._transfer_groups import SMALL, known_sent, path_of
from .collectives import Collective
from .page import Page
from .timeline import described_held, draw
from .verdict import Verdict, verdict_of

_SHOWN = 8
"""How many arguments are written."""


@dataclasses.dataclass(frozen=True)
class Report(Figures, Page):
    """The report of a step on a mesh. Prints as text, and can be written as a page, Markdown or JSON.

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

    def to_markdown(self) -> str:
        """Return the report in Markdown.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> print(report.to_markdown().splitlines()[-1])
        - flops of each device, in products and convolutions: 0
        """
        return self._written(markdown=True)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: the limiting resource, the costliest transfers, suspicions, and checks that passed.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> report.verdict.suspicious
        ()
        """
        return verdict_of(self)

    def draw(self, figure: Any = None) -> Any:
        """Draw the memory of each device over the course of the step, and the bytes sent over each set of mesh axes.

        Needs the extra `plot`.

        Arguments:
            figure: Matplotlib's figure to draw into; by default a new one. It is returned, and can be saved.

        >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
        >>> report.draw().axes[0].get_ylabel()
        'held by each device (B)'
        """
        return draw(self.timeline, self.by_axes(), figure)

    def __str__(self) -> str:
        return self._written(markdown=False)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def _page(self, source: bool) -> tuple[str, Html]:
        return report_page(self, [*self._figures()], source)

    def _headline(self) -> tuple[str, str]:
        return self.verdict.binds, self.verdict.explanation

    def __rich__(self) -> Any:
        """Return the tables that `rich.print` shows, which fit the terminal."""
        from rich.console import Group
        from rich.text import Text

        title, *said = self._head()
        parts: list[Any] = [Text(title, "bold"), *map(Text, said)]
        for title, lines in self.verdict.sections():
            parts += [Text(f"\n{title}", "bold"), *(Text(f"- {line}") for line in lines)]
        parts += [rich_table(*section) for section in self._sections()]
        parts += [Text("\n".join(self._figures())), *(Text(f"note: {n}", "dim") for n in self.notes)]
        return Group(*parts)

    # --- writing ---

    def _written(self, markdown: bool) -> str:
        parts = [*self._head()]
        for title, lines in self.verdict.sections():
            listed = "\n".join(f"- {line}" if markdown else f"  {line}" for line in lines)
            parts.append(f"### {title}\n\n{listed}" if markdown else f"{title}:\n{listed}")
        if markdown:
            parts += [f"### {title}\n\n{markdown_table(header, rows)}" for title, header, rows in self._sections()]
        else:
            total = known_sent(self.collectives)
            parts += [f"{_title(axes, found)}\n{_lines(found, total)}" for axes, found in self.by_axes().items()]
            parts += [] if (table := self._table_of_copies()) is None else [written_table(*table)]
            parts += [] if self.timeline is None else [written_table(*self.timeline._section())]
        parts.append("\n".join(f"- {line}" if markdown else line for line in self._figures()))
        if self.notes:
            parts.append("\n".join(f"- {n}" if markdown else f"note: {n}" for n in self.notes))
        return "\n\n".join(parts)

    def _head(self) -> Iterator[str]:
        yield f"{self.step} on {described_mesh(self.mesh, self.devices)} ({self.platform}, by={self.by!r})"
        verdict = self.verdict
        yield f"{verdict.binds} {verdict.explanation}".strip()

    def _sections(self) -> Iterator[Section]:
        """Yield the tables: the bytes sent over each set of mesh axes, copies, and the arrays in memory at the peak."""
        total = known_sent(self.collectives)
        for axes, found in self.by_axes().items():
            yield _title(axes, found), _HEADER, [dataclasses.astuple(row) for row in _rows(found, total)]
        if (table := self._table_of_copies()) is not None:
            yield table
        if self.timeline is not None:
            yield self.timeline._section()

    def _table_of_copies(self) -> Section | None:
        """Return the table of the arguments of which several devices have the same shard."""
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
        header = ("argument", "on each device", "copies", "replicated", "otherwise")
        return ("arguments in several copies:", header, rows) if rows else None

    def _figures(self) -> Iterable[str]:
        if self.between:
            yield self._across_slices()
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

    def _across_slices(self) -> str:
        """Say what each device sends to other slices, and what stays within."""
        sent: dict[str, list[Collective]] = {}
        for c in self.chosen(over="slices"):
            is_gradient = c.phase == "backward" and "gather" not in c.kind
            what = ("gradients" if is_gradient else "parameters") if c.parameters else ""
            sent.setdefault(f"{what or 'other arrays'} ({phase_of(c.phase)})", []).append(c)
        each = [
            f"{describe_bytes(known_sent(cs))} of {what}, {counted(sum(c.times or 0 for c in cs), 'time')}"
            for what, cs in sent.items()
        ]
        within = known_sent(self.collectives) - known_sent([c for cs in sent.values() for c in cs])
        return (
            f"across slices ({', '.join(self.between)}), from each device: {'; '.join(each) or 'nothing'}; "
            f"within slices: {describe_bytes(within)}"
        )


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row for collectives that differ only in how often they run: the cells below `_HEADER`."""

    kind: str
    when: str
    times: str
    sent: str
    array: str
    parameter: str
    operation: str
    line: str
    why: str


def _rows(found: Sequence[Collective], total: int) -> list[_Row]:
    """Return the rows for some collectives, largest bytes first. Rows of less than 1% of a total are one."""
    merged: dict[_Row, list[Collective]] = {}
    for c in found:
        merged.setdefault(_row_of(c), []).append(c)
    rows, small = list[tuple[int, _Row]](), list[Collective]()
    for row, same in merged.items():
        if all(c.total_sent is not None for c in same) and known_sent(same) < SMALL * total:
            small += same
            continue
        times = row.times if same[0].times is None else f"{row.times} {_times(same)}".strip()
        # In a loop of unknown length, the bytes of one iteration decide the order.
        weight = sum(c.total_sent or c.sent or 0 for c in same)
        rows.append((weight, dataclasses.replace(row, times=times)))
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    if small:
        kinds, size = ", ".join(dict.fromkeys(c.kind for c in small)), describe_bytes(known_sent(small))
        one = _Row(kinds, "-", _times(small), f"{size} in all", "smaller ones", "-", "-", "-", "less than 1% each")
        ordered.append(one)
    return ordered


def _row_of(c: Collective) -> _Row:
    """Return the row for a collective, without how often it runs if that is known."""
    return _Row(
        kind=c.kind if c.along_all else f"{c.kind} among {c.devices}",
        when=phase_of(c.phase),
        sent="not known" if c.sent is None else describe_bytes(c.sent),
        array=c.array,
        parameter=path_of(c) or "-",
        operation=c.operation or "no named operation",
        line="-" if c.source is None else str(c.source),
        why=c.reason or "not known",
        times="not known" if c.times is None else "at most" if c.in_branch else "",
    )


def _times(found: Sequence[Collective]) -> str:
    return str(sum(c.times or 0 for c in found))


def _title(axes: tuple[str, ...] | None, found: Sequence[Collective]) -> str:
    return f"over {described_axes(axes)}: each device sends {_sent(found)}"


def _sent(found: Sequence[Collective]) -> str:
    """Write the bytes that a device sends, and the least if conditionals decide."""
    sent, fewest = (total_sent(found, least=which) for which in (False, True))
    if sent is None:
        return f"at least {describe_bytes(known_sent(found))}, and more that depends on values"
    return describe_bytes(sent) + ("" if sent == fewest else f", and at least {describe_bytes(fewest or 0)}")


_HEADER = ("kind", "when", "times", "sent each time", "array", "parameter", "operation", "line", "why")


def _lines(found: Sequence[Collective], total: int) -> str:
    """Write collectives as text, each with its reason on a second line."""
    rows = _rows(found, total)
    sent = (f"{r.times} x {r.sent}" if r.operation != "-" else f"{r.sent}, {r.times} times" for r in rows)
    first = aligned([(s, r.kind, r.when, r.array, r.parameter, r.line) for s, r in zip(sent, rows, strict=True)])
    reasons = (f"\n      {r.operation}: {r.why}" if r.operation != "-" else "" for r in rows)
    return "\n".join(f"  {a}{why}" for a, why in zip(first, reasons, strict=True))
