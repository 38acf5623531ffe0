"""Exchange rows between devices that hold different experts, in rounds, inside `jax.shard_map`.

How many rows go from one device to another is known only at run time, and an all-to-all moves arrays of fixed sizes. So
each round moves at most so many rows from each device to each other one, and there are as many rounds as the longest of
these queues needs, at run time. Nothing is dropped, and nothing is padded for the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._jax_versions import varying_axes
from .._mesh_axes import Axes
from .._per_device import vary_like

OfExperts = Callable[[jax.Array, jax.Array], jax.Array]
"""From rows sorted by local expert, and the number of rows of each, to the results."""


class Exchange(NamedTuple):
    """Where experts are, and how many rows move in a round."""

    mesh_axes: Axes
    """The mesh axes that the experts are sharded over."""
    devices: int
    """The number of devices along these."""
    experts: int
    """The number of experts on each device."""
    round_size: int | None
    """The largest number of rows that a device sends to another one in a round."""

    def rows_of_round(self, rows: int) -> int:
        """Return how many of its rows a device sends to another one in a round: by default 1.5 times an even share."""
        size = -(-3 * rows // (2 * self.devices)) if self.round_size is None else self.round_size
        return max(1, rows if self.devices == 1 else min(size, rows))

    def run(self, of_experts: OfExperts, x: jax.Array, source: jax.Array, expert: jax.Array) -> jax.Array:
        """Return the result of each row, from its expert; zeros for a row without an expert.

        Arguments:
            of_experts: what the experts do.
            x: the shard of the operand, of which rows are taken.
            source: the position in `x` of each row.
            expert: the number of the expert of each row, among the experts of all devices.
        """
        (rows,) = expert.shape
        size = self.rows_of_round(rows)
        known = (expert >= 0) & (expert < self.experts * self.devices)
        device = jnp.where(known, expert // self.experts, self.devices)
        order = vary_like(jnp.argsort(device), device)
        counts = jnp.bincount(device, length=self.devices + 1)[: self.devices]
        starts = jnp.cumsum(counts) - counts

        def one_round(number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            places = number * size + jnp.arange(size)[None]
            sent = places < counts[:, None]
            row = order[jnp.clip(starts[:, None] + places, 0, max(rows - 1, 0))]
            taken = jnp.expand_dims(sent, range(2, x.ndim + 1))
            own = self._to_experts(jnp.where(taken, x[source[row]], 0))
            group = self._to_experts(jnp.where(sent, expert[row] % self.experts, self.experts))
            return row, jnp.where(taken, self._back(self._grouped(of_experts, own, group)), 0)

        def added(y: jax.Array, row: jax.Array, found: jax.Array) -> jax.Array:
            return y.at[row].add(found)  # what was not sent adds zeros

        row, found = one_round(0)
        y = added(vary_like(jnp.zeros((rows, *found.shape[2:]), found.dtype), found), row, found)
        rounds = -(-rows // size)
        if rounds <= 1:
            return y
        longest = jnp.max(counts)
        longest = jax.lax.pmax(longest, tuple(varying_axes(longest)))

        # Only the operands are kept for the derivative, and once for all rounds.
        @jax.checkpoint
        def further(y: jax.Array, number: jax.Array) -> jax.Array:
            return jax.lax.cond(number * size < longest, lambda y: added(y, *one_round(number)), lambda y: y, y)

        return jax.lax.scan(lambda y, number: (further(y, number), None), y, jnp.arange(1, rounds))[0]

    def _grouped(self, of_experts: OfExperts, x: jax.Array, group: jax.Array) -> jax.Array:
        """Run the experts of this device on the rows that came from all devices."""
        x, group, shape = x.reshape(-1, *x.shape[2:]), group.reshape(-1), group.shape
        order = vary_like(jnp.argsort(group), group)
        sizes = jnp.bincount(group, length=self.experts + 1)[: self.experts].astype(jnp.int32)
        y = of_experts(x[order], sizes)
        inside = jnp.expand_dims(jnp.arange(y.shape[0]) < jnp.sum(sizes), range(1, y.ndim))
        y = jnp.zeros_like(y).at[order].set(jnp.where(inside, y, 0), unique_indices=True)
        return y.reshape(*shape, *y.shape[1:])

    def _to_experts(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, self.mesh_axes, 0, 0, tiled=True) if self.devices > 1 else x

    _back = _to_experts
