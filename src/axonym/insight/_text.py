"""Format numbers and tables as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..core.errors import counted


class Said(str):
    """A text, and what it was written from, so that no name is ever read back from text."""

    __slots__ = ("of",)

    of: Any

    def __new__(cls, text: str, of: Any = None) -> Said:
        found = super().__new__(cls, text)
        found.of = of
        return found


def short_operation(operation: str) -> str:
    """Write an operation with the axes that it sums over: `dot along embed`."""
    if not isinstance(operation, Said):
        return operation
    operands, results = (
        {a.name: None for t in terms for a in t} for terms in (operation.of.operands, operation.of.results)
    )
    along = [n for n in operands if n not in results]
    return f"{operation.of.name} along {', '.join(along)}" if along and results else operation.of.name


def array_said(dtype: str, dims: Sequence[tuple[str | None, int]]) -> Said:
    """Write an array with the names of its axes, as far as known."""
    # A lifted function numbers the axes of its own arrays.
    names = tuple(n for n, _ in dims if n is not None and " of held array " not in n)
    text = f"{dtype}[{', '.join(f'{n}={size}' if n else str(size) for n, size in dims)}]"
    return Said(text, (names, tuple(size for _, size in dims)))


def parsed_bytes(given: int | str) -> int:
    """Read a number of bytes, such as `2048` or `"1.5 GiB"`."""
    if isinstance(given, int):
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\s*", given)
    if found is None:
        raise ValueError(f"expected a number of bytes such as 2048 or '1.5 MiB', got {given!r}.")
    return round(float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(found[2]))


def written_number(count: int) -> str:
    """Write a large number: `1.5e+09`."""
    return str(count) if count < 10_000 else f"{count:.4g}"


def described_seconds(t: float) -> str:
    """Write a time: `1.5 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if t >= scale:
            return f"{t / scale:.3g} {unit}"
    return f"{t / 1e-9:.3g} ns"


def as_shown(seconds: float) -> float:
    """Round an estimate to the two digits that are shown, by which plans are ordered: it is no better."""
    return float(f"{seconds:.2g}")


def phase_of(phase: str) -> str:
    """Write a phase; work that is not differentiated may be anywhere in a step."""
    return phase or "other"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with their cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown, whose columns are as wide in print."""
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * n for n in widths])
    return "\n".join(f"| {' | '.join(c.ljust(n) for c, n in zip(line, widths, strict=True))} |" for line in cells)


def described_axes(axes: Collection[str] | None) -> str:
    """Write mesh axes: `data and model`."""
    if axes is None:
        return "mesh axes that are not known"
    return " and ".join(axes) if axes else "no mesh axis"


def in_order(axes: Collection[tuple[str, ...] | None]) -> list[tuple[str, ...] | None]:
    """Sort sets of mesh axes as reports list them: sets of few axes first, and unknown ones last."""
    return sorted(axes, key=lambda a: (a is None, len(a or ()), a or ()))


def described_mesh(mesh: Mapping[str, int], devices: int | None = None) -> str:
    """Write a mesh: `the mesh data=4, model=2`; or the number of devices, given if it is not known."""
    if devices is not None:
        return f"{counted(devices, 'device')}, whose mesh is not known"
    return f"the mesh {', '.join(f'{n}={s}' for n, s in mesh.items())}" if mesh else "one device"
