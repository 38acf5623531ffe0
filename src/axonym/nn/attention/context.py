"""Attention along a sharded sequence: by a ring, by an exchange of heads for positions, or by all-gathers.

| `context`      | what moves                                             | to each of `n` devices                     |
|----------------|--------------------------------------------------------|--------------------------------------------|
| `"ring"`       | keys and values, from each device to the next          | `n - 1` times its shard of keys and values |
| `"all_to_all"` | queries, keys, values and results: heads for positions | `(n - 1) / n` of its shard of each         |
| `"all_gather"` | keys and values, all at once, and they are stored      | as the ring                                |

`("all_to_all", "ring")` and `("all_to_all", "all_gather")` exchange heads over the last mesh axis of the positions, and
do the other over the mesh axes before it, where heads do not suffice for all devices.

All compute block by block (see `_blockwise`), in one `shard_map` over all mesh axes. Under a causal mask, devices with
later positions would have more work, so the ring and the all-gather first exchange halves of shards for zig-zag order,
and the results back. A sliding window does not need this balancing, and makes the ring shorter: keys travel only as far
as the window reaches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from ...axis import Names
from ...core import errors
from ...core.jax_versions import set_apart
from ...distribution.kept_shards import in_pipeline, kept_over, refuse_gathered
from ...distribution.mesh_axes import (
    AnyMesh,
    Axes,
    fits,
    has_manual,
    mapped_axes,
    mesh_around,
    shard_count,
    sharded_over,
    spec_of,
)
from ...distribution.per_device import gather_axes, run_per_device
from ...named_array import NamedArray, wrap
from ...ops import _kernels
from ...ops._operands import require_subset
from ._axis_roles import AttentionOperands, AxisRoles, find_roles, merge_axes, split_axes
from ._blockwise import BATCH, HEADS, KEYS, QUERIES, Blockwise, ScoreTerms, attend, to_zigzag
from .masks import Causal, Mask

Context: TypeAlias = (
    Literal["ring", "all_to_all", "all_gather"]
    | tuple[Literal["all_to_all"], Literal["ring"]]
    | tuple[Literal["all_to_all"], Literal["all_gather"]]
)
"""The ways to attend along a sharded sequence: see `dot_product_attention`."""

_CONTEXTS = "ring", "all_to_all", "all_gather", ("all_to_all", "ring"), ("all_to_all", "all_gather")


class SequenceSharding(NamedTuple):
    """The mesh axes over which each axis of the operands is sharded, positions of queries and keys alike."""

    mesh: AnyMesh
    axes: tuple[tuple[str, Axes], ...]
    sequence: Axes
    """The mesh axes of the positions."""

    @property
    def shards(self) -> int:
        """Return the number of shards of the positions."""
        return shard_count(self.mesh, self.sequence)

    def spec(self, names: Names, replicated: Names = ()) -> PartitionSpec:
        axes = dict(self.axes)
        return spec_of(() if n in replicated else axes.get(n, ()) for n in names)

    def local(self, x: NamedArray, names: Names | None = None) -> int:
        """Return the size of a shard of an array, or of some of its axes."""
        axes = dict(self.axes)
        return math.prod(
            s // shard_count(self.mesh, axes.get(n, ())) for n, s in x.shape.items() if names is None or n in names
        )


class _Way(NamedTuple):
    """How devices attend to the keys of others: over some mesh axes by exchanging heads, over others in another way."""

    exchanged: Axes
    devices: int
    """How many exchange them."""
    kept: Axes
    """The mesh axes that positions stay sharded over."""
    is_ring: bool


def attend_along_sequence(
    context: Context | None, of: AttentionOperands, precision: jax.lax.PrecisionLike, refused: Sequence[str]
) -> NamedArray | None:
    """Compute `dot_product_attention` along a sharded sequence; `refused` are given arguments that this does not take.

    Without a `context`, the one that moves fewer bytes is chosen. Then the result is None, for the caller to compute
    it, if the positions of queries and keys are not sharded alike, or the operands do not allow it.
    """
    query, key, value, KPos, _, mask, bias, _ = of
    entries = dict(zip(key.names, jax.typeof(key.array).sharding.spec, strict=False))
    if context is None and not any(mapped_axes(n) or entries.get(n) is not None for n in KPos):
        return None  # a quick check
    what = "dot_product_attention" + ("" if context is None else f" by context={context!r}")
    if context is not None and context not in _CONTEXTS:
        words = [c for c in _CONTEXTS if isinstance(c, str)]
        hint = errors.suggestion(context, words) if isinstance(context, str) else ""
        raise ValueError(f"{what}: no such context; choose one of {', '.join(map(repr, _CONTEXTS))}.{hint}")
    problems, operands = [f"it takes no {argument}" for argument in refused], (query, key, value)
    mesh = mesh_around([x.array for x in operands])
    found = _sharded_over(what, mesh, operands)
    roles = find_roles(of, problems, found)
    if len(KPos) != 1 and not roles.causal:
        problems.append(f"it takes one axis of key positions, not {errors.describe_axes(KPos)}")
    if not roles.positions:
        problems.append("the query has no positions")
    placed = None if problems else _sharding_of_sequence(roles, mesh, found, operands, problems)
    alike = placed and found.get(KPos[0]) and found.get(KPos[0]) == found.get(roles.positions[0])
    if context is None and (problems or not alike or (has_manual(mesh) and not in_pipeline())):
        return None
    if in_pipeline():
        for n in (*KPos, *roles.positions):
            refuse_gathered(what, "context", n)
        if not alike and any(n in found for n in (*KPos, *roles.positions)):
            problems.append(f"positions of queries and keys are not sharded alike, as {found}")
    if placed is None or problems:
        raise ValueError(f"{what}: {'; and '.join(problems)}. Without `context`, attention has no such limits.")
    # What scores depend on besides queries and keys, as the fields of `ScoreTerms`.
    causal = mask if isinstance(mask, Causal) else None
    given = {
        "bias": (bias, roles.of_scores),
        "mask": (mask.also if isinstance(mask, Causal) else mask, roles.of_scores),
        "segments": (causal and causal.segments, (*roles.batch, *roles.heads, *roles.positions)),
    }
    terms = {label: x for label, (x, _) in given.items() if x is not None}
    for label, x in terms.items():
        require_subset(what, label, x.names, given[label][1])
    if "segments" in terms and not has_manual(placed.mesh):  # inside `shard_map`, keys are sharded
        sizes = [("the key", key.axis_size(KPos[0])), ("the segments", terms["segments"].axis_size(roles.positions[0]))]
        if sizes[0][1] != sizes[1][1]:
            raise ValueError(errors.size_mismatch(what, KPos[0], sizes))
    lengths = key.axis_size(KPos[0]), query.axis_size(roles.positions[0])
    if context is None:
        keys, queries = placed.local(key) + placed.local(value), placed.local(query)
        result = queries // query.axis_size(roles.features[0]) * placed.local(value, roles.values)
        choices: list[Context] = ["ring", "all_to_all"]
        moved: dict[Context, float] = {}
        for choice in [*choices, *([("all_to_all", "ring")] if len(placed.sequence) > 1 else [])]:
            way = _way_of_context(what, choice, placed)
            if way.devices == 1 or _exchanged_axis(roles, placed, query, way.devices) is not None:
                once = (1 - 1 / way.devices) * (keys + queries + result)  # each operand and the result
                moved[choice] = once + _hops_of_ring(placed, way, *lengths, mask) * keys
        context = min(moved, key=lambda choice: moved[choice])
    way = _way_of_context(what, context, placed)
    hops, exchanged = _hops_of_ring(placed, way, *lengths, mask), _exchanged_axis(roles, placed, query, way.devices)
    if way.devices > 1 and exchanged is None:
        axes = [*roles.batch, *roles.heads]
        raise ValueError(
            f"{what}: the positions are sharded over {errors.describe_axes(way.exchanged)}, which are "
            f"{way.devices} devices. They must divide a shard of the key's heads or batch, and divide none of "
            f"{errors.describe_axes(axes, (placed.local(key, (n,)) for n in axes))}. context='ring' needs no heads."
        )
    query, scale = of.scaled()
    kept = way.kept, shard_count(placed.mesh, way.kept)
    plan = Blockwise(roles.causal, roles.window, float(scale), precision, *kept)
    names = tuple(x.names for x in (query, key, value, *terms.values()))
    kernel = _sequence_kernel(what, way, roles, placed, plan, names, tuple(terms), hops, exchanged)
    if in_pipeline():
        whole, sizes = _needed_whole(way, roles), {n: size for x in operands for n, size in x.shape.items()}
        for label, x in terms.items():  # all-gather the shards along the axes of which every device needs all
            shards = (n in whole[label] and size == sizes[n] for n, size in x.shape.items())
            complete = gather_axes(x.array, (placed.sequence if is_shard else () for is_shard in shards))
            terms[label] = wrap(complete, x.names)
    return wrap(kernel.call(query.array, key.array, value.array, *(x.array for x in terms.values())), kernel.names)


def _way_of_context(what: str, context: Context, placed: SequenceSharding) -> _Way:
    """Return which mesh axes of the positions a context is about."""
    *outer, last = placed.sequence or ("",)
    if isinstance(context, str):
        exchanged, kept = (placed.sequence, ()) if context == "all_to_all" else ((), placed.sequence)
    elif placed.shards > 1 and not outer:
        raise ValueError(
            f"{what}: the positions are sharded over one mesh axis, {last}, and this needs two, to exchange heads over "
            f"the last: map the positions to ('ring', {last!r}), or use {context[0]!r} or {context[1]!r}."
        )
    else:
        exchanged, kept = placed.sequence[-1:], tuple(outer)
    return _Way(exchanged, shard_count(placed.mesh, exchanged), kept, context in ("ring", ("all_to_all", "ring")))


def _needed_whole(way: _Way, roles: AxisRoles) -> dict[str, Names]:
    """Return the sharded axes of which every device needs all: segments, and the keys of masks and biases."""
    of_scores = (*roles.positions, *roles.keys) if way.exchanged else roles.keys
    return {"segments": roles.positions, "bias": of_scores, "mask": of_scores}


# --- the roles and shardings of axes ---


def _sharded_over(what: str, mesh: AnyMesh, operands: Sequence[NamedArray]) -> dict[str, Axes]:
    """Return the mesh axes over which each axis is sharded: from the arrays if Explicit, from the mapping if not.

    Inside `shard_map`, they are the manual mesh axes of the mapping; in a pipeline, where an axis stays sharded.
    """
    if in_pipeline():
        return {n: mapped_axes(n) for x in operands for n in x.names if kept_over(n) is not None}
    by_mapping = AxisType.Manual if has_manual(mesh) else AxisType.Auto
    found: dict[str, Axes] = {}
    for x in () if mesh.empty else operands:
        for n, axes in zip(x.names, sharded_over(what, x.names, x.array, mesh, by_mapping), strict=True):
            found.setdefault(n, axes)
    return {n: axes for n, axes in found.items() if axes}


def _sharding_of_sequence(
    roles: AxisRoles, mesh: AnyMesh, found: dict[str, Axes], operands: Sequence[NamedArray], problems: list[str]
) -> SequenceSharding:
    """Return a placement of all operands, with the positions of keys and queries sharded alike."""
    (queries,), (keys,) = roles.positions, roles.keys
    sequence = found.get(queries) or found.get(keys, ())
    # The positions are sharded over all mesh axes of the sequence, so no other axis is.
    others = [n for n in found if n not in (queries, keys, *roles.features, *roles.values)]
    axes = {n: tuple(a for a in found[n] if a not in sequence) for n in others} | {queries: sequence, keys: sequence}
    if has_manual(mesh):
        return SequenceSharding(mesh, (), (kept_over(queries) or ()) if in_pipeline() else sequence)
    placed = SequenceSharding(mesh, tuple(axes.items()), sequence)
    sizes = {n: s for x in operands for n, s in x.shape.items()}
    problems += [
        f"axis {n!r} of size {sizes[n]} is sharded over {errors.describe_shape({a: mesh.shape[a] for a in own})}, "
        "which does not divide it"
        for n, own in axes.items()
        if sizes[n] % shard_count(mesh, own)
    ]
    if not problems and not all(fits(placed.spec(x.names), tuple(x.shape.values()), mesh) for x in operands):
        problems.append("two axes of one operand would be sharded over the same mesh axis")
    return placed


# --- the choice of context ---


def _hops_of_ring(placed: SequenceSharding, way: _Way, keys: int, queries: int, mask: Mask) -> int:
    """Return how many hops the keys of a device make in a ring: as many as the window needs."""
    shards = shard_count(placed.mesh, way.kept)
    if not isinstance(mask, Causal) or mask.window is None or keys != queries:
        return shards - 1
    shard = keys * way.devices if has_manual(placed.mesh) else keys // shards
    # The first query of a shard attends to `window - 1` positions before the shard.
    return min(shards - 1, -(-(mask.window - 1) // shard))


def _exchanged_axis(roles: AxisRoles, placed: SequenceSharding, query: NamedArray, count: int) -> int | None:
    """Return the merged axis to exchange for positions: heads, or else the batch; None if neither is possible."""
    for position, names in ((HEADS, roles.heads), (BATCH, roles.batch)):
        if names and placed.local(query, names) % count == 0:
            return position
    return None


@_kernels.cached
def _sequence_kernel(
    what: str,
    way: _Way,
    roles: AxisRoles,
    placed: SequenceSharding,
    plan: Blockwise,
    names: tuple[Names, ...],
    labels: tuple[str, ...],
    hops: int,
    exchanged: int | None,
) -> _kernels.Kernel:
    manual = has_manual(placed.mesh)
    whole = _needed_whole(way, roles)
    axes, count = plan.axes, plan.shards

    def split(x: jax.Array, **dims: Any) -> jax.Array:
        return set_apart(jax.lax.all_to_all(set_apart(x), way.exchanged, **dims, tiled=True))

    def on_device(*arrays: jax.Array) -> jax.Array:
        """Compute attention for the shards of one device."""
        sizes = {n: s for own, x in zip(names[:3], arrays, strict=False) for n, s in zip(own, x.shape, strict=True)}
        dtype = jnp.result_type(*arrays[:3])
        features, values = roles.features, roles.values
        parts = (*roles.of_queries, features), (*roles.of_keys, features), (*roles.of_keys, values)
        q, k, v = (merge_axes(x.astype(dtype), n, p) for x, n, p in zip(arrays[:3], names[:3], parts, strict=True))
        scores = (*roles.of_queries, roles.keys)
        of_terms = {"bias": scores, "mask": scores, "segments": (roles.batch, roles.heads, roles.positions)}
        terms = ScoreTerms(
            **{
                label: merge_axes(x, own, of_terms[label], sizes | dict(zip(own, x.shape, strict=True)))
                for label, own, x in zip(labels, names[3:], arrays[3:], strict=True)
            }
        )
        if way.devices > 1:
            assert exchanged is not None
            q = split(q, split_axis=exchanged, concat_axis=QUERIES)
            k, v = (split(x, split_axis=exchanged, concat_axis=KEYS) for x in (k, v))
            terms = jax.tree.map(functools.partial(_own_slice, way.exchanged, way.devices, exchanged), terms)
            own_queries = functools.partial(_own_slice, axes, count, QUERIES)
            terms = terms._replace(**jax.tree.map(own_queries, {"bias": terms.bias, "mask": terms.mask}))
        planned = plan
        if count > 1:  # each device attends for its own queries: keys and values make hops in a ring, or are gathered
            # A bias or a mask has a shard of the queries in their order, so queries cannot be reordered with one.
            unsharded = all(x is None or x.shape[QUERIES] == 1 for x in (terms.bias, terms.mask))
            even = q.shape[QUERIES] % 2 == 0 and k.shape[KEYS] % 2 == 0
            zigzag = plan.causal and plan.window is None and unsharded and even
            own_hops = hops if way.is_ring else 0
            planned = plan._replace(sharded_queries=True, sharded_keys=way.is_ring, zigzag=zigzag, hops=own_hops)
            if not way.is_ring:
                k, v = (jax.lax.all_gather(x, axes, axis=KEYS, tiled=True) for x in (k, v))
            elif zigzag:
                k, v = (to_zigzag(x, KEYS, axes, count) for x in (k, v))
            q = to_zigzag(q, QUERIES, axes, count) if zigzag else q
        result, log_total = attend(planned, q, k, v, terms)
        queries = q.shape[QUERIES] * (count if planned.sharded_queries else 1)
        keys = k.shape[KEYS] * (count if planned.sharded_keys else 1)
        # A query that may attend to no key has equal scores in plain attention, and so the mean of all values.
        if terms.mask is not None or (plan.window is not None and queries > keys):
            mean = jnp.mean(v, KEYS)
            mean = jax.lax.pmean(mean, axes) if planned.sharded_keys else mean
            result = jnp.where(jnp.isinf(log_total)[..., None], mean[:, :, None, None], result)
        if planned.zigzag:
            result = to_zigzag(result, QUERIES, axes, count, inverse=True)
        if way.devices > 1:
            result = split(result, split_axis=QUERIES, concat_axis=exchanged)
        return split_axes(result, (*roles.of_queries, values), sizes, roles.out)

    def positional(*arrays):
        if placed.mesh.empty or manual:
            return on_device(*arrays)
        in_specs = [placed.spec(n) for n in names[:3]]
        in_specs += [placed.spec(n, whole[label]) for label, n in zip(labels, names[3:], strict=True)]
        return run_per_device(on_device, arrays, in_specs, placed.spec(roles.out), placed.mesh)

    # Inside another `shard_map`, masks have all keys, and keys are sharded.
    return _kernels.make_kernel(what, positional, names, roles.out, mesh_aware=True, same_sizes=not manual)


def _own_slice(axes: Axes, count: int, axis: int, x: jax.Array) -> jax.Array:
    """Return the slice of a device's own heads, batch or queries; an axis of size one stays."""
    if x.shape[axis] == 1 or count == 1:
        return x
    size = x.shape[axis] // count
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis)
