"""Decide how each operation is distributed: the policy. This is the file to change for another policy.

To change a contraction: `combine`, which asks `settle` where the result lies, and `add_up`, which says how devices add
up their parts of the sum. `combine` also decides elementwise operations.

The others: `settle` decides where any result lies: an axis keeps its sharding; where operands disagree, or an axis is
new, the mapping decides. `gathered_over` decides which parameters are all-gathered before use, and `exchange_columns`
which look-ups in a table whose columns are stored sharded gather indices in place of the table.

Other code carries these decisions out or predicts them: see the package. These families are decided where they are
carried out, since nothing else predicts them: operations that need all of an axis (`ops/_kernels.py`), top-k,
convolutions, attention along the sequence, dispatch to experts, and the rules of users (`custom_partitioning`), where
an axis may have several factors, and the largest operand decides where `settle` raises an error. A contraction that
sums all axes begins with those that only one operand has (`_sum_out`, by `jnp.sum`), and a convolution gathers its
weight by `fsdp_ops.in_compute_sharding`; neither asks this file.

On Explicit mesh axes, the decision says where the result lies, and JAX adds up partial sums to get there. FSDP's
operations add them up as `sums` says. JAX makes gradients and reductions, and asks nobody how: `sums_of_jax` says so to
the report by names. A reduce-scatter without an axis to shard (`onto`) is the gradient of a gather.

A policy keeps one law: if operands lie where the mapping puts their names, results do. Reports by name assume it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ..axis import Names
from ..core import errors
from .active_settings import Entry
from .mesh_axes import Axes, entry_of, is_parameter, mapped_axes, storage_axes


class PlacedAxes(NamedTuple):
    """The axes of an array, and the mesh axes that each is sharded over."""

    names: Sequence[str | None]
    over: Sequence[Axes]


class PartialSum(NamedTuple):
    """A sum over devices of the parts that each of them computed."""

    kind: Literal["all-reduce", "reduce-scatter"]
    axes: Axes
    """The mesh axes along which devices have the parts."""
    onto: str | None = None
    """The axis of the sum that a reduce-scatter shards, if it is one axis."""


class ColumnExchange(NamedTuple):
    """A look-up of all rows in each shard of the columns, after which columns are exchanged for rows."""

    axes: Axes
    """The mesh axes that shard the columns of the table, and rows of the indices."""
    column: str
    row: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """The distribution of an operation on several operands."""

    operands: Sequence[PlacedAxes]
    """The placements of the operands when the operation begins."""
    gathers: Mapping[int, Sequence[Axes]]
    """For each operand that is a parameter, the mesh axes over which each of its axes is all-gathered."""
    sums: Sequence[PartialSum]
    result: PlacedAxes


class Undecided(ValueError):
    """Raised if names and mappings do not determine how an operation is distributed."""


class Mappings:
    """A compute and a parameter mapping on a mesh, and what they say about names.

    Arguments:
        mesh: the size of each mesh axis.
        compute: the mapping by which arrays are sharded where they are used.
        storage: the mapping by which parameters are stored.
    """

    def __init__(self, mesh: Mapping[str, int], compute: Mapping[str, Entry], storage: Mapping[str, Entry]):
        self.mesh, self.compute, self.storage = mesh, compute, storage

    def used(self, name: str | None) -> Axes:
        """Return the mesh axes that an axis is sharded over where it is used."""
        return () if name is None else mapped_axes(name, self.compute)

    def stored(self, name: str | None) -> Axes:
        """Return the mesh axes that an axis of a parameter is sharded over between uses."""
        return () if name is None else storage_axes(name, self.storage, self.compute)

    def is_stored(self, names: Iterable[str | None]) -> bool:
        """Return whether an array with these axes is a parameter, and so lies where it is stored."""
        return is_parameter([n for n in names if n is not None], self.storage, self.compute)

    def gathered(self, name: str | None) -> Axes:
        """Return the mesh axes over which an axis of a parameter is all-gathered before use."""
        return tuple(a for a in self.stored(name) if a not in self.used(name))

    def extra(self, names: Iterable[str | None]) -> Axes:
        """Return the mesh axes over which a parameter is all-gathered before use."""
        return distinct(a for n in names for a in self.gathered(n))

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of devices along some mesh axes."""
        return math.prod(self.mesh[a] for a in axes)


def distinct(axes: Iterable[str]) -> Axes:
    """Return each mesh axis once, in order."""
    return tuple(dict.fromkeys(axes))


Successors = Mapping[str, Names]
"""The axes of a result that take over the sharding of an operand's axis, major to minor. Where several axes are merged
into one, the mapping lists them in the order in which they are merged."""

# --- products and elementwise operations ---


