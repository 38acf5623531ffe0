"""Judge a step: its limiting resource, its costliest transfers, suspicions with advice, and checks that passed.

Each check of `CHECKS` yields its findings, or else what to say if it has none. Texts and pages show these words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..core.errors import counted, describe_bytes, suggestion
from ..core.source_lines import Source
from ..distribution.mesh_axes import axes_in, mesh_axes
from ._arguments import PlacedArgument
from ._figures import Figures, needed_memory
from ._text import Said, described_axes, described_seconds, phase_of, short_operation
from .records import (
    SMALL,
    Collective,
    RepeatedWork,
    carried,
    carried_axes,
    described_held,
    from_lines,
    grouped,
    known_sent,
    path_of,
    some,
    why,
    without_numbers,
)

_COSTLIEST = 3
"""The number of transfers in a verdict."""
_MUCH = 0.05
"""The share from which repeated work, copies, and transfers without a reason are worth a remark."""
_WIDE = 0.2
"""The share of the flops from which products in a larger dtype than their operands are worth a remark; and of the
memory, from which arguments that are not donated are."""
_LEAST = 0.02
"""The share of the bound on time, or of the memory of a chip, below which something costs too little for a remark."""
_MOST = 0.4
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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The summary of a report: limits, costliest transfers, suspicions with advice, and checks that passed.

    >>> report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    >>> report.verdict.binds
    'Nothing is sent between devices.'
    """

    binds: str
    """The resource that limits the step, in a sentence."""
    explanation: str
    costliest: tuple[str, ...]
    """The three costliest transfers, each with its share, its array, the path of the parameter, the reason and line."""
    suspicious: tuple[Suspicion, ...]
    """The suspicions, the most severe first."""
    fine: tuple[str, ...]
    """The checks that found nothing."""


def verdict_of(report: Figures) -> Verdict:
    """Judge a report."""
    checks = [[*check(report)] for check in CHECKS]
    findings = [x for found in checks for x in found if isinstance(x, Suspicion)]
    findings.sort(key=lambda f: ("fix", "look", "note").index(f.severity))
    fine = tuple(x for found in checks for x in found[:1] if not isinstance(x, Suspicion))
    costliest, total = list[str](), known_sent(report.collectives)
    for group in grouped(report.collectives)[:_COSTLIEST]:
        if total and known_sent(group) / total >= SMALL:
            times, sizes = sum(c.times or 0 for c in group), {c.sent or 0 for c in group}
            size = describe_bytes(sizes.pop()) if len(sizes) == 1 else f"up to {describe_bytes(max(sizes))}"
            phases = " and ".join(dict.fromkeys(phase_of(c.phase) for c in group))
            costliest.append(
                f"{_percentage(known_sent(group) / total)}: {group[0].kind} over {described_axes(group[0].axes)} of "
                f"{carried(group)}, {times} x {size}, {phases}{from_lines(group)}: {why(group)}"
            )
    return Verdict(*_binds(report), tuple(costliest), tuple(findings), fine)


def _binds(report: Figures) -> tuple[str, str]:
    """Say what binds, and explain it."""
    bounds, wasted = report.bounds, repeated_share(report)
    again = f"{_percentage(wasted)} of the compute is repeated" if wasted >= SMALL else ""
    if bounds is None or not bounds.named() or not bounds.longest:  # no chip gives times
        if not report.collectives:
            return "Nothing is sent between devices.", f"{again}." if again else ""
        unknown = "No chip was given, so times are not known"
        if bounds is not None:
            unknown = "Times are not known, because they depend on values"
        sums = {axes: known_sent(found) for axes, found in report.by_axes().items()}
        most, size = max(sums.items(), key=lambda pair: pair[1])
        sent = report.total_sent()
        much = f"each device sends {describe_bytes(size)} over it" if size else "how much depends on values"
        share = f", {_percentage(size / sent)} of all" if sent else ""
        advice = "" if bounds is not None else ' Pass a chip, such as chip="v5p", for times.'
        most_bytes = f"Most bytes go over {described_axes(most)}: {much}{share}.{advice}"
        return f"{unknown}{'; ' if again else ''}{again}.", most_bytes
    least = f"A step takes at least {described_seconds(bounds.longest)} on {bounds.chip}"
    held, about = needed_memory(report), ""
    if held is None and report.timeline is not None and report.timeline.held:
        held, about = report.timeline.peak, "about "
    if held is not None and bounds.capacity is not None and held > bounds.capacity:
        fits_not = f"This does not fit: {about}{describe_bytes(held)} of {describe_bytes(bounds.capacity)}."
        return fits_not, f"{least}. The table of the peak lists the arrays."
    if bounds.bottleneck == "compute" and bounds.compute is not None:
        if wasted >= SMALL:
            shared = described_seconds(bounds.compute * (1 - wasted))
            same = f"Several devices do the same work; shared, compute would take at least {shared}."
            return f"Compute binds, and {_percentage(wasted)} of it is repeated.", f"{least}. {same}"
        more, others = f"{least}.", [(t, name) for name, t in bounds.named() if name != "compute"]
        if others:
            t, longest = max(others, key=lambda pair: pair[0])
            more += " Transfers and reads may hide behind it; if none does, a step takes at least "
            more += f"{described_seconds(sum(t for _, t in bounds.named()))}."
            more += f" The longest of it: {longest}, {described_seconds(t)}."
        return "Compute binds.", more
    if bounds.bottleneck == "memory":
        why_memory = "It is the time to read each argument and write each result once."
        return "Reading and writing memory binds.", f"{least}. {why_memory}"
    if bounds.compute:
        compute = described_seconds(bounds.compute)
        least += f", {bounds.longest / bounds.compute:.3g} times the compute ({compute})"
    if bounds.longest == bounds.host:
        return "Moving to the host binds.", f"{least}."
    axes = next(a for a, t in bounds.links.items() if t == bounds.longest)
    sentences = [least]
    if own := grouped([c for c in report.collectives if c.axes == axes]):
        what = f"{own[0][0].kind} of {carried(own[0])}{from_lines(own[0])}: {why(own[0])}"
        sentences.append(f"{_percentage(_share_sent(report, own[0]))} of all bytes sent: {what}")
    sentences += [again] if again else []
    return f"{bounds.bottleneck[0].upper()}{bounds.bottleneck[1:]} binds.", f"{'. '.join(sentences)}."


