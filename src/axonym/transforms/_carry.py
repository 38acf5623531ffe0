"""Compare a tree with a required `TreeSpec`: a carry with the initial one, a branch with the other.

`jax.lax.scan` and similar functions take only trees of arrays, and describe mistakes by position. So the transforms
pass them lists of raw arrays, and compare the specs leaf by leaf: errors describe mistakes by path and name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..axis import Names
from ..core import errors
from ..core.jax_versions import varying_axes
from ..core.tree_spec import ARRAYS_AND_NUMBERS, Slot, StaticLeaf, TreeSpec, flatten_arrays
from ..distribution.active_settings import Entry
from ..distribution.mesh_axes import entry_of, mesh_around, mesh_axes, padded, reshard
from ..distribution.per_device import vary_like, varying_over
from ..ops import _kernels

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class MismatchMessages:
    """The wording of messages about a tree that must have the spec of another."""

    tree: str
    """The word for both trees, as in "carry"."""
    before: str
    """The words before the type it must have, as in "goes in as"."""
    after: str
    """The words before the type it has, as in "comes out as"."""
    only_before: str
    """The words after a leaf that it lacks."""
    only_after: str
    """The words after a leaf that it should not have."""
    remedy: str
    """Advice for different placements; {before} and {after} stand for the placements."""


CARRY = MismatchMessages(
    "carry",
    "goes in as",
    "comes out as",
    "goes in but does not come out",
    "comes out but does not go in",
    "Start with a carry that is placed like that, `axonym.shard(..., {after})`, or put it back in the body.",
)


class CarryShardingChanged(Exception):
    """Raised while tracing a loop whose carry comes out sharded, or device-varying, over more mesh axes than before."""

    def __init__(self, specs: Sequence[Sequence[Entry]], varying: Sequence[Sequence[str]]):
        super().__init__(specs, varying)
        self.specs = specs
        self.varying = varying


def run_settled(run: Callable[[list[Any]], R], what: str, carry: Sequence[Any]) -> R:
    """Trace a loop with a carry that starts out with its final sharding and device-varying type.

    On Explicit mesh axes the sharding is part of the type, and inside `shard_map` so is whether a value is
    device-varying. So a carry made by `zeros` has another type after the first step. Sharding a replicated array costs
    no communication, nor does making it device-varying. Every attempt adds at least one mesh axis, so there are few
    attempts; a step that replicates an axis again raises an error. `run` traces the loop, with a body that calls
    `conform_to_spec` with `settles`.
    """
    start = list(carry)
    attempted = False
    while True:
        try:
            return run(start)
        except CarryShardingChanged as found:
            mesh, changes = mesh_around(start), zip(start, found.specs, found.varying, strict=True)
            start = [varying_over(reshard(jnp.asarray(x), spec, mesh), varying) for x, spec, varying in changes]
            attempted = True
        except TypeError as refusal:
            if not attempted:
                raise
            raise TypeError(
                f"{what}: the placement of the carry never settles. It comes out sharded over more mesh axes than it "
                f"goes in with, and when it starts like that, {refusal}"
            ) from refusal


def conform_to_spec(
    what: str, words: MismatchMessages, spec: TreeSpec, types: Sequence[Any], tree: Any, *, settles: bool = False
) -> list[Any]:
    """Check that a tree has the required spec, and return its arrays in the layout of that spec.

    The order of axes is only layout, so axes are transposed to agree. Any other difference is an error, which lists
    every leaf with its type before and after.

    Arguments:
        words: the wording for the tree.
        spec: the spec it must have.
        types: the types its arrays must have.
        settles: the tree is the carry of a loop. A weak type among `types`, from a Python number, becomes the dtype of
            the tree, and `run_settled` starts the loop with the sharding and device-varying type of the tree.
    """
    arrays, found = flatten_arrays(tree, ARRAYS_AND_NUMBERS)
    if found.structure != spec.structure:
        was, became = spec.paths(), found.paths()
        sides = (
            ([p for p in was if p not in became], words.only_before),
            ([p for p in became if p not in was], words.only_after),
        )
        parts = [f"{', '.join(f'{words.tree}{p}' for p in paths)} {said}" for paths, said in sides if paths]
        if not parts:
            before, after = spec.structure, found.structure
            # JAX compares only complete structures, whose text would bury the difference: find the smallest parts.
            while before.node_data() == after.node_data() and (
                differing := [(x, y) for x, y in zip(before.children(), after.children(), strict=False) if x != y]
            ):
                before, after = differing[0]
            parts.append(f"a part of it {words.before} {before} and {words.after} {after}")
        raise TypeError(f"{what}: the {words.tree} must keep one structure, but {' and '.join(parts)}.")
    expected, given = iter(types), iter(arrays)
    result, problems, moved = [], [], False
    for i, (slot, new) in enumerate(zip(spec.slots, found.slots, strict=True)):
        if isinstance(slot, StaticLeaf) or isinstance(new, StaticLeaf):
            before = slot if isinstance(slot, StaticLeaf) else next(expected)
            after = new if isinstance(new, StaticLeaf) else next(given)
            both = isinstance(before, StaticLeaf) and isinstance(after, StaticLeaf)
            if not both or not (before.value is after.value or before == after):
                shown = f"{_describe_slot(slot, before)} and {words.after} {_describe_slot(new, after)}"
                problems.append((i, shown, "Values that are not arrays cannot change."))
            continue
        before, after = next(expected), next(given)
        if slot and new and set(slot) == set(new):
            after, new = _kernels.transpose_to(after, new, slot), slot
        # A value that is the same on all devices may take the place of a device-varying one, but not the reverse.
        after = vary_like(after, before)
        remedy = _describe_difference(words, slot, before, new, jax.typeof(after), settles)
        if remedy and settles and _starts_otherwise(slot, before, new, jax.typeof(after)):
            moved = True
        elif remedy:
            shown = f"{_describe_type(slot, before)} and {words.after} {_describe_type(new, jax.typeof(after))}"
            problems.append((i, shown, remedy))
        result.append(after)
    if problems:
        paths = spec.paths()
        lines = [f"{words.tree}{paths[i]} {words.before} {shown}. {remedy}" for i, shown, remedy in problems]
        raise TypeError("\n  ".join([f"{what}:", *lines]) if len(lines) > 1 else f"{what}: {lines[0]}")
    if moved:
        pairs = [(before, jax.typeof(x)) for before, x in zip(types, result, strict=True)]
        added = [sorted(varying_axes(after) - varying_axes(before)) for before, after in pairs]
        raise CarryShardingChanged([tuple(after.sharding.spec) for _, after in pairs], added)
    return result


def _starts_otherwise(slot: Names | None, before: Any, new: Names | None, after: Any) -> bool:
    """Return whether the second array differs only by being sharded, or device-varying, over more mesh axes."""
    if slot != new or before.shape != after.shape:
        return False
    was, now = _explicit_entries(before), _explicit_entries(after)
    same_dtype = before.dtype == after.dtype or _takes_dtype_of(before, after)
    # A prefix: mesh axes may only be added, so that `run_settled` ends.
    return same_dtype and all(n[: len(w)] == w for w, n in zip(was, now, strict=True))


def _describe_difference(
    words: MismatchMessages, slot: Names | None, before: Any, new: Names | None, after: Any, promoted: bool
) -> str | None:
    """Return advice about two arrays of different types; None if they agree."""
    if (slot or new) and slot != new:
        return "Both need the same axes: `broadcast_axis` adds one, and a reduction or an index takes one away."
    if before.shape != after.shape:
        return "Both need the same sizes."
    if before.dtype != after.dtype and not (promoted and _takes_dtype_of(before, after)):
        return f"Cast it with `.astype({before.dtype})`, or the other to {after.dtype}."
    moves = []
    for i, (was, now) in enumerate(zip(_explicit_entries(before), _explicit_entries(after), strict=True)):
        if was != now:
            axis = repr(new[i]) if new else f"dimension {i}"
            moves.append(f"{axis} is {_sharded_over_text(now)} where it was {_sharded_over_text(was)}")
    if moves:
        remedy = words.remedy.format(before=_placement_text(slot, before), after=_placement_text(new, after))
        return f"Here {' and '.join(moves)}, and on Explicit mesh axes that is part of the type. {remedy}"
    if axes := sorted(varying_axes(after) - varying_axes(before)):
        return f"Inside `shard_map`, make the other differ, too: `jax.lax.pcast(..., {tuple(axes)}, to='varying')`."
    return None


def _sharded_over_text(axes: tuple[str, ...]) -> str:
    return f"sharded over {' and '.join(map(repr, axes))}" if axes else "replicated"


def _placement_text(names: Names | None, aval: Any) -> str:
    """Return the sharding of an array as users write it."""
    entries = [entry_of(axes) for axes in _explicit_entries(aval)]
    if not names:
        return str(jax.sharding.PartitionSpec(*entries))
    return str(dict(zip(names, entries, strict=True)))


def _takes_dtype_of(weak: Any, other: Any) -> bool:
    """Return whether a Python number, which has a weak type, takes the dtype of another array."""
    kinds = (jnp.bool_, bool), (jnp.integer, int), (jnp.floating, float), (jnp.complexfloating, complex)
    number = next((number for kind, number in kinds if jnp.issubdtype(weak.dtype, kind)), None)
    return weak.weak_type and number is not None and jnp.result_type(number, other.dtype) == other.dtype


def _explicit_entries(aval: Any) -> tuple[tuple[str, ...], ...]:
    """Return the Explicit mesh axes that each axis of an array is sharded over."""
    return tuple(map(mesh_axes, padded(aval.sharding.spec, len(aval.shape))))


def _describe_type(names: Names | None, aval: Any) -> str:
    varying = sorted(varying_axes(aval))
    differs = f" that differs along mesh axis {errors.quoted(varying)}" if varying else ""
    kind = "" if names is not None or not aval.shape else "raw "
    return f"{kind}{errors.describe_sharded(aval.dtype, names, aval.shape, _explicit_entries(aval))}{differs}"


def _describe_slot(slot: Slot, leaf: Any) -> str:
    if isinstance(slot, StaticLeaf):
        value = slot.value
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        return f"a {type(value).__name__}" + (f" {value.__name__}" if hasattr(value, "__name__") else "")
    return _describe_type(slot, leaf if hasattr(leaf, "manual_axis_type") else jax.typeof(leaf))
