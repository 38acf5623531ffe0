"""Run pipelines: layers are sharded over stages, and each stage works on a different microbatch at a time.

If the axis of stacked layers is sharded over a mesh axis, each device along it is a *stage* and has some of the
layers. The batch is split into microbatches. In every *tick*, each stage applies its layers to a microbatch and sends
the result to the next stage. Before the first microbatch arrives and after the last one has left, a stage is idle.

The program is one loop over ticks inside `shard_map`. Devices run the same program in lock-step: an idle stage computes
too, from the values of some microbatch, and the results are not used. A condition on the stage would save nothing, and
a collective inside it would be wrong. `GPipe` differentiates the loop. `OneFOneB` has a loop of its own, which runs
forward and backward passes, and returns the gradients. It leaves out a pass in the ticks in which no stage runs it.

`_stages` says what each device has, applies its layers, and decides which axes are sharded in there.

With rounds, a microbatch passes through all stages several times, and a stage applies different layers each time.
Layers are still stored in one contiguous block for each stage, so stages first exchange the layers that they will
apply.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ..axis import Axis
from ..core.tree_spec import flatten_arrays
from ..distribution.mesh_axes import axes_in, current_mesh, mapped_on, shard_count
from ..distribution.operation_scope import operation_scope
from ..distribution.operations_on_shards import NeedsCompleteAxes
from ..distribution.per_device import vary_like
from ._stages import Arrays, Fold, Stages, Then, added, at, chosen, floating_parts, wide_dtype, with_none
from .pipeline_schedules import GPipe, Schedule, first_ticks


def _in_turns(taken: int, of: int, *conditional: Any) -> Any:
    """Run `jax.lax.cond` in a scope that says in how many turns of a loop its condition holds."""
    with jax.named_scope(operation_scope("turns", (), (), (), turns=(taken, of))):
        return jax.lax.cond(*conditional)


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
        groups = stacked, carry, (tuple(args), dict(kwargs)), tuple(then_args) if inside else ()
        result = _Pipeline(schedule, what, Layers, fold, inside, mesh, stages, groups).run(groups)
        if inside is not None:
            return result
    return result if then is None else then(result, *then_args)


class _Pipeline(Stages):
    """A call of a pipeline, while its mapping is active."""

    def run(self, groups: Sequence[Any]) -> Any:
        arrays = [flatten_arrays(group)[0] for group in groups]
        self._kept = self._keep()
        try:
            self._place()
        except NeedsCompleteAxes as error:
            raise self._refusal(error) from None
        layers, idle = self._Layers, self._schedule.idle(self._count)
        with jax.named_scope(operation_scope("pipeline", ((layers.name,),), (), (np.empty(layers.size),), idle=idle)):
            out_specs = PartitionSpec() if self._then is not None else tuple(self._specs[1])
            results = self._per_device(self._on_device, arrays, out_specs)
        if self._then is not None:
            return results
        return self._trees[1].unflatten(map(self._sharded_like, results, self._types[1], self._specs[1]))

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
            results = cast(Arrays, _recomputed_results(self, stacked, batches, rest))
        else:
            total = _total_loss(self, stacked, batches, rest, head)
            return jax.lax.psum(total, sorted(self._over))
        at_last = jax.lax.axis_index(stages) == last

        def of_last(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            # Only the last stage has results: the others add zeros, which makes the sum a broadcast from it. Of devices
            # with the same results, one may count.
            alike = tuple(sorted(self._over - {*stages, *self._mesh_axes_of_batch, *axes_in(spec)}))
            here = at_last & (jax.lax.axis_index(alike) == 0) if alike else at_last
            return self._sum(jnp.where(here, x, 0), (*stages, *alike))

        results = map(of_last, results, self._specs[1])
        return tuple(self._joined(names, x) for names, x in zip(self._trees[1].names, results, strict=True))

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
            group, member = divmod(microbatch, S)
            ran_forward = (group * R + round_) * S + member  # the index of the task in which it did
            own, further = self._in_round(0, stacked, round_), self._in_round(2, rest, round_)
            (floats, with_floats), (further_floats, with_further) = floating_parts(own), floating_parts(further)
            # Computed again from the stored input: only inputs are kept, for any number of layers in a stage.
            _, transposed = jax.vjp(
                lambda xs, here, ys: self._compute(with_floats(xs), here, with_further(ys), microbatch),
                floats,
                at(stored, ran_forward % slots),
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

        ticks = self._schedule.ticks(S)

        def tick(state: Any, t: jax.Array) -> Any:
            arriving, returning, stored, total, sums, carry_grads = state
            # In the last ticks no stage runs forward, in the first ones none backward. All devices know, so these
            # conditions may contain collectives; the arrays between stages are sent in every tick.
            leaving, stored = _in_turns(
                last_up,
                ticks,
                t < last_up,
                forward,
                lambda x, stored, index: (x, stored),
                arriving,
                stored,
                t - first_up,
            )
            # The last stage runs backward in the tick in which it ran forward.
            _, microbatch, round_ = self._work(t - first_down, backward=True)
            if given is not None:
                result_grads, head_sums = at(given, microbatch), []
            else:
                ending, ended, round_there = self._work(t - first_ending, backward=True)
                total, head_sums, result_grads = _in_turns(
                    self._schedule.microbatches,
                    ticks,
                    ending & (round_there == R - 1),
                    add_loss,
                    lambda total, head_sums, leaving, _: (total, head_sums, [jnp.zeros_like(x) for x in leaving]),
                    total,
                    sums[2],
                    leaving,
                    ended,
                )
            arriving_grads = chosen((stage == last) & (round_ == R - 1), result_grads, returning)
            here_grads, *layer_sums, carry_grads = _in_turns(
                ticks - first_ending,
                ticks,
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
        # Filled with values that can occur, as idle stages compute with them.
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
        dtype = jnp.float32 if given is not None else jax.eval_shape(self._value, first, head, 0).dtype
        total = vary_like(jnp.zeros((), dtype), *first)
        state = first, [jnp.zeros_like(x) for x in first], stored, total, sums, [jnp.zeros_like(x) for x in batches]
        (*_, total, sums, carry_grads), _ = jax.lax.scan(tick, state, jnp.arange(ticks))
        return total, (sums[0], carry_grads, sums[1], sums[2])

    def loss_of(self, results: Arrays, head: Arrays) -> jax.Array:
        """Return the sum of losses of the results of the last stage."""

        def of_one(m: jax.Array) -> jax.Array:
            own = self._from_last(at(results, m)) if self._loss_on_all else at(results, m)
            return self._value(own, head, m)

        each = jax.lax.map(of_one, jnp.arange(self._schedule.microbatches))
        return jnp.where(jax.lax.axis_index(self._stages) == self._count - 1, jnp.sum(each), 0)


# --- derivatives ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total_loss(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays, head: Arrays) -> jax.Array:
    """Return the sum of losses of a device's examples, which is zero except on the last stage."""
    return pipeline.loss_of(pipeline.forward(stacked, batches, rest, remat=False), head)


def _total_forward(pipeline: _Pipeline, *groups: Arrays) -> Any:
    total, gradients = pipeline.both_ways(*groups, given=None)
    return total, (groups, gradients)


def _total_backward(pipeline: _Pipeline, kept: Any, given: jax.Array) -> Any:
    groups, gradients = kept  # in the dtype of sums, since they are not divided by a number of examples yet
    return tuple(with_none(xs, [x * given for x in own]) for xs, own in zip(groups, gradients, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed_results(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Arrays:
    """Return the results of the last stage, keeping nothing for the derivative."""
    return pipeline.forward(stacked, batches, rest, remat=False)


def _recomputed_forward(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Any:
    return _recomputed_results(pipeline, stacked, batches, rest), (stacked, batches, rest)


def _recomputed_backward(pipeline: _Pipeline, groups: Any, given: Arrays) -> Any:
    stacked, batches, rest = groups
    _, gradients = pipeline.both_ways(stacked, batches, rest, [], given=given)
    return tuple(map(with_none, groups, gradients[:3]))


_total_loss.defvjp(_total_forward, _total_backward)
_recomputed_results.defvjp(_recomputed_forward, _recomputed_backward)
