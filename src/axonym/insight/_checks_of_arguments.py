"""Check where the arguments of a step lie, and what it holds."""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import describe_bytes
from ..distribution.mesh_axes import axes_in
from ._arguments import PlacedArgument
from ._checks_of_mapping import explained_axes, how_to_place, misspelt, not_placed
from ._figures import Figures, needed_memory
from ._text import described_axes
from .records import MUCH, WIDE, described_held, some, without_numbers
from .suspicions import LEAST, MOST, Found, Suspicion, listed, matters, percentage, share_sent


def check_memory(report: Figures) -> Found:
    held, bounds, memory = needed_memory(report), report.bounds, report.memory
    if held is None or memory is None or bounds is None or bounds.capacity is None:
        return
    if held > bounds.capacity:
        beside, advice = memory.results - memory.aliased, "gradient checkpointing, or a smaller batch on each device"
        size, what = memory.temporaries, "temporaries"
        if memory.arguments > size:
            advice = "storing parameters sharded over more mesh axes, with axonym.fsdp"
            size, what = memory.arguments, "arguments"
        donate = f", and donating arguments (donate_args), beside which {describe_bytes(beside)} of results are held"
        donate *= bool(report.undonated) and beside > MUCH * memory.total
        advice += f": {what} are the largest part, {describe_bytes(size)}{donate}."
        cause = f"The step needs {describe_bytes(held)}, and {bounds.chip} has {describe_bytes(bounds.capacity)}."
        yield Suspicion("fix", cause, advice=advice)
    elif report.by == "compiled" and report.platform != "cpu":
        # Otherwise some of the memory is not counted, or it is the memory that a CPU needs.
        yield f"it fits: {describe_bytes(held)} of {describe_bytes(bounds.capacity)}"


def check_donation(report: Figures) -> Found:
    """Find arguments beside which results of the same sizes are held, since the step does not donate them."""
    sizes, undonated = {x.path: x.bytes for x in report.placed}, report.undonated or ()
    held = sum(sizes.get(path, 0) for path in undonated)
    total = report.timeline.peak if report.timeline else report.memory.total if report.memory else sum(sizes.values())
    if held > MUCH * total:
        largest = some(sorted(dict.fromkeys(map(without_numbers, undonated))))
        cause = f"Results are held beside arguments of the same sizes, which are not donated: {largest}."
        so = f"If the results are their updates, a device holds {describe_bytes(held)} less with donation."
        names = sorted({path.partition("/")[0] for path in undonated})
        # Of a model and its state, results are the updates.
        severity = "look" if held >= WIDE * total and len(names) > 1 else "note"
        yield Suspicion(severity, cause, (so,), f"donate_args for {some(names)}, if the caller needs them no more.")
    elif report.undonated == ():
        yield "results take the place of the arguments that they update"


def check_kept(report: Figures) -> Found:
    """Find a forward pass that keeps most of the memory for the backward pass."""
    if report.timeline is None or not any(report.timeline.phases):
        return
    kept = sum(h.bytes for h in report.timeline.kept_for_backward)
    share, capacity = kept / report.timeline.peak, report.bounds.capacity if report.bounds else None
    if share > 0.5 and kept >= LEAST * (capacity or 0):
        of_it = described_held(report.timeline.kept_for_backward)
        cause = f"{percentage(share)} of the peak is kept for the backward pass: {of_it}."
        yield Suspicion("note", cause, advice="gradient checkpointing, which computes some of it again.")
    elif share <= 0.5:
        yield "the backward pass does not keep most of the memory"


