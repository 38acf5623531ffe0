"""Put transfers together that a reader takes for one, and write what they carry, from where, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..core.errors import counted
from ..core.source_lines import Source
from ._text import Said
from .records import Collective

SMALL = 0.01
"""The share of a total below which rows are folded, and work that is repeated is not said."""


def path_of(c: Collective) -> str:
    """Write the parameter that a collective carries, or that it carries the gradient of; empty if there is none."""
    return " or ".join(dict.fromkeys(map(without_numbers, c.parameters)))


def grouped(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Put transfers together that a reader takes for one, the largest first.

    These are parameters that are gathered, gradients of parameters that are summed, and sums of arrays with the same
    axes. Other transfers of activations have causes of their own.
    """
    found: dict[Any, list[Collective]] = {}
    for c in collectives:
        sums = "reduce" in c.kind and "held array" not in c.array
        key = (c.array.partition("[")[0],) if c.parameters else (c.array,) if sums else (c.array, c.source, c.reason)
        found.setdefault((c.kind, c.axes, bool(c.parameters), key), []).append(c)
    return sorted((sorted(g, key=lambda c: -(c.mean_sent or 0)) for g in found.values()), key=lambda g: -known_sent(g))


def carried(group: Sequence[Collective]) -> str:
    """Describe the arrays that a group of transfers carries."""
    first, paths = group[0], list(dict.fromkeys(map(path_of, group)))
    gradient = "reduce" in first.kind
    if not first.parameters:
        operations = {c.operation.partition("[")[0] for c in group if c.operation}
        return first.array + (f" in {operations.pop()}" if len(operations) == 1 else "")
    if len(paths) == 1:
        return f"{first.array} ({'the gradient of ' * gradient}{paths[0]})"
    dtype = first.array.partition("[")[0]
    return f"{dtype} {'gradients of ' * gradient}parameters ({some(paths)})"


_WIDE = 60
"""The number of characters that a list may have."""


def some(words: Sequence[str], most: int = 4) -> str:
    """List the first words, as many as fit into part of a line, and count the others."""
    while most > 1 and len(", ".join(words[:most])) > _WIDE:
        most -= 1
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def from_lines(group: Sequence[Collective]) -> str:
    """Write where a group of transfers comes from."""
    lines = list(dict.fromkeys(str(c.source) for c in group if c.source))
    return (f", {lines[0]}" if lines else "") + (f" and {counted(len(lines) - 1, 'more line')}" if lines[1:] else "")


def why(group: Sequence[Collective]) -> str:
    """Write the reason for most of the bytes in a group of transfers."""
    sent: dict[str, int] = {}
    for c in group:
        reason = c.reason or "why is not known"
        if len(group) > 1:
            reason = re.sub(r"^the gradient of (\[[^\]]*\] |.+ is (?=summed over))", "", reason)
        sent[reason] = sent.get(reason, 0) + (c.mean_sent or 0)
    more = f"; and {counted(len(sent) - 1, 'other reason')}" if len(sent) > 1 else ""
    return f"{max(sent, key=lambda reason: sent[reason])}{more}"


def known_sent(found: Sequence[Collective]) -> int:
    """Return the bytes that a device sends, apart from exchanges of which values decide how often they run."""
    return sum(c.mean_sent or 0 for c in found)


def waited(c: Collective) -> float:
    """Return about how many seconds a call waits for a collective, as far as known."""
    return (c.waits or 0.0) * (c.times or 0)


def at_line(source: Source | None) -> str:
    return f" at {source}" if source else ""


def percentage(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1g}%"


def carried_axes(c: Collective) -> tuple[str, ...]:
    """Return the names of the axes of the array that a collective carries, as far as known."""
    return c.array.of[0] if isinstance(c.array, Said) else ()


def without_numbers(path: str) -> str:
    """Write a path for all layers of a kind: `layers/*/weight`."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", path)
