"""What a mixture of experts needs besides its layers: rows sent to experts and back, and the losses of a router."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .. import _errors, _kernels
from .._jax_versions import varying_axes
from .._mesh_axes import (
    AnyMesh,
    Axes,
    axes_of_type,
    entry_of,
    explicit_mesh,
    fits,
    mapped_on,
    mesh_around,
    reshard,
    shard_count,
    sharded_over,
    spec_of,
)
from .._per_device import run_per_device, vary_like, varying_over
from .._tree_spec import flatten
from ..axis import Axis, AxisSelector, Names, name_of
from ..named_array import NamedArray, wrap
from ..ops._operands import one_axis, require_named
from ..ops.contraction import dot
from ..ops.creation import arange
from ..ops.elementwise import square
from ..ops.reductions import logsumexp, mean
from ..ops.selection import searchsorted, where
from ..ops.sorting import argsort
from ._expert_exchange import Exchange
from .embedding import one_hot

__all__ = ["dispatch", "limit_capacity", "load_balancing_loss", "router_z_loss"]

Experts = Callable[[Any, NamedArray, NamedArray], NamedArray]


@_errors.say_how_to_call
def dispatch(
    fn: Experts,
    params: Any,
    x: NamedArray,
    expert: NamedArray,
    experts: AxisSelector,
    *,
    rows: str = "rows",
    round_size: int | None = None,
) -> NamedArray:
    """Send each row to its expert, and return what the experts make of the rows, where the rows were.

    Experts that are sharded over mesh axes get their rows by an all-to-all, and send the results back by another one.
    No device ever has all rows, or all experts. What moves has a fixed size, so rows are exchanged in rounds: as many
    as it takes, so that no row is dropped.

    Arguments:
        fn: what experts do: `fn(params, x, sizes)` takes rows that are sorted by expert, and the number of rows of each
            expert, as `MoELinear` does. Rows after these are zeros.
        params: a tree of arrays that `fn` needs. Those with the axis of the experts are sharded as the experts are.
            Arrays that are not arguments cannot be used in `fn` where experts or rows are sharded.
        x: the array with the rows.
        expert: the number of the expert of each row. Its axes are those of the rows; if `x` lacks some, such as one of
            several choices, each row is sent to several experts. Rows with a number that no expert has give zeros.
        experts: the axis of the experts.
        rows: the name of the axis of sorted rows, in `fn`.
        round_size: how many of its rows a device sends to another one in a round; by default 1.5 times an even share.

    >>> Experts, Embed = axn.make_axes(experts=2, embed=1)
    >>> layer = axn.nn.MoELinear(axn.named([[[1.0]], [[10.0]]], ("experts", "embed", "out")), None, Experts, Embed,
    ...     axn.Axis("out", 1))
    >>> x, expert = axn.named([[1.0], [2.0], [3.0]], ("tokens", "embed")), axn.named([1, 0, 1], "tokens")
    >>> axn.nn.dispatch(lambda layer, x, sizes: layer(x, sizes), layer, x, expert, Experts)
    NamedArray(float32[tokens=3, out=1], [[10.] [ 2.] [30.]])
    """
    arrays, tree = flatten(params)
    return _Dispatch(fn, tree, tree.names, x, expert, name_of(experts), rows, round_size).run(arrays)


class _Dispatch:
    def __init__(
        self,
        fn: Experts,
        tree: Any,
        names: Sequence[Names | None],
        x: NamedArray,
        expert: NamedArray,
        experts: str,
        rows: str,
        round_size: int | None,
    ):
        self._fn, self._tree, self._names, self._experts, self._rows = fn, tree, names, experts, rows
        self._round_size = round_size
        require_named("dispatch", x)
        require_named("dispatch", expert)
        if not jnp.issubdtype(expert.dtype, jnp.integer):
            raise TypeError(f"dispatch: `expert` has the number of each row's expert, so integers, not {expert.dtype}.")
        if round_size is not None and round_size < 1:
            raise ValueError(f"dispatch: `round_size` is a number of rows, at least 1, got {round_size}.")
        for n in expert.names:
            if n in x.names and x.axis_size(n) != expert.axis_size(n):
                places = [("the array", x.axis_size(n)), ("`expert`", expert.axis_size(n))]
                raise ValueError(_errors.size_mismatch("dispatch", n, places))
        self._row_names = expert.names
        self._own_rows = tuple(n for n in expert.names if n in x.names)
        self._features = tuple(n for n in x.names if n not in expert.names)
        for n in (rows, experts):
            if n in (*expert.names, *x.names):
                raise ValueError(
                    f"dispatch: {n!r} is an axis of the rows {_errors.describe_axes(expert.names)} or of the array "
                    f"{_errors.describe_axes(x.names)}, and the axis of "
                    f"{'sorted rows in `fn`: call that something else, `rows=...`' if n == rows else 'the experts'}."
                )
        self._x = jnp.asarray(x.rearrange((*self._own_rows, *self._features)).array)
        self._expert = jnp.asarray(expert.array)
        self._result: Names = ()

    def run(self, params: Sequence[Any]) -> NamedArray:
        held = next((i for i, names in enumerate(self._names) if names and self._experts in names), None)
        if held is None:
            raise ValueError(
                f"dispatch: no array of `params` has the axis {self._experts!r} of the experts; the axes are "
                f"{', '.join(_errors.describe_axes(n) for n in self._names if n is not None) or 'none'}."
            )
        operands = (self._expert, self._x, *map(jnp.asarray, params))
        in_names = (self._row_names, (*self._own_rows, *self._features), *(names or () for names in self._names))
        with jax.named_scope(_kernels.operation_scope("dispatch", in_names, self._row_names, operands)):
            return wrap(self._run(held, operands), (*self._row_names, *self._result))

    def _run(self, held: int, operands: Sequence[Any]) -> jax.Array:
        mesh = mesh_around(operands)
        names, array = self._names[held], operands[2 + held]
        assert names is not None
        position = names.index(self._experts)
        manual = axes_of_type(mesh, AxisType.Manual)
        if mesh.empty or manual:
            axes = mapped_on("dispatch", self._experts, mesh, AxisType.Manual) if manual else ()
            return self._on_device(axes, mesh, array.shape[position])(*operands)
        of_rows = sharded_over("dispatch", self._row_names, self._expert, mesh, AxisType.Auto)
        axes = sharded_over("dispatch", names, array, mesh, AxisType.Auto)[position]
        placed = self._divided(of_rows, axes, mesh)
        specs = [
            spec_of(placed),
            spec_of([axes for n, axes in zip(self._row_names, placed, strict=True) if n in self._own_rows]),
            *(
                spec_of([axes if n == self._experts else () for n in own]) if own else PartitionSpec()
                for own in self._names
            ),
        ]
        if not fits([entry_of(axes)], [array.shape[position]], mesh):
            raise ValueError(
                f"dispatch: axis {self._experts!r} of size {array.shape[position]} cannot be sharded over mesh axes "
                f"{_errors.quoted(axes)} of {shard_count(mesh, entry_of(axes))} devices: the sizes do not divide."
            )
        count = array.shape[position] // shard_count(mesh, entry_of(axes))
        used = {a for own in placed for a in own}
        explicit = AxisType.Explicit in mesh.axis_types
        if not used and (not explicit or explicit_mesh((self._expert, self._x)) is None):
            return self._on_device((), mesh, count)(*operands)
        y = run_per_device(
            self._on_device(axes, mesh, count),
            operands,
            specs,
            specs[0],
            mesh,
            axis_names=set(mesh.axis_names) if explicit else used,
        )
        return reshard(y, (*map(entry_of, of_rows), *[None] * (y.ndim - len(of_rows))), mesh)

    def _divided(self, of_rows: Sequence[Axes], axes: Axes, mesh: AnyMesh) -> list[Axes]:
        """Return the mesh axes of the rows, which are sharded over those of the experts, too."""
        placed = list(of_rows)
        missing = tuple(a for a in axes if not any(a in own for own in placed))
        if not missing:
            return placed
        for i, size in enumerate(self._expert.shape):
            wanted = (*placed[i], *missing)
            if size % shard_count(mesh, entry_of(wanted)) == 0:
                placed[i] = wanted
                return placed
        shown = _errors.describe_axes(self._row_names, self._expert.shape)
        raise ValueError(
            f"dispatch: the experts are sharded over mesh axes {_errors.quoted(axes)}, and the devices along "
            f"{_errors.quoted(missing)} cannot share the rows {shown}: no axis is a multiple of "
            f"{shard_count(mesh, entry_of(missing))} times what it is sharded over already. Pad the rows, or map "
            "one of their axes to these mesh axes."
        )

    def _on_device(self, axes: Axes, mesh: AnyMesh, count: int) -> Callable[..., jax.Array]:
        exchange = Exchange(axes, shard_count(mesh, entry_of(axes)), count, self._round_size)

        def on_device(expert: jax.Array, x: jax.Array, *params: jax.Array) -> jax.Array:
            # Weights vary like the rows, so that their gradients are summed over devices once, not in each round.
            over = varying_axes(expert) | varying_axes(x)
            params = tuple(varying_over(p, sorted(over - varying_axes(p))) for p in params)
            own = [n for n in self._row_names if n in self._own_rows]
            sizes = dict(zip(self._row_names, expert.shape, strict=True))
            source = jnp.arange(math.prod(sizes[n] for n in own)).reshape([sizes[n] if n in own else 1 for n in sizes])
            source = vary_like(jnp.broadcast_to(source, expert.shape).reshape(-1), expert)
            y = exchange.run(
                lambda x, sizes: self._of_experts(params, x, sizes),
                x.reshape(-1, *x.shape[len(own) :]),
                source,
                expert.reshape(-1).astype(jnp.int32),
            )
            return y.reshape(*expert.shape, *y.shape[1:])

        return on_device

    def _of_experts(self, params: Sequence[jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
        rows = wrap(x, (self._rows, *self._features))
        y = self._fn(self._tree.unflatten(params), rows, wrap(sizes, (self._experts,)))
        if not isinstance(y, NamedArray) or y.shape.get(self._rows) != x.shape[0]:
            found = _errors.describe_axes(y.names, y.array.shape) if isinstance(y, NamedArray) else type(y).__name__
            raise ValueError(
                f"dispatch: `fn` must return a named array with its axis {self._rows!r} of rows, got {found}."
            )
        y = y.rearrange((self._rows, ...))
        self._result = y.names[1:]
        return y.array


# --- what a router needs ---


@_errors.say_how_to_call
def limit_capacity(expert: NamedArray, experts: Axis, factor: float) -> NamedArray:
    """Take rows away from experts that get too many: each keeps the first ones, in the order of the rows.

    The rows that are taken away get -1, for which `dispatch` gives zeros, so `(expert < 0).sum()` counts them. Which
    rows these are does not depend on how anything is sharded.

    Arguments:
        expert: the number of the expert of each row.
        experts: the axis of the experts.
        factor: how many rows an expert keeps, as a multiple of an even share.

    >>> axn.nn.limit_capacity(axn.named([0, 0, 1, 0], "tokens"), axn.Axis("experts", 2), 1.0)
    NamedArray(int32[tokens=4], [ 0  0  1 -1])
    """
    axes = require_named("limit_capacity", expert).axes
    capacity = math.ceil(factor * expert.size / one_axis("limit_capacity", "experts", experts).size)
    flat = expert.flatten_axes(axes, "rows")
    order = argsort(flat, "rows")
    ordered = flat["rows", order]
    rank = arange(ordered.resolve_axis("rows")) - searchsorted(ordered, ordered)
    return where(rank["rows", argsort(order, "rows")] < capacity, flat, -1).unflatten_axis("rows", axes)


@_errors.say_how_to_call
def load_balancing_loss(probabilities: NamedArray, expert: NamedArray, experts: Axis) -> NamedArray:
    """Return a loss that is least, 1, where all experts get as many rows, as in Switch Transformers.

    The loss is the number of experts times the sum, over experts, of the share of the rows that an expert gets and the
    mean probability that the router gives it. Only the latter has a gradient.

    Arguments:
        probabilities: what the router gives to each expert, for each row.
        expert: the number of the expert of each row, or of several choices.
        experts: the axis of the experts.

    >>> probabilities, expert = axn.full({"tokens": 4, "experts": 2}, 0.5), axn.named([0, 1, 1, 0], "tokens")
    >>> axn.nn.load_balancing_loss(probabilities, expert, axn.Axis("experts", 2))
    NamedArray(float32[], 1.)
    """
    experts = one_axis("load_balancing_loss", "experts", experts)
    share = mean(one_hot(expert, experts), expert.names)
    rows = tuple(n for n in probabilities.names if n != experts.name)
    return experts.size * dot(share, mean(probabilities, rows), axis=experts)


@_errors.say_how_to_call
def router_z_loss(logits: NamedArray, experts: AxisSelector) -> NamedArray:
    """Return the mean squared log-sum-exp of a router's logits, a loss that keeps them small, as in ST-MoE.

    >>> axn.nn.router_z_loss(axn.zeros({"tokens": 4, "experts": 1}), "experts")
    NamedArray(float32[], 0.)
    """
    return mean(square(logsumexp(require_named("router_z_loss", logits), experts)))