def combine(
    what: str, operands: Sequence[PlacedAxes], names: Names, sizes: Mapping[str, int], by: Mappings, summed: Names = ()
) -> Decision:
    """Decide an operation that treats every index of an axis independently, or sums over the axis.

    Arguments:
        operands: the placements in which the operands are used. A parameter begins in its storage sharding.
        names: the axes of the result.
        sizes: the sizes of all axes.
        summed: the axes that are summed over.
    """
    begin, gathers = list(operands), dict[int, list[Axes]]()
    for i, operand in enumerate(operands):
        if gathered_over(
            operand.names, [a for o in operands if o is not operand for n in o.names for a in by.used(n)], by
        ):
            begin[i] = PlacedAxes(operand.names, [*map(by.stored, operand.names)])
            gathers[i] = [*map(by.gathered, operand.names)]
    # By the operands as they are used: the storage of a parameter must not decide where activations lie.
    result = settle(what, names, sizes, operands, by)
    placed = [pair for operand in operands for pair in zip(*operand, strict=True)]
    parts = [distinct(a for n, axes in placed if n == name for a in axes) for name in summed]
    result, sums = add_up(parts, result, [sizes[n] for n in names], by)
    return Decision(begin, gathers, sums, result)


def add_up(
    parts: Sequence[Axes], result: PlacedAxes, sizes: Sequence[int], by: Mappings
) -> tuple[PlacedAxes, Sequence[PartialSum]]:
    """Decide where a product lies if devices have parts of its sum, and how the parts are added up.

    A policy that shards the sum would use its sizes and the mappings; this one leaves it as the parts lie.

    Arguments:
        parts: for each axis that is summed over, the mesh axes that it is sharded over.
        result: the axes of the sum, as the parts lie.
        sizes: the sizes of these axes.
    """
    return sums_of_jax(parts, result)


def sums_of_jax(
    parts: Sequence[Axes], result: PlacedAxes, stored: PlacedAxes | None = None, at_once: bool = True
) -> tuple[PlacedAxes, Sequence[PartialSum]]:
    """Return where a sum lies that JAX adds up, and how: reductions, and gradients whatever the policy for products is.

    Arguments:
        parts, result: as for `add_up`.
        stored: where the sum must lie in the end if it is the gradient of a parameter.
        at_once: whether all axes are summed in one step, as products are. Others sum one axis after another.
    """
    over = distinct(a for axes in parts for a in axes)
    # Each device keeps only its shard of a gradient, so it need not get the sum of the others' shards.
    if stored is not None:
        pairs = zip(stored.over, result.over, strict=True)
        extra = distinct(a for kept, used in pairs for a in kept if a not in used)
        if set(extra) <= set(over):
            rest = tuple(a for a in over if a not in extra)
            return stored, [PartialSum("reduce-scatter", extra), *([PartialSum("all-reduce", rest)] if rest else [])]
        # Some mesh axes of the storage sharding hold parts of the sum, others equal sums: no one collective does both.
        if set(extra) & set(over):
            raise Undecided(f"a gradient summed over some of {', '.join(extra)}")
    return result, [PartialSum("all-reduce", axes) for axes in ([over] if at_once else parts) if axes]


def gathered_over(names: Iterable[str | None], others: Iterable[str], by: Mappings) -> Axes | None:
    """Return the mesh axes over which an operand is all-gathered before use because it is a parameter.

    There are none if the operand is stored as it is used; None means that it is not, but cannot be gathered. To be
    gathered, its storage sharding must refine its compute sharding, and other operands must be sharded over the mesh
    axes of the gather.

    Arguments:
        others: the mesh axes that other operands are sharded over.
    """
    names = tuple(names)
    if not by.is_stored(names) or not (extra := by.extra(names)):
        return ()
    # An all-gather takes away the minor mesh axes of an axis. With other major ones, shards would have to move as well.
    refines = all(by.stored(n)[: len(used)] == used for n in names for used in [by.used(n)])
    # If no other operand is sharded over them, all devices along these mesh axes would compute the same.
    return extra if refines and set(extra) <= set(others) else None


# --- results ---


def settle(
    what: str,
    names: Names,
    sizes: Mapping[str, int],
    operands: Sequence[PlacedAxes],
    by: Mappings,
    successors: Successors = MappingProxyType({}),
) -> PlacedAxes:
    """Decide where a result lies: each axis keeps the sharding that it has in the operands.

    Arguments:
        names: the axes of the result.
        sizes: the sizes of its axes, at least.
        successors: the axes of the result that take over the sharding of an operand's axis; by default the axis of that
            name.
    """
    mapping = {n: by.used(n) for n in names if n in by.compute}
    wanted: dict[str, list[Axes]] = {}
    for operand in operands:
        for name, axes in _inherited_axes(operand, names, sizes, by, successors).items():
            if axes not in wanted.setdefault(name, []):
                wanted[name].append(axes)
    seen = {n for operand in operands for n in operand.names}
    chosen: dict[str, Axes] = {}
    for name in names:
        choices = wanted.get(name, [])
        if len(choices) > 1 and name not in mapping:
            raise Undecided(_describe_disagreement(what, name, choices, by))
        if len(choices) == 1:
            # A resized axis is replicated if its mesh axes no longer divide it.
            chosen[name] = choices[0] if sizes[name] % by.count(choices[0]) == 0 else ()
        else:
            # An axis that operands have, and none of them shards, stays replicated: the mapping alone is no reason to
            # move data. Where they disagree, and for a new axis, it decides.
            chosen[name] = mapping.get(name, ()) if choices or name not in seen else ()
            if sizes[name] % by.count(chosen[name]):
                problem = errors.indivisible(f"axis {name!r}", sizes[name], {a: by.mesh[a] for a in chosen[name]})
                raise Undecided(f"{what}: by the active mapping, {problem} Resize the axis, or map it to None.")
    for axis in by.mesh:  # if several axes would have a mesh axis, it is left to the one that is mapped to it
        users = [n for n, axes in chosen.items() if axis in axes]
        if len(users) > 1:
            entitled = [n for n in users if axis in mapping.get(n, ())]
            if len(entitled) != 1:
                raise Undecided(_describe_collision(what, axis, users, by, bool(entitled)))
            chosen = {n: axes if n in entitled else tuple(a for a in axes if a != axis) for n, axes in chosen.items()}
    return PlacedAxes(names, [chosen[n] for n in names])