def check_copies(report: Figures) -> Found:
    """Find parameters, and what an optimizer keeps of them. Batches have copies wherever a mesh axis is not theirs."""
    explained, total = explained_axes(report), sum(x.bytes for x in report.placed)
    sent, capacity = {p for c in report.collectives for p in c.parameters}, report.bounds and report.bounds.capacity
    parameters = {x.axes for x in report.placed if x.path in (*report.updated, *sent)}
    large = [x for x in report.placed if x.copies > 1 and x.bytes > MUCH * total]
    groups: dict[tuple[tuple[str, ...], int], list[PlacedArgument]] = {}
    for x in large:
        over = {*x.replicated_over}
        if x.axes in parameters and not (over and over <= explained) and not over & misspelt(report):
            groups.setdefault((x.replicated_over, x.copies), []).append(x)
    for (over, copies), arrays in groups.items():
        if not matters(report, held=sum(x.bytes - x.bytes // x.copies for x in arrays)):
            continue
        size, left = sum(x.bytes for x in arrays), sum(x.bytes // x.copies for x in arrays)
        along, paths = f" over {described_axes(over)}" if over else "", {x.path for x in arrays}
        cause = f"{percentage(size / total)} of the bytes of arguments are held in {copies} copies"
        cause += f"{',' * bool(over)}{along}: {listed(arrays)}."
        stored = [x for x in report.placed if over and set(over) <= {a for axes in x.over for a in axes}]
        if stored := [x for x in stored if x.path in sent]:
            cause += f" Sharded{along}: only {listed(stored)}."
        less = f"{describe_bytes(left)} of each device instead of {describe_bytes(size)}"
        so = [f"Without copies, they would take {less}."]
        sums = [c for c in report.collectives if c.kind == "all-reduce" and set(c.axes or ()) <= set(over)]
        share = share_sent(report, [c for c in sums if paths.intersection(c.parameters)])
        if share >= MUCH:
            so.append(f"Their gradients are all-reduced{along}, {percentage(share)} of the bytes sent.")
        # The axes that all have, that nothing shards, and that their copies divide.
        free = [
            {n for n, size, by in zip(x.axes, x.sizes, x.over, strict=True) if n and not by and size % copies == 0}
            for x in arrays
        ]
        common = sorted(set.intersection(*free) - {n for n, by in report.mapping.items() if by})
        more, advice = ", which sends half as much again" if share >= MUCH else "", ""
        if unplaced := [n for n in not_placed(report, over) if n in {n for x in arrays for n in x.axes}]:
            advice = how_to_place(unplaced)
        elif common and over:
            advice = f"store {common[0]} sharded{along}, with axonym.fsdp{more}."
        # Data parallelism is usual: it sends less than sharded parameters, if the copies fit.
        wasteful = (stored and share >= MOST) or (capacity and size - left >= MOST * capacity)
        yield Suspicion("look" if wasteful else "note", cause, tuple(so), advice)
    if report.placed and math.prod(report.mesh.values()) > 1 and not large:
        yield "no large argument is held in copies"


def check_stored(report: Figures) -> Found:
    """Find parameters that lie otherwise than a mapping says, over mesh axes that it gives to others."""
    if report.parameter_mapping or report.placed_by_rule:
        return
    taken = {*axes_in(report.mapping.values())}
    stored: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    # The state of an optimizer may be sharded where its parameter is replicated: only updates are gathered then.
    replicated = {_in_model(x) for x in _updated_arguments(report) if not any(x.over)}
    for x in _updated_arguments(report):
        for n, over in zip(x.axes, x.over, strict=True):
            if taken.intersection(over) and not report.mapping.get(n or "") and _in_model(x) not in replicated:
                stored.setdefault((n or "", over), {})[without_numbers(x.path)] = None
    for (n, over), paths in stored.items():
        cause = f"{some(list(paths))} came sharded over {described_axes(over)} along {n}, which no mapping says, and "
        cause += "other axes are sharded over it."
        so = "The compiler may sum or move activations instead of gathering parameters."
        yield Suspicion("look", cause, (so,), "axonym.fsdp, with this as the parameter mapping.")


def check_states(report: Figures) -> Found:
    """Find parameters and what an optimizer keeps of them that are sharded over different mesh axes."""
    alike: dict[Any, list[PlacedArgument]] = {}
    for x in _updated_arguments(report):
        alike.setdefault(_in_model(x), []).append(x)
    pairs = [
        (a, b)
        for a, *others in alike.values()
        for b in others
        if any(a.over) and any(b.over) and {*zip(a.axes, a.over, strict=True)} != {*zip(b.axes, b.over, strict=True)}
    ]
    if pairs:
        (a, b), more = pairs[0], f" and {len(pairs) - 1} more" if pairs[1:] else ""
        cause = f"{without_numbers(a.path)} and {without_numbers(b.path)}{more} have the same axes, but lie otherwise."
        yield Suspicion("look", cause, ("An update moves one to the other.",), "one placement for both.")


def _updated_arguments(report: Figures) -> list[PlacedArgument]:
    """Return the arguments that the step updates, if their axes have names."""
    return [x for x in report.placed if x.path in report.updated and None not in x.axes]


def _in_model(x: PlacedArgument) -> tuple[str, frozenset[str | None]]:
    """Return the name and axes that a parameter has in common with the moments that an optimizer keeps of it."""
    return x.path.rpartition("/")[2], frozenset(x.axes)
