"""Write the transfers of a page: the costliest ones, and all of them as rows that open, with their lines of code."""

from __future__ import annotations

import dataclasses
import linecache
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, bar, code, element, folded, html, joined
from ..core.source_lines import Source
from ._figures import total_sent
from ._text import Said, described_seconds, phase_of
from ._transfer_groups import SMALL, grouped, known_sent, path_of, why
from .records import Collective

Report: TypeAlias = Any
"""A report: its module uses this one, and imports point one way."""

_SMALLER = 60
"""How many rows of less than 1% are written."""
_AROUND = 3
"""How many lines of code are shown before and after a line."""


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.0095 else f"{100 * share:.0f}%"


def short_operation(operation: str) -> str:
    """Write an operation with the axes that it sums over: `dot along embed`."""
    if not isinstance(operation, Said):
        return operation
    operands, results = (
        {a.name: None for t in terms for a in t} for terms in (operation.of.operands, operation.of.results)
    )
    along = [n for n in operands if n not in results]
    return f"{operation.of.name} along {', '.join(along)}" if along and results else operation.of.name


@dataclasses.dataclass(frozen=True)
class _Alike:
    """The transfers that differ only in the layer."""

    one: Collective
    all: Sequence[Collective]

    @property
    def known(self) -> bool:
        return all(c.total_sent is not None for c in self.all)

    @property
    def sent(self) -> int:
        return known_sent(self.all)

    def size(self) -> str:
        """Write how often it is sent, and the bytes."""
        times = [c.times for c in self.all if c.times is not None]
        often = str(sum(times)) if len(times) == len(self.all) else "some"
        each = "some bytes" if self.one.sent is None else describe_bytes(self.one.sent)
        return f"{often} × {each} = {describe_bytes(self.sent) if self.known else 'depends on values'}"


