"""Send rows to the experts of a mixture and back, and compute the losses of its router."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ..axis import Axis, AxisSelector, Names
from ..core import errors
from ..core.jax_versions import active_platform, varying_axes
from ..core.tree_spec import TreeSpec, flatten_arrays
from ..distribution.active_settings import activate_here, pads_uneven
from ..distribution.kept_shards import KeptShards, exchange as exchange_shards, is_kept, kept_over, refuse_gathered
from ..distribution.mesh_axes import (
    AnyMesh,
    Axes,
    entries_of,
    entry_of,
    explicit_mesh,
    fits,
    has_explicit,
    has_manual,
    mapped_on,
    mesh_around,
    mesh_axes,
    padded,
    reshard,
    shard_count,
    sharded_over,
    spec_of,
    storage_axes,
)
from ..distribution.on_shards import OnShards
from ..distribution.operation_scope import operation_scope
from ..distribution.operations_on_shards import GROUPS, ROWS, SIZES, NeedsCompleteAxes, Shard
from ..distribution.per_device import gather_axes, run_per_device, vary_like
from ..named_array import NamedArray, wrap
from ..ops._operands import at_least_int32, one_axis, require_named
from ..ops.contraction import dot
from ..ops.creation import arange
from ..ops.elementwise import square
from ..ops.reductions import logsumexp, mean
from ..ops.selection import searchsorted, where
from ..ops.sorting import argsort
from .embedding import one_hot

__all__ = ["dispatch", "limit_capacity", "load_balancing_loss", "router_z_loss"]

Arrays = Sequence[jax.Array]


def dispatch(
    fn: Callable[[Any, NamedArray, NamedArray], NamedArray],
    params: Any,
    x: NamedArray,
    expert: NamedArray,
    experts: Axis,
    *,
    rows: str = "rows",
    round_size: int | None = None,
    exchange: Literal["all_to_all", "ragged"] | None = None,
) -> NamedArray:
    """Send each row to its expert, and return the results in the original order of the rows.

    Experts that are sharded over mesh axes get their rows by an all-to-all, and send the results back by another. If
    rows are sharded over these mesh axes too, they stay so: no device has all rows, or all experts. Messages have a
    fixed size, so rows are exchanged in as many rounds as needed, and no row is dropped. On GPUs and TPUs, a ragged
    all-to-all moves only the existing rows of a round.

    Arguments:
        fn: the function of the experts: `fn(params, x, sizes)` takes rows that are sorted by expert, and the number of
            rows of each expert, as `MoELinear` does. Where rows or experts are sharded, it is traced for all of them,
            and run on those of a device, so it must compute each row by itself, and use `sizes` in products by groups
            only; anything else is an error that names its line. There can be copies of rows, whose results are not
            used.
        params: a tree of arrays that `fn` needs. Arrays with the axis of the experts are sharded as the experts are. A
            random key is the same in all rounds, and on all devices. Arrays that are not arguments cannot be used in
            `fn` where experts or rows are sharded.
        expert: the number of the expert of each row. It has the axes of the rows; if `x` lacks one of them, such as an
            axis of several choices, each row is sent to several experts. Rows with a number that no expert has give
            zeros.
        rows: the name of the axis of sorted rows, in `fn`.
        round_size: how many of its rows a device sends to another one in a round, where experts are sharded; by default
            1.5 times an even share.
        exchange: `"ragged"` or `"all_to_all"`; by default `"ragged"`, except on CPUs, for which XLA does not have it.

    >>> Experts, Embed = axn.make_axes(experts=2, embed=1)
    >>> layer = axn.nn.MoELinear(axn.named([[[1.0]], [[10.0]]], ("experts", "embed", "out")), None, Experts, Embed,
    ...     axn.Axis("out", 1))
    >>> x, expert = axn.named([[1.0], [2.0], [3.0]], ("tokens", "embed")), axn.named([1, 0, 1], "tokens")
    >>> axn.nn.dispatch(lambda layer, x, sizes: layer(x, sizes), layer, x, expert, Experts)
    NamedArray(float32[tokens=3, out=1], [[10.] [ 2.] [30.]])
    """
    experts = one_axis("dispatch", "experts", experts)
    exchanged = (experts.name, *getattr(expert, "names", ()))
    if any(map(is_kept, exchanged)):
        call = functools.partial(dispatch, experts=experts, rows=rows, round_size=round_size, exchange=exchange)
        return exchange_shards("dispatch", lambda xs: call(fn, *xs), (params, x, expert), exchanged)
    arrays, tree = flatten_arrays(params)
    if exchange is not None:
        refuse_gathered(f"dispatch by exchange={exchange!r}", "exchange", experts.name)
    if exchange not in ("all_to_all", "ragged", None):
        raise ValueError(f'dispatch: `exchange` is "all_to_all", "ragged" or None, got {exchange!r}.')
    has_ragged = active_platform() != "cpu"
    if exchange == "ragged" and not has_ragged:
        raise ValueError(
            'dispatch: XLA has no ragged all-to-all for CPUs, on which this runs: use `exchange="all_to_all"` or None, '
            "which is ragged on GPUs and TPUs."
        )
    dispatched = _Dispatch(fn, tree, x, expert, experts, rows, round_size, has_ragged and exchange != "all_to_all")
    return dispatched.run([jnp.asarray(a) for a in arrays])


class _Dispatch:
    def __init__(
        self,
        fn: Callable[..., NamedArray],
        tree: TreeSpec,
        x: NamedArray,
        expert: NamedArray,
        experts: Axis,
        rows: str,
        round_size: int | None,
        ragged: bool,
    ):
        self._fn, self._tree, self._experts, self._rows = fn, tree, experts, rows
        self._round_size, self._ragged = round_size, ragged
        require_named("dispatch", x)
        _require_numbers("dispatch", expert)
        if round_size is not None and round_size < 1:
            raise ValueError(f"dispatch: `round_size` is a number of rows, at least 1, got {round_size}.")
        for n in expert.names:
            if n in x.names and x.axis_size(n) != expert.axis_size(n):
                places = [("the array", x.axis_size(n)), ("`expert`", expert.axis_size(n))]
                raise ValueError(errors.size_mismatch("dispatch", n, places))
        self._row_names = expert.names
        self._own_rows = tuple(n for n in expert.names if n in x.names)
        self._features = tuple(n for n in x.names if n not in expert.names)
        for n in (rows, experts.name):
            if n in (*expert.names, *x.names):
                raise ValueError(
                    f"dispatch: {n!r} is an axis of the rows {errors.describe_axes(expert.names)} or of the array "
                    f"{errors.describe_axes(x.names)}, and the axis of "
                    f"{'sorted rows in `fn`: call that something else, `rows=...`' if n == rows else 'the experts'}."
                )
        self._x = jnp.asarray(x.rearrange((*self._own_rows, *self._features)).array)
        self._expert = jnp.asarray(expert.array)
        self._result: Names = ()
        self._times = 1
        """How many devices have other rows, or other experts."""

    def run(self, params: Sequence[jax.Array]) -> NamedArray:
        held = [(p, n) for p, n in zip(params, self._tree.names, strict=True) if n and self._experts.name in n]
        if not held:
            raise ValueError(
                f"dispatch: no array of `params` has the axis {self._experts.name!r} of the experts; the axes are "
                f"{', '.join(errors.describe_axes(n) for n in self._tree.names if n is not None) or 'none'}."
            )
        operands = (self._expert, self._x, *params)
        in_names = (self._row_names, (*self._own_rows, *self._features), *(names or () for names in self._tree.names))
        scope = operation_scope("dispatch", in_names, self._row_names, operands)
        with jax.named_scope(scope):
            mesh = mesh_around(operands)
            run = self._among_shards if has_manual(mesh) else self._on_mesh
            y = run(mesh, held, operands)
        return wrap(y, (*self._row_names, *self._result))

    def _among_shards(self, mesh: AnyMesh, held: Sequence[tuple[jax.Array, Names]], operands: Arrays) -> jax.Array:
        """Run the dispatch inside `shard_map`, where the operands are shards.

        The number of experts in the parameters shows whether their axis is sharded.
        """
        counts = {p.shape[names.index(self._experts.name)] for p, names in held}
        axes = mapped_on("dispatch", self._experts.name, mesh, AxisType.Manual)
        local = self._experts.size // shard_count(mesh, axes)
        if counts == {self._experts.size}:
            axes, local = (), self._experts.size
        elif counts != {local}:
            places = [("the argument", self._experts.size), *(("`params`, on each device", n) for n in sorted(counts))]
            raise ValueError(errors.size_mismatch("dispatch", self._experts.name, places))
        same = set(axes) - varying_axes(operands[0]) - varying_axes(operands[1])
        if same and varying_axes(held[0][0]):  # or JAX does not track that
            raise ValueError(
                f"dispatch: the experts are sharded over mesh axis {errors.quoted(sorted(same))}, over which the rows "
                f"{errors.describe_axes(self._row_names)} are replicated. Shard an axis of the rows over it, too."
            )
        over_rows = [a for n in self._row_names for a in kept_over(n) or ()]
        self._times = shard_count(mesh, tuple({*axes, *over_rows}))
        return self._on_device(self._exchange(axes, mesh, local))(*operands)

    def _exchange(self, axes: Axes, mesh: AnyMesh, local_experts: int) -> _ExpertExchange:
        return _ExpertExchange(axes, shard_count(mesh, axes), local_experts, self._round_size, self._ragged)

    def _on_mesh(self, mesh: AnyMesh, held: Sequence[tuple[jax.Array, Names]], operands: Arrays) -> jax.Array:
        name, size = self._experts.name, self._experts.size
        for p, names in held:
            if p.shape[names.index(name)] != size:
                places = [("the argument", size), ("`params`", p.shape[names.index(name)])]
                raise ValueError(errors.size_mismatch("dispatch", name, places))
        if mesh.empty:
            return self._on_device(self._exchange((), mesh, size))(*operands)
        each = (sharded_over("dispatch", names, p, mesh, AxisType.Auto)[names.index(name)] for p, names in held)
        axes = next(filter(None, each), ())
        even = -(-size // shard_count(mesh, axes)) * shard_count(mesh, axes)
        if even != size and pads_uneven() and not has_explicit(mesh):
            # Add copies of the last expert, which get no rows. They are no zeros, since the copies of rows that fill up
            # a round go to them, too: see `_ExpertExchange`.
            expert, x, *params = operands
            expert = jnp.where(expert < size, expert, even)  # numbers without an expert stay such
            for i, names in enumerate(self._tree.names):
                if names and name in names:
                    more = [(0, (even - size) * (n == name)) for n in names]
                    params[i] = jnp.pad(params[i], more, mode="edge")
            operands, size = (expert, x, *params), even
        # The mesh axes that each axis of the rows is sharded over, in the array or else in `expert`.
        of_x = sharded_over("dispatch", (*self._own_rows, *self._features), self._x, mesh, AxisType.Auto)
        own = dict(zip(self._own_rows, of_x, strict=False))
        of_rows: list[Axes] = []
        for n, over in zip(
            self._row_names, sharded_over("dispatch", self._row_names, self._expert, mesh, AxisType.Auto), strict=True
        ):
            taken = {a for other in of_rows for a in other}
            of_rows.append(tuple(a for a in own.get(n) or over if a not in taken))
        placed = list(of_rows)
        missing = tuple(a for a in axes if not any(a in over for over in of_rows))
        if missing:  # the rows are sharded over the mesh axes of the experts, too
            shape = self._expert.shape
            i = next((i for i, n in enumerate(shape) if n % shard_count(mesh, (*placed[i], *missing)) == 0), None)
            if i is None:
                raise ValueError(
                    f"dispatch: the experts are sharded over mesh axes {errors.quoted(axes)}, and the devices along "
                    f"{errors.quoted(missing)} cannot share the rows {errors.describe_axes(self._row_names, shape)}: "
                    f"no axis can be cut into {shard_count(mesh, missing)} times as many shards as it has. Pad the "
                    "rows, or map one of their axes to these mesh axes."
                )
            placed[i] = (*placed[i], *missing)
        for n, count, over in ((name, size, axes), *zip(self._row_names, self._expert.shape, placed, strict=True)):
            if count % shard_count(mesh, over):
                problem = errors.indivisible(f"axis {n!r}", count, {a: mesh.shape[a] for a in over})
                raise ValueError(f"dispatch: {problem} Pad it, or map it to None.")
        used = {a for own in placed for a in own}
        explicit = has_explicit(mesh)
        exchange = self._exchange(axes, mesh, size // shard_count(mesh, axes))
        if not used and (not explicit or explicit_mesh(operands) is None):
            return self._on_device(exchange)(*operands)
        stored = [
            self._stored(p, names, axes, used, mesh) for p, names in zip(operands[2:], self._tree.names, strict=True)
        ]
        of_x = [own for n, own in zip(self._row_names, placed, strict=True) if n in self._own_rows]
        self._times = shard_count(mesh, tuple(used))
        y = run_per_device(
            self._on_device(exchange, stored),
            operands,
            [spec_of(placed), spec_of(of_x), *map(spec_of, stored)],
            spec_of(placed),
            mesh,
            # JAX cannot differentiate partly manual functions on Explicit mesh axes.
            axis_names=set(mesh.axis_names) if explicit else used,
        )
        return reshard(y, padded(map(entry_of, of_rows), y.ndim), mesh)

    def _stored(self, p: jax.Array, names: Names | None, axes: Axes, used: set[str], mesh: AnyMesh) -> list[Axes]:
        """Return the storage sharding of a parameter, with its experts sharded over `axes`."""
        if names is None:
            return []
        each = map(mesh_axes, entries_of(p)) if has_explicit(mesh) else map(storage_axes, names)
        found = [
            axes if n == self._experts.name else tuple(a for a in own if a in used - {*axes})
            for n, own in zip(names, each, strict=True)
        ]
        if fits(map(entry_of, found), p.shape, mesh):
            return found
        # A parameter that the mesh axes do not divide is replicated, except over the experts.
        return [axes if n == self._experts.name else () for n in names]

    def _on_device(self, exchange: _ExpertExchange, stored: Sequence[Sequence[Axes]] = ()) -> Callable[..., jax.Array]:
        def on_device(expert: jax.Array, x: jax.Array, *params: jax.Array) -> jax.Array:
            gathered = list(params)
            for i, (names, each) in enumerate(zip(self._tree.names, stored, strict=False)):
                over = [() if n == self._experts.name else axes for n, axes in zip(names or (), each, strict=True)]
                # A shard is made device-varying before it is gathered, so that its gradient is summed in shards.
                gathered[i] = gather_axes(vary_like(gathered[i], expert, x), over) if any(over) else gathered[i]
            # Weights vary like the rows, so that their gradients are summed over devices once, not in each round. The
            # sum over rounds is in float32.
            wide = [vary_like(p.astype(jnp.float32) if p.dtype in _NARROW else p, expert, x) for p in gathered]
            sizes = dict(zip(self._row_names, expert.shape, strict=True))
            shape = [size if n in self._own_rows else 1 for n, size in sizes.items()]
            source = jnp.broadcast_to(jnp.arange(math.prod(shape)).reshape(shape), expert.shape)

            def of_experts(x: jax.Array, sizes: jax.Array) -> jax.Array:
                own = [w if w.dtype == p.dtype else w.astype(p.dtype) for w, p in zip(wide, params, strict=True)]
                if self._times == 1:
                    return self._of_experts(own, x, sizes)
                return self._on_rows(own, x, sizes, expert.size * self._times, exchange.devices)

            y = exchange.run(
                of_experts,
                x.reshape(math.prod(shape), *x.shape[len(self._own_rows) :]),
                vary_like(source.reshape(-1), expert),
                expert.reshape(-1),
            )
            return y.reshape(*expert.shape, *y.shape[1:])

        return on_device

    def _on_rows(self, params: Arrays, x: jax.Array, sizes: jax.Array, rows: int, count: int) -> jax.Array:
        """Run `fn`, traced for all rows and all experts, on some of both; `count` devices have other experts."""
        name = self._experts.name
        shards = [
            Shard(p, tuple((GROUPS,) if n == name and count > 1 else () for n in names or ((),) * p.ndim))
            for p, names in zip(params, self._tree.names, strict=True)
        ]
        shards += [Shard(x, ((ROWS,), *((),) * (x.ndim - 1))), Shard(sizes, ((SIZES,),))]
        counts = {ROWS: Fraction(max(rows, 2), x.shape[0]), GROUPS: count, SIZES: count}
        runner = OnShards(counts, {(GROUPS,): name}, rows=max(rows, 2))
        *of_all, all_rows, all_sizes = map(runner.complete, shards)
        with activate_here(kept=KeptShards(complete=True)):
            program = jax.make_jaxpr(self._of_experts)(of_all, all_rows, all_sizes)
        try:
            (y,) = runner.run(program.jaxpr, program.consts, shards)
            return runner.moved(None, y, ((ROWS,), *((),) * (y.here.ndim - 1))).here
        except NeedsCompleteAxes as error:
            raise ValueError(
                f"dispatch: `fn` gets some of the rows and experts here, and must compute each row by itself: {error}"
            ) from None

    def _of_experts(self, params: Sequence[jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
        rows = wrap(x, (self._rows, *self._features))
        y = self._fn(self._tree.unflatten(params), rows, wrap(sizes, (self._experts.name,)))
        if not isinstance(y, NamedArray) or y.shape.get(self._rows) != x.shape[0]:
            found = errors.describe_axes(y.names, y.array.shape) if isinstance(y, NamedArray) else type(y).__name__
            raise ValueError(
                f"dispatch: `fn` must return a named array with its axis {self._rows!r} of rows, got {found}."
            )
        y = y.rearrange((self._rows, ...))
        self._result = y.names[1:]
        errors.distinct("dispatch", (*self._row_names, *self._result))
        return y.array


_NARROW = (jnp.bfloat16, jnp.float16)


def _require_numbers(what: str, expert: NamedArray) -> None:
    if not jnp.issubdtype(require_named(what, expert).dtype, jnp.integer):
        raise TypeError(f"{what}: `expert` has the number of each row's expert, so integers, not {expert.dtype}.")


# --- functions for routers ---


def limit_capacity(
    expert: NamedArray, experts: Axis, factor: float, *, order: Sequence[AxisSelector] | None = None
) -> NamedArray:
    """Drop rows from experts that get too many: each expert keeps its first rows.

    The dropped rows get -1, for which `dispatch` gives zeros, so `(expert < 0).sum()` counts them. Which rows are
    dropped does not depend on the mapping.

    Arguments:
        factor: how many rows an expert keeps, as a multiple of an even share.
        order: the axes of the rows, the outermost one first, which determine which rows are the first ones. Needed if
            there are several axes: `("choice", "tokens")` drops second choices before first ones.

    >>> axn.nn.limit_capacity(axn.named([0, 0, 1, 0], "tokens"), axn.Axis("experts", 2), 1.0)
    NamedArray(int32[tokens=4], [ 0  0  1 -1])
    """
    what = "limit_capacity"
    _require_numbers(what, expert)
    if order is None and expert.ndim > 1:
        raise ValueError(
            f"{what}: the rows have axes {errors.describe_axes(expert.names)}; say which rows are the first ones, "
            f"such as `order={tuple(reversed(expert.names))}`."
        )
    ordered = expert if order is None else expert.rearrange(tuple(order))
    # Rounded first, since 1.1 * 100 is more than 110 in floating point.
    capacity = math.ceil(round(factor * expert.size / one_axis(what, "experts", experts).size, 6))
    flat = ordered.astype(jnp.int32).flatten_axes(ordered.axes, "rows")
    # The rank of a row among its expert's: sorted by expert, its place after the first row of the same expert. The
    # sort is stable, so first rows stay first.
    by_expert = argsort(flat, "rows")
    grouped = flat["rows", by_expert]
    rank = arange(grouped.resolve_axis("rows")) - searchsorted(grouped, grouped)
    kept = where(rank["rows", argsort(by_expert, "rows")] < capacity, flat, -1)
    return kept.unflatten_axis("rows", ordered.axes).rearrange(expert.names)


def load_balancing_loss(probabilities: NamedArray, expert: NamedArray, experts: Axis) -> NamedArray:
    """Return the load-balancing loss of Switch Transformers: 1, its minimum, if all experts get equally many rows.

    The loss is the number of experts times a sum over experts: the share of the rows that an expert gets, times the
    mean probability that the router gives it. Only the probability has a gradient.

    Arguments:
        probabilities: the probability that the router gives to each expert, for each row.
        expert: the number of the expert of each row, or of several choices.

    >>> probabilities, expert = axn.full({"tokens": 4, "experts": 2}, 0.5), axn.named([0, 1, 1, 0], "tokens")
    >>> axn.nn.load_balancing_loss(probabilities, expert, axn.Axis("experts", 2))
    NamedArray(float32[], 1.)
    """
    experts = one_axis("load_balancing_loss", "experts", experts)
    dtype = jnp.promote_types(require_named("load_balancing_loss", probabilities, "probabilities").dtype, jnp.float32)
    share = mean(one_hot(expert, experts, dtype=dtype), expert.names)
    rows = tuple(n for n in probabilities.names if n != experts.name)
    return experts.size * dot(share, mean(probabilities, rows), axis=experts)


def router_z_loss(logits: NamedArray, experts: AxisSelector) -> NamedArray:
    """Return the z-loss of ST-MoE, which keeps a router's logits small: the mean of their squared log-sum-exp.

    >>> axn.nn.router_z_loss(axn.zeros({"tokens": 4, "experts": 1}), "experts")
    NamedArray(float32[], 0.)
    """
    return mean(square(logsumexp(require_named("router_z_loss", logits), experts)))


# --- the exchange ---
#
# The number of rows that go from one device to another is known only at run time, but an all-to-all moves arrays of
# fixed sizes. So each round moves at most a fixed number of rows between each pair of devices, and there are as many
# rounds at run time as the longest of these queues needs. Nothing is dropped, and nothing is padded for the worst case.
#
# A round is filled up with copies of rows, which go to some expert, and whose results are not used. Experts see real
# values, because the derivative at zero may be infinite and would spoil gradients.
#
# A ragged all-to-all moves only the rows, not the copies. XLA has it for GPUs and TPUs.


class _ExpertExchange(NamedTuple):
    """Exchanges rows between the devices along the mesh axes that the experts are sharded over, in rounds."""

    mesh_axes: Axes
    devices: int
    """The number of devices along these mesh axes."""
    local_experts: int
    round_size: int | None
    """The largest number of rows that a device sends to another one in a round; None for 1.5 times an even share."""
    ragged: bool
    """True if rows alone move, by ragged all-to-alls, without the copies that fill up a round."""

    def run(
        self, of_experts: Callable[..., jax.Array], x: jax.Array, source: jax.Array, expert: jax.Array
    ) -> jax.Array:
        """Return the result of each row, from its expert; zeros for a row without an expert.

        Arguments:
            of_experts: computes results from rows sorted by local expert, and the number of rows of each.
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
            return jnp.where(_mask_beside(known, y), y, 0)

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
            return y.at[row].add(jnp.where(_mask_beside(sent, found), found, 0))  # zeros for copies

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

    def _grouped(self, of_experts: Callable[..., jax.Array], x: jax.Array, group: jax.Array) -> jax.Array:
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


def _mask_beside(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Append axes of size one to a mask, for the other axes of the array."""
    return jnp.expand_dims(mask, range(mask.ndim, x.ndim))
