"""Time two ways of doing the same thing, in turn, so that both see the same noise."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, and its limit."""

    section: str
    what: str
    ours: str
    theirs: str
    ratio: float
    limit: float
    note: str = ""

    @property
    def over(self) -> bool:
        return self.ratio > self.limit


def side_by_side(
    ours: Callable[[], Any], theirs: Callable[[], Any], *, repeats: int, rounds: int = 5, warm: int = 3
) -> tuple[list[float], list[float]]:
    """Seconds of single calls of two functions."""
    first, second = in_turn([ours, theirs], repeats=repeats, rounds=rounds, warm=warm)
    return first, second


def in_turn(
    fns: Sequence[Callable[[], Any]], *, repeats: int, rounds: int = 5, warm: int = 3
) -> tuple[list[float], ...]:
    """Seconds of single calls, taken in turn. Each round starts with the garbage collected and the collector off."""
    for _ in range(warm):
        for fn in fns:
            fn()
    times: tuple[list[float], ...] = tuple([] for _ in fns)
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        try:
            for _ in range(repeats):
                for fn, into in zip(fns, times, strict=True):
                    start = time.perf_counter()
                    fn()
                    into.append(time.perf_counter() - start)
        finally:
            gc.enable()
    return times


def timed_row(
    section: str,
    what: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    limit: float,
    *,
    repeats: int = 400,
    rounds: int = 5,
    note: str = "",
) -> Row:
    """Measure a pair; the ratio is that of the medians."""
    a, b = side_by_side(ours, theirs, repeats=repeats, rounds=rounds)
    ratio = statistics.median(a) / statistics.median(b)
    return Row(section, what, _show(a), _show(b), ratio, limit, note)


def _show(times: list[float]) -> str:
    low, middle = min(times), statistics.median(times)
    unit, scale = ("us", 1e6) if middle < 1e-3 else ("ms", 1e3) if middle < 1 else ("s", 1.0)
    return f"{middle * scale:.1f} {unit} (min {low * scale:.1f})"


def print_table(rows: list[Row]) -> None:
    """Print rows as an aligned table, a section at a time, and what is over its limit."""
    header = ("", "what", "axonym: median (min)", "raw JAX: median (min)", "ratio", "limit", "")
    cells = [
        (r.section, r.what, r.ours, r.theirs, f"{r.ratio:.2f}", f"{r.limit:.2f}", "OVER" if r.over else "")
        for r in rows
    ]
    widths = [max(len(c[i]) for c in (header, *cells)) for i in range(len(header))]
    for cell, note in zip((header, *cells), ("", *(r.note for r in rows)), strict=True):
        print("  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip() + (f"  {note}" if note else ""))
    over = [r for r in rows if r.over]
    print(f"\n{len(rows)} rows, {len(over)} over budget" + "".join(f"\n  {r.section}: {r.what}" for r in over))
