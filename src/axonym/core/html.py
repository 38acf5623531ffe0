"""Write HTML: elements whose text is escaped, words with the colors of mesh axes, and arrays with their cuts.

Pages, notebooks and the pictures of the documentation speak one language. A color is a mesh axis, which the text names
too. Filled is what the first device holds, and a cut between shards has the color of its mesh axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

_EMPTY = ("br", "input", "meta")
_COLORS = 5
"""The number of mesh axes that have a color; further ones are grey."""
_CLOSEST = 4
"""The least distance between two cuts."""

COLORS = {
    "bg": ("#ffffff", "#14171c"),
    "card": ("#f4f6f8", "#1d2128"),
    "text": ("#1b1f24", "#e6e9ee"),
    "soft": ("#57606a", "#a3acb8"),
    "line": ("#d8dce1", "#353b45"),
    "empty": ("#e4e6e9", "#2c3139"),
    "fill": ("#4b5560", "#a9b4c1"),
    "mid": ("#9aa2ab", "#6d7783"),
    "pale": ("#dadfe5", "#434b56"),
    "fix": ("#a40e26", "#ff8b94"),
    "good": ("#17692f", "#5fd182"),
    "m0": ("#57606a", "#a3acb8"),
    "m1": ("#0072b2", "#56b4e9"),
    "m2": ("#ad4700", "#f0904d"),
    "m3": ("#00785a", "#35c9a0"),
    "m4": ("#a04a7d", "#e59cc6"),
    "m5": ("#7a6a00", "#e8d44d"),
}
"""The colors for a light and a dark scheme. Mesh axes have m1 to m5, and m0 for further ones."""

STYLE = """\
.soft { color: var(--soft) } .num { white-space: nowrap; font-variant-numeric: tabular-nums }
b.m0, b.m1, b.m2, b.m3, b.m4, b.m5 { color: var(--c) }
.m0 { --c: var(--m0); --d: var(--c) } .m1 { --c: var(--m1); --d: var(--c) } .m2 { --c: var(--m2); --d: var(--c) }
.m3 { --c: var(--m3); --d: var(--c) } .m4 { --c: var(--m4); --d: var(--c) } .m5 { --c: var(--m5); --d: var(--c) }
u { text-decoration: none; border-bottom: 3px solid var(--c) }
.badge { font-size: 12px; font-weight: 600; border: 1px solid currentColor; border-radius: 10px; padding: 0 7px; \
margin-left: 8px; white-space: nowrap }
.bar { display: flex; height: 12px; background: var(--empty); flex: 1; min-width: 60px }
.bar i { --c: var(--fill); --d: var(--c); min-width: 1px; background: linear-gradient(var(--c) 50%, var(--d) 50%); \
flex: none }
.tree, .tree ul { list-style: none; padding: 0 } .tree ul { margin-left: 5px; padding-left: 18px; \
border-left: 1px solid var(--line) } .tree li > .leaf { padding: 3px 0 3px 17px }
.leaf, .node { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: center }
.node { display: inline-flex; width: calc(100% - 20px) }
.tree .name { flex: 0 1 calc(300px - 24px * var(--depth, 0)) } .tree .num { min-width: 74px; text-align: right }
.tree .bar { flex: 0 0 90px } .leaf svg, .node svg { flex: none }
.held { fill: var(--fill) } .empty { fill: var(--empty) }
.line { fill: none; stroke: var(--mid) } [class^=cut] { stroke-width: 2 } .cut0 { stroke: var(--m0) }
.cut1 { stroke: var(--m1) } .cut2 { stroke: var(--m2) } .cut3 { stroke: var(--m3) } .cut4 { stroke: var(--m4) }
.cut5 { stroke: var(--m5) }"""
"""The style of what pages and notebooks share."""


def light_dark(*names: str) -> str:
    """Return the definitions of colors in CSS, all by default; the scheme of an element decides between the two."""
    return "; ".join(f"--{name}: light-dark({', '.join(COLORS[name])})" for name in names or COLORS)


class Html(str):
    """Text that is HTML already. It is well-formed XML, too."""

    __slots__ = ()


def visible(text: str) -> str:
    """Return text with its control characters, and the ones that turn text around, as Python writes them in strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\t\n" else ascii(c)[1:-1] for c in text)


