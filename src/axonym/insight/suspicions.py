"""Suspicions about a step, and what the checks that find them share: shares of its costs, and words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.source_lines import Source
from ._arguments import PlacedArgument
from ._figures import Figures
from ._text import Said, described_axes, short_operation
from .records import MUCH, SMALL, Collective, RepeatedWork, known_sent, path_of, some, without_numbers

LEAST = 0.02
"""The share of the bound on time, or of the memory of a chip, below which something costs too little for a remark."""


MOST = 0.4
"""The share of the bytes sent, or of the memory of a chip, from which replicated parameters may be wasteful."""


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """Something suspicious in a step: its cause, what follows from it, and what to try.

    >>> print(axn.insight.Suspicion("fix", "Nothing uses model.", ("50% of compute is repeated.",), "shard mlp."))
    fix: Nothing uses model. Try: shard mlp. So: 50% of compute is repeated.
    """

    severity: str
    """`fix`, `look` or `note`."""
    cause: str
    consequences: tuple[str, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        so = f" So: {' '.join(self.consequences)}" if self.consequences else ""
        return f"{self.severity}: {self.cause}{f' Try: {self.advice}' if self.advice else ''}{so}"


Found = Iterator[Suspicion | str]


def percentage(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1g}%"


def at_line(source: Source | None) -> str:
    return f" at {source}" if source else ""


def repeated_share(report: Figures, work: Sequence[RepeatedWork] | None = None) -> float:
    """Return the share of all compute that devices could leave to others: of some products, or of all."""
    needless = sum(w.needless for w in (report.repeated if work is None else work))
    return needless / report.flops if report.flops else 0.0


def described_repeats(report: Figures, work: Sequence[RepeatedWork]) -> Iterator[str]:
    """Say how much of the compute is repeated, how often, and where that begins."""
    if (share := repeated_share(report, work)) >= SMALL:
        along: dict[str, list[RepeatedWork]] = {}
        for w in work:
            over = f" along {described_axes(w.axes)}" if w.axes else ""
            along.setdefault(f"{w.copies} devices{over}", []).append(w)
        parts = [*along]
        if len(along) > 1:
            parts = [f"{p} ({percentage(repeated_share(report, own))})" for p, own in along.items()]
        first = short_operation(work[0].operation or "a product without names")
        same = f"first{at_line(work[0].source)} in {first}: {' and '.join(parts)} do the same."
        yield f"{percentage(share)} of the compute is repeated, {same}"


def share_sent(report: Figures, found: Sequence[Collective]) -> float:
    return known_sent(found) / max(1, known_sent(report.collectives))


def matters(report: Figures, found: Sequence[Collective] = (), held: int = 0) -> bool:
    """Return whether transfers, or held bytes, cost something, where a chip tells."""
    bounds, sent = report.bounds, dict[Any, list[int]]()
    if bounds is None or not bounds.longest or (held and bounds.memory is None):
        return True
    for c in report.collectives:
        sent.setdefault(c.axes, []).append(c.mean_sent or 0)
    seconds = sum(bounds.links.get(c.axes or (), 0.0) * (c.mean_sent or 0) / max(1, sum(sent[c.axes])) for c in found)
    if report.memory is not None and bounds.memory:
        seconds += bounds.memory * min(1.0, held / max(1, report.memory.arguments))
    return seconds >= LEAST * bounds.longest or held >= LEAST * (bounds.capacity or math.inf)


def much_is_sent(report: Figures, found: Sequence[Collective]) -> float:
    """Return the share of the bytes sent, if it is worth a remark."""
    share = share_sent(report, found)
    return share if share >= MUCH and matters(report, found) else 0.0


def paths_of(found: Sequence[Collective]) -> str:
    """List the parameters of transfers, the largest first."""
    return some(list(dict.fromkeys(path_of(c) for c in sorted(found, key=lambda c: -(c.total_sent or 0)))))


def listed(arrays: Sequence[PlacedArgument]) -> str:
    """List the paths of arguments, the largest first."""
    sizes: dict[str, int] = {}
    for x in arrays:
        path = without_numbers(x.path)
        sizes[path] = sizes.get(path, 0) + x.bytes
    return some(sorted(sizes, key=lambda path: -sizes[path]), 6)


def said_of(c: Collective) -> Any:
    """Return what the operation of a transfer was written from: a `ScopedOperation`, or None."""
    return c.operation.of if isinstance(c.operation, Said) else None


def is_placed(c: Collective) -> bool:
    """Return whether a placement makes a transfer."""
    return said_of(c) is not None and said_of(c).name == "shard"
