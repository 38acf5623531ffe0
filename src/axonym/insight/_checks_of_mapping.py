"""Check that a mapping uses all of a mesh, for axes that arrays have, and that no device repeats what others do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.errors import suggestion
from ..distribution.mesh_axes import mesh_axes
from ._checks_of_transfers import lost_axes
from ._figures import Figures
from ._text import Said, described_axes
from .records import MUCH, SMALL, RepeatedWork
from .suspicions import Found, Suspicion, described_repeats, listed, percentage, repeated_share


def check_names(report: Figures) -> Found:
    for name, over in _unknown_names(report).items():
        # A mapping for several models has names that some have not; an axis that it shards is not meant by another.
        of_it = [mapping for mapping in (report.parameter_mapping, report.mapping) if mapping.get(name)]
        hint = suggestion(name, [n for n in report.axes if not all(mapping.get(n) for mapping in of_it)])
        work = [w for w in report.repeated if set(w.axes) & set(over)]
        has = f"The mapping shards {name} over {described_axes(over)}, but no array has an axis of that name.{hint}"
        if not hint and repeated_share(report, work) < MUCH:
            yield Suspicion("note", has)
            continue
        so, total = [*described_repeats(report, work)], sum(x.bytes for x in report.placed)
        if arrays := [x for x in report.placed if set(x.replicated_over) & set(over) and x.bytes > MUCH * total]:
            held = f"{percentage(sum(x.bytes for x in arrays) / total)} of the bytes of arguments are held in "
            copies = " or ".join(map(str, sorted({x.copies for x in arrays})))
            so.append(f"{held}{copies} copies: {listed(arrays)}.")
        advice = f"map one of the axes that the step has ({', '.join(report.axes[:12])}), or leave {name} out."
        yield Suspicion("fix", has, tuple(so), "" if hint else advice)
    if report.axes and (report.mapping or report.parameter_mapping):
        yield "each name of the mapping is an axis of an array"


def _unknown_names(report: Figures) -> dict[str, tuple[str, ...]]:
    """Return the names of the mappings that no array has, with their mesh axes."""
    both = {**report.parameter_mapping, **report.mapping} if report.axes else {}
    return {n: mesh_axes(over) for n, over in both.items() if over and n not in report.axes}


def misspelt(report: Figures) -> set[str]:
    return {a for over in _unknown_names(report).values() for a in over}


def check_mesh_axes(report: Figures) -> Found:
    idle = _idle_mesh_axes(report)
    if over := [a for a in idle or () if a not in misspelt(report)]:
        work = [w for w in report.repeated if set(over) & set(w.axes)]
        axes, along = ("axis", "it") if len(over) == 1 else ("axes", "them")
        devices, unplaced = math.prod(report.mesh[a] for a in over), not_placed(report, over)
        although = f", over which the mapping shards {described_axes(unplaced)}" if unplaced else ""
        cause = f"Nothing uses the mesh {axes} {described_axes(over)}{although}: "
        cause += f"{devices} devices along {along} hold the same."
        advice = _axes_to_shard(report, work, *over) or f"a mesh without {described_axes(over)}."
        # Code per device may use the place of a device without sending anything.
        severity = "fix" if work or not report.flops else "look"
        yield Suspicion(severity, cause, tuple(described_repeats(report, work)), advice)
    if idle == [] and math.prod(report.mesh.values()) > 1:
        yield "each mesh axis is used"


def _idle_mesh_axes(report: Figures) -> list[str] | None:
    """Return the mesh axes that nothing uses; None if that is not known."""
    devices = math.prod(report.mesh.values())
    known = all(math.prod(report.mesh[a] for axes in x.over for a in axes) * x.copies == devices for x in report.placed)
    if not report.placed or not known or any(c.axes is None for c in report.collectives):
        return None
    used = {a for x in report.placed for axes in x.over for a in axes}
    used |= {a for c in report.collectives for a in c.axes or ()}
    return [a for a, n in report.mesh.items() if n > 1 and a not in used]


def explained_axes(report: Figures) -> set[str]:
    """Return the mesh axes whose copies and repeated work follow from another remark."""
    return misspelt(report).union(_idle_mesh_axes(report) or ())


def check_repeats(report: Figures) -> Found:
    explained, lines = explained_axes(report), {lost.source for lost in lost_axes(report)} - {None}
    work = [w for w in report.repeated if not (w.axes and set(w.axes) <= explained) and w.source not in lines]
    if repeated_share(report, work) >= MUCH:
        own = [[w for w in work if w.axes == axes] for axes in dict.fromkeys(w.axes for w in work)]
        most = max(own, key=lambda same: repeated_share(report, same))
        axes = most[0].axes
        over = f" over {described_axes(axes)}" if axes else ""
        advice = f"keep an axis of {most[0].operation or 'its operands'} sharded{over}, where it is computed."
        cause = "".join(described_repeats(report, work))
        yield Suspicion("fix", cause, advice=_axes_to_shard(report, most, *axes) or advice)
    if report.flops and math.prod(report.mesh.values()) > 1 and repeated_share(report) < SMALL:
        yield "no product is repeated outside of code per device"


def _axes_to_shard(report: Figures, work: Sequence[RepeatedWork], *over: str) -> str:
    """Advise to shard axes of repeated operations over the mesh axes that repeat them.

    These are axes of their first operands, such as the batch, if none of them is sharded, and else axes of parameters.
    If it is not known which mesh axes repeat the operations, there is no advice.
    """
    if not over:
        return ""
    if unplaced := not_placed(report, over):
        return how_to_place(unplaced)
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


def not_placed(report: Figures, over: Sequence[str]) -> list[str]:
    """Return the axes that a mapping shards over some mesh axes, along which arguments are replicated all the same.

    A mapping says where results of operations lie. Arguments lie where they were made, or where a placement puts them.
    """
    both = {**report.parameter_mapping, **report.mapping}
    known = ((n, {*x.replicated_over}.intersection(over)) for x in report.placed for n in x.axes if n is not None)
    return list(dict.fromkeys(n for n, alike in known if alike.intersection(mesh_axes(both.get(n)))))


def how_to_place(names: Sequence[str]) -> str:
    said = described_axes(names)
    return f"in_placement=mapping of axonym.named_jit, or axonym.shard for arguments with {said}, where they are made."
