"""Write the transfers of a page: the costliest ones, and all of them as rows that open, with their lines of code."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, bar, code, element, folded, html, joined
from ..core.source_lines import Source
from ._figures import total_sent
from ._text import described_seconds, phase_of, short_operation
from ._transfer_groups import SMALL, grouped, known_sent, path_of, waited, why
from .records import Collective

Report: TypeAlias = Any
"""A report: its module uses this one, and imports point one way."""

_SMALLER = 60
"""How many rows of less than 1% are written."""
_AROUND = 3
"""How many lines of code are shown before and after a line."""


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.0095 else f"{100 * share:.0f}%"


_Alike: TypeAlias = list[Collective]
"""The transfers that differ only in the layer."""


def _known(found: _Alike) -> bool:
    return all(c.total_sent is not None for c in found)


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
        # Where values decide how often something is sent, one time decides the order.
        by_size = sorted(together.values(), key=lambda found: sum(c.sent or 0 for c in found), reverse=True)
        self._found = sorted(by_size, key=known_sent, reverse=True)
        places = dict.fromkeys(x.source for x, *_ in self._found if source and x.source is not None)
        self._lines = {place: f"line-{i}" for i, place in enumerate(places) if _around(place)}

    def costliest(self) -> Html:
        """Write the lines of the verdict, each with a bar, its bytes and its time."""
        groups = grouped(self._report.collectives)  # the verdict has a line for each of the first
        pairs = zip(self._report.verdict.costliest, groups, strict=False)
        items = [self._costly(line, group) for line, group in pairs]
        said = f"{describe_bytes(self._total)} are sent by each device in a call. "
        link = element("a", f"All {counted(len(self._found), 'transfer')}", href="#transfers")
        after = joined([said, link]) if self._found else "Nothing is sent."
        return element("section", element("h2", "The costliest transfers"), *items, element("p", after, class_="small"))

    def _costly(self, line: str, found: _Alike) -> Html:
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
        return element("div", *said, self._code(found), class_="item")

    def all(self) -> Html:
        """Write all transfers as rows that open, the ones of less than 1% folded together."""
        if not self._found:
            return html("")
        small = [x for x in self._found if known_sent(x) < SMALL * self._total and _known(x)]
        large = [x for x in self._found if known_sent(x) >= SMALL * self._total or not _known(x)]
        rows = [self._row(x) for x in large]
        if small:
            inside = [self._row(x) for x in small[:_SMALLER]]
            if rest := small[_SMALLER:]:
                inside.append(element("p", f"and {len(rest)} smaller: report.to_json() has them", class_="small flat"))
            title = f"{len(small)} of less than 1% each: {describe_bytes(sum(map(known_sent, small)))} in all"
            rows.append(folded(title, *inside, class_="rest"))
        label = element("label", "Filter ", element("input", id="filter", type="search", placeholder="all-gather mlp"))
        return joined([element("p", label, hidden=True, data_scripted=True), element("div", *rows, class_="rows")])

    def _row(self, found: _Alike) -> Html:
        c, known, sent = found[0], _known(found), known_sent(found)
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
        details: Mapping[str, str] = {
            "why": self._words.said(c.reason or "not known"),
            "array": joined([self._words.array(c.array), " on each device"]),
            "sent": joined([size, self._time(found), f"among {c.devices} devices"], ", "),
            **self._exposed(found),
            "operation": code(c.operation) if c.operation else "no named operation",
        }
        listed = element("dl", *(part for k, v in details.items() for part in (element("dt", k), element("dd", v))))
        return folded(row, listed, self._code(found))

    def _time(self, found: _Alike) -> str | None:
        """Return the time of a transfer: its share of the time of all over its mesh axes."""
        bounds, axes = self._report.bounds, found[0].axes
        known = [c for c in self._report.collectives if c.axes == axes and c.total_sent is not None]
        # The bound has the branches that send least.
        whole = total_sent(known, least=True)
        if bounds is None or axes not in bounds.links or found[0].in_branch or not whole:
            return None
        return described_seconds(bounds.links[axes] * known_sent(found) / whole)

    def _exposed(self, found: _Alike) -> dict[str, str]:
        """Return whether computing runs beside a transfer, and about how long a call waits for it."""
        if (beside := found[0].beside) is None:
            return {}
        overlapped = "partly overlapped" if beside else "not overlapped"
        seconds = sum(map(waited, found))
        if seconds:
            return {"exposed": f"{overlapped}, about {described_seconds(seconds)}"}
        return {"exposed": "no: computing hides it" if beside else overlapped}

    # --- lines of code ---

    def _code(self, found: _Alike) -> Html | None:
        """Return the place of the code of a transfer, which the script fills."""
        name = self._lines.get(source) if (source := found[0].source) is not None else None
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