class Transfers:
    """The transfers of a report, the ones of repeated layers together, and the lines of code around them.

    Arguments:
        source: whether there are lines of code.
    """

    def __init__(self, report: Report, words: Words, source: bool):
        self._report, self._words = report, words
        self._total = known_sent(report.collectives)
        together: dict[Any, list[Collective]] = {}
        for c in report.collectives:
            key = c.kind, c.axes, c.array, c.phase, c.operation, c.source, c.reason, path_of(c)
            together.setdefault(key, []).append(c)
        found = (_Alike(same[0], same) for same in together.values())
        # Where values decide how often something is sent, one time decides the order.
        self._found = sorted(found, key=lambda x: (x.sent, sum(c.sent or 0 for c in x.all)), reverse=True)
        places = dict.fromkeys(x.one.source for x in self._found if source and x.one.source is not None)
        self._lines = {place: f"line-{i}" for i, place in enumerate(places) if _around(place)}

    def costliest(self) -> Html:
        """Write the lines of the verdict, each with a bar, its bytes and its time."""
        groups = grouped(self._report.collectives)  # the verdict has a line for each of the first
        pairs = zip(self._report.verdict.costliest, groups, strict=False)
        items = [self._costly(line, _Alike(group[0], group)) for line, group in pairs]
        said = f"{describe_bytes(self._total)} are sent by each device in a call. "
        link = element("a", f"All {counted(len(self._found), 'transfer')}", href="#transfers")
        after = joined([said, link]) if self._found else "Nothing is sent."
        return element("section", element("h2", "The costliest transfers"), *items, element("p", after, class_="small"))

    def _costly(self, line: str, x: _Alike) -> Html:
        share, _, rest = line.partition(": ")
        reason = why(x.all)
        what = rest.removesuffix(f": {reason}")
        number = joined([describe_bytes(x.sent), self._time(x)], " · ")
        top = [element("b", share), bar(x.sent / max(1, self._total), self._words.color(x.one.axes))]
        said = [
            element("p", *top, element("span", number, class_="num soft"), class_="top"),
            element("p", self._words.said(what), ":" if what != rest else None),
            element("p", self._words.said(reason), class_="soft") if what != rest else None,
        ]
        return element("div", *said, self._code(x), class_="item")

    def all(self) -> Html:
        """Write all transfers as rows that open, the ones of less than 1% folded together."""
        if not self._found:
            return html("")
        large = [x for x in self._found if x.sent >= SMALL * self._total or not x.known]
        small = [x for x in self._found if x.sent < SMALL * self._total and x.known]
        rows = [self._row(x) for x in large]
        if small:
            inside = [self._row(x) for x in small[:_SMALLER]]
            if rest := small[_SMALLER:]:
                inside.append(element("p", f"and {len(rest)} smaller: report.to_json() has them", class_="small flat"))
            title = f"{len(small)} of less than 1% each: {describe_bytes(sum(x.sent for x in small))} in all"
            rows.append(folded(title, *inside, class_="rest"))
        label = element("label", "Filter ", element("input", id="filter", type="search", placeholder="all-gather mlp"))
        return joined([element("p", label, hidden=True, data_scripted=True), element("div", *rows, class_="rows")])

    def _row(self, x: _Alike) -> Html:
        c, share = x.one, x.sent / max(1, self._total)
        name = short_operation(c.operation or "")
        what = joined([" in the backward pass of " if c.phase == "backward" else " in ", code(name)]) if name else None
        if c.parameters:
            gradient = "the gradient of " if c.kind in ("all-reduce", "reduce-scatter") else ""
            what = joined([f" of {gradient}", code(path_of(c))])
        row = element(
            "span",
            element("b", percent(share) if x.known else "?"),
            bar(share, self._words.color(c.axes)),
            element("span", element("b", c.kind), " over ", self._words.axes(c.axes), what),
            element("span", phase_of(c.phase), class_="small"),
            code(str(c.source)) if c.source else element("span", "no line", class_="small"),
            class_="row",
        )
        known: Mapping[str, str] = {
            "why": self._words.said(c.reason or "not known"),
            "array": joined([self._words.array(c.array), " on each device"]),
            "sent": joined([x.size(), self._time(x), f"among {c.devices} devices"], ", "),
            "operation": code(c.operation) if c.operation else "no named operation",
        }
        details = element("dl", *(part for k, v in known.items() for part in (element("dt", k), element("dd", v))))
        return folded(row, details, self._code(x))

    def _time(self, x: _Alike) -> str | None:
        """Return the time of a transfer: its share of the time of all over its mesh axes."""
        bounds, axes = self._report.bounds, x.one.axes
        known = [c for c in self._report.collectives if c.axes == axes and c.total_sent is not None]
        # The bound has the branches that send least.
        whole = total_sent(known, least=True)
        if bounds is None or axes not in bounds.links or x.one.in_branch or not whole:
            return None
        return described_seconds(bounds.links[axes] * x.sent / whole)

    # --- lines of code ---

    def _code(self, x: _Alike) -> Html | None:
        """Return the place of the code of a transfer, which the script fills."""
        name = self._lines.get(x.one.source) if x.one.source is not None else None
        return element("div", data_line=name) if name is not None else None

    def lines(self) -> Html:
        """Write the lines of code around each transfer, each place once."""
        return joined([element("div", _listing(place), id=name) for place, name in self._lines.items()])


def _around(source: Source) -> dict[int, str]:
    """Return the lines around a line by their numbers; none if the file cannot be read."""
    try:
        found = linecache.getlines(source.file)
    except ValueError:  # no file can have such a name
        return {}
    numbers = range(max(1, source.line - _AROUND), min(len(found), source.line + _AROUND) + 1)
    return {n: found[n - 1].rstrip() for n in numbers}


def _listing(source: Source) -> Html:
    """Return the lines around a line, which is marked."""
    path = os.path.relpath(source.file)
    path = str(source).rpartition(":")[0] if path.startswith("..") else path.replace(os.sep, "/")
    lines = [
        element("mark", f"{n:5}  {text}") if n == source.line else html(f"{n:5}  {text}")
        for n, text in _around(source).items()
    ]
    title = f"{source.function} in {path}:{source.line}"
    return element("div", element("p", title), element("pre", joined(lines, "\n"), tabindex="0"), class_="code")
