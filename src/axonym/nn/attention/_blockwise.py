"""Compute attention on one device, block by block, without storing the scores of more than one block.

For each block of queries, blocks of keys are visited one after another, with a running maximum and a running sum. The
gradient recomputes the scores of each block from the queries, the keys and the log of the sum. Blocks that the mask
excludes are skipped, by a condition around arithmetic only: a collective inside it would be wrong, since devices skip
different blocks.

The keys of a sharded sequence arrive one shard after another. With `hops`, a shard is sent on to the next device while
scores with it are computed; in the gradient, the sums for keys and values travel with it, and then back.

Arrays have the axes (batch, heads, group, positions, features); keys and values have no group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.jax_versions import varying_axes
from ...distribution.mesh_axes import Axes
from ...distribution.per_device import permute, vary_like, varying_over

BLOCK = 512
"""The largest number of positions in a block."""
BATCH, HEADS, QUERIES, KEYS = 0, 1, 3, 2
"""Positions of axes in queries, or in keys."""


class Blockwise(NamedTuple):
    """The static part of a computation: the mask, and the sharding of queries and keys."""

    causal: bool
    window: int | None
    scale: float
    precision: Any
    axes: Axes = ()
    """The mesh axes that the positions are sharded over."""
    shards: int = 1
    """The number of shards of the positions."""
    sharded_queries: bool = False
    sharded_keys: bool = False
    zigzag: bool = False
    """Whether shards are in zig-zag order: see `to_zigzag`."""
    hops: int = 0
    """How often a shard of keys is sent on to the next device."""

    def query_runs(self, query: jax.Array) -> _Runs:
        """Return the runs of local queries."""
        length = query.shape[QUERIES]
        starts = self._starts(length, jax.lax.axis_index(self.axes)) if self.sharded_queries else jnp.zeros(1, int)
        return _Runs(length, starts)

    def key_runs(self, key: jax.Array, hop: Any) -> _Runs:
        """Return the runs of the keys on this device after some hops."""
        length = key.shape[KEYS]
        if not self.sharded_keys:
            return _Runs(length, jnp.zeros(1, int))
        return _Runs(length, self._starts(length, (jax.lax.axis_index(self.axes) - hop) % self.shards))

    def _starts(self, length: int, shard: jax.Array) -> jax.Array:
        """Return the first position of each run in a shard."""
        if not self.zigzag:
            return shard[None] * length
        last = 2 * self.shards - 1 - shard
        # The half with the even number comes first: `to_zigzag` sent it as the first half of a shard.
        halves = jnp.where(shard % 2 == 0, jnp.stack([shard, last]), jnp.stack([last, shard]))
        return halves * (length // 2)

    def product(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, y, precision=self.precision, preferred_element_type=_wide_dtype(x))

    def passed_on(self, xs: Any, hops: int = 1) -> Any:
        """Send arrays on by some hops."""
        pairs = [(i, (i + hops) % self.shards) for i in range(self.shards)]
        return jax.tree.map(lambda x: permute(x, self.axes, pairs), xs)


class ScoreTerms(NamedTuple):
    """Terms that scores depend on, besides queries and keys.

    Bias and mask have the axes (batch, heads, group, queries, keys), with all keys; each axis may have size one.
    Segments have the axes (batch, heads, positions), with all positions.
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    segments: jax.Array | None = None


# --- zig-zag order ---


def to_zigzag(x: jax.Array, axis: int, axes: Axes, count: int, inverse: bool = False) -> jax.Array:
    """Exchange halves of shards, so that under a causal mask all devices have the same work; or undo it.

    The first and the last half are on the first device, the second and the last but one on the second, and so on.
    """
    halves = []
    for i, half in enumerate(jnp.split(x, 2, axis)):
        pairs = [(d, min(2 * d + i, 2 * count - 1 - 2 * d - i)) for d in range(count)]
        halves.append(permute(half, axes, [(b, a) for a, b in pairs] if inverse else pairs))
    return jnp.concatenate(halves, axis)


