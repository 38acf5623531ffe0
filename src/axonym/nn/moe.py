"""`MoELinear`: a linear layer with separate weights for each expert."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import random
from ..axis import Axis, AxisSpec, Names
from ..core import errors
from ..core.jax_versions import active_platform
from ..core.named_scope import named_call
from ..distribution.mesh_axes import (
    AnyMesh,
    Axes,
    axes_in,
    entries_of,
    explicit_mesh,
    fits,
    has_manual,
    mapped_axes,
    mesh_around,
    mesh_axes,
    reshard,
    spec_of,
    storage_axes,
)
from ..distribution.per_device import gather_axes, run_per_device, varying_over, with_auto_axes
from ..named_array import NamedArray, named
from ..ops import _kernels
from ..ops._operands import distinct, one_axis, private, require_named
from ..ops.creation import zeros
from .linear import BOUND, stored_inputs

__all__ = ["MoELinear"]


class MoELinear(eqx.Module):
    """A linear layer of several experts, each of which handles its own group of rows.

    The rows of the input, such as tokens, must be sorted by expert: first the rows of the first expert, as many as
    `group_sizes` says, then the rows of the second, and so on. All experts share the bias.

    Rows and experts can be sharded, by the active mapping or, on Explicit mesh axes, by the arrays' own shardings. Each
    device then multiplies its shard of the rows with its shard of the weights. If experts are sharded, the results are
    summed over their mesh axes; if rows are sharded over the same mesh axes, they are all-gathered first. With
    `dispatch`, experts get their own rows instead, by an all-to-all.

    The fields besides `weight` and `bias` are arguments of `init`.

    >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
    >>> layer = axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0))
    >>> layer.weight.shape
    {'experts': 2, 'embed': 3, 'mlp': 4}
    >>> layer(axn.ones({"tokens": 8, "embed": 3}), axn.named([5, 3], Experts)).shape
    {'tokens': 8, 'mlp': 4}
    """

    weight: NamedArray
    bias: NamedArray | None
    Experts: Axis = eqx.field(static=True)
    In: Axis = eqx.field(static=True)
    Out: Axis = eqx.field(static=True)
    use_gmm: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(
        Experts: AxisSpec,
        In: AxisSpec,
        Out: AxisSpec,
        *,
        key: jax.Array,
        use_bias: bool = True,
        out_first: bool = False,
        init_scale: float = 1.0,
        use_gmm: bool = False,
    ) -> MoELinear:
        """Make a layer with random weights and a bias of zeros.

        The weights are drawn from a truncated normal distribution with standard deviation 1 / sqrt(size of In).

        Arguments:
            out_first: whether the axis of the output comes before the axis of the input in the weight.
            init_scale: multiplies the standard deviation of the weights.
            use_gmm: whether to use the Pallas kernel megablox, on TPU only, instead of `jax.lax.ragged_dot`. It is
                refused in `dispatch` with sharded experts.

        >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
        >>> axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0), out_first=True).weight.shape
        {'experts': 2, 'mlp': 4, 'embed': 3}
        """
        what = "MoELinear"
        experts, In, Out = one_axis(what, "Experts", Experts), one_axis(what, "In", In), one_axis(what, "Out", Out)
        distinct(what, (experts.name, In.name, *(() if In.name == Out.name else (Out.name,))))
        (stored,) = stored_inputs((In,), (Out,))
        axes = (experts, Out, stored) if out_first else (experts, stored, Out)
        weight = random.truncated_normal(key, axes, -BOUND, BOUND) * (init_scale / math.sqrt(In.size))
        return MoELinear(weight, zeros(Out) if use_bias else None, experts, In, Out, use_gmm)

    @property
    def out_first(self) -> bool:
        """Return whether the axis of the output comes before the axis of the input in the weight.

        >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
        >>> axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0)).out_first
        False
        """
        return self.weight.names[-1] != self.Out.name

    @named_call
    def __call__(
        self, inputs: NamedArray, group_sizes: NamedArray | jax.Array, *, key: jax.Array | None = None
    ) -> NamedArray:
        """Multiply each row by the weight of its expert, and add the bias.

        Arguments:
            inputs: a named array with the axis `In` and one axis of rows, sorted by expert.
            group_sizes: the number of rows of each expert. The results for rows after the last group are undefined.

        >>> Experts, In, Out = axn.make_axes(experts=2, x=1, y=1)
        >>> layer = axn.nn.MoELinear(axn.named([[[1.0]], [[10.0]]], (Experts, In, Out)), None, Experts, In, Out)
        >>> layer(axn.ones({"rows": 3, "x": 1}), axn.named([2, 1], Experts))
        NamedArray(float32[rows=3, y=1], [[ 1.] [ 1.] [10.]])
        """
        require_named("MoELinear", inputs)
        if self.use_gmm and (platform := active_platform()) != "tpu":
            raise ValueError(
                "MoELinear: `use_gmm` selects the Pallas kernel megablox, which runs on TPU only; the devices here are "
                f"{platform.upper()}s. Without `use_gmm`, `jax.lax.ragged_dot` computes the same everywhere."
            )
        if not isinstance(group_sizes, NamedArray):
            group_sizes = named(group_sizes, self.Experts.name)
        kernel = _grouped_kernel(
            inputs.names, self.weight.names, group_sizes.names, self.Experts.name, self.In, self.Out, self.use_gmm
        )
        result = kernel.apply(inputs.array, self.weight.array, group_sizes.array)
        return result if self.bias is None else result + self.bias


@_kernels.shared("names", "weight_names", "size_names", "experts", "In", "Out")
def _grouped_kernel(
    names: Names, weight_names: Names, size_names: Names, experts: str, In: Axis, Out: Axis, use_gmm: bool
) -> _kernels.Kernel:
    what = "MoELinear"
    _kernels.select(what, names, In.name)
    _kernels.select(what, size_names, experts, operand=2)
    rows = [n for n in names if n != In.name]
    if len(rows) != 1:
        raise ValueError(
            f"{what}: the input must have one axis of rows besides {In.name!r}, but has {errors.describe_axes(rows)}. "
            f"Merge them with `axonym.flatten_axes(inputs, {tuple(rows)}, 'rows')`, or map over all but one with "
            "`axonym.vmap`."
        )
    (stored,) = (a.name for a in stored_inputs((In,), (Out,)))
    if {*weight_names} != {experts, stored, Out.name}:
        expected = errors.describe_axes((experts, stored, Out.name))
        raise ValueError(
            f"{what}: the axes of the weight are {errors.describe_axes(weight_names)}, and should be {expected}. "
            "Apply stacked layers with `axonym.vmap` or `axonym.scan` over their axis."
        )
    if len(size_names) != 1:
        raise ValueError(f"{what}: `group_sizes` has axes {errors.describe_axes(size_names)}, and needs {experts!r}.")
    product = _GroupedProduct(names, weight_names, rows[0], experts, (In.name, stored), Out.name, use_gmm)
    distinct(what, product.out_names)

    def positional(x, weight, sizes):
        return product.by_partitioner(x, weight, _checked_sizes(what, product, x, weight, sizes))

    def per_device(x, weight, sizes):
        return product.by_device(x, weight, _checked_sizes(what, product, x, weight, sizes))

    # Private names, since the summed axis can have the name of the output, and the sizes must not influence the
    # sharding of the result.
    in_names = (
        tuple(private("the input", (n,))[0] if n == In.name else n for n in names),
        tuple(n if n == Out.name else private("the weight", (n,))[0] for n in weight_names),
        private("group_sizes", size_names),
    )
    return _kernels.make_kernel(what, positional, in_names, product.out_names, product=True, per_device=per_device)


def _checked_sizes(what: str, product: _GroupedProduct, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the sizes as signed integers that can count all rows."""
    for name, given, stored in (
        (product.summed[0], x.shape[product.names.index(product.summed[0])], product.summed[1]),
        (product.groups, sizes.shape[0], product.groups),
    ):
        own = weight.shape[product.weight_names.index(stored)]
        if given != own:
            raise ValueError(errors.size_mismatch(what, name, [("the argument", given), ("the layer", own)]))
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{what}: `group_sizes` must be integers, got {sizes.dtype}.")
    return sizes.astype(jnp.int32)


