"""Check the exchanges of a step for causes that the step could do without."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.errors import describe_bytes
from ..core.source_lines import Source
from ._figures import Figures
from ._text import described_axes
from .records import MUCH, Collective, carried_axes, grouped, known_sent, path_of, some
from .suspicions import (
    Found,
    Suspicion,
    at_line,
    described_repeats,
    is_placed,
    much_is_sent,
    paths_of,
    percentage,
    said_of,
    share_sent,
)


class _Lost(NamedTuple):
    """Axes that are gathered, or moved to another axis, although a mapping shards them."""

    names: tuple[str, ...]
    source: Source | None
    gathered: bool
    reason: str
    cause: str


def lost_axes(report: Figures) -> dict[_Lost, float]:
    """Find activations that are gathered, or moved to another axis, and make up much of the bytes sent: their share."""
    # Where placements trade shards along one axis for shards along another, as of experts, exchanges are asked for.
    traded = {c.axes for c in report.collectives if c.moved and (is_placed(c) or c.cause == "placement")}
    together: dict[_Lost, list[Collective]] = {}
    for c in report.collectives:
        names, lost = c.gathered or c.moved, not c.stored and not c.of_indices and not c.parameters
        lost = lost and not (c.moved and c.axes in traded)
        if names and lost and not (said_of(c) and said_of(c).name == "dispatch"):
            key = _Lost(names, c.source, bool(c.gathered), c.reason or "why is not known", c.cause)
            together.setdefault(key, []).append(c)
    shares = {key: much_is_sent(report, found) for key, found in together.items()}
    # A placement is the cause of what others need again.
    ordered = sorted(shares.items(), key=lambda pair: pair[0].cause != "placement")
    return {key: share for key, share in ordered if share}


def check_activations(report: Figures) -> Found:
    for (names, source, gathered, reason, by), share in lost_axes(report).items():
        said, at = described_axes(names), at_line(source)
        does = "gathered" if gathered else "moved"
        cause = f"{said} is {does}{at}, {percentage(share)} of the bytes sent: {reason}."
        work = [w for w in report.repeated if source is not None and w.source == source]
        advice = {
            "placement": f"add {said} to the placement{at}, or leave the placement out.",
            "code without names": f"write it with names, along another axis than {said}, or inside axonym.shard_map.",
        }.get(by, f"another axis than {said}, or an operation that does not need all of it.")
        yield Suspicion("look", cause, tuple(described_repeats(report, work)), advice)
    gathers = [c for c in report.collectives if c.kind in ("all-gather", "all-to-all") and not c.parameters]
    told = all(c.reason for c in gathers) and share_sent(report, [c for c in gathers if "gather" in c.kind]) < MUCH
    if report.collectives and (told or not gathers):
        yield "no large activation is gathered"


def check_conversions(report: Figures) -> Found:
    """Find parameters that a placement gathers before the step converts them to a smaller dtype."""
    late = [c for c in report.collectives if c.converted]
    if share := much_is_sent(report, late):
        dtype, to = late[0].array.partition("[")[0], late[0].converted
        cause = f"Parameters are gathered as {dtype}{at_line(late[0].source)}, {percentage(share)} of the bytes sent, "
        cause += f"and only then converted to {to}: {some(list(dict.fromkeys(map(path_of, late))))}."
        yield Suspicion("look", cause, advice=f"convert them to {to} before the placement.")


def check_casts(report: Figures) -> Found:
    """Find gradients that a step converts to a larger dtype before devices add them up."""
    if report.cast is not None:
        before, after, line = report.cast
        sums = [c for c in report.collectives if "reduce" in c.kind and c.phase in ("backward", "") and c.parameters]
        cause = f"Gradients are converted from {before} to {after}{at_line(line)} before devices add them up, "
        cause += f"{percentage(share_sent(report, sums))} of the bytes sent: {paths_of(sums)}."
        yield Suspicion("look", cause, advice=f"add them up in {before}, and convert the sums.")


def check_parameters(report: Figures) -> Found:
    """Find parameters that a placement gathers outside of the differentiated function, or more than a mapping does."""
    by_line: dict[Source | None, list[Collective]] = {}
    for c in report.collectives:
        early = not c.phase or any(report.mapping.get(n) for n in c.gathered)
        # From JAX 0.12 on, XLA lays what an operation gathers to the placement of the arguments.
        if c.kind == "all-gather" and c.parameters and is_placed(c) and early and not c.stored:
            by_line.setdefault(c.source, []).append(c)
    for line, own in by_line.items():
        if (share := much_is_sent(report, own)) and line is not None:
            names = [n for n in own[0].gathered if report.mapping.get(n)]
            where = "outside of the forward and backward pass"
            where = f"although the mapping shards {described_axes(names)}" if names else where
            cause = f"Parameters are gathered{at_line(line)} by a placement, {where}, {percentage(share)} of the bytes "
            cause += f"sent: {paths_of(own)}."
            advice = "leave the placement out: look-ups, sums and updates need no complete array."
            yield Suspicion("look", cause, advice=advice)
    for c in report.collectives:
        at = [x for x in report.collectives if x.source == c.source and x.operation is None]
        if c.cause == "look-up" and (share := much_is_sent(report, at)):
            cause = f"All of {path_of(c)} is gathered{at_line(c.source)} to look rows up without names, "
            cause += f"{percentage(share)} of the bytes sent with its gradient."
            yield Suspicion("look", cause, advice="table[axis, numbers] of a named array, which sends rows only.")


def check_loops(report: Figures) -> Found:
    """Find parameters that a loop sends again in each turn, rather than a part of them, such as one of its layers."""
    given = {x.path: (x.axes, x.sizes) for x in report.placed}

    def is_again(c: Collective) -> bool:
        if c.parameters[0] not in given:
            return False
        axes, sizes = given[c.parameters[0]]
        names = carried_axes(c)
        # A loop over layers sends one of them in each turn, and again if it has more turns.
        parts = math.prod(size for n, size in zip(axes, sizes, strict=True) if n not in names)
        return len(names) == len(axes) or (bool(names) and {*names} <= {*axes} and (c.times or 0) > parts)

    again = [c for c in report.collectives if (c.times or 0) > 1 and c.parameters and is_again(c)]
    if share := much_is_sent(report, again):
        kinds = dict.fromkeys("parameters" if "gather" in c.kind else "gradients" for c in again)
        times = sorted({c.times or 0 for c in again})
        often = f"{times[0]} to {times[-1]} times" if times[1:] else f"{times[0]} times"
        cause = (
            f"The same {' and '.join(kinds)} are sent again in each turn of a loop{at_line(again[0].source)}, {often}, "
        )
        cause += f"{percentage(share)} of the bytes sent: {paths_of(again)}."
        advice = "fewer and larger microbatches, if the loop is over these, or one exchange before or after the loop."
        yield Suspicion("look", cause, advice=advice)
    sums = ("all-reduce", "reduce-scatter")
    of_one = [c for c in report.collectives if "gather" in c.kind or (c.phase == "backward" and c.kind in sums)]
    if report.collectives and all(c.parameters or c.times == 1 for c in of_one):
        yield "no loop sends the same parameter again"


def check_slices(report: Figures) -> Found:
    """Find parameters that are gathered from other slices, over a slow network, wherever they are used."""
    gathers = [c for c in report.chosen("slices") if "gather" in c.kind and c.parameters]
    if gathers:
        cause = f"Parameters are gathered across slices ({', '.join(report.between)}) at each use, "
        cause += f"{describe_bytes(known_sent(gathers))}: {paths_of(gathers)}."
        advice = "store them within a slice: let the slices lie along a mesh axis that the parameter mapping leaves "
        advice += "out."
        yield Suspicion("look", cause, advice=advice)
    elif report.between:
        yield "no parameter is gathered across slices"


def check_sums(report: Figures) -> Found:
    """Find a mapping for whose exchanges of activations a step takes much longer than for its compute."""
    bounds = report.bounds
    if bounds is None or not bounds.compute or not bounds.links or max(bounds.links.values()) < _LONG:
        return
    axes, seconds = max(bounds.links.items(), key=lambda pair: pair[1])
    over = [c for c in report.collectives if c.axes == axes]
    own = [c for c in over if not c.parameters and not c.stored and c.reason is not None]
    if seconds < _LONGER * bounds.compute or not own or known_sent(own) < known_sent(over) / 2:
        return
    first = grouped(own)[0]
    cause = f"Exchanges of activations over {described_axes(axes)} take {seconds / bounds.compute:.2g} times the "
    cause += f"compute, most{at_line(first[0].source)}: {first[0].reason}."
    yield Suspicion("look", cause, advice=f"shard another axis over {described_axes(axes)}, such as the batch.")


_LONGER = 3
"""The factor by which exchanges of activations take longer than the compute, from which they are worth a remark."""
_LONG = 1e-3
"""The seconds from which they are: in small steps, everything is short."""


def check_reasons(report: Figures) -> Found:
    unknown = [c for c in report.collectives if c.reason is None]
    if not (share := much_is_sent(report, unknown)):
        if known_sent(report.collectives) and share_sent(report, unknown) < MUCH:
            yield "the cause of each large transfer is known"
        return
    c, *_ = largest = grouped(unknown)[0]
    where, over = f" in {c.operation}" if c.operation else "", described_axes(c.axes)
    cause = f"Why {percentage(share)} of the bytes are sent is not known, first{at_line(c.source)}: "
    cause += f"{percentage(share_sent(report, largest))} by the {c.kind} of {c.array}{where}."
    advice = "names for the arrays there: see axonym.names."
    if is_placed(c):
        advice = f"see what the placement there leaves out: an axis that was sharded over {over} before it."
    elif c.operation:
        advice = f"see which of these axes is sharded over {over}: what looks up, sorts, joins or cuts it needs all "
        advice += "of it."
    yield Suspicion("look", cause, advice=advice)