# --- attention ---


def attend(plan: Blockwise, query: jax.Array, key: jax.Array, value: jax.Array, terms: ScoreTerms) -> Any:
    """Return the result, and the log of the sum of exponentials: zero and infinite for queries without keys."""
    # Gradients are summed once, outside, over the mesh axes over which an operand is replicated.
    over = set(plan.axes).union(*map(varying_axes, jax.tree.leaves((query, key, value, terms))))
    operands = jax.tree.map(lambda x: varying_over(x, sorted(over - varying_axes(x))), (query, key, value, terms))
    return _attend(plan, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Blockwise, query: jax.Array, key: jax.Array, value: jax.Array, terms: ScoreTerms) -> Any:
    shape = query.shape[:-1]
    wide = _wide_dtype(query)
    state = [jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, value.shape[-1]), wide)]
    state = [vary_like(x, query) for x in state]
    queries = plan.query_runs(query)

    def visit(state: Any, here: Any, hop: Any) -> Any:
        return _Visits(plan, terms, queries, plan.key_runs(here[0], hop)).add_keys(state, query, here)

    def step(carry: Any, hop: jax.Array) -> Any:
        state, here = carry
        coming = plan.passed_on(here)  # while scores are computed
        return (visit(state, here, hop), coming), None

    here = key, value
    if plan.hops:
        (state, here), _ = jax.lax.scan(step, (state, here), jnp.arange(plan.hops))
    top, total, sums = visit(state, here, plan.hops)
    none = total == 0
    log_total = jnp.where(none, jnp.inf, top + jnp.log(jnp.where(none, 1, total)))
    return (sums / jnp.where(none, 1, total)[..., None]).astype(query.dtype), log_total


def _forward(plan: Blockwise, *operands: Any) -> Any:
    found: Any = _attend(plan, *operands)
    return found, (*operands, *found)


def _backward(plan: Blockwise, saved: Any, cotangents: Any) -> Any:
    query, key, value, terms, result, log_total = saved
    given = cotangents[0].astype(query.dtype)
    # The gradient of softmax subtracts, for each query, the sum of its weights times their gradients: this sum is the
    # result times its gradient, so it needs no scores.
    delta = jnp.sum(given.astype(log_total.dtype) * result, -1) - cotangents[1]
    wide = _wide_dtype(query)
    bias = None if terms.bias is None else vary_like(jnp.zeros(terms.bias.shape, wide), query)
    sums: Any = (vary_like(jnp.zeros(query.shape, wide), query), bias)
    moving: Any = tuple(vary_like(jnp.zeros(x.shape, wide), query) for x in (key, value))
    queries = plan.query_runs(query)

    def visit(sums: Any, moving: Any, here: Any, hop: Any) -> Any:
        visits = _Visits(plan, terms, queries, plan.key_runs(here[0], hop))
        return visits.add_gradients(sums, moving, here, (query, given, log_total, delta))

    def step(carry: Any, hop: jax.Array) -> Any:
        sums, moving, here = carry
        coming = plan.passed_on(here)
        sums, moving = visit(sums, moving, here, hop)
        return (sums, plan.passed_on(moving), coming), None

    here = key, value
    if plan.hops:
        (sums, moving, here), _ = jax.lax.scan(step, (sums, moving, here), jnp.arange(plan.hops))
    sums, moving = visit(sums, moving, here, plan.hops)
    if plan.hops:
        # The gradients traveled with their keys: back to the device that holds these.
        moving = plan.passed_on(moving, -plan.hops)
    of_bias = None if terms.bias is None else sums[1].astype(terms.bias.dtype)
    of_query, of_key, of_value = (
        x.astype(y.dtype) for x, y in zip((sums[0], *moving), (query, key, value), strict=True)
    )
    return of_query, of_key, of_value, ScoreTerms(of_bias)