def _inherited_axes(
    operand: PlacedAxes, names: Names, sizes: Mapping[str, int], by: Mappings, successors: Successors
) -> Mapping[str, Axes]:
    """Return the mesh axes that one operand implies for each axis of the result."""
    placed = dict(zip(operand.names, operand.over, strict=True))
    # A replicated axis has no say: adding a replicated bias must not gather what it is added to.
    kept = {n: axes for n, axes in placed.items() if n is not None and axes and n not in successors}
    taken: dict[str, Axes] = {}
    for name, candidates in successors.items():
        left = [n for n in candidates if n in names]
        for axis in placed.get(name, ()):
            # Mesh axes go to the major part, as long as they divide it, so that shards stay contiguous.
            while left and sizes[left[0]] % by.count((*taken.get(left[0], ()), axis)):
                left.pop(0)
            if left:
                taken[left[0]] = (*taken.get(left[0], ()), axis)
    return kept | taken


# --- changes of placement ---


def change(before: Sequence[Axes], after: Sequence[Axes]) -> tuple[str, Axes] | None:
    """Return the collective that takes an array from one sharding to another, and its mesh axes.

    There is none if each device has what it needs, and only cuts it.
    """
    kept = [_common_axes(*pair) for pair in zip(before, after, strict=True)]
    left, new = (
        {i: axes[len(own) :] for i, (axes, own) in enumerate(zip(all_axes, kept, strict=True)) if axes != own}
        for all_axes in (before, after)
    )
    if not left:
        return None
    if not new:
        return "all-gather", distinct(a for axes in left.values() for a in axes)
    # Mesh axes go, as they are, from one axis to another.
    if len(left) == 1 and [*left.values()] == [*new.values()] and left.keys() != new.keys():
        return "all-to-all", next(iter(left.values()))
    raise Undecided("a change of placement by several exchanges, or to mesh axes in another order")


def _common_axes(before: Axes, after: Axes) -> Axes:
    """Return the major mesh axes that two shardings of an axis share."""
    count = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    return before[: min(len(before), len(after)) if count is None else count]


# --- look-ups in tables ---


def exchange_columns(table: Names, indices: Names, indexed: str | None, by: Mappings) -> ColumnExchange | None:
    """Decide whether a look-up in a stored table exchanges columns for rows, instead of gathering the table.

    It does if one axis of the table, other than the indexed one, is stored sharded, and one axis of the indices is
    sharded over the same mesh axes.
    """
    extra = gathered_over(table, [a for n in indices for a in by.used(n)], by)
    if not extra:
        return None
    columns = [n for n in table if by.stored(n) != by.used(n)]
    rows = [n for n in indices if set(extra) & set(by.used(n))]
    # One all-to-all can exchange one axis for one other. In all other cases the table is gathered.
    simple = len(columns) == 1 and columns != [indexed] and len(rows) == 1
    return ColumnExchange(extra, columns[0], rows[0]) if simple and set(extra) <= set(by.used(rows[0])) else None


# --- errors ---


def _describe_disagreement(what: str, name: str, choices: Sequence[Axes], by: Mappings) -> str:
    return (
        f"{what}: the operands shard axis {name!r} over different mesh axes of "
        f"{errors.describe_shape(by.mesh)}, so the sharding of the result is ambiguous. Set it with "
        + " or ".join(f"`axonym.axis_mapping({{{name!r}: {entry_of(c)!r}}}, merge=True)`" for c in choices)
        + ", or place the operands alike first with `axonym.shard`."
    )


def _describe_collision(what: str, axis: str, users: Sequence[str], by: Mappings, both_mapped: bool) -> str:
    listed = " and ".join(repr(n) for n in users)
    wanted = None if both_mapped else axis
    return (
        f"{what}: axes {listed} of the result would both be sharded over mesh axis {axis!r} of "
        f"{errors.describe_shape(by.mesh)}. Say which one is{' not' if both_mapped else ''} with "
        + " or ".join(f"`axonym.axis_mapping({{{n!r}: {wanted!r}}}, merge=True)`" for n in users)
        + ", or place an operand differently first with `axonym.shard`."
    )