# --- the product of each group of rows with its own matrix ---
#
# The partitioner would all-gather the rows or the matrices. But the group sizes determine the rows of each group on a
# device. So each device multiplies its shard of the rows by its shard of the matrices inside `jax.shard_map`, and if
# the groups are sharded, partial results are summed.


class _GroupedProduct(NamedTuple):
    """A grouped product: the axes of the rows and of the matrices, and the role of each."""

    names: Names
    weight_names: Names
    rows: str
    groups: str
    summed: tuple[str, str]
    """The names of the summed axis in the rows and in the matrices."""
    out: str
    use_gmm: bool

    @property
    def out_names(self) -> Names:
        return tuple(self.out if n == self.summed[0] else n for n in self.names)

    def multiply(self, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        """Multiply local arrays whose first group starts at the first row."""
        dtype = jnp.result_type(x, weight)
        x, weight = x.astype(dtype), weight.astype(dtype)
        row, summed = self.names.index(self.rows), self.names.index(self.summed[0])
        where = (self.weight_names.index(n) for n in (self.groups, self.summed[1], self.out))
        group, weight_summed, out = where
        if self.use_gmm:
            x = _kernels.transpose_to(x, self.names, (self.rows, self.summed[0]))
            order = (group, out, weight_summed) if out < weight_summed else (group, weight_summed, out)
            y = _megablox(x, jax.lax.transpose(weight, order), sizes, transposed=out < weight_summed)
        else:
            numbers = jax.lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(((summed,), (weight_summed,)), ((), ())),
                lhs_ragged_dimensions=[row],
                rhs_group_dimensions=[group],
            )
            y = jax.lax.ragged_dot_general(x, weight, sizes, numbers)
        return _kernels.transpose_to(y, (self.rows, self.out), self.out_names)

    def by_partitioner(self, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        """Multiply replicated operands, or leave them to the partitioner."""
        mesh = mesh_around((x, weight, sizes))
        if self.use_gmm and not mesh.empty and not has_manual(mesh):  # XLA does not partition kernels
            whole = [PartitionSpec(*[None] * a.ndim) for a in (x, weight, sizes)]
            return run_per_device(self.multiply, (x, weight, sizes), whole, whole[0], mesh, check_vma=False)
        # On an Explicit mesh, JAX does not infer the sharding of the result, even if all operands are replicated.
        return with_auto_axes(self.multiply, mesh, PartitionSpec(None, None))(x, weight, sizes)

    def by_device(self, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array | None:
        """Multiply shards on their devices; return None unless rows or groups are sharded in a suitable way."""
        mesh = mesh_around((x, weight, sizes))
        shards = None if mesh.empty or has_manual(mesh) else _shards_of_product(self, x, weight, mesh)
        if shards is None:
            return None
        y = run_per_device(
            shards.multiply,
            (x, weight, sizes),
            (shards.of_rows, shards.of_weight, PartitionSpec(None)),
            shards.of_result,
            mesh,
            check_vma=not self.use_gmm,  # the type of the kernel's result does not say over which mesh axes it varies
        )
        # On Auto mesh axes, the users of the result decide its sharding.
        return reshard(y, shards.wanted, mesh)


def _shards_of_product(product: _GroupedProduct, x: jax.Array, weight: jax.Array, mesh: AnyMesh) -> _Shards | None:
    if explicit_mesh((x, weight)) is not None:
        each = (product.names, x), (product.weight_names, weight)
        in_rows, in_weight = (dict(zip(ns, map(mesh_axes, entries_of(a)), strict=True)) for ns, a in each)
    else:
        in_rows = {n: mapped_axes(n) for n in product.names}
        in_weight = {n: storage_axes(n) for n in product.weight_names}
    rows, groups = in_rows[product.rows], in_weight[product.groups]
    if not (rows or groups):
        return None
    # Along these mesh axes, devices have other groups as well as other rows, so each needs the rows of all of them.
    shared, rows_of_result = tuple(itertools.takewhile(groups.__contains__, reversed(rows)))[::-1], rows
    if set(rows[: len(rows) - len(shared)]) & set(groups):
        # Rows that are all-gathered over these mesh axes would not be contiguous, so they are not sharded over them.
        rows, shared = tuple(a for a in rows if a not in groups), ()
        in_rows = {**in_rows, product.rows: rows}
    summed, weight_summed = in_rows[product.summed[0]], in_weight[product.summed[1]]
    # A gathered array varies over these mesh axes, as the result does over the rows' mesh axes. For JAX, a result that
    # varies over other mesh axes could not be replicated over them, so operands are replicated over these beforehand.
    if summed != weight_summed:
        in_rows = {**in_rows, product.summed[0]: summed if {*summed} <= {*rows, *groups} else ()}
        in_weight = {**in_weight, product.summed[1]: weight_summed if {*weight_summed} <= {*rows} else ()}
        summed = ()
    # The result keeps its rows sharded, so `out` cannot be sharded over their mesh axes too: the weight is gathered
    # over these. That takes away minor mesh axes, so of several, only the ones before these stay.
    out = in_weight[product.out]
    if not {*out} <= {*rows}:
        out = tuple(itertools.takewhile(lambda a: a not in rows, out))
        in_weight = {**in_weight, product.out: out}
    out = () if {*out} & {*rows} else out
    of_rows = spec_of(in_rows[n] for n in product.names)
    of_weight = spec_of(in_weight[n] for n in product.weight_names)
    if not (fits(of_rows, x.shape, mesh) and fits(of_weight, weight.shape, mesh)):
        return None
    wanted = {product.rows: rows_of_result, product.out: out}
    placed = spec_of(wanted[n] for n in product.out_names)
    return _Shards(product, rows, groups, shared, summed, out, of_rows, of_weight, placed)


class _Shards(NamedTuple):
    """The sharding of a grouped product: the mesh axes that each of its axes is sharded over."""

    product: _GroupedProduct
    rows: Axes
    groups: Axes
    shared: Axes
    """The last mesh axes of the rows, if the groups are also sharded over them."""
    summed: Axes
    """The mesh axes that the summed axis is sharded over in both operands."""
    out: Axes
    of_rows: PartitionSpec
    of_weight: PartitionSpec
    wanted: PartitionSpec
    """The final sharding of the result, with its rows sharded like the rows of the operand."""

    @property
    def of_result(self) -> PartitionSpec:
        placed = {self.product.rows: self.rows, self.product.out: self.out}
        return spec_of(placed[n] for n in self.product.out_names)

    def multiply(self, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        """Multiply the local shards, inside `shard_map`."""
        product = self.product
        row = product.names.index(product.rows)
        keep = {product.rows: self.rows, product.summed[0]: self.summed}
        x = _gather_shard(x, product.names, self.of_rows, keep)
        # Before it is gathered, it varies over the same mesh axes as the rows, so that its gradient is scattered before
        # it is summed over the rest.
        weight = varying_over(weight, [a for a in self.rows if a not in axes_in(self.of_weight)])
        keep = {product.groups: self.groups, product.summed[1]: self.summed, product.out: self.out}
        weight = _gather_shard(weight, product.weight_names, self.of_weight, keep)
        if self.shared:
            x = jax.lax.all_gather(x, self.shared, axis=row, tiled=True)
        # The number of local rows of each local group, and the first of these rows.
        ends = jnp.cumsum(sizes, dtype=sizes.dtype)
        ends = jnp.stack([ends - sizes, ends])
        if self.groups:
            groups = weight.shape[product.weight_names.index(product.groups)]
            ends = jax.lax.dynamic_slice_in_dim(ends, jax.lax.axis_index(self.groups) * groups, groups, axis=1)
        if outer := self.rows[: len(self.rows) - len(self.shared)]:
            ends = ends - (jax.lax.axis_index(outer) * x.shape[row]).astype(ends.dtype)
        starts, ends = jnp.clip(ends, 0, x.shape[row])
        sizes, first = ends - starts, starts[0]
        if not self.groups:  # this device holds all groups
            y = product.multiply(x, weight, sizes)
        else:
            y = product.multiply(jnp.roll(x, -first, row), weight, sizes)
            index = jax.lax.broadcasted_iota(sizes.dtype, y.shape, row)
            y = jnp.roll(jnp.where(index < jnp.sum(sizes), y, jnp.zeros((), y.dtype)), first, row)
        if self.shared:
            y = jax.lax.psum_scatter(y, self.shared, scatter_dimension=row, tiled=True)
        added = (*self.summed, *(a for a in self.groups if a not in self.shared))
        return jax.lax.psum(y, added) if added else y


def _gather_shard(x: jax.Array, names: Names, spec: PartitionSpec, keep: dict[str, Axes]) -> jax.Array:
    """All-gather the axes of a local shard that do not keep their sharding."""
    stored = map(mesh_axes, spec)
    return gather_axes(x, [() if axes == keep[n] else axes for n, axes in zip(names, stored, strict=True)])


# --- Pallas ---

_TILE = 128


def _megablox(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """Multiply with the Pallas kernel for TPUs, or its simulation on other devices.

    The rows come first in `x`, the groups in `weight`; `transposed`: the summed axis comes last in the matrices.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # Pallas is slow to import

    # The kernel takes complete tiles of rows, and leaves rows after the last group undefined, in gradients too.
    inside = jax.lax.broadcasted_iota(sizes.dtype, (x.shape[0], 1), 0) < jnp.sum(sizes)
    rows = jax.lax.pad(jnp.where(inside, x, 0), jnp.zeros((), x.dtype), [(0, -x.shape[0] % _TILE, 0), (0, 0, 0)])
    try:
        y = gmm(rows, weight, sizes, x.dtype, (_TILE,) * 3, transpose_rhs=transposed, interpret=interpret)
    except ValueError as e:
        if "check_vma" not in str(e):
            raise
        raise ValueError(
            "MoELinear: JAX's kernel megablox (`use_gmm`) does not run where JAX tracks which values are "
            "device-varying, as in `dispatch` with sharded experts. Leave `use_gmm` out there."
        ) from e
    return jnp.where(inside, y[: x.shape[0]], 0)