# --- shares and words ---


def _percentage(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1g}%"


def _at(source: Source | None) -> str:
    return f" at {source}" if source else ""


def repeated_share(report: Figures, work: Sequence[RepeatedWork] | None = None) -> float:
    """Return the share of all compute that devices could leave to others: of some products, or of all."""
    needless = sum(w.needless for w in (report.repeated if work is None else work))
    return needless / report.flops if report.flops else 0.0


def _share_sent(report: Figures, found: Sequence[Collective]) -> float:
    return known_sent(found) / max(1, known_sent(report.collectives))


def _matters(report: Figures, found: Sequence[Collective] = (), held: int = 0) -> bool:
    """Return whether transfers, or held bytes, cost something, where a chip tells."""
    bounds, sent = report.bounds, dict[Any, list[int]]()
    if bounds is None or not bounds.longest or (held and bounds.memory is None):
        return True
    for c in report.collectives:
        sent.setdefault(c.axes, []).append(c.mean_sent or 0)
    seconds = sum(bounds.links.get(c.axes or (), 0.0) * (c.mean_sent or 0) / max(1, sum(sent[c.axes])) for c in found)
    if report.memory is not None and bounds.memory:
        seconds += bounds.memory * min(1.0, held / max(1, report.memory.arguments))
    return seconds >= _LEAST * bounds.longest or held >= _LEAST * (bounds.capacity or math.inf)


def _much_is_sent(report: Figures, found: Sequence[Collective]) -> float:
    """Return the share of the bytes sent, if it is worth a remark."""
    share = _share_sent(report, found)
    return share if share >= _MUCH and _matters(report, found) else 0.0


def _paths(found: Sequence[Collective]) -> str:
    """List the parameters of transfers, the largest first."""
    return some(list(dict.fromkeys(path_of(c) for c in sorted(found, key=lambda c: -(c.total_sent or 0)))))


def _listed(arrays: Sequence[PlacedArgument]) -> str:
    """List the paths of arguments, the largest first."""
    sizes: dict[str, int] = {}
    for x in arrays:
        path = without_numbers(x.path)
        sizes[path] = sizes.get(path, 0) + x.bytes
    return some(sorted(sizes, key=lambda path: -sizes[path]), 6)


def _said(c: Collective) -> Any:
    """Return what the operation of a transfer was written from: a `ScopedOperation`, or None."""
    return c.operation.of if isinstance(c.operation, Said) else None


def _is_placed(c: Collective) -> bool:
    """Return whether a placement makes a transfer."""
    return _said(c) is not None and _said(c).name == "shard"


# --- checks: findings, or a text, such as `each mesh axis is used`, that says that there is none ---

_Found = Iterator[Suspicion | str]


def _fits(report: Figures) -> _Found:
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
        donate *= bool(report.undonated) and beside > _MUCH * memory.total
        advice += f": {what} are the largest part, {describe_bytes(size)}{donate}."
        cause = f"The step needs {describe_bytes(held)}, and {bounds.chip} has {describe_bytes(bounds.capacity)}."
        yield Suspicion("fix", cause, advice=advice)
    elif report.by == "compiled" and report.platform != "cpu":
        # Otherwise some of the memory is not counted, or it is the memory that a CPU needs.
        yield f"it fits: {describe_bytes(held)} of {describe_bytes(bounds.capacity)}"


