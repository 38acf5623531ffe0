"""Write HTML: elements whose text is escaped, and the words of reports with the colors of mesh axes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_EMPTY = ("br", "input", "meta")
_COLORS = 5
"""The number of mesh axes that have a color; further ones are grey."""


class Html(str):
    """Text that is HTML already. It is well-formed XML, too."""

    __slots__ = ()


def visible(text: str) -> str:
    """Return text with its control characters, and the ones that turn text around, as Python writes them in strings."""
    return (
        text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else ascii(c)[1:-1] for c in text)
    )


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


def copyable(title: str, text: str) -> Html:
    """Return code below a title, with a button that copies it, which the script of the page shows."""
    button = element("button", "copy", type="button", hidden=True, data_copies=True)
    return element("div", element("p", title, " ", button), element("pre", text, tabindex="0"), class_="code")


class Words:
    """The words of a report, in which mesh axes have their colors, and code looks like code.

    Arguments:
        mesh: the mesh axes, in order.
        mapping: the mesh axes that logical axes are sharded over, which arrays show.
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
        return joined(
            [
                code(joined([n, "/", joined([self.axis(a) for a in over_of(over)], "+")]))
                for n, over in mapping.items()
                if over
            ],
            " ",
        )

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

    def placed(self, axes: Sequence[str | None], sizes: Sequence[int], over: Sequence[Sequence[str]]) -> Html:
        """Write the axes of an argument, with the mesh axes that they are sharded over."""
        cells = [
            joined(
                [
                    joined([self._underlined(n, by), "="]) if n else None,
                    str(size),
                    joined(["/", joined([self.axis(a) for a in by], "+")]) if by else None,
                ]
            )
            for n, size, by in zip(axes, sizes, over, strict=True)
        ]
        return code(joined(["[", joined(cells, ", "), "]"]))

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
