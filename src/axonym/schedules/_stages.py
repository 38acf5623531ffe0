"""Divide the arrays of a pipeline among devices, microbatches and rounds, and apply the layers of a stage.

Layers and loss are traced for complete axes, and run on shards: see `axonym.distribution.on_shards`. The loss is traced
for all of the batch, and what a device has of a microbatch is a shard of it. So sums and means over examples are added
up over microbatches, and what needs more of the batch is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..axis import Axis, Names, name_of
from ..core import errors
from ..core.jax_versions import active_platform, varying_axes
from ..core.tree_spec import flatten_arrays, is_key
from ..distribution.active_settings import Entry, activate_here, active_mapping, active_parameter_mapping
from ..distribution.kept_shards import KeptShards
from ..distribution.mesh_axes import (
    AnyMesh,
    Axes,
    axes_in,
    entries_by_name,
    entry_of,
    fits,
    has_explicit,
    mapped_axes,
    mesh_axes,
    reshard,
    restricted,
    shard_count,
)
from ..distribution.on_shards import OnShards
from ..distribution.operations_on_shards import MICROBATCHES, NeedsCompleteAxes, Shard
from ..distribution.per_device import gather_axes, permute, run_per_device, vary_like, varying_over
from ..named_array import is_named_array
from .pipeline_schedules import GPipe, Schedule, check_stages, work_of

Arrays = list[jax.Array]


def at(xs: Arrays, i: Any) -> Arrays:
    return [x[i] for x in xs]


def slice_of(x: jax.Array, position: int, count: int, i: jax.Array) -> jax.Array:
    """Return the `i`-th of `count` slices of an array."""
    size = x.shape[position] // count
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, position)


def which_are_keys(xs: Arrays, old: Any = None) -> list[bool]:
    """Return which arrays are random keys, by their dtype; `old` may also have keys of `jax.random.PRNGKey`."""
    old = old.array if is_named_array(old) else old
    return [is_key(x) or (x is old and x.dtype == np.uint32) for x in xs]


def folded_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Fold a number into each key of an array."""
    if keys.ndim == (0 if is_key(keys) else 1):
        return jax.random.fold_in(keys, number)
    return jax.vmap(lambda key: folded_in(key, number))(keys)


def added(x: jax.Array, y: jax.Array, place: tuple[int, int, jax.Array] | None) -> jax.Array:
    """Add to an array, or to a slice of it, given by arguments of `slice_of`."""
    if place is None or place[1] == 1:
        return x + y
    position, _, i = place
    return jax.lax.dynamic_update_slice_in_dim(x, slice_of(x, *place) + y, i * y.shape[position], position)


def chosen(condition: Any, xs: Arrays, others: Arrays) -> Arrays:
    return [jnp.where(condition, x, y) for x, y in zip(xs, others, strict=True)]


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype of a sum over microbatches."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def floating_parts(xs: Arrays) -> tuple[Arrays, Callable[..., list[Any]]]:
    """Return the arrays that can be differentiated, and a function that restores all arrays from these."""
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in xs]

    def with_others(own: Sequence[Any], others: Sequence[Any] = tuple(xs)) -> list[Any]:
        left = iter(own)
        return [next(left) if is_float else x for x, is_float in zip(others, floats, strict=True)]

    return [x for x, is_float in zip(xs, floats, strict=True) if is_float], with_others


def with_none(xs: Arrays, gradients: Arrays) -> list[Any]:
    """Return gradients for all arrays, in their dtypes; None for arrays that cannot be differentiated."""
    floats, with_others = floating_parts(xs)
    return with_others([g.astype(x.dtype) for g, x in zip(gradients, floats, strict=True)], [None] * len(xs))


# --- sums over devices ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved_widely(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a linear function whose transpose is a sum over devices; compute this sum in a wide dtype."""
    return move(x)


def _moved_backward(move: Callable[[jax.Array], jax.Array], x: jax.Array, given: jax.Array) -> tuple[jax.Array]:
    wide = wide_dtype(x.dtype)
    return (jax.vjp(move, x.astype(wide))[1](given.astype(wide))[0].astype(x.dtype),)