def html(text: str) -> Html:
    """Return HTML as it is, and other text as HTML that shows it."""
    return text if isinstance(text, Html) else Html(escape(visible(text)))


def element(tag: str, *children: str | None, **attributes: Any) -> Html:
    """Return an element around HTML or text.

    Attributes that are False or None are left out; `class_` and `data_over` are written `class` and `data-over`.
    """
    written = ""
    for name, value in attributes.items():
        if value is not None and value is not False:
            text = escape(visible("" if value is True else str(value)), {'"': "&quot;"})
            written += f' {name.rstrip("_").replace("_", "-")}="{text}"'
    return Html(f"<{tag}{written}/>" if tag in _EMPTY else f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str | None], between: str = "") -> Html:
    """Join HTML and text."""
    return Html(html(between).join(html(part) for part in parts if part is not None))


def listed(parts: Sequence[str]) -> Html:
    """Join HTML and text to a list: `a, b and c`."""
    return joined([joined(parts[:-1], ", "), parts[-1]], " and ") if len(parts) > 1 else joined(parts)


def table(label: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Return a table whose first cells name its rows. If it is wider than the page, it scrolls by itself."""
    head = element("tr", *(element("th", cell, scope="col") if cell else element("td") for cell in header))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inside = element("table", element("thead", head), element("tbody", *body))
    return element("div", inside, class_="wide", tabindex="0", role="region", aria_label=label)


def folded(summary: str, *children: str | None, **attributes: Any) -> Html:
    """Return something that opens: its summary is shown, and on request the rest."""
    return element("details", element("summary", summary), *children, **attributes)


def code(text: str) -> Html:
    return element("code", text)


def bar(share: float, kind: str = "") -> Html:
    """Return a bar that fills a share of its width; the number is text beside it."""
    return stacked([(share, kind)])


def stacked(parts: Iterable[tuple[float, str]]) -> Html:
    """Return a bar with several parts, each with its share of the width and its kind."""
    filled = [
        element("i", class_=kind or None, style=f"width:{100 * min(share, 1):.3g}%")
        for share, kind in parts
        if share > 0
    ]
    return element("span", *filled, class_="bar", aria_hidden="true")


def picture(label: str, width: float, height: float, *parts: Html) -> Html:
    """Return a picture, which scrolls by itself if it is wider than the page."""
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "style": f"min-width:{min(width, 900):g}px"}
    inside = element("svg", *parts, role="img", aria_label=label, **size)
    return element("div", inside, class_="wide", tabindex="0", role="group", aria_label="a picture")


def cuts(
    corner: tuple[float, float], size: tuple[float, float], over: Sequence[Sequence[str]], mesh: Mapping[str, int]
) -> list[Html]:
    """Draw an array of two axes: the shard of the first device is filled, and there is a cut between any two shards.

    `over` has the mesh axes of the rows and of the columns. A mesh axis has the color of its place in `mesh`.
    """
    (left, top), (width, height) = corner, size
    rows, columns = (math.prod(mesh[a] for a in axes) for axes in over)
    parts = [
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" class="empty"/>',
        f'<rect x="{left:g}" y="{top:g}" width="{width / columns:g}" height="{height / rows:g}" class="held"/>',
    ]
    for count, axes, horizontal, length in ((rows, over[0], True, height), (columns, over[1], False, width)):
        step = -(-count * _CLOSEST // int(length))  # of more cuts than fit, some are drawn
        for i in range(step, count, step):
            before, after = (np.unravel_index(j, [mesh[a] for a in axes]) for j in (i - step, i))
            axis = next(a for a, m, n in zip(axes, before, after, strict=True) if m != n)
            number = [*mesh].index(axis) + 1
            color = number if number <= _COLORS else 0
            row, column = top + height * i / count, left + width * i / count
            at = f"M{left:g} {row:g}h{width:g}" if horizontal else f"M{column:g} {top:g}v{height:g}"
            parts.append(f'<path d="{at}" class="cut{color}"/>')
    parts.append(f'<path d="M{left:g} {top:g}h{width:g}v{height:g}h{-width:g}z" class="line"/>')
    return [Html(part) for part in parts]


def copyable(title: str, text: str) -> Html:
    """Return code below a title, with a button that copies it, which the script of the page shows."""
    button = element("button", "copy", type="button", hidden=True, data_copies=True)
    return element("div", element("p", title, " ", button), element("pre", text, tabindex="0"), class_="code")


class Words:
    """The words of a report, in which mesh axes have their colors, and code looks like code.

    Arrays show the mesh axes that the mapping shards their axes over.
    """

    def __init__(self, mesh: Collection[str], mapping: Mapping[str, Any] | None = None):
        self._class = {axis: f"m{i + 1 if i < _COLORS else 0}" for i, axis in enumerate(mesh)}
        self._mapping = mapping or {}
        axis = "|".join(sorted(map(re.escape, mesh), key=len, reverse=True)) or r"(?!)"
        self._marked = re.compile(
            rf"(?P<over>\b(?:over|along|axis|axes) )(?P<axes>(?:{axis})(?:(?: and |, )(?:{axis}))*)(?![\w=])"
            r"|(?P<code>\b\w+\[[^\[\]]*\]|(?<!\w)[\w.-]+\.py:\d+|(?<![\w/])[\w*]+(?:/[\w*]+)+)"
            r"|(?<=at least )(?P<time>\d[\d.e+-]* \w?s\b)"
        )

    def color(self, axes: Sequence[str] | None) -> str:
        """Return the class of a bar for transfers over some mesh axes: it has the colors of the first two."""
        known = [self._class.get(a, "m0") for a in axes or ()]
        return " ".join([known[0], *(f"and-{k}" for k in known[1:2])]) if known else "m0"

    def axis(self, name: str, text: str = "") -> Html:
        return element("b", text or name, class_=self._class.get(name, "m0"))

    def axes(self, names: Sequence[str] | None) -> Html:
        if names is None:
            return html("mesh axes that are not known")
        return joined([self.axis(n) for n in names], " and ") if names else html("no mesh axis")

    def mesh(self, sizes: Mapping[str, int]) -> Html:
        return joined([self.axis(a, f"{a}={n}") for a, n in sizes.items()], " ") if sizes else html("one device")

    def entries(self, mapping: Mapping[str, Any]) -> Html:
        """Write a mapping: `batch/data mlp/model`."""
        shown = ((n, over_of(over)) for n, over in mapping.items() if over)
        return joined([code(joined([n, "/", joined(map(self.axis, over), "+")])) for n, over in shown], " ")

    def array(self, text: str) -> Html:
        """Write an array on a device, in which the axes that a mapping shards are underlined with their colors."""
        kind, _, inside = text.partition("[")
        if not inside.endswith("]"):
            return code(text)
        cells = []
        for cell in inside[:-1].split(", "):
            name, _, size = cell.partition("=")
            over = over_of(self._mapping.get(name)) if size else ()
            cells.append(joined([self._underlined(name, over), "=", size]) if size else html(cell))
        return code(joined([kind, "[", joined(cells, ", "), "]"]))

    def placed(
        self, axes: Sequence[str | None], sizes: Sequence[int], over: Sequence[Sequence[str]], kind: str = ""
    ) -> Html:
        """Write the axes of an array, with the mesh axes that they are sharded over, after its dtype if it is given."""
        cells = list[Html]()
        for n, size, by in zip(axes, sizes, over, strict=True):
            name = joined([self._underlined(n, by), "="]) if n else None
            cells.append(joined([name, str(size), joined(["/", joined(map(self.axis, by), "+")]) if by else None]))
        return code(joined([kind, "[", joined(cells, ", "), "]"]))

    def _underlined(self, name: str, over: Sequence[str]) -> Html:
        return element("u", name, class_=self._class.get(over[0], "m0")) if over else html(name)

    def said(self, text: str) -> Html:
        """Write a sentence."""
        parts, end = list[str](), 0
        for found in self._marked.finditer(text):
            parts.append(text[end : found.start()])
            end = found.end()
            if found["axes"]:
                names = re.split("( and |, )", found["axes"])
                parts += [found["over"], *(n if i % 2 else self.axis(n) for i, n in enumerate(names))]
            else:
                parts.append(self.array(found[0]) if found["code"] else element("b", found[0]))
        return joined([*parts, text[end:]])


def over_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a mapping."""
    return () if not entry else (entry,) if isinstance(entry, str) else tuple(entry)
