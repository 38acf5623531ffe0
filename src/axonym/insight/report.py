"""The report of a step: its collectives, its memory and its flops. This is the object that `explain` returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import counted, describe_bytes
from ..distribution.active_settings import Entry
from ._arguments import PlacedArgument
from ._html import Html
from ._parameters import without_numbers
from ._report_page import report_page
from ._text import (
    Section,
    aligned,
    described_axes,
    described_mesh,
    described_seconds,
    in_order,
    markdown_table,
    phase_of,
    rich_table,
    written_number,
    written_table,
)
from .chips import Chip
from .collectives import Collective
from .page import Page
from .repeating import RepeatedWork
from .timeline import MemoryTimeline, draw
from .verdict import SMALL, Verdict, least_sent, path_of, verdict_of

_SHOWN = 8
"""How many arguments are written."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that each device holds, by the compiler's own account.

    >>> axn.insight.Memory(arguments=8, results=4, aliased=0, temporaries=0).arguments
    8
    """

    arguments: int
    results: int
    aliased: int
    """The bytes of results that overwrite donated arguments."""
    temporaries: int
    """The block for all arrays that live only during the call, as small as the compiler could make it."""

    @property
    def total(self) -> int:
        """Return the bytes that a device holds during the call.

        >>> axn.insight.Memory(arguments=8, results=4, aliased=4, temporaries=2).total
        10
        """
        return self.arguments + self.results - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds on the time of a call on a chip, in seconds. A step takes at least the longest of them.

    >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={("data",): 5e-4}).bottleneck
    'memory'
    """

    chip: str
    compute: float | None
    memory: float | None
    """If each argument is read once and each result written once."""
    links: Mapping[tuple[str, ...], float]
    """For each set of mesh axes, sending over it with all links of a chip."""
    capacity: int | None = None
    """The bytes of memory of the chip."""

    @property
    def bottleneck(self) -> str:
        """Return which of the bounds is the longest.

        >>> axn.insight.Bounds("v5e", compute=None, memory=None, links={("data",): 5e-4}).bottleneck
        'sending over data'
        """
        return max(self.named(), key=lambda pair: pair[1])[0]

    @property
    def longest(self) -> float:
        """Return the longest of the bounds.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=2e-3, links={}).longest
        0.002
        """
        return max(t for _, t in self.named())

    def named(self) -> list[tuple[str, float]]:
        """Return each bound with its name.

        >>> axn.insight.Bounds("v5e", compute=1e-3, memory=None, links={("data",): 5e-4}).named()
        [('compute', 0.001), ('sending over data', 0.0005)]
        """
        pairs = [("compute", self.compute), ("memory", self.memory)]
        links = [(f"sending over {described_axes(axes)}", t) for axes, t in self.links.items()]
        return [(name, t) for name, t in pairs if t is not None] + links


