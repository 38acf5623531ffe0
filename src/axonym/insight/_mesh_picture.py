"""Draw a mesh: a cell for each device, and an arrow along each mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..core.errors import describe_bytes
from ._html import Html, Words, element, picture

_MOST = 64
"""How many columns and rows are drawn."""
_LABELS = 150
"""The width of the labels of rows."""


def mesh_picture(mesh: Mapping[str, int], over: Sequence[str], sent: Mapping[str, int | None], words: Words) -> Html:
    """Draw a mesh, whose largest axis has the columns.

    Arguments:
        over: the mesh axes that shard arrays, each as names with spaces between them. The first is shown; the script of
            the page shows the others.
        sent: the bytes that each device sends along each mesh axis.
    """
    large = {a: n for a, n in mesh.items() if n > 1}
    across = max(large, key=lambda a: large[a])
    down = {a: n for a, n in large.items() if a != across}
    columns, rows = min(large[across], _MOST), min(math.prod(down.values()), _MOST)
    width, height = min(48, max(10, 640 // columns)), min(28, max(7, 180 // rows))
    left, top = (_LABELS + 30 * len(down) if down else 0), 54
    parts = [element("rect", x=left, y=top, width=columns * width, height=rows * height, fill="var(--empty)")]
    for i, names in enumerate(over):
        lies = _lying(names.split(), across, columns, down, rows, (left, top, width, height))
        parts.append(element("g", *lies, data_over=names, style="display:none" if i else None))
    if width >= 24 and height >= 16:
        parts += [
            element("text", str(_number(c, r, across, large)), x=left + width * c + width // 2,
                    y=top + height * r + height // 2 + 4, class_="id")
            for c in range(columns) for r in range(rows)
        ]  # fmt: skip
    most = max((n or 0 for n in sent.values()), default=0)
    for i, axis in enumerate([across, *down]):
        n = sent.get(axis)
        thick = 3 + 9 * (n or 0) / most if most else 3
        much = "" if n == 0 else f", {describe_bytes(n)}" if n is not None else ", depends on values"
        label = f"{axis}={mesh[axis]}{much}"
        if i == 0:
            parts.append(_arrow(left, 38, columns * width, thick, words.color([axis])))
            parts.append(element("text", label, x=left, y=20))
        else:
            parts.append(_arrow(_LABELS + 30 * i - 15, top, rows * height, thick, words.color([axis]), turned=True))
            parts.append(element("text", f"{label} ↓", x=0, y=top + 16 * i))
    rest = [
        f"{more} more {kind} are alike"
        for kind, more in (("columns", large[across] - columns), ("rows", math.prod(down.values()) - rows))
        if more > 0
    ]
    bottom = top + rows * height
    if rest:
        parts.append(element("text", ", ".join(rest), x=left, y=bottom + 18))
    wide, high = left + max(columns * width, 260) + 8, max(bottom + (26 if rest else 6), top + 16 * len(down) + 6)
    named = ", ".join(f"{a}={n}" for a, n in mesh.items())
    return picture(f"The mesh {named}", wide, high, *parts)


def _lying(
    over: Sequence[str], across: str, columns: int, down: Mapping[str, int], rows: int, place: tuple[int, int, int, int]
) -> list[Html]:
    """Draw the cells that hold the shard of the first device, and gaps between cells with other shards."""
    left, top, width, height = place
    inside = [(a, n) for a, n in down.items() if a in over]
    shards = [tuple(_index(r, a, down) for a, _ in inside) for r in range(rows)]
    wide = width if across in over else columns * width
    same = [f"M{left} {top + height * r}h{wide}v{height}h{-wide}z" for r, shard in enumerate(shards) if not any(shard)]
    gaps = [f"M{left + width * c} {top}v{rows * height}" for c in range(1, columns)] if across in over else []
    gaps += [f"M{left} {top + height * r}h{columns * width}" for r in range(1, rows) if shards[r] != shards[r - 1]]
    thin = 3 if min(width, height) > 12 else 1.5
    return [
        element("path", d="".join(same), fill="var(--fill)"),
        element("path", d="".join(gaps), stroke="var(--bg)", stroke_width=thin),
    ]


def _index(row: int, axis: str, down: Mapping[str, int]) -> int:
    """Return the place of a row along a mesh axis; the last axis runs fastest."""
    names = list(down)
    after = math.prod(down[a] for a in names[names.index(axis) + 1 :])
    return row // after % down[axis]


def _number(column: int, row: int, across: str, large: Mapping[str, int]) -> int:
    """Return the number of a device in the order of the mesh."""
    down = {a: n for a, n in large.items() if a != across}
    number = 0
    for axis, size in large.items():
        number = number * size + (column if axis == across else _index(row, axis, down))
    return number


def _arrow(x: float, y: float, length: float, thick: float, kind: str, turned: bool = False) -> Html:
    """Draw an arrow with two heads, to the right of a point or below it."""
    head, half = thick + 4, thick / 2
    half_head = head * 0.8
    path = (
        f"M0 0L{head:g} {-half_head:g}V{-half:g}H{length - head:g}V{-half_head:g}L{length:g} 0"
        f"L{length - head:g} {half_head:g}V{half:g}H{head:g}V{half_head:g}z"
    )
    turn = " rotate(90)" if turned else ""
    return element("path", d=path, class_=kind, fill="var(--c)", transform=f"translate({x:g} {y:g}){turn}")
