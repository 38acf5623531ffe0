"""Find the shardings of the results of a `shard_map` by name, from the shardings of the arguments.

For each axis of a result, in this order:

1. an axis that has its size outside is replicated;
2. an axis that has the size of its shards in the arguments is sharded as there; one that has the size after gathering
   over minor mesh axes is sharded over the remaining ones;
3. any other axis, which is new or was resized, is sharded as the mapping says.

The type of a result determines whether this can be correct. A result that is device-varying over a mesh axis must be
sharded over it, because it has no single value; a result that is invariant over it would be copies of one shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..core import errors
from ..core.jax_versions import varying_axes
from ..distribution import active_settings
from ..distribution.active_settings import Entry, active_mapping
from ..distribution.mesh_axes import AnyMesh, axes_in, entry_of, mapped_axes, mesh_axes, restricted
from ..named_array import raw, wrap_like
from ..sharding.leaves import Leaf
from ..sharding.placement import LeafPlacement, Placement, Rule, check_entries, is_placement, resolve
from ._axis_environment import Axes, AxisEnvironment, count, describe_axes, of_size_one, possible_shardings


def restricted_to_manual(spec: PartitionSpec, manual: Collection[str]) -> PartitionSpec:
    """Return the spec with manual mesh axes only; an unconstrained entry is an error."""
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(f"shard_map: {spec} leaves a dimension to the partitioner, but it is manual here.")
    return restricted(spec, manual)


def place_results(
    result: Any, placement: Placement, environment: AxisEnvironment, manual: Collection[str], what: str
) -> tuple[list[Leaf], Any]:
    """Return the leaves of a result on one device, each with its spec, and the structure of the tree.

    Specs follow from the user's placement, and where it is None, from names and the environment.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mapping = active_mapping()
    with active_settings.activate(None):  # so that a leaf without a placement has no spec
        leaves, structure = resolve(result, placement, mesh, what)
        by_position = _by_position(result, placement, mesh, what)
    placed, problems = [], []
    for leaf, given in zip(leaves, by_position, strict=True):
        if leaf.shape is None:
            placed.append(leaf)
            continue
        spec, found = (leaf.spec, []) if leaf.spec is not None else _by_name(leaf, environment, mapping)
        spec = restricted_to_manual(spec, manual)
        value = leaf.value
        if not found:
            found = check_entries(leaf, tuple(spec), mesh)
            value, wrong = _made_varying(leaf, spec, environment, manual, given)
            found += wrong
        problems += found
        placed.append(Leaf(leaf.keys, value, leaf.names, leaf.shape, spec))
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  {p}" for p in problems)
        raise ValueError(f"{what}: {listed}")
    return placed, structure


class _Unplaced(Rule):
    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return None


def _by_position(result: Any, placement: Placement, mesh: AnyMesh, what: str) -> list[bool]:
    """Return whether each leaf has a spec by position; a mapping is not one, as it applies to replicated axes, too."""

    def of_its_own(p: LeafPlacement) -> LeafPlacement:
        return p if isinstance(p, (PartitionSpec, jax.sharding.Sharding)) else _Unplaced()

    leaves, _ = resolve(result, jax.tree.map(of_its_own, placement, is_leaf=is_placement), mesh, what)
    return [leaf.spec is not None for leaf in leaves]


def _by_name(leaf: Leaf, environment: AxisEnvironment, mapping: Mapping[str, Entry]) -> tuple[PartitionSpec, list[str]]:
    """Return the spec of a result by the names of its axes."""
    assert leaf.shape is not None
    if leaf.names is None:
        return PartitionSpec(*(None,) * len(leaf.shape)), []
    if len(leaf.names) != len(leaf.shape):
        return PartitionSpec(), [f"{_result_path(leaf)}: {errors.wrong_rank(leaf.names, leaf.shape)}"]
    entries, problems, taken = [], [], set()
    for name, size in zip(leaf.names, leaf.shape, strict=True):
        ways = _possible_axes(environment, name, size)
        if len(ways) > 1:
            listed = " or ".join(f"sharded over {' and '.join(map(repr, w))}" if w else "replicated" for w in ways)
            problems.append(
                f"{_describe_result(leaf)}: by the arguments, axis {name!r} of size {size} could be {listed}. Say "
                "which with `out_specs`."
            )
        axes = ways[0] if ways else mapped_axes(name, mapping)
        # Sizes do not show shardings over mesh axes of size one; if two axes could have them, either is correct.
        axes = tuple(a for a in axes if a not in taken or a not in of_size_one())
        taken.update(axes)
        entries.append(entry_of(axes))
    return PartitionSpec(*entries), problems


def _possible_axes(environment: AxisEnvironment, name: str, size: int) -> list[Axes]:
    """Return the possible shardings of an axis with this size."""
    found = []
    for _, now, at_most in possible_shardings(name, size):
        found.append(now)
        if not environment.checked and 1 < count(now) < count(at_most):
            found.append(at_most)  # resized, or gathered over some mesh axes: only its type would show which
    ways = list(dict.fromkeys(found))
    return ways if len(ways) < 2 else [w for w in ways if not w or set(w) - of_size_one()]


def _made_varying(
    leaf: Leaf, spec: PartitionSpec, environment: AxisEnvironment, manual: Collection[str], given: bool
) -> tuple[Any, list[str]]:
    """Make a result device-varying over the mesh axes of its spec, or describe its problem."""
    if not environment.checked:
        return leaf.value, []
    value = raw(leaf.value)
    varies = varying_axes(value) & set(manual)
    used = set(axes_in(spec))
    problems = []
    if lost := sorted(varies - used - of_size_one()):
        problems.append(
            f"{_describe_result(leaf)} varies over {describe_axes(lost)}, but no axis of it is sharded over that, "
            f"so there is no one value to return. Reduce it with `axonym.psum` or `axonym.pmean`, gather it with "
            "`axonym.all_gather(..., invariant=True)`, or say which axis is sharded: by the mapping, or by `out_specs`."
        )
    if not given and (copied := sorted(used - varies - of_size_one())):
        names = [n for n, entry in zip(leaf.names or (), spec, strict=True) if set(mesh_axes(entry)) & set(copied)]
        problems.append(
            f"{_describe_result(leaf)} is the same on all devices of {describe_axes(copied)}, so sharding axis "
            f"{errors.quoted(names)} over that would make copies of one shard. If they are meant, use "
            "`axonym.pvary`; if the axis is replicated, rename it, or say so with a PartitionSpec in `out_specs`."
        )
    alone = sorted((varies - used) & of_size_one())
    if problems or not alone:
        return leaf.value, problems
    # On one device, a program for several devices returns the same as on several.
    value = jax.lax.psum(value, tuple(alone))
    return wrap_like(value, leaf.value), []


def _result_path(leaf: Leaf) -> str:
    return f"result {leaf.path!r}" if leaf.keys else "the result"


def _describe_result(leaf: Leaf) -> str:
    assert leaf.shape is not None
    axes = errors.describe_axes(leaf.names, leaf.shape) if leaf.names is not None else f"of shape {leaf.shape}"
    return f"{_result_path(leaf)} {axes}"