def _donated(report: Figures) -> _Found:
    """Find arguments beside which results of the same sizes are held, since the step does not donate them."""
    sizes, undonated = {x.path: x.bytes for x in report.placed}, report.undonated or ()
    held = sum(sizes.get(path, 0) for path in undonated)
    total = report.timeline.peak if report.timeline else report.memory.total if report.memory else sum(sizes.values())
    if held > _MUCH * total:
        largest = some(sorted(dict.fromkeys(map(without_numbers, undonated))))
        cause = f"Results are held beside arguments of the same sizes, which are not donated: {largest}."
        so = f"If the results are their updates, a device holds {describe_bytes(held)} less with donation."
        names = sorted({path.partition("/")[0] for path in undonated})
        # Of a model and its state, results are the updates.
        severity = "look" if held >= _WIDE * total and len(names) > 1 else "note"
        yield Suspicion(severity, cause, (so,), f"donate_args for {some(names)}, if the caller needs them no more.")
    elif report.undonated == ():
        yield "results take the place of the arguments that they update"


def _kept(report: Figures) -> _Found:
    """Find a forward pass that keeps most of the memory for the backward pass."""
    if report.timeline is None or not any(report.timeline.phases):
        return
    kept = sum(h.bytes for h in report.timeline.kept_for_backward)
    share, capacity = kept / report.timeline.peak, report.bounds.capacity if report.bounds else None
    if share > 0.5 and kept >= _LEAST * (capacity or 0):
        of_it = described_held(report.timeline.kept_for_backward)
        cause = f"{_percentage(share)} of the peak is kept for the backward pass: {of_it}."
        yield Suspicion("note", cause, advice="gradient checkpointing, which computes some of it again.")
    elif share <= 0.5:
        yield "the backward pass does not keep most of the memory"


def _unknown(report: Figures) -> dict[str, tuple[str, ...]]:
    """Return the names of the mappings that no array has, with their mesh axes."""
    both = {**report.parameter_mapping, **report.mapping} if report.axes else {}
    return {n: mesh_axes(over) for n, over in both.items() if over and n not in report.axes}


def _misspelt(report: Figures) -> set[str]:
    return {a for over in _unknown(report).values() for a in over}


def _mapping(report: Figures) -> _Found:
    for name, over in _unknown(report).items():
        # A mapping for several models has names that some have not; an axis that it shards is not meant by another.
        of_it = [mapping for mapping in (report.parameter_mapping, report.mapping) if mapping.get(name)]
        hint = suggestion(name, [n for n in report.axes if not all(mapping.get(n) for mapping in of_it)])
        work = [w for w in report.repeated if set(w.axes) & set(over)]
        has = f"The mapping shards {name} over {described_axes(over)}, but no array has an axis of that name.{hint}"
        if not hint and repeated_share(report, work) < _MUCH:
            yield Suspicion("note", has)
            continue
        so, total = [*_of_repeated(report, work)], sum(x.bytes for x in report.placed)
        if arrays := [x for x in report.placed if set(x.replicated_over) & set(over) and x.bytes > _MUCH * total]:
            held = f"{_percentage(sum(x.bytes for x in arrays) / total)} of the bytes of arguments are held in "
            copies = " or ".join(map(str, sorted({x.copies for x in arrays})))
            so.append(f"{held}{copies} copies: {_listed(arrays)}.")
        advice = f"map one of the axes that the step has ({', '.join(report.axes[:12])}), or leave {name} out."
        yield Suspicion("fix", has, tuple(so), "" if hint else advice)
    if report.axes and (report.mapping or report.parameter_mapping):
        yield "each name of the mapping is an axis of an array"


def _idle(report: Figures) -> list[str] | None:
    """Return the mesh axes that nothing uses; None if that is not known."""
    devices = math.prod(report.mesh.values())
    known = all(math.prod(report.mesh[a] for axes in x.over for a in axes) * x.copies == devices for x in report.placed)
    if not report.placed or not known or any(c.axes is None for c in report.collectives):
        return None
    used = {a for x in report.placed for axes in x.over for a in axes}
    used |= {a for c in report.collectives for a in c.axes or ()}
    return [a for a, n in report.mesh.items() if n > 1 and a not in used]


def _explained(report: Figures) -> set[str]:
    """Return the mesh axes whose copies and repeated work follow from another remark."""
    return _misspelt(report).union(_idle(report) or ())


