"""Say what the operation of a scope, which `axonym.distribution.operation_scope` writes, has to do with an exchange."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..distribution.mesh_axes import Axes
from ..distribution.operation_scope import CHOICE, NamedAxis, ScopedOperation, Term, operations_in
from ..ops._blocks import SCOPE
from ._text import Said, described_axes


def operation(scope: str) -> ScopedOperation | None:
    """Return the innermost named operation of a scope, or None if there is none."""
    found = [op for op in operations_in(scope) if op.name not in ("pipeline", "turns")]
    return _in_model(found[-1]) if found else None


def said_of(op: ScopedOperation | None) -> Said | None:
    """Write an operation, if there is one."""
    return None if op is None else Said(str(op), op)


@functools.lru_cache(maxsize=4096)
def _in_model(found: ScopedOperation) -> ScopedOperation:
    """Return an operation with the axes of the model: a kernel renames those that are the same in several operands."""
    if found.name != "MoELinear":
        return found
    last = {a.axis: dataclasses.replace(a, name=a.axis) for term in (*found.operands, *found.results) for a in term}
    operands, results = (
        tuple(tuple(last[a.axis] for a in term) for term in terms) for terms in (found.operands, found.results)
    )
    return dataclasses.replace(found, operands=operands, results=results)


def names_in(operations: Iterable[ScopedOperation]) -> set[str]:
    """Return the names of all axes of operations."""
    found = {a for op in operations for term in (*op.operands, *op.results) for a in term}
    # A lifted function numbers the axes of its own arrays.
    return {a.axis for a in found if " of held array " not in a.name}


def choices_in(operations: Iterable[ScopedOperation]) -> list[str]:
    """Return which implementations run of operations that choose among several, and why."""
    return sorted({op.name for op in operations if op.name.startswith(CHOICE)})


def around(scope: str, name: str) -> ScopedOperation | None:
    """Return the operation of a name that surrounds a scope, such as the dispatch of rows to experts, or None."""
    return next((op for op in operations_in(scope) if op.name == name), None)


def turns(scope: str) -> tuple[int, int] | None:
    """Return in how many turns of a loop the condition of this scope holds, and how many there are, if it is known."""
    ends = re.search(r"#[0-9a-f]{12}\)*/[a-z]+$", scope)
    found = operations_in(ends[0]) if ends else []
    return found[0].turns if found else None


def reason_in_pipeline(pipeline: ScopedOperation, kind: str, over: Collection[str]) -> str:
    """Explain what stages of a pipeline exchange, apart from what their layers do."""
    if pipeline.over.isdisjoint(over):
        return f"adds up or gathers what a stage needs of its {pipeline.axes[0]}, or their gradients"
    if kind == "collective-permute":
        return "sends in each tick what a stage computes to the next one, or its gradient to the one before"
    return f"gives each stage of {pipeline.axes[0]} what others have, or adds up what all have"


def phase(scope: str) -> str:
    """Return the phase of a training step in which an instruction runs, from its scope."""
    outermost = re.sub(r"[^/()\[\]:]+\[[^\[\]]*->[^\[\]]*\]", "", scope)
    if "optimizer" in outermost.split("/"):  # `jax.named_scope("optimizer")`
        return "optimizer"
    after = outermost.rpartition("rematted_computation")
    if after[1]:
        return "backward" if "transpose(" in after[2] else "recomputed"
    if "transpose(" in outermost:
        return "backward"
    return "forward" if "jvp(" in outermost else ""


# --- arrays ---


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or result of an operation, matched with an array."""

    term: Term
    places: tuple[tuple[NamedAxis, int], ...] | None
    """Its axes, each with its position in the array; None if equal sizes leave them ambiguous."""


def array(
    op: ScopedOperation,
    kind: str,
    when: str,
    sizes: Sequence[int],
    mesh: Mapping[str, int],
    exchanged: Mapping[int, Collection[str]],
) -> Array | None:
    """Find the operand or result of which an array on one device is a shard, of one or several with the same axes.

    A collective of this kind carries it. `exchanged` has, by position, the mesh axes over which it is gathered.
    """
    matched = {term: _match(term, sizes, mesh, exchanged) for term in (*op.operands, *op.results)}
    found = None
    if kind in ("all-reduce", "reduce-scatter"):  # it carries a result, or the gradient of an operand
        found = _only(matched[term] for term in (op.operands if _is_of_gradient(op, when) else op.results))
    return found or _only(matched.values())


def _only(found: Iterable[Array | None]) -> Array | None:
    """Return what was found, the first of it if all has the same axes, and None otherwise."""
    arrays = [x for x in found if x is not None]
    return arrays[0] if len({frozenset(a.name for a in x.term) for x in arrays}) == 1 else None