@dataclasses.dataclass(frozen=True)
class Report(Page):
    """The report of a step on a mesh. Prints as text, and can be written as a page, Markdown or JSON.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> isinstance(report, axn.insight.Report)
    True
    """

    step: str
    platform: str
    mesh: Mapping[str, int]
    by: str
    """How it was made: by `compiled`, `partitioner`, `shardy` or `names`."""
    collectives: tuple[Collective, ...]
    memory: Memory | None
    """None where nothing was compiled to the end."""
    flops: int | None
    """Floating-point operations of each device in products and convolutions; None if that is not known."""
    bounds: Bounds | None
    notes: tuple[str, ...]
    uncertain: int = 0
    """The error of the bytes that each device sends, beyond the notes; 0 for a compiled step, which is exact."""
    timeline: MemoryTimeline | None = None
    """The memory of each device over the course of the step; None if the program was not compiled for CPUs."""
    arguments: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The bytes of each argument of the step on each device, by the name of its parameter, without the padding that
    compilers for some devices add."""
    placed: tuple[PlacedArgument, ...] = ()
    """The arrays in the arguments, and where they lie, as far as known."""
    repeated: tuple[RepeatedWork, ...] = ()
    """The products of which several devices compute the same part, in the order of the step."""
    mapping: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    """The compute mapping of the step."""
    parameter_mapping: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    """The mapping that parameters are stored by, if it is another."""
    axes: tuple[str, ...] = ()
    """The names of the axes of all arrays in the step."""

    def total_sent(self, over: str | None = None, kind: str | None = None, phase: str | None = None) -> int | None:
        """Return the bytes that each device sends in a call; None if that depends on values.

        Arguments:
            over: only collectives along this mesh axis, alone or with others.
            kind: only collectives of this kind.
            phase: only collectives of this phase.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").total_sent()
        0
        """
        chosen = [
            c.total_sent
            for c in self.collectives
            if (over is None or over in (c.axes or ())) and kind in (None, c.kind) and phase in (None, c.phase)
        ]
        return _sum(chosen)

    def count(self, kind: str | None = None) -> int | None:
        """Return how many collectives run in a call, one with several arrays once; None if values decide.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").count("all-gather")
        0
        """
        return _sum([c.times for c in self.collectives if kind in (None, c.kind) and c.place[0] == 0])

    def by_axes(self) -> dict[tuple[str, ...] | None, tuple[Collective, ...]]:
        """Return the collectives by the mesh axes that they run over.

        >>> axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner").by_axes()
        {}
        """
        keys = in_order({c.axes for c in self.collectives})
        return {key: tuple(c for c in self.collectives if c.axes == key) for key in keys}

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
            total = least_sent(self.collectives)
            parts += [f"{_title(axes, found)}\n{_lines(found, total)}" for axes, found in self.by_axes().items()]
            parts += [] if (table := self._table_of_copies()) is None else [written_table(*table)]
            parts += [] if self.timeline is None else [written_table(*self.timeline._section())]
        parts.append("\n".join(f"- {line}" if markdown else line for line in self._figures()))
        if self.notes:
            parts.append("\n".join(f"- {n}" if markdown else f"note: {n}" for n in self.notes))
        return "\n\n".join(parts)

    def _head(self) -> Iterator[str]:
        yield f"{self.step} on {described_mesh(self.mesh)} ({self.platform}, by={self.by!r})"
        verdict = self.verdict
        yield f"{verdict.binds} {verdict.explanation}".strip()

    def _sections(self) -> Iterator[Section]:
        """Yield the tables: the bytes sent over each set of mesh axes, copies, and the arrays in memory at the peak."""
        total = least_sent(self.collectives)
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
            yield f"kept for the backward pass, of the temporaries: {self.timeline._kept()}"
        if self.uncertain:
            yield f"the bytes sent may be off by {describe_bytes(self.uncertain)}"
        flops = "not known" if self.flops is None else written_number(self.flops)
        yield f"flops of each device, in products and convolutions: {flops}"
        if self.bounds is not None and self.bounds.named():
            times = ", ".join(f"{name} {described_seconds(t)}" for name, t in self.bounds.named())
            yield f"least times on {self.bounds.chip}: {times}; bottleneck: {self.bounds.bottleneck}"


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
        if all(c.total_sent is not None for c in same) and least_sent(same) < SMALL * total:
            small += same
            continue
        times = row.times if same[0].times is None else f"{row.times} {_times(same)}".strip()
        # In a loop of unknown length, the bytes of one iteration decide the order.
        weight = sum(c.total_sent or c.sent or 0 for c in same)
        rows.append((weight, dataclasses.replace(row, times=times)))
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    if small:
        kinds, size = ", ".join(dict.fromkeys(c.kind for c in small)), describe_bytes(least_sent(small))
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
    return f"over {described_axes(axes)}: each device sends {_total([c.total_sent for c in found])}"


_HEADER = ("kind", "when", "times", "sent each time", "array", "parameter", "operation", "line", "why")


def _lines(found: Sequence[Collective], total: int) -> str:
    """Write collectives as text, each with its reason on a second line."""
    rows = _rows(found, total)
    sent = (f"{r.times} x {r.sent}" if r.operation != "-" else f"{r.sent}, {r.times} times" for r in rows)
    first = aligned([(s, r.kind, r.when, r.array, r.parameter, r.line) for s, r in zip(sent, rows, strict=True)])
    reasons = (f"\n      {r.operation}: {r.why}" if r.operation != "-" else "" for r in rows)
    return "\n".join(f"  {a}{why}" for a, why in zip(first, reasons, strict=True))


def bounds_on(chip: Chip, collectives: Sequence[Any], memory: Memory | None, flops: int | None) -> Bounds:
    links: dict[tuple[str, ...], float] = {}
    for c in collectives:
        if c.axes and c.total_sent is not None and not c.in_branch:
            links[c.axes] = links.get(c.axes, 0) + c.total_sent / chip.link_bandwidth
    touched = None if memory is None else memory.arguments + memory.results
    return Bounds(
        chip=chip.name,
        compute=None if flops is None else flops / chip.flops,
        memory=None if touched is None else touched / chip.memory_bandwidth,
        links=links,
        capacity=chip.memory,
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _total(values: Sequence[int | None]) -> str:
    total = _sum(values)
    if total is not None:
        return describe_bytes(total)
    return f"at least {describe_bytes(sum(v or 0 for v in values))}, and more that depends on values"