def _mesh_axes(report: Figures) -> _Found:
    idle = _idle(report)
    if over := [a for a in idle or () if a not in _misspelt(report)]:
        work = [w for w in report.repeated if set(over) & set(w.axes)]
        axes, along = ("axis", "it") if len(over) == 1 else ("axes", "them")
        devices, unplaced = math.prod(report.mesh[a] for a in over), _not_placed(report, over)
        although = f", over which the mapping shards {described_axes(unplaced)}" if unplaced else ""
        cause = f"Nothing uses the mesh {axes} {described_axes(over)}{although}: "
        cause += f"{devices} devices along {along} hold the same."
        advice = _axes_to_shard(report, work, *over) or f"a mesh without {described_axes(over)}."
        # Code per device may use the place of a device without sending anything.
        severity = "fix" if work or not report.flops else "look"
        yield Suspicion(severity, cause, tuple(_of_repeated(report, work)), advice)
    if idle == [] and math.prod(report.mesh.values()) > 1:
        yield "each mesh axis is used"


def _repeated(report: Figures) -> _Found:
    explained, lines = _explained(report), {lost.source for lost in _lost(report)} - {None}
    work = [w for w in report.repeated if not (w.axes and set(w.axes) <= explained) and w.source not in lines]
    if repeated_share(report, work) >= _MUCH:
        own = [[w for w in work if w.axes == axes] for axes in dict.fromkeys(w.axes for w in work)]
        most = max(own, key=lambda same: repeated_share(report, same))
        axes = most[0].axes
        over = f" over {described_axes(axes)}" if axes else ""
        advice = f"keep an axis of {most[0].operation or 'its operands'} sharded{over}, where it is computed."
        cause = "".join(_of_repeated(report, work))
        yield Suspicion("fix", cause, advice=_axes_to_shard(report, most, *axes) or advice)
    if report.flops and math.prod(report.mesh.values()) > 1 and repeated_share(report) < SMALL:
        yield "no product is repeated outside of code per device"


def _of_repeated(report: Figures, work: Sequence[RepeatedWork]) -> Iterator[str]:
    """Say how much of the compute is repeated, how often, and where that begins."""
    if (share := repeated_share(report, work)) >= SMALL:
        along: dict[str, list[RepeatedWork]] = {}
        for w in work:
            over = f" along {described_axes(w.axes)}" if w.axes else ""
            along.setdefault(f"{w.copies} devices{over}", []).append(w)
        parts = [*along]
        if len(along) > 1:
            parts = [f"{p} ({_percentage(repeated_share(report, own))})" for p, own in along.items()]
        first = short_operation(work[0].operation or "a product without names")
        same = f"first{_at(work[0].source)} in {first}: {' and '.join(parts)} do the same."
        yield f"{_percentage(share)} of the compute is repeated, {same}"


def _axes_to_shard(report: Figures, work: Sequence[RepeatedWork], *over: str) -> str:
    """Advise to shard axes of repeated operations over the mesh axes that repeat them.

    These are axes of their first operands, such as the batch, if none of them is sharded, and else axes of parameters.
    If it is not known which mesh axes repeat the operations, there is no advice.
    """
    if not over:
        return ""
    if unplaced := _not_placed(report, over):
        return _how_to_place(unplaced)
    having: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for x in report.placed:
        for n, size in zip(x.axes, x.sizes, strict=True):
            if n is not None:
                having[n], sizes[n] = having.get(n, 0) + 1, size
    count, free, firsts = math.prod(report.mesh[a] for a in over), list[str](), list[str]()
    for w in work:
        if not isinstance(w.operation, Said):
            continue
        op = w.operation.of
        firsts += [a.name for a in op.operands[0]]
        if w.phase != "backward" and len(op.operands) == 2 and len(op.results) == 1:
            # Those that the mapping leaves: of the first operand, or else of the second.
            first, second = ([a.name for a in term if a in op.results[0]] for term in op.operands)
            of_one = second if any(map(report.mapping.get, first)) else first
            free += [n for n in of_one if not report.mapping.get(n)]
    found = [n for n in dict.fromkeys(free) if n in sizes and sizes[n] % count == 0]
    more_of = []
    # An axis of the first operands that the mapping shards, such as the batch, over more mesh axes.
    if (n := next((n for n in firsts if report.mapping.get(n)), None)) in sizes and n is not None:
        wider = (*mesh_axes(report.mapping[n]), *over)
        if len(set(wider)) == len(wider) and sizes[n] % math.prod(report.mesh[a] for a in wider) == 0:
            more_of = [f"{n} over {described_axes(wider)}"]
    # An axis of nearly all arrays, like the features of a model, would be summed over everywhere.
    rare = [n for n in found if having[n] <= len(report.placed) / 2]
    # An axis that no argument has is part of another one, or made of several: a mapping may have forgotten it.
    made = [n for n in free if report.placed and n not in sizes]
    names = list(dict.fromkeys([*made, *(rare or found)]))[: 2 if more_of else 4]
    few = [f"{' or '.join(names)} over {described_axes(over)}"] if names else []
    return f"shard {', or '.join([*few, *more_of])}." if few or more_of else ""


