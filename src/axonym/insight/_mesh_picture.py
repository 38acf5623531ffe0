"""Draw a mesh: a cell for each device, and an arrow along each mesh axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ..core.errors import describe_bytes
from ..core.html import Html, Words, element, picture

_MOST = 64
"""How many columns and rows are drawn."""
_LABELS = 150
"""The width of the labels of rows."""
_TOP = 54
"""The height of the labels above the cells."""


def mesh_picture(mesh: Mapping[str, int], over: Sequence[str], sent: Mapping[str, int | None], words: Words) -> Html:
    """Draw a mesh, whose largest axis has the columns.

    Arguments:
        over: the mesh axes that shard arrays, each as names with spaces between them. The first is shown; the script of
            the page shows the others.
        sent: the bytes that each device sends along each mesh axis.
    """
    cells = _Cells({a: n for a, n in mesh.items() if n > 1})
    parts = [*cells.drawn(over)]
    most = max((n or 0 for n in sent.values()), default=0) or 1
    for i, axis in enumerate([cells.across, *cells.down]):
        much = ", depends on values" if (n := sent.get(axis)) is None else f", {describe_bytes(n)}" if n else ""
        label, thick = f"{axis}={mesh[axis]}{much}", 3 + 9 * (n or 0) / most
        if i == 0:
            parts.append(_arrow(f"translate({cells.left} 38)", cells.width, thick, words.color([axis])))
            parts.append(element("text", label, x=cells.left, y=20))
        else:
            turned = f"translate({_LABELS + 30 * i - 15} {_TOP}) rotate(90)"
            parts.append(_arrow(turned, cells.height, thick, words.color([axis])))
            parts.append(element("text", f"{label} ↓", x=0, y=_TOP + 16 * i))
    bottom = _TOP + cells.height
    if rest := cells.rest():
        parts.append(element("text", rest, x=cells.left, y=bottom + 18))
    width = cells.left + max(cells.width, 260) + 8
    height = max(bottom + (26 if rest else 6), _TOP + 16 * len(cells.down) + 6)
    return picture(f"The mesh {', '.join(f'{a}={n}' for a, n in mesh.items())}", width, height, *parts)


class _Cells:
    """The cells of a mesh: its largest axis has the columns, the others together the rows."""

    def __init__(self, mesh: Mapping[str, int]):
        self.across = max(mesh, key=lambda a: mesh[a])
        self.down = {a: n for a, n in mesh.items() if a != self.across}
        places = itertools.product(*map(range, self.down.values()))
        self._rows = [dict(zip(self.down, place, strict=True)) for place in itertools.islice(places, _MOST)]
        self._columns = min(mesh[self.across], _MOST)
        self._more = mesh[self.across] - self._columns, math.prod(self.down.values()) - len(self._rows)
        self._wide, self._high = min(48, max(10, 640 // self._columns)), min(28, max(7, 180 // len(self._rows)))
        self.left = _LABELS + 30 * len(self.down) if self.down else 0
        self.width, self.height = self._columns * self._wide, len(self._rows) * self._high

    def rest(self) -> str:
        """Say how many rows and columns are not drawn."""
        return ", ".join(
            f"{n} more {kind} are alike" for n, kind in zip(self._more, ("columns", "rows"), strict=True) if n
        )

    def drawn(self, over: Sequence[str]) -> Iterator[Html]:
        yield element("rect", x=self.left, y=_TOP, width=self.width, height=self.height, fill="var(--empty)")
        for i, names in enumerate(over):
            yield element("g", *self._shards(names.split()), data_over=names, style="display:none" if i else None)

    def _shards(self, over: Sequence[str]) -> Iterator[Html]:
        """Draw the cells that hold the shard of the first device, and gaps between cells with other shards."""
        left, wide, high = self.left, self._wide, self._high
        own = wide if self.across in over else self.width
        shards = [[row[a] for a in self.down if a in over] for row in self._rows]
        same = [f"M{left} {_TOP + high * r}h{own}v{high}h{-own}z" for r, shard in enumerate(shards) if not any(shard)]
        gaps = [f"M{left + c * wide} {_TOP}v{self.height}" for c in range(1, self._columns) if self.across in over]
        gaps += [f"M{left} {_TOP + high * r}h{self.width}" for r in range(1, len(shards)) if shards[r] != shards[r - 1]]
        yield element("path", d="".join(same), fill="var(--fill)")
        yield element("path", d="".join(gaps), stroke="var(--bg)", stroke_width=3 if min(wide, high) > 12 else 1.5)


def _arrow(place: str, length: float, thick: float, kind: str) -> Html:
    """Draw an arrow with two heads."""
    head, half, wide = thick + 4, thick / 2, 0.8 * (thick + 4)
    path = (
        f"M0 0L{head:g} {-wide:g}V{-half:g}H{length - head:g}V{-wide:g}L{length:g} 0"
        f"L{length - head:g} {wide:g}V{half:g}H{head:g}V{wide:g}z"
    )
    return element("path", d=path, class_=kind, fill="var(--c)", transform=place)
