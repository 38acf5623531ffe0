"""Tables of reports, comparisons and plans: the text writes their cells, and the page adds bars and colors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..core.errors import counted, describe_bytes
from ..core.html import Html, Words, bar, element, table
from ._text import phase_of
from .records import HeldArray

_SHOWN = 8
"""The largest number of held arrays that are written one by one."""


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cells: Sequence[str]
    shares: Sequence[float] = ()
    """The shares of their width that bars fill on a page; empty if there are no bars."""
    axes: tuple[str, ...] | None = ()
    """The mesh axes that have the color of the bars."""


def column_of(
    title: str,
    values: Sequence[Any],
    written: Callable[[Any], str],
    axes: tuple[str, ...] | None = (),
    most: float | None = None,
) -> Column:
    """Make a column of numbers, with bars that are shares of the most; None is not known."""
    most = max((v or 0 for v in values), default=0) if most is None else most
    cells = ["not known" if v is None else written(v) for v in values]
    return Column(title, cells, [(v or 0) / (most or 1) for v in values], axes)


def rows_of(columns: Iterable[Column]) -> list[tuple[str, ...]]:
    """Return the cells of a table by rows."""
    return list(zip(*(c.cells for c in columns), strict=True))


def measured(number: str, share: float, kind: str = "") -> Html:
    """Write a number with a bar beside it."""
    return element("span", element("span", number, class_="num"), bar(share, kind), class_="cell")


def on_page(label: str, columns: Sequence[Column], words: Words, turned: bool = False) -> Html:
    """Write a table for a page.

    Arguments:
        turned: whether each column is a row there.
    """
    shown = [
        [measured(cell, c.shares[i], words.color(c.axes) if c.axes != () else "") if c.shares else words.said(cell)
         for i, cell in enumerate(c.cells)]
        for c in columns
    ]  # fmt: skip
    titles = [words.said(c.title) for c in columns]
    if turned:
        rows = [[title, *cells] for title, cells in zip(titles[1:], shown[1:], strict=True)]
        return table(label, [titles[0], *shown[0]], rows)
    return table(label, titles, zip(*shown, strict=True))


def held_columns(arrays: Sequence[HeldArray], whole: int, arguments: int | None = None) -> list[Column]:
    """Describe arrays that a device holds, the largest first, in columns; bars are shares of a whole.

    Arguments:
        arguments: the bytes of arguments beside them, for a first row.
    """
    rows = [] if arguments is None else [("arguments", describe_bytes(arguments), "-", "-", "-")]
    sizes = [] if arguments is None else [arguments]
    for h in arrays[:_SHOWN]:
        size = f"{f'{h.count} x ' if h.count > 1 else ''}{describe_bytes(h.bytes // h.count)}"
        rows.append((h.array, size, phase_of(h.phase), str(h.source or "-"), h.operation))
        sizes.append(h.bytes)
    if left := arrays[_SHOWN:]:
        sizes.append(sum(h.bytes for h in left))
        smaller = counted(sum(h.count for h in left), "smaller one")
        rows.append((smaller, describe_bytes(sizes[-1]), "-", "-", "-"))
    array, written, phases, lines, by = zip(*rows, strict=True) if rows else [()] * 5
    return [
        Column("array on each device", array),
        Column("bytes", written, [n / (whole or 1) for n in sizes]),
        Column("made in", phases),
        Column("line", lines),
        Column("by", by),
    ]