_attend.defvjp(_forward, _backward)


# --- blocks ---


class _Visits(NamedTuple):
    """Visits to blocks of local queries `i`, and of the keys `j` that are on this device."""

    plan: Blockwise
    terms: ScoreTerms
    queries: _Runs
    keys: _Runs

    def add_keys(self, state: Any, query: jax.Array, here: tuple[jax.Array, jax.Array]) -> Any:
        """Add keys to the running maximum, the running sum and the weighted sum of values, for all queries."""
        queries, keys, plan = self.queries, self.keys, self.plan

        def of_queries(state: Any, i: jax.Array) -> Any:
            q = queries.block(query, i, QUERIES)

            def of_keys(own: Any, j: jax.Array) -> Any:
                def visited(own: Any) -> Any:
                    top, total, sums = own
                    k, v = (keys.block(x, j, KEYS) for x in here)
                    scores = self.scores(q, k, i, j)
                    higher = jnp.maximum(top, jnp.max(scores, -1))
                    # While all keys are masked the maximum is minus infinity, and its difference to itself is NaN.
                    base = jnp.where(jnp.isneginf(higher), 0, higher)
                    weights, shrunk = jnp.exp(scores - base[..., None]), jnp.exp(top - base)
                    added = plan.product("bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v)
                    return [higher, total * shrunk + jnp.sum(weights, -1), sums * shrunk[..., None] + added]

                return self.unless_excluded(i, j, visited, own), None

            own, _ = jax.lax.scan(of_keys, [queries.block(x, i, QUERIES) for x in state], jnp.arange(keys.blocks))
            return [queries.updated(x, i, QUERIES, y) for x, y in zip(state, own, strict=True)], None

        return jax.lax.scan(of_queries, state, jnp.arange(queries.blocks))[0]

    def add_gradients(self, sums: Any, moving: Any, here: tuple[jax.Array, jax.Array], of_queries: Any) -> Any:
        """Add to the gradients of all queries, of the bias, and of some keys and their values."""
        queries, keys, plan = self.queries, self.keys, self.plan

        def of_keys(carry: Any, j: jax.Array) -> Any:
            sums, moving = carry
            k, v = (keys.block(x, j, KEYS) for x in here)

            def of_query(carry: Any, i: jax.Array) -> Any:
                (of_q, of_bias), moved = carry
                q, given, log_total, delta = (queries.block(x, i, QUERIES) for x in of_queries)

                def visited(own: Any) -> Any:
                    own_q, own_bias, own_k, own_v = own
                    # Computed again from the logarithm of their sum, which was kept in place of the weights.
                    weights = jnp.exp(self.scores(q, k, i, j) - log_total[..., None])
                    own_v += plan.product("bhgqk,bhgqd->bhkd", weights.astype(v.dtype), given)
                    of_scores = weights * (plan.product("bhgqd,bhkd->bhgqk", given, v) - delta[..., None])
                    if own_bias is not None:
                        # Where the bias was broadcast, its gradient is the sum.
                        wide = [a for a, size in enumerate(own_bias.shape) if size == 1]
                        own_bias += jnp.sum(of_scores, wide, keepdims=True)
                    of_scores = (of_scores * plan.scale).astype(q.dtype)
                    own_q += plan.product("bhgqk,bhkd->bhgqd", of_scores, k)
                    own_k += plan.product("bhgqk,bhgqd->bhkd", of_scores, q)
                    return own_q, own_bias, own_k, own_v

                own_bias = None if of_bias is None else self.block(of_bias, i, j)
                own = (queries.block(of_q, i, QUERIES), own_bias, *moved)
                own_q, own_bias, *moved = self.unless_excluded(i, j, visited, own)
                if of_bias is not None:
                    of_bias = jax.lax.dynamic_update_slice(of_bias, own_bias, self.starts(of_bias, i, j))
                return ((queries.updated(of_q, i, QUERIES, own_q), of_bias), tuple(moved)), None

            own = tuple(keys.block(x, j, KEYS) for x in moving)
            (sums, own), _ = jax.lax.scan(of_query, (sums, own), jnp.arange(queries.blocks))
            return (sums, tuple(keys.updated(x, j, KEYS, y) for x, y in zip(moving, own, strict=True))), None

        return jax.lax.scan(of_keys, (sums, moving), jnp.arange(keys.blocks))[0]

    def unless_excluded(self, i: jax.Array, j: jax.Array, visited: Callable[[Any], Any], own: Any) -> Any:
        """Visit a block, unless the mask excludes all of it."""
        queries, keys = self.queries, self.keys
        if not self.plan.causal:
            return visited(own)
        first, last = queries.start(i), queries.start(i) + queries.size - 1
        some = keys.start(j) <= last
        if self.plan.window is not None:
            some &= keys.start(j) + keys.size - 1 > first - self.plan.window
        return jax.lax.cond(some, visited, lambda own: own, own)

    def scores(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Compute the scores of a block, with minus infinity where the mask excludes a key."""
        plan, terms = self.plan, self.terms
        scores = plan.product("bhgqd,bhkd->bhgqk", q, k) * plan.scale
        if terms.bias is not None:
            scores = scores + self.block(terms.bias, i, j).astype(scores.dtype)
        q_pos, k_pos = self.queries.positions(i)[:, None], self.keys.positions(j)[None]
        allowed = []
        if plan.causal:
            allowed.append((k_pos <= q_pos)[None, None, None])
        if plan.window is not None:
            allowed.append((k_pos > q_pos - plan.window)[None, None, None])
        if terms.mask is not None:
            allowed.append(self.block(terms.mask, i, j))
        if terms.segments is not None:
            of_q, of_k = (
                jax.lax.dynamic_slice_in_dim(terms.segments, runs.start(b), runs.size, KEYS)
                for runs, b in ((self.queries, i), (self.keys, j))
            )
            allowed.append(of_q[:, :, None, :, None] == of_k[:, :, None, None])
        for each in allowed:
            scores = jnp.where(each, scores, -jnp.inf)
        return scores

    def block(self, x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Return a block of a mask or bias: local queries, and keys by their position; axes of size one stay."""
        if x.shape[-2] > 1:
            x = self.queries.block(x, i, 3)
        return jax.lax.dynamic_slice_in_dim(x, self.keys.start(j), self.keys.size, 4) if x.shape[-1] > 1 else x

    def starts(self, x: jax.Array, i: jax.Array, j: jax.Array) -> list[jax.Array]:
        """Return where a block of a bias begins."""
        zero = jnp.zeros((), int)
        of_queries = i * self.queries.size if x.shape[-2] > 1 else zero
        return [zero] * 3 + [of_queries, self.keys.start(j) if x.shape[-1] > 1 else zero]


class _Runs:
    """The local positions: runs of equal length, each cut into blocks of equal length."""

    def __init__(self, length: int, starts: jax.Array):
        self.starts = starts
        run = length // starts.shape[0]
        # The largest divisor that is small enough, unless it is far too small.
        size = next(s for s in range(min(BLOCK, run), 0, -1) if run % s == 0)
        self.size = size if size >= BLOCK // 8 else run
        self.per_run = run // self.size
        self.blocks = length // self.size

    def start(self, block: jax.Array) -> jax.Array:
        """Return the position of the first element of a block."""
        return self.starts[block // self.per_run] + block % self.per_run * self.size

    def positions(self, block: jax.Array) -> jax.Array:
        return self.start(block) + jnp.arange(self.size)

    def block(self, x: jax.Array, block: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, block * self.size, self.size, axis)

    def updated(self, x: jax.Array, block: jax.Array, axis: int, own: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, own, block * self.size, axis)


def _wide_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
