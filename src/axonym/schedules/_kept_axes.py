"""Decide which axes stay sharded in the layers of a pipeline, and in its loss; others are all-gathered.

In the layers, an axis stays sharded if the schedule says so, and two traces do not show that all of it is needed: see
`_sharded_code`. That is decided for each mesh axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import name_of
from ..core import errors
from ..core.jax_versions import varying_axes
from ..distribution.active_settings import activate_here, active_mapping
from ..distribution.kept_shards import KeptShards
from ..distribution.mesh_axes import Axes, mapped_axes, mesh_axes, shard_count
from ..distribution.on_shards import NeedsCompleteAxes
from ..distribution.per_device import gather_axes, varying_over
from ..named_array import is_named_array
from ._sharded_code import check_computed_from_shards
from ._stage_arrays import Arrays, at
from ._stages import Stages

_FIRST: Any = np.int32(0)
"""The number of a microbatch or a round in a program that is only compared; no traced one, which would differ."""


class KeptAxes(Stages):
    """Stages that keep axes sharded."""

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

    def _choose(
        self, candidates: Iterable[Axes], check: Callable[[frozenset[str], frozenset[str]], None]
    ) -> KeptShards:
        """Return the axes that stay sharded: those over as many of the mesh axes as pass a check."""
        kept, reasons = list[str](), dict[str, str]()
        for axes in candidates:
            names = self._names_over([*kept, *axes])
            try:
                check(names, names - self._names_over(kept))
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

    def _check_programs(self, whole: Any, shards: Any, names: frozenset[str], sums: bool) -> bool:
        counts = {n: shard_count(self._mesh, mapped_axes(n)) for n in names}
        return check_computed_from_shards(whole, shards, counts, sums)

    def _complete(self, group: int, xs: Arrays, names: Collection[str]) -> Arrays:
        """All-gather shards of some axes."""
        return [
            gather_axes(x, [mapped_axes(n) if n in names else () for n in own or ()])
            for own, x in zip(self._trees[group].names, xs, strict=True)
        ]

    # --- the loss ---

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
        """Return the loss of a microbatch, or of its shard here; the sum is over all devices and microbatches."""
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
        over_others = dict.fromkeys(a for n in sorted(self._kept.names & of_carry) for a in mapped_axes(n))
        check = functools.partial(self._check_loss, at(batches, 0), head)
        return self._choose([*over_stages, *((a,) for a in over_others)], check)

    def _check_loss(self, results: Arrays, head: Arrays, names: frozenset[str], added: frozenset[str]) -> None:
        """Check that `then` can be computed from shards of some axes."""
        for own, spec in zip(self._trees[3].names, self._specs[3], strict=True):
            for n, entry in zip(own or (), spec, strict=True):
                if n in names and mesh_axes(entry)[: len(mapped_axes(n))] != mapped_axes(n):
                    raise NeedsCompleteAxes(f"an argument of `then` stores {n!r} in other shards.")

        def trace(complete: bool) -> Any:
            self._kept_in_loss = KeptShards(names - added if complete else names)
            args = self._complete(1, summed, self._kept.names - self._kept_in_loss.names), self._gathered(3, head)
            self._kept_in_loss = KeptShards(names, added if complete else frozenset())
            return jax.make_jaxpr(functools.partial(self._then_of, microbatch=0))(*args)

        def check() -> None:
            nonlocal summed
            summed = [jax.lax.psum(x, self._stages) for x in results]
            programs = trace(True), trace(False)
            over_others = {a for n in added for a in mapped_axes(n)} - {*self._stages}
            if self._check_programs(*programs, added, sums=bool(over_others)) != bool(over_others):
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
