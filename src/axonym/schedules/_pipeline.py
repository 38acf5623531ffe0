"""Pipelines: layers over stages, each of which works on another microbatch at a time.

If the axis of stacked layers is sharded over a mesh axis, each device along it is a *stage* and has some of the
layers. The batch is cut into microbatches. In every *tick*, each stage applies its layers to a microbatch and sends the
result to the next stage. Before the first microbatch arrives and after the last one has left, a stage is idle.

The program is one loop over ticks inside `shard_map`. Devices run the same program in lock-step: an idle stage computes
too, from the values of some microbatch, and the results are not used. A condition would save nothing, and a collective
inside it would be wrong. The derivative of `GPipe` is that of the loop. `OneFOneB` has a loop of its own, which runs
forward and backward, and whose results are the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .. import _errors
from .._context import Entry, active_mapping, active_parameter_mapping
from .._jax_versions import varying_axes
from .._mesh_axes import (
    AnyMesh,
    Axes,
    axes_in,
    current_mesh,
    entries_by_name,
    entry_of,
    mapped_on,
    mesh_axes,
    restricted,
    shard_count,
)
from .._per_device import gather_axes, run_per_device, vary_like, varying_over
from .._tree_spec import TreeSpec, flatten_arrays
from ..axis import Axis, Names, name_of
from ..manual import _axis_environment
from ..manual._axis_environment import ArgumentAxis
from ..named_array import is_named_array
from ._sharded_loss import is_computed_from_shards
from .pipeline_schedules import GPipe, Schedule

Fold = Callable[..., Any]
"""Applies layers: from their arrays, their axis, a carry, and further arguments by position and keyword."""
Then = Callable[..., Any]
"""Computes the loss, a sum over examples, from a result and further arguments."""
Arrays = list[jax.Array]


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

    Arrays come in four groups: those of the layers, the carry, further arguments of the layers, and those of `then`.
    """

    def __init__(
        self, schedule: Schedule, what: str, Layers: Axis, fold: Fold, then: Then | None, mesh: AnyMesh, stages: Axes
    ):
        self._schedule, self._what, self._Layers, self._fold, self._then = schedule, what, Layers, fold, then
        self._mesh, self._stages, self._count = mesh, stages, shard_count(mesh, stages)
        self._batch = name_of(schedule.axis)

    def run(self, *groups: Any) -> Any:
        arrays, trees = zip(*map(flatten_arrays, groups), strict=True)
        self._trees: Sequence[TreeSpec] = trees
        stored = {**active_mapping(), **active_parameter_mapping(), self._Layers.name: entry_of(self._stages)}
        of_head = {**stored, self._batch: active_mapping().get(self._batch)}
        mappings = stored, active_mapping(), active_mapping(), of_head
        specs = [
            [self._spec(names, x, mapping, raw=i < 3) for names, x in zip(tree.names, xs, strict=True)]
            for i, (tree, xs, mapping) in enumerate(zip(trees, arrays, mappings, strict=True))
        ]
        self._check(arrays[1], specs[1])
        manual = self._manual(specs)
        # Weights are sharded over mesh axes that the batch is sharded over, too. Over others they are gathered here.
        kept = manual & self._of_batch(specs)
        specs = [[restricted(spec, manual if i in (1, 2) else kept) for spec in own] for i, own in enumerate(specs)]
        self._specs = specs
        each = zip(trees[3].names, arrays[3], specs[3], strict=True)
        self._shards = frozenset(
            ArgumentAxis(n, size, size // shard_count(self._mesh, self._kept(n, entry)), self._kept(n, entry))
            for names, x, spec in each
            for n, size, entry in zip(names or (), x.shape, spec, strict=False)
            if self._kept(n, entry)
        )
        ends = list(itertools.accumulate(map(len, arrays)))

        def on_device(*shards: jax.Array) -> Any:
            return self._on_device(*(list(shards[end - len(xs) : end]) for end, xs in zip(ends, arrays, strict=True)))

        flat, flat_specs = ([x for group in both for x in group] for both in (arrays, specs))
        out_specs = tuple(specs[1]) if self._then is None else PartitionSpec()
        results = run_per_device(on_device, flat, flat_specs, out_specs, self._mesh, axis_names=manual)
        return trees[1].unflatten(results) if self._then is None else results

    # --- where things are ---

    def _spec(self, names: Names | None, x: Any, mapping: Mapping[str, Entry], raw: bool) -> PartitionSpec:
        if names is not None:
            return PartitionSpec(*entries_by_name(names, mapping))
        # As in `axonym.scan`, raw arrays are sliced along their first axis, but not those of `then`.
        return PartitionSpec(*([entry_of(self._stages) if raw else None] if x.ndim else []), *[None] * (x.ndim - 1))

    def _kept(self, name: str, entry: Entry) -> Axes:
        """Return the mesh axes of stages that an axis of an argument of `then` stays sharded over, as mapped."""
        own = mesh_axes(active_mapping().get(name))
        mapped = own == mesh_axes(entry)[: len(own)] and {*own} <= {*self._stages}
        return own if mapped and name not in (self._Layers.name, self._batch) else ()

    def _manual(self, specs: Sequence[Sequence[PartitionSpec]]) -> set[str]:
        """Return the mesh axes that are manual: not Auto ones that only weights are sharded over in computations.

        With these the partitioner does tensor parallelism inside of a tick. On Explicit mesh axes JAX cannot
        differentiate that, so weights that are sharded over these are all-gathered.
        """
        if AxisType.Explicit in self._mesh.axis_types:
            return set(self._mesh.axis_names)
        weights = (*self._trees[0].names, *self._trees[3].names)
        computed = {a for names in weights for a in axes_in(entries_by_name(names or ()))}
        return set(self._mesh.axis_names) - (computed - self._of_batch(specs))

    def _of_batch(self, specs: Sequence[Sequence[PartitionSpec]]) -> set[str]:
        """Return the mesh axes over which devices have different stages or examples."""
        return {*self._stages, *(a for group in specs[1:3] for spec in group for a in axes_in(spec))}

    def _check(self, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> None:
        what, M = self._what, self._schedule.microbatches
        if self._Layers.size % self._count:
            raise ValueError(
                f"{what}: the {self._Layers.size} layers of axis {self._Layers.name!r} cannot be divided among the "
                f"{self._count} stages of {_errors.describe_shape({a: self._mesh.shape[a] for a in self._stages})}."
            )
        for names, x, spec in zip(self._trees[1].names, arrays, specs, strict=True):
            if names is None or self._batch not in names:
                raise ValueError(
                    f"{what}: the schedule cuts axis {self._batch!r} into microbatches, which every array of the carry "
                    f"must have; got {_errors.describe_axes(names or (), x.shape)}."
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
                    f"{x.dtype}{_errors.describe_axes(names, x.shape)}."
                )
            others = [n for n, entry in zip(names, spec, strict=True) if mesh_axes(entry) and n != self._batch]
            if others and self._then is not None:
                raise ValueError(
                    f"{what}: with `then`, the carry {_errors.describe_axes(names, x.shape)} may be sharded along "
                    f"{self._batch!r} only, and the active mapping shards {_errors.quoted(others)} too. Map it to "
                    "None, or compute the loss after the fold."
                )
            if {*self._stages} & {*axes_in(spec)}:
                raise ValueError(
                    f"{what}: the carry {_errors.describe_axes(names, x.shape)} is sharded over a mesh axis of the "
                    f"stages, {_errors.describe_axes(self._stages)}; every stage works on all of a microbatch."
                )

    # --- on each device ---

    def _on_device(self, stacked: Arrays, carry: Arrays, rest: Arrays, head: Arrays) -> Any:
        stages, last = self._stages, self._count - 1
        batches = [self._cut(names, x) for names, x in zip(self._trees[1].names, carry, strict=True)]
        if self._shards and not self._can_combine(batches, head):
            self._shards = frozenset()
        # Device-varying before the loop, so that gradients are summed over devices once, after it.
        over = {*stages}.union(*map(varying_axes, (*carry, *rest)))
        stacked, rest, head = (
            [varying_over(x, sorted(over - varying_axes(x))) for x in xs] for xs in (stacked, rest, head)
        )
        head = self._gathered(3, head)
        batches = [varying_over(x, sorted(over - varying_axes(x))) for x in batches]
        if self._schedule.gather == "before":
            stacked = self._gathered(0, stacked)
        if isinstance(self._schedule, GPipe):
            results = self.forward(stacked, batches, rest, self._schedule.remat)
        elif self._then is None:
            results = cast(Arrays, _recomputed(self, stacked, batches, rest))
        else:
            total = _total(self, stacked, batches, rest, head)
            return jax.lax.psum(total, sorted(over))
        here = jax.lax.axis_index(stages) == last
        results = [jax.lax.psum(jnp.where(here, x, 0), stages) for x in results]
        return tuple(self._joined(names, x) for names, x in zip(self._trees[1].names, results, strict=True))

    def forward(self, stacked: Arrays, batches: Arrays, rest: Arrays, remat: bool) -> Arrays:
        """Run all microbatches forward; the results are those of the last stage."""
        stage, compute = jax.lax.axis_index(self._stages), jax.checkpoint(self._compute) if remat else self._compute
        M = self._schedule.microbatches

        def tick(arriving: Arrays, t: jax.Array) -> Any:
            here = _chosen(stage == 0, _at(batches, jnp.minimum(t, M - 1)), arriving)
            leaving = compute(stacked, here, rest, jnp.clip(t - stage, 0, M - 1))
            return self._sent(leaving, 1), leaving

        # Idle stages compute with values that can occur, so that they are finite, and so are their derivatives.
        _, left = jax.lax.scan(tick, _at(batches, 0), jnp.arange(M + self._count - 1))
        return [x[self._count - 1 :] for x in left]

    def both_ways(self, stacked: Arrays, batches: Arrays, rest: Arrays, head: Arrays, given: Arrays | None) -> Any:
        """Run each microbatch forward and backward; return the sum of losses, and the gradients of all four groups.

        Gradients that are summed over microbatches are wider than the arrays if these are narrow floats.

        Arguments:
            given: the derivative of each result; None for that of the loss.
        """
        M, last = self._schedule.microbatches, self._count - 1
        stage, slots = jax.lax.axis_index(self._stages), 2 * last + 1
        (weights, with_weights), (further, with_further), (of_then, _) = map(_floating, (stacked, rest, head))

        def tick(state: Any, t: jax.Array) -> Any:
            arriving, returning, stored, total, sums = state
            up, down = t - stage, t - 2 * last + stage
            here = _chosen(stage == 0, _at(batches, jnp.clip(up, 0, M - 1)), arriving)
            stored = [x.at[up % slots].set(y) for x, y in zip(stored, here, strict=True)]
            leaving = self._compute(stacked, here, rest, jnp.clip(up, 0, M - 1))
            # The last stage goes backward in the tick in which it went forward.
            down_here, working = jnp.clip(down, 0, M - 1), (down >= 0) & (down < M)
            ending = working & (stage == last)
            if given is not None:
                of_results, of_head, of_all = _at(given, down_here), [], ending
            elif not self._shards:
                loss, of_results, of_head = self._loss(leaving, head, down_here)
                total, of_all = total + jnp.where(ending, loss, 0), ending
            else:  # of a microbatch on the last stage, all stages compute the loss together
                ended = jnp.clip(t - last, 0, M - 1)
                loss, of_results, of_head = self._loss(self._of_last(leaving), head, ended)
                of_results = [jax.lax.psum(x, self._stages) for x in of_results]
                total, of_all = total + jnp.where(ending, loss, 0), (t >= last) & (t - last < M)
            _, backward = jax.vjp(
                lambda xs, here, ys: self._compute(with_weights(xs), here, with_further(ys), down_here),
                weights,
                _at(stored, down % slots),
                further,
            )
            of_weights, of_here, of_further = backward(_chosen(stage == last, of_results, returning))
            sums = [
                [x + jnp.where(condition, y, 0).astype(x.dtype) for x, y in zip(xs, ys, strict=True)]
                for xs, ys, condition in (
                    (sums[0], of_weights, working),
                    (sums[1], of_further, working),
                    (sums[2], of_head, of_all),
                )
            ]
            return (self._sent(leaving, 1), self._sent(of_here, -1), stored, total, sums), of_here

        first = _at(batches, 0)
        stored = [jnp.broadcast_to(x, (slots, *x.shape)) for x in first]
        summed = weights, further, of_then if given is None else []
        sums = [[jnp.zeros_like(x, _wide(x.dtype)) for x in xs] for xs in summed]
        total = vary_like(jnp.zeros((), jnp.float32), *first)
        state = first, [jnp.zeros_like(x) for x in first], stored, total, sums
        (*_, total, sums), of_carry = jax.lax.scan(tick, state, jnp.arange(M + 2 * last))
        # The first stage is the last to go backward.
        return total, (sums[0], [jnp.where(stage == 0, x[2 * last :], 0) for x in of_carry], sums[1], sums[2])

    def loss_of(self, results: Arrays, head: Arrays) -> jax.Array:
        """Return the sum of losses of the results of the last stage."""

        def of_one(m: jax.Array) -> jax.Array:
            own = self._of_last(_at(results, m)) if self._shards else _at(results, m)
            return self._value(own, head, m)

        each = jax.lax.map(of_one, jnp.arange(self._schedule.microbatches))
        return jnp.where(jax.lax.axis_index(self._stages) == self._count - 1, jnp.sum(each), 0)

    def _compute(self, stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array) -> Arrays:
        """Apply the layers of this stage."""
        if self._schedule.gather == "inside":
            stacked = self._gathered(0, stacked)
        layers, carry = self._trees[0].unflatten(stacked), self._trees[1].unflatten(here)
        args, kwargs = self._trees[2].unflatten(self._own(2, rest, microbatch))
        result = self._fold(layers, self._Layers.resize(self._Layers.size // self._count), carry, *args, **kwargs)
        return [x.astype(y.dtype) for x, y in zip(flatten_arrays(result)[0], here, strict=True)]

    def _loss(self, results: Arrays, head: Arrays, microbatch: jax.Array) -> tuple[jax.Array, Arrays, Arrays]:
        """Return the loss of a microbatch, and its derivatives by the results and by the arguments of `then`."""
        floats, with_floats = _floating(head)

        def loss(results: Arrays, floats: Arrays) -> jax.Array:
            return self._value(results, with_floats(floats), microbatch)

        value, (of_results, of_head) = jax.value_and_grad(loss, (0, 1))(results, floats)
        return value, of_results, of_head

    def _value(self, results: Arrays, head: Arrays, microbatch: jax.Array) -> jax.Array:
        """Return the loss of a microbatch. If the stages compute it together, each has all of it."""
        found = self._of_then(results, head, microbatch)
        same = [a for a in self._stages if self._shards and a in varying_axes(found)]
        return jax.lax.pmean(found, same) if same else found

    def _of_then(self, results: Arrays, head: Arrays, microbatch: jax.Array | int) -> jax.Array:
        environment = _axis_environment.interned(self._shards, checked=True, combined=True)
        with _axis_environment.activate(environment) if self._shards else contextlib.nullcontext():
            args = self._trees[3].unflatten(self._own(3, head, microbatch))
            found: Any = self._then and self._then(self._trees[1].unflatten(results), *args)
        found = found.array if is_named_array(found) else jnp.asarray(found)
        if found.shape:
            raise ValueError(f"{self._what}: `then` must return one number, got an array of shape {found.shape}.")
        return found.astype(jnp.float32)

    def _can_combine(self, batches: Arrays, head: Arrays) -> bool:
        """Return whether `then` may be computed from shards of the axes that are sharded over the stages.

        If not, its arguments are all-gathered.
        """
        shards, programs = self._shards, []

        def trace() -> None:
            results = [jax.lax.psum(varying_over(x[0], self._stages), self._stages) for x in batches]
            for self._shards in (frozenset(), shards):
                of_then = functools.partial(self._of_then, microbatch=0)
                programs.append(jax.make_jaxpr(of_then)(results, self._gathered(3, head)))

        try:
            jax.eval_shape(trace)
        except (LookupError, TypeError, ValueError):
            if not programs:
                raise
            return False  # it needs all of an axis: shards do not fit other arrays
        finally:
            self._shards = shards
        whole, of_shards = programs
        differs = varying_axes(of_shards.out_avals[0]) & {*self._stages}
        return not differs and is_computed_from_shards(whole, of_shards)

    def _of_last(self, xs: Arrays) -> Arrays:
        """Return the arrays of the last stage, on all of them."""
        here = jax.lax.axis_index(self._stages) == self._count - 1
        found = [jax.lax.psum(jnp.where(here, x, 0), self._stages) for x in xs]
        return [varying_over(x, self._stages) for x in found]

    # --- arrays ---

    def _sent(self, xs: Arrays, offset: int) -> Arrays:
        """Send arrays to the next stage, or to the previous one."""
        pairs = [(i, i + offset) for i in range(self._count) if 0 <= i + offset < self._count]
        return [jax.lax.ppermute(x, self._stages, pairs) for x in xs]

    def _own(self, group: int, xs: Arrays, microbatch: jax.Array | int) -> Arrays:
        """Return the slices of arrays that are for a microbatch."""
        each = zip(self._trees[group].names, xs, strict=True)
        return [self._cut(names, x)[microbatch] if names and self._batch in names else x for names, x in each]

    def _gathered(self, group: int, xs: Arrays) -> Arrays:
        """All-gather weights, except over stages."""
        shards = {s.name: len(s.axes) for s in self._shards} if group == 3 else {}

        def over(name: str, entry: Entry) -> Axes:
            return () if name in (self._Layers.name, self._batch) else mesh_axes(entry)[shards.get(name, 0) :]

        return [
            gather_axes(x, [over(n, e) for n, e in zip(names or (), spec, strict=False)])
            for x, names, spec in zip(xs, self._trees[group].names, self._specs[group], strict=True)
        ]

    def _cut(self, names: Names | None, x: jax.Array) -> jax.Array:
        """Cut the local batch into microbatches, along a new first axis."""
        position, M = (names or ()).index(self._batch), self._schedule.microbatches
        shape = (*x.shape[:position], M, x.shape[position] // M, *x.shape[position + 1 :])
        return jnp.moveaxis(x.reshape(shape), position, 0)

    def _joined(self, names: Names | None, x: jax.Array) -> jax.Array:
        """Undo `_cut`."""
        position = (names or ()).index(self._batch)
        x = jnp.moveaxis(x, 0, position)
        return x.reshape((*x.shape[:position], -1, *x.shape[position + 2 :]))


def _at(xs: Arrays, i: Any) -> Arrays:
    return [x[i] for x in xs]


def _chosen(condition: Any, xs: Arrays, others: Arrays) -> Arrays:
    return [jnp.where(condition, x, y) for x, y in zip(xs, others, strict=True)]


def _wide(dtype: Any) -> Any:
    """Return the dtype of a sum over microbatches."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _floating(xs: Arrays) -> tuple[Arrays, Callable[..., list[Any]]]:
    """Return the arrays that can be differentiated, and a function from such arrays to all."""
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in xs]

    def with_others(own: Sequence[Any], others: Sequence[Any] = tuple(xs)) -> list[Any]:
        left = iter(own)
        return [next(left) if is_float else x for x, is_float in zip(others, floats, strict=True)]

    return [x for x, is_float in zip(xs, floats, strict=True) if is_float], with_others


# --- derivatives ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays, head: Arrays) -> jax.Array:
    """Return the sum of losses of the examples of a device, which is zero except for the last stage."""
    return pipeline.loss_of(pipeline.forward(stacked, batches, rest, remat=False), head)


def _total_forward(pipeline: _Pipeline, *groups: Arrays) -> Any:
    total, gradients = pipeline.both_ways(*groups, given=None)
    return total, (groups, gradients)


def _total_backward(pipeline: _Pipeline, kept: Any, given: jax.Array) -> Any:
    groups, gradients = kept  # in the dtype of sums, which holds them before they are divided by a number of examples
    return tuple(_with_none(xs, [x * given for x in own]) for xs, own in zip(groups, gradients, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Arrays:
    """Return the results of the last stage, of which nothing is kept for the derivative."""
    return pipeline.forward(stacked, batches, rest, remat=False)


def _recomputed_forward(pipeline: _Pipeline, stacked: Arrays, batches: Arrays, rest: Arrays) -> Any:
    return _recomputed(pipeline, stacked, batches, rest), (stacked, batches, rest)


def _recomputed_backward(pipeline: _Pipeline, groups: Any, given: Arrays) -> Any:
    stacked, batches, rest = groups
    _, gradients = pipeline.both_ways(stacked, batches, rest, [], given=given)
    return tuple(map(_with_none, groups, gradients[:3]))


def _with_none(xs: Arrays, gradients: Arrays) -> list[Any]:
    """Return gradients for all arrays, in their dtypes; None for those that cannot be differentiated."""
    floats, with_others = _floating(xs)
    return with_others([g.astype(x.dtype) for g, x in zip(gradients, floats, strict=True)], [None] * len(xs))


_total.defvjp(_total_forward, _total_backward)
_recomputed.defvjp(_recomputed_forward, _recomputed_backward)
