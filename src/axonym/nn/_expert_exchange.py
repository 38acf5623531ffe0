"""Exchange rows between devices that hold different experts, in rounds, inside `jax.shard_map`.

The number of rows that go from one device to another is known only at run time, but an all-to-all moves arrays of fixed
sizes. So each round moves at most a fixed number of rows between each pair of devices, and there are as many rounds at
run time as the longest of these queues needs. Nothing is dropped, and nothing is padded for the worst case.

A round is filled up with copies of rows, which go to some expert, and whose results are not used. Experts see real
values, because the derivative at zero may be infinite and would spoil gradients.

A ragged all-to-all moves only the rows, not the copies. XLA has it for GPUs and TPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.jax_versions import varying_axes
from ..distribution.mesh_axes import Axes
from ..distribution.per_device import vary_like
from ..ops._operands import at_least_int32

OfExperts = Callable[[jax.Array, jax.Array], jax.Array]
"""Computes the results from rows sorted by local expert, and the number of rows of each."""


class ExpertExchange(NamedTuple):
    """Exchanges rows between the devices along some mesh axes, in rounds."""

    mesh_axes: Axes
    """The mesh axes that the experts are sharded over."""
    devices: int
    """The number of devices along these mesh axes."""
    local_experts: int
    """The number of experts on each device."""
    round_size: int | None
    """The largest number of rows that a device sends to another one in a round; None for 1.5 times an even share."""
    ragged: bool
    """Whether only rows move, by ragged all-to-alls, or also the copies that fill up a round."""

    def run(self, of_experts: OfExperts, x: jax.Array, source: jax.Array, expert: jax.Array) -> jax.Array:
        """Return the result of each row, from its expert; zeros for a row without an expert.

        Arguments:
            of_experts: the function that the experts compute.
            x: the shard of the operand from which rows are taken.
            source: the position in `x` of each row.
            expert: the number of the expert of each row, among the experts of all devices.
        """
        (rows,) = expert.shape
        expert = at_least_int32(expert)
        known = (expert >= 0) & (expert < self.local_experts * self.devices)
        expert = jnp.where(known, expert, 0).astype(jnp.int32)
        if not rows:
            sizes = jnp.zeros(self.local_experts, jnp.int32).at[0].set(1)
            return of_experts(jnp.zeros((1, *x.shape[1:]), x.dtype), sizes)[:0]
        if self.devices == 1:
            y = self._grouped(of_experts, x[source], expert)
            return jnp.where(_beside(known, y), y, 0)

        device = jnp.where(known, expert // self.local_experts, self.devices)
        order = vary_like(jnp.argsort(device), device)
        counts = jnp.bincount(device, length=self.devices + 1)[: self.devices]
        starts = jnp.cumsum(counts) - counts
        even = -(-3 * rows // (2 * self.devices))
        size = min(even if self.round_size is None else self.round_size, rows)

        def one_round(y: jax.Array | None, number: jax.Array | int) -> jax.Array:
            places = number * size + jnp.arange(size)[None]
            sent = places < counts[:, None]
            row = order[jnp.clip(starts[:, None] + places, 0, rows - 1)]
            sizes = jnp.sum(sent, 1, dtype=jnp.int32)
            received = self._exchanged(sizes) if self.ragged else sizes
            own = self._moved(x[source[row]], sizes, received).reshape(-1, *x.shape[1:])
            group = self._moved(expert[row] % self.local_experts, sizes, received).reshape(-1)
            found = self._grouped(of_experts, own, group)
            found = self._moved(found.reshape(*row.shape, *found.shape[1:]), received, sizes)
            if y is None:
                y = vary_like(jnp.zeros((rows, *found.shape[2:]), found.dtype), found)
            return y.at[row].add(jnp.where(_beside(sent, found), found, 0))  # zeros for copies

        y = one_round(None, 0)
        rounds = -(-rows // size)
        if rounds == 1:
            return y
        # The same on all devices that exchange rows, whether or not JAX tracks device-varying values.
        longest = jax.lax.pmax(jnp.max(counts), tuple(sorted({*self.mesh_axes, *varying_axes(counts)})))

        # Only the operands are kept for the derivative, once for all rounds.
        @jax.checkpoint
        def further(y: jax.Array, number: jax.Array) -> jax.Array:
            return jax.lax.cond(number * size < longest, lambda y: one_round(y, number), lambda y: y, y)

        return jax.lax.scan(lambda y, number: (further(y, number), None), y, jnp.arange(1, rounds))[0]

    def _grouped(self, of_experts: OfExperts, x: jax.Array, group: jax.Array) -> jax.Array:
        """Run the experts of this device on rows, each with its local expert."""
        order = vary_like(jnp.argsort(group), group)
        y = of_experts(x[order], jnp.bincount(group, length=self.local_experts).astype(jnp.int32))
        return jnp.zeros_like(y).at[order].set(y, unique_indices=True)

    def _moved(self, x: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        """Send each device the first `sent` rows of its part of the first axis."""
        if not self.ragged:
            return self._exchanged(x)
        flat = x.reshape(-1, *x.shape[2:])
        starts = vary_like(jnp.arange(self.devices, dtype=jnp.int32) * x.shape[1], sent)
        place = jnp.zeros_like(starts) + jax.lax.axis_index(self.mesh_axes) * x.shape[1]
        # Positions that receive nothing keep their own copies, which do not contribute to derivatives.
        y = jax.lax.ragged_all_to_all(
            flat, jax.lax.stop_gradient(flat), starts, sent, place, received, axis_name=self.mesh_axes
        )
        return y.reshape(x.shape)

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """Send each device its part along the first axis, and get one from each."""
        return jax.lax.all_to_all(x, self.mesh_axes, 0, 0, tiled=True)


def _beside(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Append axes of size one to a mask, for the other axes of the array."""
    return jnp.expand_dims(mask, range(mask.ndim, x.ndim))