def _not_placed(report: Figures, over: Sequence[str]) -> list[str]:
    """Return the axes that a mapping shards over some mesh axes, along which arguments are replicated all the same.

    A mapping says where results of operations lie. Arguments lie where they were made, or where a placement puts them.
    """
    both = {**report.parameter_mapping, **report.mapping}
    known = ((n, {*x.replicated_over}.intersection(over)) for x in report.placed for n in x.axes if n is not None)
    return list(dict.fromkeys(n for n, alike in known if alike.intersection(mesh_axes(both.get(n)))))


def _how_to_place(names: Sequence[str]) -> str:
    said = described_axes(names)
    return f"in_placement=mapping of axonym.named_jit, or axonym.shard for arguments with {said}, where they are made."


def _came_sharded(report: Figures) -> _Found:
    """Find parameters that lie otherwise than a mapping says, over mesh axes that it gives to others."""
    if report.parameter_mapping or report.placed_by_rule:
        return
    taken = {*axes_in(report.mapping.values())}
    stored: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    # The state of an optimizer may be sharded where its parameter is replicated: only updates are gathered then.
    replicated = {_in_model(x) for x in _updated(report) if not any(x.over)}
    for x in _updated(report):
        for n, over in zip(x.axes, x.over, strict=True):
            if taken.intersection(over) and not report.mapping.get(n or "") and _in_model(x) not in replicated:
                stored.setdefault((n or "", over), {})[without_numbers(x.path)] = None
    for (n, over), paths in stored.items():
        cause = f"{some(list(paths))} came sharded over {described_axes(over)} along {n}, which no mapping says, and "
        cause += "other axes are sharded over it."
        so = "The compiler may sum or move activations instead of gathering parameters."
        yield Suspicion("look", cause, (so,), "axonym.fsdp, with this as the parameter mapping.")


def _lie_apart(report: Figures) -> _Found:
    """Find parameters and what an optimizer keeps of them that are sharded over different mesh axes."""
    alike: dict[Any, list[PlacedArgument]] = {}
    for x in _updated(report):
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


def _updated(report: Figures) -> list[PlacedArgument]:
    """Return the arguments that the step updates, if their axes have names."""
    return [x for x in report.placed if x.path in report.updated and None not in x.axes]


def _in_model(x: PlacedArgument) -> tuple[str, frozenset[str | None]]:
    """Return the name and axes that a parameter has in common with the moments that an optimizer keeps of it."""
    return x.path.rpartition("/")[2], frozenset(x.axes)


