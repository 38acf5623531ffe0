"""Decide which axes stay sharded in the layers of a pipeline and in its loss, and compute the loss.

Both are traced for complete axes, and run on shards: see `axonym.distribution.on_shards`. The loss is traced for all of
the batch, and what a device has of a microbatch is a shard of it. So sums and means over examples are added up over
microbatches, and what needs more of the batch is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import name_of
from ..core import errors
from ..core.jax_versions import varying_axes
from ..distribution.active_settings import active_mapping
from ..distribution.kept_shards import KeptShards
from ..distribution.mesh_axes import mapped_axes, mesh_axes
from ..distribution.on_shards import MICROBATCHES, NeedsCompleteAxes
from ..distribution.per_device import gather_axes, varying_over
from ..named_array import is_named_array
from ._stage_arrays import Arrays, at
from ._stages import Stages


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
                self._check_stored()
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

    def _check_stored(self) -> None:
        """Check that the arguments of `then` are stored in the shards that are kept."""
        for names, spec in zip(self._trees[3].names, self._specs[3], strict=True):
            for n, entry in zip(names or (), spec, strict=True):
                over = mapped_axes(n) if n in self._kept_in_loss.names else ()
                if mesh_axes(entry)[: len(over)] != over:
                    raise NeedsCompleteAxes(f"an argument of `then` stores {n!r} in other shards.", n, over)

    def _value(self, results: Arrays, head: Arrays, microbatch: jax.Array | int) -> jax.Array:
        """Return what this device adds to the loss for a microbatch; complete on each stage if all compute it."""
        groups = [
            self._complete(results, self._kept.names - self._kept_in_loss.names),
            self._microbatch(3, head, microbatch),
        ]
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

    def _complete(self, results: Arrays, names: Collection[str]) -> Arrays:
        """All-gather results along some axes."""
        return [
            gather_axes(x, [mapped_axes(n) if n in names else () for n in own or ()])
            for own, x in zip(self._trees[1].names, results, strict=True)
        ]

    def _from_last(self, xs: Arrays) -> Arrays:
        """Send the arrays of the last stage to all stages."""
        here = jax.lax.axis_index(self._stages) == self._count - 1
        found = [self._sum(jnp.where(here, x, 0), self._stages) for x in xs]
        return [varying_over(x, self._stages) for x in found]
