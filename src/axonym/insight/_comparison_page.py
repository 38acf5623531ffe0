"""The page of a comparison: what differs between mappings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..core.errors import describe_bytes
from ..core.html import Html, Words, bar, code, element, folded, html, joined, over_of, table
from ._report_page import crumb, mapping_line, navigation, section, verdict_card
from ._text import described_seconds, in_order
from ._transfer_groups import known_sent

Comparison: TypeAlias = Any
"""A comparison: its module uses this one, and imports point one way."""

_CHANGES = 8
"""The largest number of differing transfers that are shown at once."""

Quantity: TypeAlias = tuple[Html, str, Mapping[str, float | None], Any]
"""A name, the class of its bars, its value for each mapping, and how a value is written."""


def comparison_page(comparison: Comparison, headline: str, changes: str) -> tuple[str, Html]:
    """Return the title and the body of the page of a comparison."""
    reports = comparison.reports
    first, *others = reports
    report = reports[first]
    words = Words(list(dict.fromkeys(a for r in reports.values() for a in r.mesh)), report.mapping)
    sections: dict[str, tuple[str, Html]] = {}
    sections["bars"] = ("Side by side", _side_by_side(reports, words))
    for i, other in enumerate(others):
        sections[f"changes-{i}"] = (f"{other}, compared with {first}", _changes(comparison, first, other, words))
    each = [
        joined([element("h3", name), verdict_card(r, words, "h4"), mapping_line(r, words)])
        for name, r in reports.items()
    ]
    sections["verdicts"] = ("The verdicts", joined(each))
    lead = element("p", words.said(changes), class_="lead") if changes else None
    body = joined(
        [
            crumb(report, words),
            element("section", element("h1", words.said(headline)), lead, class_="card", aria_label="the comparison"),
            navigation({name: text for name, (text, _) in sections.items()}),
            *(section(text, inside, name=name) for name, (text, inside) in sections.items()),
        ]
    )
    return f"{headline} {report.step}", body


def _quantities(reports: Mapping[str, Any], words: Words) -> Iterator[Quantity]:
    """Yield what can be compared: the bounds, or else the bytes sent; and the memory."""
    bounds = {name: r.bounds for name, r in reports.items()}
    links = in_order({a for r in reports.values() for a in r.by_axes()})
    if all(b is not None and b.named() for b in bounds.values()):
        yield html("compute"), "", {n: b.compute for n, b in bounds.items()}, described_seconds
        memory = {n: b.memory for n, b in bounds.items()}
        yield html("reading arguments, writing results"), "mid", memory, described_seconds
        for a in links:
            times = {n: b.links.get(a, 0.0) for n, b in bounds.items()}
            yield joined(["sending over ", words.axes(a)]), words.color(a), times, described_seconds
    else:
        for a in links:
            sent = {n: known_sent(r.by_axes().get(a, ())) for n, r in reports.items()}
            yield joined(["sent over ", words.axes(a)]), words.color(a), sent, describe_bytes
    held = {n: None if r.memory is None else r.memory.total for n, r in reports.items()}
    yield html("memory"), "", held, describe_bytes


def _side_by_side(reports: Mapping[str, Any], words: Words) -> Html:
    """Draw a bar for each mapping and quantity; bars of one unit have one axis."""
    shown = [q for q in _quantities(reports, words) if any(v for v in q[2].values())]
    rows = []
    for name, kind, values, written in shown:
        most = max((v or 0 for n, _, vs, w in shown if w is written for v in vs.values()), default=0) or 1
        base = next(iter(values.values()))
        stacks = [
            [bar((v or 0) / most, kind) for v in values.values()],
            [element("span", "not known" if v is None else written(v), class_="num") for v in values.values()],
            [html(""), *(_ratio(base, v) for v in [*values.values()][1:])],
        ]
        rows.append(
            element("li", element("span", name), *(element("span", *stack, class_="stack") for stack in stacks))
        )
    order = joined([element("b", n) for n in reports], ", ")
    return joined([element("p", "From above: ", order, "."), element("ul", *rows, class_="pair")])


def _ratio(before: float | None, after: float | None) -> Html:
    """Write by how much a value changes: `2.7x less`."""
    if before is None or after is None or before == after:
        return element("span", "" if before is None or after is None else "the same", class_="soft")
    if not before or not after:
        said = "only the first" if before else "not the first"
    else:
        ratio = max(before, after) / min(before, after)
        said = f"{ratio:.2g}× {'less' if after < before else 'more'}" if ratio >= 1.05 else "nearly the same"
    return element("span", said, class_="less" if after < before else "more")


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
    lines = comparison.differences(first, other)
    mapped = joined([element("p", "In the mapping:"), element("ul", *entries)]) if entries else None
    if not lines:
        return joined([mapped, element("p", "Both send the same.")])
    header = ("times × bytes", "transfer", "why")
    shown = [_line(line, words) for line in lines[:_CHANGES]]
    rest = [_line(line, words) for line in lines[_CHANGES:]]
    parts = [mapped, element("h3", "Transfers added (+), and removed (−)"), table("changes", header, shown)]
    if rest:
        parts.append(folded(f"{len(rest)} smaller", table("smaller changes", header, rest)))
    return joined(parts)


def _entry(entry: Any, words: Words) -> Html:
    return joined([words.axis(a) for a in over_of(entry)], "+") if over_of(entry) else html("not sharded")


def _line(line: str, words: Words) -> Sequence[Html]:
    """Return the cells for a line of `Comparison.differences`."""
    found = re.match(r"([+-]) (.*?)  (.*)", line, re.DOTALL)
    assert found is not None, line
    sign, size, text = found.groups()
    what, _, why = text.partition(": ")
    number = element("span", f"{'+' if sign == '+' else '−'} {size}", class_=f"num {'more' if sign == '+' else 'less'}")
    return number, words.said(what), words.said(why or "not known")