def summed_wide(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return move(x) if wide_dtype(x.dtype) == x.dtype else _moved_widely(move, x)


_moved_widely.defvjp(lambda move, x: (move(x), x), _moved_backward)


Fold = Callable[..., Any]
"""Applies layers: from their arrays, their axis, a carry, and further arguments by position and keyword."""
Then = Callable[..., Any]
"""Computes the loss, a sum over examples, from a result and further arguments."""


class Stages:
    """The stages of a pipeline, while its mapping is active.

    Arrays come in four groups: the layers, the carry, further arguments of the layers, and the arguments of `then`.
    """

    def __init__(
        self,
        schedule: Schedule,
        what: str,
        Layers: Axis,
        fold: Fold,
        then: Then | None,
        mesh: AnyMesh,
        stages: Axes,
        groups: Sequence[Any],
    ):
        self._schedule, self._what, self._Layers, self._fold, self._then = schedule, what, Layers, fold, then
        self._mesh, self._stages, self._count = mesh, stages, shard_count(mesh, stages)
        self._batch, self._rounds = name_of(schedule.axis), schedule.rounds
        self._mesh_axes_of_batch = mapped_axes(self._batch)
        arrays, self._trees = zip(*map(flatten_arrays, groups), strict=True)
        self._keys = which_are_keys(arrays[2], groups[2][1].get("key"))
        # Not the arrays: JAX keeps this for derivatives, and tracers must not outlive what they trace.
        self._types: list[list[Any]] = [[*map(jax.typeof, xs)] for xs in arrays]
        self._kept = self._kept_in_loss = KeptShards()
        self._place()
        self._check()

    def _per_device(self, fn: Callable[..., Any], arrays: Sequence[Arrays], out_specs: Any) -> Any:
        """Call a function of the four groups of arrays on the shards of each device."""
        ends = list(itertools.accumulate(map(len, arrays)))

        def on_device(*shards: jax.Array) -> Any:
            return fn(*(list(shards[end - len(xs) : end]) for end, xs in zip(ends, arrays, strict=True)))

        flat, specs = [*itertools.chain(*arrays)], [*itertools.chain(*self._specs)]
        return run_per_device(on_device, flat, specs, out_specs, self._mesh, axis_names=self._manual)

    # --- shardings ---

    def _spec(self, names: Names | None, x: Any, mapping: Mapping[str, Entry], raw: bool) -> PartitionSpec:
        if names is not None:
            return PartitionSpec(*entries_by_name(names, mapping))
        # As in `axonym.scan`, raw arrays are sliced along their first axis, except arguments of `then`.
        return PartitionSpec(*([entry_of(self._stages) if raw else None] if x.ndim else []), *[None] * (x.ndim - 1))

    def _place(self) -> None:
        """Decide which mesh axes are manual, and how arrays are sharded over these."""
        mapping, stages = active_mapping(), entry_of(self._stages)
        stored = {**mapping, **active_parameter_mapping(), self._Layers.name: stages}
        examples = {n: mapping.get(n) for n in (*self._kept.names, self._batch)}
        mappings = stored, examples, {self._Layers.name: stages, **examples}, {**stored, **examples}
        specs = [
            [self._spec(names, x, mapping, raw=i < 3) for names, x in zip(tree.names, xs, strict=True)]
            for i, (tree, xs, mapping) in enumerate(zip(self._trees, self._types, mappings, strict=True))
        ]
        work = {
            *self._stages,
            *(a for group in specs[1:3] for spec in group for a in axes_in(spec)),
            *(a for n in self._kept.names for a in mapped_axes(n)),
        }
        self._manual = self._manual_axes(work)
        # XLA for CPUs aborts on such a sum of bfloat16 over devices if some mesh axes are left to the partitioner.
        self._sums_wide = active_platform() == "cpu" and self._manual != {*self._mesh.axis_names}
        # Weights stay sharded over mesh axes that also shard the batch. Over others they are gathered here.
        self._specs = [[restricted(spec, self._manual & work) for spec in own] for own in specs]
        for tree, xs, own in zip(self._trees, self._types, self._specs, strict=True):
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

    def _sharded_like(self, result: jax.Array, x: Any, spec: PartitionSpec) -> jax.Array:
        """Shard a result along Explicit mesh axes as the carry was, whose type is `x`, also where stages had all."""
        others = restricted(x.sharding.spec, {*self._mesh.axis_names} - {*axes_in(spec)})
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

    def _check(self) -> None:
        what, M = self._what, self._schedule.microbatches
        layers, divisor = self._Layers.size, self._count * self._rounds
        if layers % divisor:
            rounds = f" in {self._rounds} rounds" if self._rounds > 1 else ""
            raise ValueError(
                f"{what}: the {layers} layers of axis {self._Layers.name!r} cannot be divided among the "
                f"{self._count} stages of {errors.describe_shape({a: self._mesh.shape[a] for a in self._stages})}"
                f"{rounds}. Make them by `Stacked.init(..., divisible_by={divisor})`, which adds layers that are "
                "skipped."
            )
        check_stages(self._schedule, self._count)
        for names, x, spec in zip(self._trees[1].names, self._types[1], self._specs[1], strict=True):
            if names is None or self._batch not in names:
                raise ValueError(
                    f"{what}: the schedule cuts axis {self._batch!r} into microbatches, which every array of the carry "
                    f"must have; got {errors.describe_axes(names or (), x.shape)}. Give it the axis, or pass it as a "
                    "further argument if the layers do not change it."
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
                    f"{x.dtype}{errors.describe_axes(names, x.shape)}. Use GPipe for it."
                )
            if {*self._stages} & {*axes_in(entries_by_name(names))}:
                raise ValueError(
                    f"{what}: the carry {errors.describe_axes(names, x.shape)} is sharded over a mesh axis of the "
                    f"stages, {errors.describe_axes(self._stages)}; every stage works on all of a microbatch. Map "
                    "its axes to other mesh axes."
                )

    def _prepared(self, stacked: Arrays, carry: Arrays, rest: Arrays) -> list[Arrays]:
        """Cut the carry into microbatches, and make all arrays device-varying."""
        batches = [self._cut(names, x) for names, x in zip(self._trees[1].names, carry, strict=True)]
        # Made device-varying before the loop, so that gradients are summed over devices once, after it.
        self._over = {*self._stages}.union(*map(varying_axes, (*carry, *rest)))
        batches = self._varying(batches) if self._sums_wide else [self._made_varying(x) for x in batches]
        return [self._varying(stacked), batches, self._varying(rest)]

    def _compute(self, stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array) -> Arrays:
        """Apply the layers of this stage in a round."""
        if self._schedule.gather == "inside":
            # Gather in each tick, even if a compiler would move the gather out of the loop.
            stacked, here = jax.lax.optimization_barrier((stacked, here))
            stacked = self._gathered(0, stacked)
        return self._apply(stacked, here, rest, microbatch)

    def _apply(self, stacked: Arrays, here: Arrays, rest: Arrays, microbatch: jax.Array) -> Arrays:
        groups = [stacked, here, self._microbatch(2, rest, microbatch)]
        if not self._kept.names:
            with activate_here(kept=self._kept):
                return self._folded(groups)
        try:
            shards, runner = self._on_shards(self._folded, (0, 1, 2), groups, self._kept._replace(complete=True))
            wanted = [self._shard(names, x, self._kept) for names, x in zip(self._trees[1].names, here, strict=True)]
            found = [runner.moved(None, x, y.over).here for x, y in zip(shards, wanted, strict=True)]
        except NeedsCompleteAxes as error:
            raise self._refusal(error) from None
        for i, (x, y) in enumerate(zip(found, here, strict=True)):
            mixed = varying_axes(x) - varying_axes(y)
            if alone := tuple(a for a in mixed if self._mesh.shape[a] == 1):
                found[i] = jax.lax.psum(x, alone)
            if mixed := mixed.difference(alone):
                shown = errors.quoted(sorted(mixed))
                raise self._refusal(NeedsCompleteAxes(f"its results differ between devices along {shown}."))
        return [vary_like(x, y) for x, y in zip(found, here, strict=True)]

    def _on_shards(
        self,
        fn: Callable[[Sequence[Arrays]], Arrays],
        numbers: Sequence[int],
        groups: Sequence[Arrays],
        kept: KeptShards,
        microbatch: jax.Array | int = 0,
    ) -> tuple[list[Shard], OnShards]:
        """Run a function of groups of arrays, which is traced for complete axes, on what is here of them."""
        sizes = {**self._mesh.shape, MICROBATCHES: self._schedule.microbatches}
        places = {MICROBATCHES: microbatch} if kept.batch else {}
        context = functools.partial(activate_here, kept=kept)
        # Of several axes over the same mesh axes, messages name one that the schedule names.
        names = [*map(name_of, self._schedule.keep_sharded), *sorted(kept.names), kept.batch]
        written = {kept.over(n): n for n in reversed(names) if kept.over(n)}
        runner = OnShards(sizes, written, context, sums=bool(kept.batch), places=places)
        shards = [
            [self._shard(names, x, kept) for names, x in zip(self._trees[i].names, xs, strict=True)]
            for i, xs in zip(numbers, groups, strict=True)
        ]
        with context():
            program = jax.make_jaxpr(fn)([[*map(runner.complete, xs)] for xs in shards])
            return runner.run(program.jaxpr, program.consts, [*itertools.chain(*shards)]), runner

    def _shard(self, names: Names | None, x: jax.Array, kept: KeptShards) -> Shard:
        """Return an array as a shard over the axes that are kept."""
        over = tuple([kept.over(n) for n in names or ()]) if names is not None else ((),) * x.ndim
        of_batch = {a for n in kept.names for a in mapped_axes(n)}.intersection(self._mesh_axes_of_batch)
        has_own = not kept.batch and self._batch in (names or ())
        return Shard(x, over, frozenset(of_batch if has_own else ()))

    def _refusal(self, error: NeedsCompleteAxes) -> ValueError:
        kept = errors.quoted([error.axis] if error.axis in self._kept.names else sorted(self._kept.names))
        return ValueError(
            f"{self._what}: the schedule keeps {kept} sharded, and its layers need all of it: {error} Without {kept} "
            "in `keep_sharded`, each device gets all of it."
        )

    def _folded(self, groups: Sequence[Arrays]) -> Arrays:
        layers, carry = self._trees[0].unflatten(groups[0]), self._trees[1].unflatten(groups[1])
        args, kwargs = self._trees[2].unflatten(groups[2])
        Layers = self._Layers.resize(self._Layers.size // (self._count * self._rounds))
        result = self._fold(layers, Layers, carry, *args, **kwargs)
        return [x.astype(y.dtype) for x, y in zip(flatten_arrays(result)[0], groups[1], strict=True)]

    # --- timing ---

    def _work(self, index: Any, backward: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return whether a stage has an `index`-th task, and the microbatch and round of it or the nearest task."""
        count = self._schedule.microbatches * self._rounds
        near = jnp.clip(index, 0, count - 1)
        return (index >= 0) & (index < count), *work_of(self._schedule, self._count, near, backward)

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
        """Return the slices of arrays for a microbatch; keys for it, if all examples of a layer have the same key."""

        def own(names: Names | None, x: jax.Array, is_key: bool) -> jax.Array:
            if names and self._batch in names:
                return self._cut(names, x)[microbatch]
            if not is_key:
                return x
            shard = jax.lax.axis_index(self._mesh_axes_of_batch) if self._mesh_axes_of_batch else 0
            # By the number of the microbatch among all of the batch.
            return folded_in(x, jnp.asarray(shard * self._schedule.microbatches + microbatch))

        # Not of `then`, which is traced for all of the batch.
        return [*map(own, self._trees[group].names, xs, self._keys if group == 2 else [False] * len(xs))]

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

    # --- axes that stay sharded ---

    def _keep(self) -> KeptShards:
        """Return which axes stay sharded in the layers, and why others do not."""
        sharded = self._names_over([a for a in self._mesh.axis_names if a not in self._stages])
        written = [*map(name_of, self._schedule.keep_sharded)]
        known = {n for tree in self._trees for names in tree.names for n in names or ()} | {*active_mapping()}
        for name in written:
            if name not in known:
                hint = errors.suggestion(name, known)
                raise ValueError(f"{self._what}: the schedule keeps {name!r} sharded, and there is no such axis.{hint}")
        kept = self._names_over({a for n in sharded.intersection(written) for a in mapped_axes(n)})
        others = sorted(sharded - kept)
        return KeptShards(kept, gathered=tuple((n, f"its schedule lacks `keep_sharded=[{n!r}]`.") for n in others))

    def _names_over(self, axes: Collection[str]) -> frozenset[str]:
        """Return the axes that the mapping shards over some mesh axes only, except layers and the batch."""
        found = {n for n in active_mapping() if 0 < len(own := mapped_axes(n)) == len({*own} & {*axes})}
        return frozenset(found - {self._Layers.name, self._batch})

    # --- the loss ---

    @property
    def _loss_on_all(self) -> bool:
        """Return whether all stages compute the loss together, from shards of its arguments."""
        return any({*mapped_axes(n)} <= {*self._stages} for n in self._kept_in_loss.names)

    def _keep_in_loss(self, batches: Arrays, head: Arrays) -> KeptShards:
        """Return which axes stay sharded in `then`: some over the stages, and some of the carry, if it allows that."""
        of_head, of_carry = ({n for names in self._trees[i].names for n in names or ()} for i in (3, 1))
        kept = {*self._stages} if self._names_over(self._stages) & of_head else set[str]()
        kept.update(a for n in self._kept.names & of_carry for a in mapped_axes(n))
        gathered = dict(self._kept.gathered)
        while True:
            self._kept_in_loss = KeptShards(self._names_over(kept), True, tuple(sorted(gathered.items())), self._batch)
            try:
                for names, spec in zip(self._trees[3].names, self._specs[3], strict=True):
                    for n, entry in zip(names or (), spec, strict=True):
                        over = mapped_axes(n) if n in self._kept_in_loss.names else ()
                        if mesh_axes(entry)[: len(over)] != over:
                            raise NeedsCompleteAxes(f"an argument of `then` stores {n!r} in other shards.", n, over)
                jax.eval_shape(lambda: self._value(at(batches, 0), self._gathered(3, head), 0))
            except NeedsCompleteAxes as error:
                if not kept.intersection(error.over):
                    raise ValueError(
                        f"{self._what}: `then` gets a microbatch at a time, and its results are added up, so it must "
                        f"be a sum or a mean over {self._batch!r}: {error}"
                    ) from None
                names, kept = self._kept_in_loss.names, kept.difference(error.over)
                gathered |= dict.fromkeys(names - self._names_over(kept), str(error))
            else:
                return self._kept_in_loss

    def _value(self, results: Arrays, head: Arrays, microbatch: jax.Array | int) -> jax.Array:
        """Return what this device adds to the loss for a microbatch; complete on each stage if all compute it."""
        left = self._kept.names - self._kept_in_loss.names
        complete = [
            gather_axes(x, [mapped_axes(n) if n in left else () for n in own or ()])
            for own, x in zip(self._trees[1].names, results, strict=True)
        ]
        groups = [complete, self._microbatch(3, head, microbatch)]
        (found,), runner = self._on_shards(self._then_of, (1, 3), groups, self._kept_in_loss, microbatch)
        over = {*self._over, *(a for n in self._kept_in_loss.names for a in mapped_axes(n))} - {*self._stages}
        together = self._stages if self._loss_on_all else ()
        value = runner.moved(None, found, (), frozenset((MICROBATCHES, *over, *together))).here
        return jax.lax.psum(varying_over(value, {*together} - varying_axes(value)), together) if together else value

    def _then_of(self, groups: Sequence[Arrays]) -> Arrays:
        found: Any = self._then and self._then(
            self._trees[1].unflatten(groups[0]), *self._trees[3].unflatten(groups[1])
        )
        found = found.array if is_named_array(found) else jnp.asarray(found)
        if found.shape:
            raise ValueError(f"{self._what}: `then` must return one number, got an array of shape {found.shape}.")
        return [found.astype(jnp.promote_types(found.dtype, jnp.float32))]

    def _from_last(self, xs: Arrays) -> Arrays:
        """Send the arrays of the last stage to all stages."""
        here = jax.lax.axis_index(self._stages) == self._count - 1
        found = [self._sum(jnp.where(here, x, 0), self._stages) for x in xs]
        return [varying_over(x, self._stages) for x in found]
