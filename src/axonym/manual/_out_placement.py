"""How the results of a `shard_map` are put together again: by name, as the arguments came apart.

For each axis of a result, in this order:

1. an axis that has the size it has outside is whole;
2. an axis that has the size of a part of it in the arguments is split as it is there, or over the first of these mesh
   axes, where it has the size that gathering over the others gives it;
3. any other axis, one that is new or was resized, is split as the mapping says.

What JAX knows about a result decides whether that can be right. A result that varies over a mesh axis must be split
over it, since there is no one value otherwise; one that does not vary over it would be copies of one part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import _context, _errors, _mesh_axes
from .._context import Entry
from .._jax_versions import varying_axes
from .._mesh_axes import active_mapping, axes_in, entry_of, mapped_axes, mesh_axes
from ..array import NamedArray, wrap
from ..sharding.meshes import AnyMesh
from ..sharding.placement import Leaf, Placement, Rule, check_entries, is_placement, resolve
from ._axis_environment import Axes, View, count, describe_axes, layouts, of_size_one


def restricted(spec: PartitionSpec, manual: Collection[str]) -> PartitionSpec:
    """The part of a spec that speaks of some mesh axes."""
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(f"shard_map: {spec} leaves a dimension to the partitioner, but it is split by hand here.")
    return _mesh_axes.restricted(spec, manual)


def place_results(
    result: Any, placement: Placement, view: View, manual: Collection[str], what: str
) -> tuple[list[Leaf], Any]:
    """The leaves of a result as a device has it, each with its spec, and the structure to put them together again.

    Arguments:
        result: what the body returned.
        placement: where the user said that it goes; None leaves that to the names.
        view: how the arguments came in.
        manual: the mesh axes that the body handles by hand.
        what: the operation, for messages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mapping = active_mapping()
    with _context.activate(None):  # so that what has no placement of its own is left without a spec
        leaves, structure = resolve(result, placement, mesh, what)
        by_position = _by_position(result, placement, mesh, what)
    placed, problems = [], []
    for leaf, given in zip(leaves, by_position, strict=True):
        if leaf.shape is None:
            placed.append(leaf)
            continue
        spec, found = (leaf.spec, []) if leaf.spec is not None else _by_name(leaf, view, mapping)
        spec = restricted(spec, manual)
        value = leaf.value
        if not found:
            found = check_entries(leaf, tuple(spec), mesh)
            value, wrong = _held_to(leaf, spec, view, manual, given)
            found += wrong
        problems += found
        placed.append(Leaf(leaf.keys, value, leaf.names, leaf.shape, spec))
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  {p}" for p in problems)
        raise ValueError(f"{what}: {listed}")
    return placed, structure


class _Unplaced(Rule):
    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> Placement:
        return None


def _by_position(result: Any, placement: Placement, mesh: AnyMesh, what: str) -> list[bool]:
    """Whether a leaf has a spec of its own. A mapping speaks of an axis wherever it may be, so of whole ones, too."""

    def of_its_own(p: Placement) -> Placement:
        return p if isinstance(p, (PartitionSpec, jax.sharding.Sharding)) else _Unplaced()

    leaves, _ = resolve(result, jax.tree.map(of_its_own, placement, is_leaf=is_placement), mesh, what)
    return [leaf.spec is not None for leaf in leaves]


def _by_name(leaf: Leaf, view: View, mapping: Mapping[str, Entry]) -> tuple[PartitionSpec, list[str]]:
    """The spec of a result by the names of its axes."""
    assert leaf.shape is not None
    if leaf.names is None:
        return PartitionSpec(*(None,) * len(leaf.shape)), []
    if len(leaf.names) != len(leaf.shape):
        return PartitionSpec(), [f"{_path(leaf)}: {_errors.wrong_rank(leaf.names, leaf.shape)}"]
    entries, problems, taken = [], [], set()
    for name, size in zip(leaf.names, leaf.shape, strict=True):
        ways = _ways(view, name, size)
        if len(ways) > 1:
            listed = " or ".join(f"split over {' and '.join(map(repr, w))}" if w else "whole" for w in ways)
            problems.append(
                f"{_described(leaf)}: by the arguments, axis {name!r} of size {size} could be {listed}. Say which with "
                "`out_specs`."
            )
        axes = ways[0] if ways else mapped_axes(name, mapping)
        # Sizes do not tell what a mesh axis of size one splits; where two axes could be it, neither matters.
        axes = tuple(a for a in axes if a not in taken or a not in of_size_one())
        taken.update(axes)
        entries.append(entry_of(axes))
    return PartitionSpec(*entries), problems


def _ways(view: View, name: str, size: int) -> list[Axes]:
    """The ways in which an axis that has this size may be split."""
    found = []
    for _, now, at_most in layouts(name, size):
        found.append(now)
        if not view.checked and 1 < count(now) < count(at_most):
            found.append(at_most)  # resized, or gathered over some mesh axes: only what it varies over would tell
    ways = list(dict.fromkeys(found))
    return ways if len(ways) < 2 else [w for w in ways if not w or set(w) - of_size_one()]


def _held_to(
    leaf: Leaf, spec: PartitionSpec, view: View, manual: Collection[str], given: bool
) -> tuple[Any, list[str]]:
    """A result that varies over the mesh axes of its spec and no others, or what is wrong with it."""
    if not view.checked:
        return leaf.value, []
    value = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
    varies = varying_axes(value) & set(manual)
    used = set(axes_in(spec))
    problems = []
    if lost := sorted(varies - used - of_size_one()):
        problems.append(
            f"{_described(leaf)} varies over {describe_axes(lost)}, but no axis of it is split over that, so there is "
            f"no one value to return. Reduce it with `axonym.psum` or `axonym.pmean`, gather it with "
            "`axonym.all_gather(..., invariant=True)`, or say which axis is split: by the mapping, or by `out_specs`."
        )
    if not given and (copied := sorted(used - varies - of_size_one())):
        names = [n for n, entry in zip(leaf.names or (), spec, strict=True) if set(mesh_axes(entry)) & set(copied)]
        problems.append(
            f"{_described(leaf)} is the same on all devices of {describe_axes(copied)}, so splitting axis "
            f"{', '.join(map(repr, names))} over that would make copies of one part. If they are meant, use "
            "`axonym.pvary`; if the axis is whole, rename it, or say so with a PartitionSpec in `out_specs`."
        )
    alone = sorted((varies - used) & of_size_one())
    if problems or not alone:
        return leaf.value, problems
    # On one device, a program for several returns what it returns on several.
    value = jax.lax.psum(value, tuple(alone))
    return wrap(value, leaf.value.names) if isinstance(leaf.value, NamedArray) else value, []


def _path(leaf: Leaf) -> str:
    return f"result {leaf.path!r}" if leaf.keys else "the result"


def _described(leaf: Leaf) -> str:
    assert leaf.shape is not None
    axes = _errors.describe_axes(leaf.names, leaf.shape) if leaf.names is not None else f"of shape {leaf.shape}"
    return f"{_path(leaf)} {axes}"