def _copies(report: Figures) -> _Found:
    """Find parameters, and what an optimizer keeps of them. Batches have copies wherever a mesh axis is not theirs."""
    explained, total = _explained(report), sum(x.bytes for x in report.placed)
    sent, capacity = {p for c in report.collectives for p in c.parameters}, report.bounds and report.bounds.capacity
    parameters = {x.axes for x in report.placed if x.path in (*report.updated, *sent)}
    large = [x for x in report.placed if x.copies > 1 and x.bytes > _MUCH * total]
    groups: dict[tuple[tuple[str, ...], int], list[PlacedArgument]] = {}
    for x in large:
        over = {*x.replicated_over}
        if x.axes in parameters and not (over and over <= explained) and not over & _misspelt(report):
            groups.setdefault((x.replicated_over, x.copies), []).append(x)
    for (over, copies), arrays in groups.items():
        if not _matters(report, held=sum(x.bytes - x.bytes // x.copies for x in arrays)):
            continue
        size, left = sum(x.bytes for x in arrays), sum(x.bytes // x.copies for x in arrays)
        along, paths = f" over {described_axes(over)}" if over else "", {x.path for x in arrays}
        cause = f"{_percentage(size / total)} of the bytes of arguments are held in {copies} copies"
        cause += f"{',' * bool(over)}{along}: {_listed(arrays)}."
        stored = [x for x in report.placed if over and set(over) <= {a for axes in x.over for a in axes}]
        if stored := [x for x in stored if x.path in sent]:
            cause += f" Sharded{along}: only {_listed(stored)}."
        less = f"{describe_bytes(left)} of each device instead of {describe_bytes(size)}"
        so = [f"Without copies, they would take {less}."]
        sums = [c for c in report.collectives if c.kind == "all-reduce" and set(c.axes or ()) <= set(over)]
        share = _share_sent(report, [c for c in sums if paths.intersection(c.parameters)])
        if share >= _MUCH:
            so.append(f"Their gradients are all-reduced{along}, {_percentage(share)} of the bytes sent.")
        # The axes that all have, that nothing shards, and that their copies divide.
        free = [
            {n for n, size, by in zip(x.axes, x.sizes, x.over, strict=True) if n and not by and size % copies == 0}
            for x in arrays
        ]
        common = sorted(set.intersection(*free) - {n for n, by in report.mapping.items() if by})
        more, advice = ", which sends half as much again" if share >= _MUCH else "", ""
        if unplaced := [n for n in _not_placed(report, over) if n in {n for x in arrays for n in x.axes}]:
            advice = _how_to_place(unplaced)
        elif common and over:
            advice = f"store {common[0]} sharded{along}, with axonym.fsdp{more}."
        # Data parallelism is usual: it sends less than sharded parameters, if the copies fit.
        wasteful = (stored and share >= _MOST) or (capacity and size - left >= _MOST * capacity)
        yield Suspicion("look" if wasteful else "note", cause, tuple(so), advice)
    if report.placed and math.prod(report.mesh.values()) > 1 and not large:
        yield "no large argument is held in copies"


class _Lost(NamedTuple):
    """Axes that are gathered, or moved to another axis, although a mapping shards them."""

    names: tuple[str, ...]
    source: Source | None
    gathered: bool
    reason: str
    cause: str


def _lost(report: Figures) -> dict[_Lost, float]:
    """Find activations that are gathered, or moved to another axis, and make up much of the bytes sent: their share."""
    # Where placements trade shards along one axis for shards along another, as of experts, exchanges are asked for.
    traded = {c.axes for c in report.collectives if c.moved and (_is_placed(c) or c.cause == "placement")}
    together: dict[_Lost, list[Collective]] = {}
    for c in report.collectives:
        names, lost = c.gathered or c.moved, not c.stored and not c.of_indices and not c.parameters
        lost = lost and not (c.moved and c.axes in traded)
        if names and lost and not (_said(c) and _said(c).name == "dispatch"):
            key = _Lost(names, c.source, bool(c.gathered), c.reason or "why is not known", c.cause)
            together.setdefault(key, []).append(c)
    shares = {key: _much_is_sent(report, found) for key, found in together.items()}
    # A placement is the cause of what others need again.
    ordered = sorted(shares.items(), key=lambda pair: pair[0].cause != "placement")
    return {key: share for key, share in ordered if share}


def _moved(report: Figures) -> _Found:
    for (names, source, gathered, reason, by), share in _lost(report).items():
        said, at = described_axes(names), _at(source)
        does = "gathered" if gathered else "moved"
        cause = f"{said} is {does}{at}, {_percentage(share)} of the bytes sent: {reason}."
        work = [w for w in report.repeated if source is not None and w.source == source]
        advice = {
            "placement": f"add {said} to the placement{at}, or leave the placement out.",
            "code without names": f"write it with names, along another axis than {said}, or inside axonym.shard_map.",
        }.get(by, f"another axis than {said}, or an operation that does not need all of it.")
        yield Suspicion("look", cause, tuple(_of_repeated(report, work)), advice)
    gathers = [c for c in report.collectives if c.kind in ("all-gather", "all-to-all") and not c.parameters]
    told = all(c.reason for c in gathers) and _share_sent(report, [c for c in gathers if "gather" in c.kind]) < _MUCH
    if report.collectives and (told or not gathers):
        yield "no large activation is gathered"


def _converted(report: Figures) -> _Found:
    """Find parameters that a placement gathers before the step converts them to a smaller dtype."""
    late = [c for c in report.collectives if c.converted]
    if share := _much_is_sent(report, late):
        dtype, to = late[0].array.partition("[")[0], late[0].converted
        cause = f"Parameters are gathered as {dtype}{_at(late[0].source)}, {_percentage(share)} of the bytes sent, "
        cause += f"and only then converted to {to}: {some(list(dict.fromkeys(map(path_of, late))))}."
        yield Suspicion("look", cause, advice=f"convert them to {to} before the placement.")


def _cast(report: Figures) -> _Found:
    """Find gradients that a step converts to a larger dtype before devices add them up."""
    if report.cast is not None:
        before, after, line = report.cast
        sums = [c for c in report.collectives if "reduce" in c.kind and c.phase in ("backward", "") and c.parameters]
        cause = f"Gradients are converted from {before} to {after}{_at(line)} before devices add them up, "
        cause += f"{_percentage(_share_sent(report, sums))} of the bytes sent: {_paths(sums)}."
        yield Suspicion("look", cause, advice=f"add them up in {before}, and convert the sums.")


def _gathered_parameters(report: Figures) -> _Found:
    """Find parameters that a placement gathers outside of the differentiated function, or more than a mapping does."""
    by_line: dict[Source | None, list[Collective]] = {}
    for c in report.collectives:
        early = not c.phase or any(report.mapping.get(n) for n in c.gathered)
        # From JAX 0.12 on, XLA lays what an operation gathers to the placement of the arguments.
        if c.kind == "all-gather" and c.parameters and _is_placed(c) and early and not c.stored:
            by_line.setdefault(c.source, []).append(c)
    for line, own in by_line.items():
        if (share := _much_is_sent(report, own)) and line is not None:
            names = [n for n in own[0].gathered if report.mapping.get(n)]
            where = "outside of the forward and backward pass"
            where = f"although the mapping shards {described_axes(names)}" if names else where
            cause = f"Parameters are gathered{_at(line)} by a placement, {where}, {_percentage(share)} of the bytes "
            cause += f"sent: {_paths(own)}."
            advice = "leave the placement out: look-ups, sums and updates need no complete array."
            yield Suspicion("look", cause, advice=advice)
    for c in report.collectives:
        at = [x for x in report.collectives if x.source == c.source and x.operation is None]
        if c.cause == "look-up" and (share := _much_is_sent(report, at)):
            cause = f"All of {path_of(c)} is gathered{_at(c.source)} to look rows up without names, "
            cause += f"{_percentage(share)} of the bytes sent with its gradient."
            yield Suspicion("look", cause, advice="table[axis, numbers] of a named array, which sends rows only.")


_AVOIDABLE = {
    "one-hot": (
        "{share} of the compute looks rows up by products with one-hot arrays: first {operation}{at}",
        "the rows by their numbers, as in table[axis, numbers].",
    ),
    "empty": (
        "{share} of the compute is of rows that are empty, if each row goes to one expert: {operation}{at} makes "
        "{sizes[1]:,} rows of {sizes[0]:,}",
        "fewer slots for each expert, or axonym.nn.dispatch, which makes no empty rows.",
    ),
    "again": (
        "{share} of the compute is a forward pass that runs a second time, called{at}, first in {operation}",
        "use what the differentiated function computes, by has_aux=True, or run it in few steps only.",
    ),
    "padding": (
        "{share} of the compute is of padding: {of} grows from {sizes[0]:,} to {sizes[1]:,}{at}",
        "a smaller multiple, or several short sequences in one.",
    ),
    "turns": (
        "{share} of the compute is the same in each turn of a loop{at}: it has {values} in {sizes[1]:,} turns",
        "compute it before the loop.",
    ),
    "cache": (
        "{share} of the compute is for all {sizes[1]:,} of {of} in each turn of a loop{at}, which changes one",
        "a cache of keys and values, such as axonym.nn.attention.KVCache, and only the new position in each turn.",
    ),
    "gathered": (
        "{bytes} of gradients are gathered by a placement{at}, of parameters that are stored sharded",
        "leave the placement out: norms, clips and updates need no complete gradients.",
    ),
    "frozen": (
        "{share} of the compute is for gradients{at} of parameters that the step leaves as they are: {of}",
        "differentiate with respect to the other parameters only, and keep no state of these.",
    ),
    "unused": (
        "{share} of the compute{at} is for all {sizes[1]:,} of {of}, of which {operation} picks {sizes[0]:,}",
        "pick them before these products.",
    ),
    "equal": (
        "{share} of the compute is of rows that are all equal, since {of} is added by a broadcast{at}",
        "broadcast after the products, or leave it to names.",
    ),
    "experts": (
        "{share} of the compute{at} is for all {sizes[1]:,} of {of}, of which each row takes {sizes[0]:,}",
        "axonym.nn.dispatch, which sends rows only to those that they take.",
    ),
    "apart": (
        "{share} of the compute{at} is in a loop, but does not depend on what it carries",
        "compute it for all turns at once, before the loop.",
    ),
    "checkpointed": (
        "{share} of the compute is computed again twice: gradient checkpointing{at} lies in or around another",
        "checkpoint in one place, such as nn.Stacked, unless memory needs both.",
    ),
    "repeated": (
        "{bytes} of an array{at}, repeated {sizes[1]:,} times, are read by products with few rows",
        "an axis for the repetition in the other operand, as grouped queries have, and the array as it is.",
    ),
    "stacked": (
        "A loop stacks {bytes} of arrays made{at}, of which only sums are used",
        "add them up in what the loop carries.",
    ),
    "sum of products": (
        "A sum of elementwise products{at} makes {sizes[1]:,} numbers of {sizes[0]:,}: it is a product of matrices",
        "axonym.dot of both, along the axis of the sum.",
    ),
    "wide": (
        "{of}{at}: {share} of the flops of the forward pass come after it in the larger dtype",
        "convert what is added or multiplied there to the smaller dtype, or convert the result.",
    ),
}
"""For each kind of avoidable work, the words of a report and the advice."""


def _avoidable(report: Figures) -> _Found:
    for work in report.avoidable:
        if work.share >= _MUCH:
            cause, advice = _AVOIDABLE[work.why]
            said = cause.format(
                share=_percentage(work.share),
                operation=short_operation(work.operation or "a product without names"),
                at=_at(work.source),
                sizes=work.sizes,
                values=counted(work.sizes[0], "value"),
                of=work.of,
                bytes=describe_bytes(work.sizes[0]),
            )
            yield Suspicion("look", f"{said}.", advice=advice)
    if report.flops and report.by != "names" and not report.avoidable:
        yield "no product has one-hot arrays or many empty rows, or runs in a second forward pass"


def _widened(report: Figures) -> _Found:
    """Find a step of which most products are in a larger dtype than the one that an operand came in."""
    if report.widened >= _WIDE:
        cause = f"{_percentage(report.widened)} of the flops are in products of which one operand, often a parameter, "
        cause += f"is converted to a larger dtype because the other one has it: {report.widened_at}."
        so = "The activations between them have this dtype, too: they take more memory, and chips multiply it more "
        so += "slowly."
        advice = "find what made them so before: an array or a scale of that dtype. Convert it, or write a Python "
        advice += "number."
        yield Suspicion("look", cause, (so,), advice)
    elif report.flops and report.by != "names" and not report.widened:
        yield "products have the dtype of their operands"


def _again(report: Figures) -> _Found:
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
    if share := _much_is_sent(report, again):
        kinds = dict.fromkeys("parameters" if "gather" in c.kind else "gradients" for c in again)
        times = sorted({c.times or 0 for c in again})
        often = f"{times[0]} to {times[-1]} times" if times[1:] else f"{times[0]} times"
        cause = f"The same {' and '.join(kinds)} are sent again in each turn of a loop{_at(again[0].source)}, {often}, "
        cause += f"{_percentage(share)} of the bytes sent: {_paths(again)}."
        advice = "fewer and larger microbatches, if the loop is over these, or one exchange before or after the loop."
        yield Suspicion("look", cause, advice=advice)
    sums = ("all-reduce", "reduce-scatter")
    of_one = [c for c in report.collectives if "gather" in c.kind or (c.phase == "backward" and c.kind in sums)]
    if report.collectives and all(c.parameters or c.times == 1 for c in of_one):
        yield "no loop sends the same parameter again"


def _across(report: Figures) -> _Found:
    """Find parameters that are gathered from other slices, over a slow network, wherever they are used."""
    gathers = [c for c in report.chosen("slices") if "gather" in c.kind and c.parameters]
    if gathers:
        cause = f"Parameters are gathered across slices ({', '.join(report.between)}) at each use, "
        cause += f"{describe_bytes(known_sent(gathers))}: {_paths(gathers)}."
        advice = "store them within a slice: let the slices lie along a mesh axis that the parameter mapping leaves "
        advice += "out."
        yield Suspicion("look", cause, advice=advice)
    elif report.between:
        yield "no parameter is gathered across slices"


def _reasons(report: Figures) -> _Found:
    unknown = [c for c in report.collectives if c.reason is None]
    if not (share := _much_is_sent(report, unknown)):
        if known_sent(report.collectives) and _share_sent(report, unknown) < _MUCH:
            yield "the cause of each large transfer is known"
        return
    c, *_ = largest = grouped(unknown)[0]
    where, over = f" in {c.operation}" if c.operation else "", described_axes(c.axes)
    cause = f"Why {_percentage(share)} of the bytes are sent is not known, first{_at(c.source)}: "
    cause += f"{_percentage(_share_sent(report, largest))} by the {c.kind} of {c.array}{where}."
    advice = "names for the arrays there: see axonym.names."
    if _is_placed(c):
        advice = f"see what the placement there leaves out: an axis that was sharded over {over} before it."
    elif c.operation:
        advice = f"see which of these axes is sharded over {over}: what looks up, sorts, joins or cuts it needs all "
        advice += "of it."
    yield Suspicion("look", cause, advice=advice)


def _waits(report: Figures) -> _Found:
    """Say how long the stages of a pipeline wait."""
    if report.idle:
        cause = f"A stage of the pipeline waits in {_percentage(report.idle)} of the time, by its schedule."
        yield Suspicion("note" if report.idle < _WIDE else "look", cause, advice="more microbatches.")


def _certain(report: Figures) -> _Found:
    if report.uncertain:
        yield Suspicion("note", f"The bytes sent may be off by {describe_bytes(report.uncertain)}.")


CHECKS = (
    _fits, _mapping, _mesh_axes, _moved, _repeated, _avoidable, _gathered_parameters, _again, _across,
    _came_sharded, _lie_apart, _copies, _converted, _cast, _widened, _donated, _kept, _reasons, _waits, _certain,
)  # fmt: skip
"""The checks, in the order in which findings of equal severity are listed."""