def _is_of_gradient(op: ScopedOperation, when: str) -> bool:
    """Return whether the scope of an operation may be that of its gradient."""
    return when == "backward" and not op.has_own_gradients


def array_in_other_shape(op: ScopedOperation, when: str, elements: int, mesh: Mapping[str, int]) -> Array | None:
    """Find the result, or the operand with this gradient, from the number of elements of an array on one device.

    Returns None if there is none, or if there are several with different axes.
    """

    def local(term: Term) -> int:
        return math.prod((a.size or 0) // math.prod(mesh.get(m, 1) for m in a.compute) for a in term)

    terms = (*op.operands, *op.results) if _is_of_gradient(op, when) else op.results
    return _only(Array(term, None) for term in reversed(terms) if local(term) == elements)


def _match(
    term: Term, sizes: Sequence[int], mesh: Mapping[str, int], exchanged: Mapping[int, Collection[str]]
) -> Array | None:
    """Find an order of the axes in which they have these sizes, each divided by a possible number of shards."""
    if any(axis.size is None for axis in term):
        return None
    places = [i for i, n in enumerate(sizes) if n != 1]
    large = [axis for axis in term if axis.size != 1]

    def fits(order: Sequence[NamedAxis]) -> bool:
        chosen = zip(order, places, strict=True)
        return all(sizes[i] in _local_sizes(axis, mesh, exchanged.get(i, ())) for axis, i in chosen) and all(
            1 in _local_sizes(axis, mesh) for axis in large if axis not in order
        )

    # All orders of the axes are tried below: with more of them, this would take too long.
    if len(large) > 7 or len(places) > len(large):
        return None
    orders = [order for order in itertools.permutations(large, len(places)) if fits(order)]
    if not orders:
        return None
    # The first has the order of the term. Another order counts only if it is the only one.
    first = orders[0]
    in_order = [axis for axis in large if axis in first] == list(first)
    return Array(term, tuple(zip(first, places, strict=True)) if in_order or len(orders) == 1 else None)


def _local_sizes(axis: NamedAxis, mesh: Mapping[str, int], without: Collection[str] = ()) -> set[int]:
    size = axis.size or 0
    shards = [math.prod(mesh.get(a, 1) for a in over if a not in without) for over in (axis.compute, axis.stored or ())]
    return {size, *(size // count for count in shards if size % count == 0)}


# --- reasons ---


def groups(scope: str) -> int:
    """Return the number of matrices by which a compiler for CPUs multiplies each row of a grouped product; or 1."""
    found = operation(scope)
    return (found.operands[2][0].size or 1) if found is not None and found.name == "MoELinear" else 1


def reason(op: ScopedOperation, kind: str, over: Collection[str], when: str, gathered: Collection[str]) -> str | None:
    """Explain by name why an operation needs a collective over some mesh axes; return None if it is not known."""
    if op.name == "shard" and when == "optimizer" and "matrix" in op.axes:
        return "gives devices whole matrices, or back what each stores of them"
    own = _EXCHANGED.get((op.name, kind))
    if own is not None and _covers(found := _sharded(op, over), over):
        return own.format(_said(found))
    rows = {a.name for term in op.results for a in term}
    if kind in ("all-reduce", "reduce-scatter"):
        if _is_of_gradient(op, when):
            # The sizes of groups have no gradient.
            terms = [[a.name for a in term] for term in (op.operands[:2] if op.name == "MoELinear" else op.operands)]
            sums = [(own, _reason_of_sum(op, over, own)) for own in terms]
            causes = dict.fromkeys(f"the gradient of [{', '.join(own)}] {why}" for own, why in sums if why)
            if causes:
                return "; or ".join(causes)
        return _reason_of_sum(op, over, rows)
    stored = stored_over(op.operands, over)
    if kind == "all-gather" and gathered:
        if set(gathered) <= {a.name for a in stored}:
            used = "and all-gathered where it is used"
            return f"{' and '.join(gathered)} is stored sharded over {described_axes(over)}, {used}"
        if op.name == "index" and stored:
            table = f"{stored[0].name}, which is stored sharded over {described_axes(over)}"
            return f"looks up all of {described_axes(gathered)} in each shard of {table}"
        if op.name == "shard":
            return reason_of_placement(gathered, (), over)
        found = [a for a in _sharded(op, over) if a.name in gathered]
        if len(found) == len(gathered):
            return f"needs all of {_said(found)}"
        came = f"{described_axes(gathered)} came sharded over {described_axes(over)}, by no active mapping"
        return f"{came}, and is all-gathered where it is used"
    if op.name == "dispatch" and kind.endswith("all-to-all"):
        found = [a for a in _sharded(op, over) if a.name not in rows]
        if _covers(found, over):
            return f"sends rows to {_said(found)}, or results back"
    if kind in ("collective-permute", "all-to-all"):
        found = _sharded(op, over)
        # The collective moves shards along an axis that the operation has over these mesh axes.
        if not stored and (names := " or ".join(a.name for a in found if _covers([a], over))):
            which = f"{names}, which is sharded over {described_axes(over)}"
            trade = f"trades shards along {which}, for shards along another axis, or back"
            return f"moves shards along {which}" if kind == "collective-permute" else trade
        if kind == "all-to-all" and len(stored) == len(found) == 1:
            where = f"{stored[0].name}, which is stored sharded over {described_axes(over)}"
            return f"exchanges shards of {where}, for shards of {found[0].name}"
    return None


def _sharded(op: ScopedOperation, over: Collection[str]) -> list[NamedAxis]:
    """Return the axes of an operation that it has sharded over some mesh axes."""
    axes = {a.name: a for term in (*op.operands, *op.results) for a in term}
    return [a for a in axes.values() if not set(over).isdisjoint(a.compute)]


def _reason_of_sum(op: ScopedOperation, over: Collection[str], kept: Collection[str]) -> str | None:
    found = [a for a in _sharded(op, over) if a.name not in kept]
    return f"sums over {_said(found)}" if _covers(found, over) else None


def reason_of_placement(gathered: Collection[str], moved: Collection[str], over: Collection[str]) -> Said:
    """Explain that a placement needs all of some axes, or shards along others."""
    does = f"replicates {described_axes(gathered)}" if gathered else f"shards another axis than {described_axes(moved)}"
    return Said(f"a placement {does}, which came sharded over {described_axes(over)}", "placement")


def reason_of_use(
    op: ScopedOperation, user: ScopedOperation | None, gathered: Collection[str], moved: Collection[str]
) -> Said:
    """Explain that a user of an array needs all of some axes, or shards along others. It may be code without names."""
    axes = dict.fromkeys(a for term in (*op.results, *op.operands) for a in term)
    said = _said([a for a in axes if a.name in (*gathered, *moved)])
    who = "code without names" if user is None else user.name
    return Said(f"{who} needs {'all of' if gathered else 'shards along another axis than'} {said}", "" if user else who)


def stored_over(terms: Sequence[Term], over: Collection[str]) -> list[NamedAxis]:
    """Return the axes of parameters that are stored sharded over some mesh axes.

    An operand with an axis that is sharded over the same mesh axis in the operation is no parameter.
    """
    parameters = (term for term in terms if all(set(over).isdisjoint(a.compute) for a in term))
    return [*{a.name: a for term in parameters for a in term if set(over) & set(a.stored or ())}.values()]


def keeps(op: ScopedOperation, axes: Collection[str], when: str) -> bool:
    """Return whether an operation computes the shards along some axes independently, as elementwise operations do.

    The results of its backward pass are the gradients of its operands.
    """
    terms = op.operands if _is_of_gradient(op, when) else op.results
    alike = op.rule.by_index or op.name == "dot"
    return alike and {a.name for term in terms for a in term}.issuperset(axes)


_BY_HALOS = "halo boundary neighbors diff gradient interp regrid"
_EXCHANGED = {
    (name, kind): reason
    for names, kind, reason in (
        (_BY_HALOS, "collective-permute", "passes the halo of {}, to neighbors"),
        ("cumsum cumprod nancumsum nancumprod", "all-gather", "gathers the totals of shards of {}"),
        ("interp regrid linalg.tridiagonal_solve", "all-gather", "needs all of {}"),
        ("interp regrid", "reduce-scatter", "adds up the gradients of elements of {}"),
    )
    for name in names.split()
}
"""Why an operation that exchanges blocks itself needs a collective, by its name and the kind of the collective."""


def exchanges(scope: str) -> bool:
    """Return whether an operation itself exchanges what blocks of its axes need."""
    return SCOPE in scope


def moved(op: ScopedOperation, over: Collection[str]) -> Axes:
    """Return the only axis of an operation that is sharded over some mesh axes: an all-to-all over these moves it."""
    found = _sharded(op, over)
    return (found[0].name,) if len(found) == 1 and _covers(found, over) and not stored_over(op.operands, over) else ()


def _said(found: Sequence[NamedAxis]) -> str:
    return " and ".join(
        f"{a.name}, which is sharded over {described_axes(a.compute)}" if a.compute else a.name for a in found
    )


def _covers(found: Sequence[NamedAxis], mesh_axes: Collection[str]) -> bool:
    """Return whether the axes are sharded over all these mesh axes."""
    return set(mesh_axes) <= {m for a in found for m in a.compute}
