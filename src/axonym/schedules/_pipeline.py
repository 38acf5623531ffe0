"""Run pipelines: layers are sharded over stages, and each stage works on a different microbatch at a time.

If the axis of stacked layers is sharded over a mesh axis, each device along it is a *stage* and has some of the
layers. The batch is split into microbatches. In every *tick*, each stage applies its layers to a microbatch and sends
the result to the next stage. Before the first microbatch arrives and after the last one has left, a stage is idle.

The program is one loop over ticks inside `shard_map`. Devices run the same program in lock-step: an idle stage computes
too, from the values of some microbatch, and the results are not used. A condition would save nothing, and a collective
inside it would be wrong. `GPipe` differentiates the loop. `OneFOneB` has a loop of its own, which runs forward and
backward passes, and returns the gradients.

With rounds, a microbatch passes through all stages several times, and a stage applies different layers each time.
Layers are still stored in one contiguous block for each stage, so stages first exchange the layers that they will
apply.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ..axis import Axis, Names, name_of
from ..core import errors
from ..core.jax_versions import active_platform, varying_axes
from ..core.tree_spec import TreeSpec, flatten_arrays
from ..distribution.active_settings import Entry, activate_here, active_mapping, active_parameter_mapping
from ..distribution.kept_shards import KeptShards
from ..distribution.mesh_axes import (
    AnyMesh,
    Axes,
    axes_in,
    current_mesh,
    entries_by_name,
    entries_of,
    entry_of,
    fits,
    has_explicit,
    mapped_axes,
    mapped_on,
    mesh_axes,
    reshard,
    restricted,
    shard_count,
)
from ..distribution.per_device import gather_axes, permute, run_per_device, vary_like, varying_over
from ..named_array import is_named_array
from ._sharded_code import NeedsCompleteAxes, check_computed_from_shards
from ._stage_arrays import (
    Arrays,
    added,
    at,
    chosen,
    floating_parts,
    folded_in,
    slice_of,
    summed_wide,
    which_are_keys,
    wide_dtype,
    with_none,
)
from .pipeline_schedules import GPipe, Schedule, check_stages, first_ticks, work_of

Fold = Callable[..., Any]
"""Applies layers: from their arrays, their axis, a carry, and further arguments by position and keyword."""
Then = Callable[..., Any]
"""Computes the loss, a sum over examples, from a result and further arguments."""


def fold_in_stages(
    schedule: Schedule,
    what: str,
    Layers: Axis,
    fold: Fold,
    stacked: Any,
    carry: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    then: Then | None,
    then_args: Sequence[Any],
) -> Any:
    """Apply stacked layers by a schedule; if they are not sharded over stages, to the batch at once."""
    mesh = current_mesh()
    stages = () if mesh is None else mapped_on(what, Layers.name, mesh, AxisType.Auto, AxisType.Explicit)
    if mesh is None or shard_count(mesh, stages) == 1:
        result = fold(stacked, Layers, carry, *args, **kwargs)
    else:
        inside = then if not isinstance(schedule, GPipe) else None
        pipeline = _Pipeline(schedule, what, Layers, fold, inside, mesh, stages)
        result = pipeline.run(stacked, carry, (tuple(args), dict(kwargs)), tuple(then_args) if inside else ())
        if inside is not None:
            return result
    return result if then is None else then(result, *then_args)


class _Pipeline:
    """A call of a pipeline, while its mapping is active.

    Arrays come in four groups: the layers, the carry, further arguments of the layers, and the arguments of `then`.
    """

    def __init__(
        self, schedule: Schedule, what: str, Layers: Axis, fold: Fold, then: Then | None, mesh: AnyMesh, stages: Axes
    ):
        self._schedule, self._what, self._Layers, self._fold, self._then = schedule, what, Layers, fold, then
        self._mesh, self._stages, self._count = mesh, stages, shard_count(mesh, stages)
        self._batch = name_of(schedule.axis)
        self._rounds = schedule.rounds
        self._mesh_axes_of_batch = mapped_axes(self._batch)

    def run(self, *groups: Any) -> Any:
        arrays, trees = zip(*map(flatten_arrays, groups), strict=True)
        self._trees: Sequence[TreeSpec] = trees
        self._keys = {2: which_are_keys(arrays[2], groups[2][1].get("key")), 3: which_are_keys(arrays[3])}
        self._kept = self._kept_in_loss = KeptShards(frozenset())
        self._place(arrays)
        self._check(arrays[1], self._specs[1])
        self._kept = self._keep(arrays)
        self._place(arrays)
        out_specs = tuple(self._specs[1]) if self._then is None else PartitionSpec()
        results = self._per_device(self._on_device, arrays, out_specs)
        if self._then is not None:
            return results
        return trees[1].unflatten(map(self._sharded_like, results, arrays[1], self._specs[1]))

    def _per_device(self, fn: Callable[..., Any], arrays: Sequence[Sequence[Any]], out_specs: Any) -> Any:
        """Call a function of the four groups of arrays on the shards of each device."""
        ends = list(itertools.accumulate(map(len, arrays)))

        def on_device(*shards: jax.Array) -> Any:
            return fn(*(list(shards[end - len(xs) : end]) for end, xs in zip(ends, arrays, strict=True)))

        flat, specs = ([x for group in both for x in group] for both in (arrays, self._specs))
        return run_per_device(on_device, flat, specs, out_specs, self._mesh, axis_names=self._manual)

    # --- axes that stay sharded inside ---

    def _keep(self, arrays: Sequence[Sequence[Any]]) -> KeptShards:
        """Return which axes stay sharded in the layers, and why others do not."""
        inside = {n for tree in self._trees[:3] for names in tree.names for n in names or ()}
        used = dict.fromkeys(a for n in self._names_over(self._mesh.axis_names) & inside for a in mapped_axes(n))
        return self._choose(
            [(a,) for a in used if a not in self._stages], functools.partial(self._check_layers, arrays)
        )

    def _choose(self, candidates: Iterable[Axes], check: Callable[[frozenset[str]], None]) -> KeptShards:
        """Return the axes that stay sharded: those over as many of the mesh axes as pass a check."""
        kept, reasons = list[str](), dict[str, str]()
        for axes in candidates:
            names = self._names_over([*kept, *axes])
            try:
                check(names)
            except Exception as error:  # whatever the code raises for shards
                reasons |= dict.fromkeys(names - self._names_over(kept), str(error))
            else:
                kept += axes
        names = self._names_over(kept)
        return KeptShards(names, gathered=tuple(sorted((n, why) for n, why in reasons.items() if n not in names)))

    def _names_over(self, axes: Collection[str]) -> frozenset[str]:
        """Return the axes that the mapping shards over some mesh axes only, except layers and the batch."""
        found = {n for n in active_mapping() if 0 < len(own := mapped_axes(n)) == len({*own} & {*axes})}
        return frozenset(found - {self._Layers.name, self._batch})

    def _check_layers(self, arrays: Sequence[Sequence[Any]], names: frozenset[str]) -> None:
        """Check that the layers can be computed from shards of some axes."""
        self._kept = KeptShards(names)
        self._place(arrays)

        def on_device(stacked: Arrays, carry: Arrays, rest: Arrays, head: Arrays) -> jax.Array:
            groups = self._prepared(stacked, carry, rest)
            groups[0] = self._gathered(0, groups[0])
            first = (
                self._in_round(0, groups[0], np.int32(0)),
                at(groups[1], 0),
                self._in_round(2, groups[2], np.int32(0)),
            )

            def trace(complete: bool) -> Any:
                self._kept = KeptShards(names, complete)
                own = [self._complete(i, xs, names) if complete else xs for i, xs in enumerate(first)]
                return jax.make_jaxpr(functools.partial(self._apply, microbatch=np.int32(0)))(*own)

            programs = trace(True), trace(False)
            self._check_programs(*programs, names, sums=False)
            for x, y in zip(programs[1].out_avals, first[1], strict=True):
                if mixed := varying_axes(x) - varying_axes(y):
                    raise NeedsCompleteAxes(f"its results differ between devices along {errors.quoted(sorted(mixed))}.")
            return jnp.zeros(())

        jax.eval_shape(lambda: self._per_device(on_device, arrays, PartitionSpec()))

    def _check_programs(self, whole: Any, shards: Any, names: frozenset[str], sums: bool) -> bool:
        counts = {n: shard_count(self._mesh, mapped_axes(n)) for n in names}
        return check_computed_from_shards(whole, shards, counts, sums)

    def _complete(self, group: int, xs: Arrays, names: Collection[str]) -> Arrays:
        """All-gather shards of some axes."""
        return [
            gather_axes(x, [mapped_axes(n) if n in names else () for n in own or ()])
            for own, x in zip(self._trees[group].names, xs, strict=True)
        ]

    # --- shardings ---

    def _spec(self, names: Names | None, x: Any, mapping: Mapping[str, Entry], raw: bool) -> PartitionSpec:
        if names is not None:
            return PartitionSpec(*entries_by_name(names, mapping))
        # As in `axonym.scan`, raw arrays are sliced along their first axis, except arguments of `then`.
        return PartitionSpec(*([entry_of(self._stages) if raw else None] if x.ndim else []), *[None] * (x.ndim - 1))

    def _place(self, arrays: Sequence[Sequence[Any]]) -> None:
        """Decide which mesh axes are manual, and how arrays are sharded over these."""
        mapping, stages = active_mapping(), entry_of(self._stages)
        stored = {**mapping, **active_parameter_mapping(), self._Layers.name: stages}
        examples = {n: mapping.get(n) for n in (*self._kept.names, self._batch)}
        mappings = stored, examples, {self._Layers.name: stages, **examples}, {**stored, **examples}
        specs = [
            [self._spec(names, x, mapping, raw=i < 3) for names, x in zip(tree.names, xs, strict=True)]
            for i, (tree, xs, mapping) in enumerate(zip(self._trees, arrays, mappings, strict=True))
        ]
        work = {*self._mesh_axes_of_work(specs), *(a for n in self._kept.names for a in mapped_axes(n))}
        self._manual = self._manual_axes(work)
        # XLA for CPUs aborts on such a sum of bfloat16 over devices if some mesh axes are left to the partitioner.
        self._sums_wide = active_platform() == "cpu" and self._manual != {*self._mesh.axis_names}
        # Weights stay sharded over mesh axes that also shard the batch. Over others they are gathered here.
        self._specs = [[restricted(spec, self._manual & work) for spec in own] for own in specs]
        for tree, xs, own in zip(self._trees, arrays, self._specs, strict=True):
            for names, x, spec in zip(tree.names, xs, own, strict=True):
                if self._kept.names.intersection(names or ()) and not self._fits(names or (), x, spec):
                    raise NeedsCompleteAxes(
                        f"{errors.describe_axes(names or (), x.shape)} is not stored in its shards."
                    )

    def _fits(self, names: Names, x: Any, spec: PartitionSpec) -> bool:
        """Return whether an array can be sharded so, and kept axes are as the mapping says, or in smaller shards."""
        kept = [
            (mapped_axes(n), mesh_axes(entry)) for n, entry in zip(names, spec, strict=True) if n in self._kept.names
        ]
        return fits(spec, x.shape, self._mesh) and all(own == found[: len(own)] for own, found in kept)

    def _sharded_like(self, result: jax.Array, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Shard a result along Explicit mesh axes as the carry was, also where stages had all of an axis."""
        others = restricted(entries_of(x), {*self._mesh.axis_names} - {*axes_in(spec)})
        return reshard(result, (own or other for own, other in zip(spec, others, strict=True)), self._mesh)

    def _manual_axes(self, work: set[str]) -> set[str]:
        """Return the manual mesh axes: all except Auto ones over which devices do the same work.

        Over these, the partitioner does tensor and sequence parallelism inside a tick. JAX cannot differentiate that on
        Explicit mesh axes, so arrays that are sharded over them are all-gathered.
        """
        if has_explicit(self._mesh):
            return set(self._mesh.axis_names)
        names = [names or () for tree in self._trees for names in tree.names]
        computed = {a for own in names for a in axes_in(entries_by_name(own))}
        return set(self._mesh.axis_names) - (computed - work)

    def _mesh_axes_of_work(self, specs: Sequence[Sequence[PartitionSpec]]) -> set[str]:
        """Return the mesh axes over which devices have different stages or examples."""
        return {*self._stages, *(a for group in specs[1:3] for spec in group for a in axes_in(spec))}

    def _check(self, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> None:
        what, M = self._what, self._schedule.microbatches
        if self._Layers.size % (self._count * self._rounds):
            rounds = f" in {self._rounds} rounds" if self._rounds > 1 else ""
            raise ValueError(
                f"{what}: the {self._Layers.size} layers of axis {self._Layers.name!r} cannot be divided among the "
                f"{self._count} stages of {errors.describe_shape({a: self._mesh.shape[a] for a in self._stages})}"
                f"{rounds}."
            )
        check_stages(self._schedule, self._count)
        for names, x, spec in zip(self._trees[1].names, arrays, specs, strict=True):
            if names is None or self._batch not in names:
                raise ValueError(
                    f"{what}: the schedule cuts axis {self._batch!r} into microbatches, which every array of the carry "
                    f"must have; got {errors.describe_axes(names or (), x.shape)}."
                )
            position = names.index(self._batch)
            shards = shard_count(self._mesh, spec[position])
            if x.shape[position] % (shards * M):
                each = f" on each of {shards} devices" if shards > 1 else ""
                raise ValueError(
                    f"{what}: axis {self._batch!r} of size {x.shape[position]} cannot be cut into {M} microbatches of "
                    f"one size{each}."
                )
            if not (isinstance(self._schedule, GPipe) or jnp.issubdtype(x.dtype, jnp.inexact)):
                raise TypeError(
                    f"{what}: OneFOneB differentiates the carry, which must consist of floating point numbers, and has "
                    f"{x.dtype}{errors.describe_axes(names, x.shape)}."
                )
            if {*self._stages} & {*axes_in(entries_by_name(names))}:
                raise ValueError(
                    f"{what}: the carry {errors.describe_axes(names, x.shape)} is sharded over a mesh axis of the "
                    f"stages, {errors.describe_axes(self._stages)}; every stage works on all of a microbatch."
                )

    # --- on each device ---

    def _on_device(self, stacked: Arrays, carry: Arrays, rest: Arrays, head: Arrays) -> Any:
        stages, last = self._stages, self._count - 1
        stacked, batches, rest = self._prepared(self._by_rounds(0, stacked), carry, self._by_rounds(2, rest))
        if self._then is not None:
            self._kept_in_loss = self._keep_in_loss(batches, head)
            head = self._gathered(3, self._varying(head))
        if self._schedule.gather == "before":
            stacked = self._gathered(0, stacked)
        if isinstance(self._schedule, GPipe):
            results = self.forward(stacked, batches, rest, self._schedule.remat)
        elif self._then is None:
            results = cast(Arrays, _recomputed(self, stacked, batches, rest))
        else:
            total = _total(self, stacked, batches, rest, head)
            return jax.lax.psum(total, sorted(self._over))
        alike = self._alike(a for spec in self._specs[1] for a in axes_in(spec))
        here = jax.lax.axis_index(stages) == last
        here = here & (jax.lax.axis_index(alike) == 0) if alike else here
        results = [self._sum(jnp.where(here, x, 0), (*stages, *alike)) for x in results]
        return tuple(self._joined(names, x) for names, x in zip(self._trees[1].names, results, strict=True))

    def _prepared(self, stacked: Arrays, carry: Arrays, rest: Arrays) -> list[Arrays]:
        """Cut the carry into microbatches, and make all arrays device-varying."""
        batches = [self._cut(names, x) for names, x in zip(self._trees[1].names, carry, strict=True)]
        # Made device-varying before the loop, so that gradients are summed over devices once, after it.
        self._over = {*self._stages}.union(*map(varying_axes, (*carry, *rest)))
        batches = self._varying(batches) if self._sums_wide else [self._made_varying(x) for x in batches]
        return [self._varying(stacked), batches, self._varying(rest)]

    def forward(self, stacked: Arrays, batches: Arrays, rest: Arrays, remat: bool) -> Arrays:
        """Run all microbatches forward; return the results of the last stage."""
        S, stage = self._count, jax.lax.axis_index(self._stages)

        def compute(stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array, round_: jax.Array) -> Arrays:
            own, further = self._in_round(0, stacked, round_), self._in_round(2, rest, round_)
            return self._compute(own, here, further, microbatch)

        if remat:
            compute = jax.checkpoint(compute)

        def tick(arriving: Arrays, t: jax.Array) -> Any:
            _, microbatch, round_ = self._work(t - stage)
            here = chosen((stage == 0) & (round_ == 0), at(batches, microbatch), arriving)
            leaving = compute(stacked, here, rest, microbatch, round_)
            return self._sent(leaving, 1), leaving

        # Idle stages compute with values that can occur, so that they and their derivatives are finite: the gradient
        # of an unused result is zero, and zero times infinity is NaN.
        ticks = self._schedule.microbatches * self._rounds + S - 1
        _, left = jax.lax.scan(tick, at(batches, 0), jnp.arange(ticks))
        left = [x[S - 1 :] for x in left]  # the first microbatch reaches the last stage in tick S - 1
        if self._rounds == 1:
            return left
        groups = [x.reshape(-1, self._rounds, S, *x.shape[1:])[:, -1] for x in left]  # of the last round
        return [x.reshape(-1, *x.shape[2:]) for x in groups]

    def both_ways(self, stacked: Arrays, batches: Arrays, rest: Arrays, head: Arrays, given: Arrays | None) -> Any:
        """Run each microbatch forward and backward; return the sum of losses, and the gradients of all four groups.

        Gradients that are summed over microbatches are wider than the arrays if these are narrow floats.

        Arguments:
            given: the derivative of each result; None to differentiate the loss.
        """
        S, R = self._count, self._rounds
        stage, last, slots = jax.lax.axis_index(self._stages), S - 1, 2 * R * S - 1
        first_up, first_down = first_ticks(self._schedule, S, stage)
        last_up = self._schedule.microbatches * R + last  # forward passes end before this tick
        _, first_ending = first_ticks(self._schedule, S, last)
        head_floats, with_head_floats = floating_parts(head)

        def add_loss(total: jax.Array, head_sums: Arrays, leaving: Arrays, microbatch: jax.Array) -> Any:
            # All stages compute the loss together if they have shards of its arguments, or else the last one does.
            results = self._from_last(leaving) if self._loss_on_all else leaving
            value, (result_grads, head_grads) = jax.value_and_grad(
                lambda results, floats: self._value(results, with_head_floats(floats), microbatch), (0, 1)
            )(results, head_floats)
            if self._loss_on_all:
                result_grads = [jax.lax.psum(x.astype(wide_dtype(x.dtype)), self._stages) for x in result_grads]
                result_grads = [x.astype(y.dtype) for x, y in zip(result_grads, leaving, strict=True)]
            else:
                head_grads = [jnp.where(stage == last, x, 0) for x in head_grads]
            head_sums = [x + y.astype(x.dtype) for x, y in zip(head_sums, head_grads, strict=True)]
            return total + jnp.where(stage == last, value, 0), head_sums, self._varying(result_grads)

        def add_nothing(total: jax.Array, head_sums: Arrays, leaving: Arrays, microbatch: jax.Array) -> Any:
            return total, head_sums, [jnp.zeros_like(x) for x in leaving]

        def forward(arriving: Arrays, stored: Arrays, index: jax.Array) -> tuple[Arrays, Arrays]:
            _, microbatch, round_ = self._work(index)
            here = chosen((stage == 0) & (round_ == 0), at(batches, microbatch), arriving)
            # A ring: an input is used before its slot comes round again, since no more than `slots` are in flight.
            stored = [x.at[index % slots].set(y) for x, y in zip(stored, here, strict=True)]
            own, further = self._in_round(0, stacked, round_), self._in_round(2, rest, round_)
            return self._compute(own, here, further, microbatch), stored

        def backward(
            grads: Arrays,
            layer_sums: Arrays,
            further_sums: Arrays,
            carry_grads: Arrays,
            stored: Arrays,
            index: jax.Array,
        ) -> tuple[Arrays, ...]:
            working, microbatch, round_ = self._work(index, backward=True)
            own, further = self._in_round(0, stacked, round_), self._in_round(2, rest, round_)
            (floats, with_floats), (further_floats, with_further) = floating_parts(own), floating_parts(further)
            # Computed again from the stored input: only inputs are kept, for any number of layers in a stage.
            _, transposed = jax.vjp(
                lambda xs, here, ys: self._compute(with_floats(xs), here, with_further(ys), microbatch),
                floats,
                at(stored, self._forward_index(microbatch, round_) % slots),
                further_floats,
            )
            layer_grads, here_grads, further_grads = transposed(grads)
            layer_sums, further_sums = (
                [
                    added(x, jnp.where(working, y, 0).astype(x.dtype), None if p is None else (p, R, round_))
                    for x, y, p in zip(own_sums, grads, own_positions, strict=True)
                ]
                for own_sums, grads, own_positions in zip(
                    (layer_sums, further_sums), (layer_grads, further_grads), positions, strict=True
                )
            )
            done = working & (stage == 0) & (round_ == 0)
            carry_grads = [
                x.at[microbatch].set(jnp.where(done, y, x[microbatch]))
                for x, y in zip(carry_grads, here_grads, strict=True)
            ]
            return here_grads, layer_sums, further_sums, carry_grads

        def tick(state: Any, t: jax.Array) -> Any:
            arriving, returning, stored, total, sums, carry_grads = state
            # In the last ticks no stage runs forward, in the first ones none backward. All devices know, so these
            # conditions may contain collectives; the arrays between stages are sent in every tick.
            leaving, stored = jax.lax.cond(
                t < last_up, forward, lambda x, stored, index: (x, stored), arriving, stored, t - first_up
            )
            # The last stage runs backward in the tick in which it ran forward.
            _, microbatch, round_ = self._work(t - first_down, backward=True)
            if given is not None:
                result_grads, head_sums = at(given, microbatch), []
            else:
                ending, ended, round_there = self._work(t - first_ending, backward=True)
                total, head_sums, result_grads = jax.lax.cond(
                    ending & (round_there == R - 1), add_loss, add_nothing, total, sums[2], leaving, ended
                )
            arriving_grads = chosen((stage == last) & (round_ == R - 1), result_grads, returning)
            here_grads, *layer_sums, carry_grads = jax.lax.cond(
                t >= first_ending,
                backward,
                lambda *kept: kept[:4],
                arriving_grads,
                *sums[:2],
                carry_grads,
                stored,
                t - first_down,
            )
            sums = *layer_sums, head_sums
            return (self._sent(leaving, 1), self._sent(here_grads, -1), stored, total, sums, carry_grads), None

        first = at(batches, 0)
        stored = [jnp.broadcast_to(x, (slots, *x.shape)) for x in first]
        summed = floating_parts(stacked)[0], floating_parts(rest)[0], head_floats if given is None else []
        sums = tuple([jnp.zeros_like(x, wide_dtype(x.dtype)) for x in xs] for xs in summed)
        positions = [
            [
                p
                for x, p in zip(xs, self._layer_positions(group, xs), strict=True)
                if jnp.issubdtype(x.dtype, jnp.inexact)
            ]
            for group, xs in ((0, stacked), (2, rest))
        ]
        dtype = jnp.float32 if given is not None else jax.eval_shape(self._call_then, first, head, 0).dtype
        total = vary_like(jnp.zeros((), dtype), *first)
        state = first, [jnp.zeros_like(x) for x in first], stored, total, sums, [jnp.zeros_like(x) for x in batches]
        (*_, total, sums, carry_grads), _ = jax.lax.scan(tick, state, jnp.arange(self._schedule.ticks(S)))
        return total, (sums[0], carry_grads, sums[1], sums[2])

    def loss_of(self, results: Arrays, head: Arrays) -> jax.Array:
        """Return the sum of losses of the results of the last stage."""

        def of_one(m: jax.Array) -> jax.Array:
            own = self._from_last(at(results, m)) if self._loss_on_all else at(results, m)
            return self._value(own, head, m)

        each = jax.lax.map(of_one, jnp.arange(self._schedule.microbatches))
        return jnp.where(jax.lax.axis_index(self._stages) == self._count - 1, jnp.sum(each), 0)

    def _compute(self, stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array) -> Arrays:
        """Apply the layers of this stage in a round."""
        if self._schedule.gather == "inside":
            # Gather in each tick, even if a compiler would move the gather out of the loop.
            stacked, here = jax.lax.optimization_barrier((stacked, here))
            stacked = self._gathered(0, stacked)
        return self._apply(stacked, here, rest, microbatch)

    def _apply(self, stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array) -> Arrays:
        layers, carry = self._trees[0].unflatten(stacked), self._trees[1].unflatten(here)
        args, kwargs = self._trees[2].unflatten(self._microbatch(2, rest, microbatch))
        Layers = self._Layers.resize(self._Layers.size // (self._count * self._rounds))
        with activate_here(kept=self._kept):
            result = self._fold(layers, Layers, carry, *args, **kwargs)
        return [x.astype(y.dtype) for x, y in zip(flatten_arrays(result)[0], here, strict=True)]

    @property
    def _loss_on_all(self) -> bool:
        """Return whether all stages compute the loss together, from shards of its arguments."""
        return any({*mapped_axes(n)} <= {*self._stages} for n in self._kept_in_loss.names)

    def _value(self, results: Arrays, head: Arrays, microbatch: jax.Array) -> jax.Array:
        """Return the loss of a microbatch, complete on each stage even if the stages compute it together."""
        found = self._call_then(results, head, microbatch)
        same = [a for a in self._stages if self._loss_on_all and a in varying_axes(found)]
        return jax.lax.pmean(found, same) if same else found

    def _call_then(self, results: Arrays, head: Arrays, microbatch: jax.Array | int) -> jax.Array:
        """Return the loss of a microbatch, or of its shard here; those of all devices and microbatches are added up."""
        found = self._then_of(self._complete(1, results, self._kept.names - self._kept_in_loss.names), head, microbatch)
        alike = shard_count(self._mesh, self._alike(a for n in self._kept_in_loss.names for a in mapped_axes(n)))
        return found / alike if alike > 1 else found

    def _then_of(self, results: Arrays, head: Arrays, microbatch: jax.Array | int) -> jax.Array:
        with activate_here(kept=self._kept_in_loss):
            args = self._trees[3].unflatten(self._microbatch(3, head, microbatch))
            found: Any = self._then and self._then(self._trees[1].unflatten(results), *args)
        found = found.array if is_named_array(found) else jnp.asarray(found)
        if found.shape:
            raise ValueError(f"{self._what}: `then` must return one number, got an array of shape {found.shape}.")
        return found.astype(jnp.promote_types(found.dtype, jnp.float32))

    def _alike(self, shards: Iterable[str]) -> Axes:
        """Return the mesh axes along which devices compute the same results, apart from some over which they do not."""
        return tuple(sorted(self._over - {*self._stages, *self._mesh_axes_of_batch, *shards}))

    def _keep_in_loss(self, batches: Arrays, head: Arrays) -> KeptShards:
        """Return which axes stay sharded in `then`: some over the stages, and some of the carry."""
        of_head, of_carry = ({n for names in self._trees[i].names for n in names or ()} for i in (3, 1))
        over_stages = [self._stages] if self._names_over(self._stages) & of_head else []
        over_others = dict.fromkeys(a for n in self._kept.names & of_carry for a in mapped_axes(n))
        check = functools.partial(self._check_loss, at(batches, 0), head)
        return self._choose([*over_stages, *((a,) for a in over_others)], check)

    def _check_loss(self, results: Arrays, head: Arrays, names: frozenset[str]) -> None:
        """Check that `then` can be computed from shards of some axes."""
        for own, spec in zip(self._trees[3].names, self._specs[3], strict=True):
            for n, entry in zip(own or (), spec, strict=True):
                if n in names and mesh_axes(entry)[: len(mapped_axes(n))] != mapped_axes(n):
                    raise NeedsCompleteAxes(f"an argument of `then` stores {n!r} in other shards.")

        def trace(complete: bool) -> Any:
            self._kept_in_loss = KeptShards(frozenset() if complete else names)
            args = self._complete(1, summed, self._kept.names - self._kept_in_loss.names), self._gathered(3, head)
            self._kept_in_loss = KeptShards(names, complete)
            return jax.make_jaxpr(functools.partial(self._then_of, microbatch=0))(*args)

        def check() -> None:
            nonlocal summed
            summed = [jax.lax.psum(x, self._stages) for x in results]
            programs = trace(True), trace(False)
            over_others = {a for n in names for a in mapped_axes(n)} - {*self._stages}
            if self._check_programs(*programs, names, sums=bool(over_others)) != bool(over_others):
                raise NeedsCompleteAxes("`then` does not add it up.")
            if varying_axes(programs[1].out_avals[0]) & {*self._stages}:
                raise NeedsCompleteAxes("`then` gives another number on each stage.")

        summed: Arrays = []
        jax.eval_shape(check)

    def _from_last(self, xs: Arrays) -> Arrays:
        """Send the arrays of the last stage to all stages."""
        here = jax.lax.axis_index(self._stages) == self._count - 1
        found = [self._sum(jnp.where(here, x, 0), self._stages) for x in xs]
        return [varying_over(x, self._stages) for x in found]

    # --- timing ---

    def _work(self, index: Any, backward: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return whether a stage has an `index`-th task, and the microbatch and round of it or the nearest task."""
        count = self._schedule.microbatches * self._rounds
        near = jnp.clip(index, 0, count - 1)
        return (index >= 0) & (index < count), *work_of(self._schedule, self._count, near, backward)

    def _forward_index(self, microbatch: jax.Array, round_: jax.Array) -> jax.Array:
        """Return the index of the task in which a stage runs a microbatch forward in a round."""
        group, member = divmod(microbatch, self._count)
        return (group * self._rounds + round_) * self._count + member

    # --- layers in rounds ---

    def _layer_positions(self, group: int, xs: Arrays) -> list[int | None]:
        """Return the position of the axis of layers in each array; None if it has none."""
        name = self._Layers.name
        return [
            (0 if x.ndim else None) if names is None else names.index(name) if name in names else None
            for names, x in zip(self._trees[group].names, xs, strict=True)
        ]

    def _by_rounds(self, group: int, xs: Arrays) -> Arrays:
        """Send each stage the layers that it works on: with rounds, several separate stretches.

        Stage `d` stores the stretches `d R` to `d R + R - 1`, and works on `s`, `S + s`, `2 S + s`, ... Each step sends
        one stretch from each stage, chosen so that each stage also gets one.
        """
        S, R = self._count, self._rounds
        if R == 1:
            return xs
        stage, common, device = jax.lax.axis_index(self._stages), math.gcd(R, S), np.arange(S)
        steps = []  # for each stage: which of its stretches it sends, to which stage, and in which round that uses it
        for m in range(R):
            stretch = (m + device * common // S) % R
            turn, to = divmod(device * R + stretch, S)
            steps.append((stretch, list(enumerate(to)), turn[np.argsort(to)]))

        def moved(x: jax.Array, position: int | None) -> jax.Array:
            if position is None:
                return x
            result, size = jax.lax.stop_gradient(x), x.shape[position] // R  # completely replaced below
            for stretch, pairs, turn in steps:
                came = permute(slice_of(x, position, R, jnp.asarray(stretch)[stage]), self._stages, pairs)
                start = jnp.asarray(turn)[stage] * size
                result = jax.lax.dynamic_update_slice_in_dim(result, came, start, position)
            return result

        return [moved(x, position) for x, position in zip(xs, self._layer_positions(group, xs), strict=True)]

    def _in_round(self, group: int, xs: Arrays, round_: jax.Array) -> Arrays:
        """Return the arrays with only the layers of a round."""
        if self._rounds == 1:
            return xs
        positions = self._layer_positions(group, xs)
        return [x if p is None else slice_of(x, p, self._rounds, round_) for x, p in zip(xs, positions, strict=True)]

    # --- arrays ---

    def _sent(self, xs: Arrays, offset: int) -> Arrays:
        """Send arrays to the next or the previous stage; with rounds, from the last one to the first."""
        S = self._count
        pairs = [(i, (i + offset) % S) for i in range(S) if self._rounds > 1 or 0 <= i + offset < S]
        return [permute(x, self._stages, pairs) for x in xs]

    def _varying(self, xs: Arrays) -> Arrays:
        """Make arrays device-varying over the mesh axes of the carry."""
        return [summed_wide(self._made_varying, x) for x in xs]

    def _made_varying(self, x: jax.Array) -> jax.Array:
        return varying_over(x, sorted(self._over - varying_axes(x)))

    def _sum(self, x: jax.Array, over: Axes) -> jax.Array:
        """Sum over mesh axes an array that is zero on all but one device along them, which is exact in any dtype."""
        wide = x.astype(wide_dtype(x.dtype)) if self._sums_wide else x
        return jax.lax.psum(wide, over).astype(x.dtype)

    def _microbatch(self, group: int, xs: Arrays, microbatch: jax.Array | int) -> Arrays:
        """Return the slices of arrays for a microbatch; keys for it, if all examples have the same key."""

        def own(names: Names | None, x: jax.Array, is_key: bool) -> jax.Array:
            if names and self._batch in names:
                return self._cut(names, x)[microbatch]
            return folded_in(x, self._place_of(microbatch)) if is_key else x

        return [*map(own, self._trees[group].names, xs, self._keys[group])]

    def _place_of(self, microbatch: jax.Array | int) -> jax.Array:
        """Return the number of a microbatch of this device among all of the batch."""
        shard = jax.lax.axis_index(self._mesh_axes_of_batch) if self._mesh_axes_of_batch else 0
        return jnp.asarray(shard * self._schedule.microbatches + microbatch)

    def _gathered(self, group: int, xs: Arrays) -> Arrays:
        """All-gather weights, except along the axes that stay sharded."""
        kept = (self._kept_in_loss if group == 3 else self._kept).names

        def over(name: str, entry: Entry) -> Axes:
            if name in (self._Layers.name, self._batch):
                return ()
            return mesh_axes(entry)[len(mapped_axes(name)) if name in kept else 0 :]

        axes = [
            [over(n, e) for n, e in zip(names or (), spec, strict=False)]
            for names, spec in zip(self._trees[group].names, self._specs[group], strict=True)
        ]
        return [
            summed_wide(functools.partial(gather_axes, over=own), x) if any(own) else x
            for x, own in zip(xs, axes, strict=True)
        ]

    def _cut(self, names: Names | None, x: jax.Array) -> jax.Array:
        """Split the local batch into microbatches, along a new first axis."""
        position, M = (names or ()).index(self._batch), self._schedule.microbatches
        shape = (*x.shape[:position], M, x.shape[position] // M, *x.shape[position + 1 :])
        return jnp.moveaxis(x.reshape(shape), position, 0)

    def _joined(self, names: Names | None, x: jax.Array) -> jax.Array:
        """Undo `_cut`."""
        position = (names or ()).index(self._batch)
        x = jnp.moveaxis(x, 0, position)
        return x.reshape((*x.shape[:position], -1, *x.shape[position + 2 :]))


# --- derivatives ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays, head: Arrays) -> jax.Array:
    """Return the sum of losses of a device's examples, which is zero except on the last stage."""
    return pipeline.loss_of(pipeline.forward(stacked, batches, rest, remat=False), head)


def _total_forward(pipeline: _Pipeline, *groups: Arrays) -> Any:
    total, gradients = pipeline.both_ways(*groups, given=None)
    return total, (groups, gradients)


def _total_backward(pipeline: _Pipeline, kept: Any, given: jax.Array) -> Any:
    groups, gradients = kept  # in the dtype of sums, since they are not divided by a number of examples yet
    return tuple(with_none(xs, [x * given for x in own]) for xs, own in zip(groups, gradients, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Arrays:
    """Return the results of the last stage, keeping nothing for the derivative."""
    return pipeline.forward(stacked, batches, rest, remat=False)


def _recomputed_forward(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Any:
    return _recomputed(pipeline, stacked, batches, rest), (stacked, batches, rest)


def _recomputed_backward(pipeline: _Pipeline, groups: Any, given: Arrays) -> Any:
    stacked, batches, rest = groups
    _, gradients = pipeline.both_ways(stacked, batches, rest, [], given=given)
    return tuple(map(with_none, groups, gradients[:3]))


_total.defvjp(_total_forward, _total_backward)
_recomputed.defvjp(_recomputed_forward, _recomputed_backward)
