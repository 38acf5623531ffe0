"""Draw slices of an array, and permutations at random."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSelector, AxisSpec
from ..core import errors
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray
from ..ops import _kernels
from ..ops._new_array import sharded_kernel
from ..ops._operands import at_least_float32, require_named
from ..ops.sorting import positions_along, take_in_order
from ._draw import Key, axis_of, check_enough, new_axes, one_key


def choice(
    key: Key, shape: AxisSpec, a: NamedArray, axis: AxisSelector, replace: bool = True, p: NamedArray | None = None
) -> NamedArray:
    """Choose slices of an array at random along an axis.

    Arguments:
        shape: the axes of the choices. `axis` may be one of them; other axes of `a` may not.
        a: the array to choose from.
        axis: the axis of `a` along which to choose.
        replace: whether the same slice may be chosen more than once.
        p: the probability of each slice, along `axis`; equal by default.

    The result has the axes of `shape`, then the axes of `a` except `axis`.

    >>> axn.random.choice(jax.random.key(0), {"draw": 5}, axn.ones({"batch": 8, "embed": 4}), "batch").shape
    {'draw': 5, 'embed': 4}
    """
    what = "random.choice"
    key = one_key(what, key)
    along = axis_of(what, a, axis)
    axes = new_axes(what, shape)
    if not replace:
        check_enough(what, axes, along)
    if p is not None and require_named(what, p).axes != (along,):
        raise ValueError(
            f"{what}: `p` has exactly the axis {along} of `a`, got {errors.describe_shape(p.shape)}. Write "
            f"`p=axonym.named(probabilities, {along.name!r})`, or rename its axis."
        )
    kernel = _choice_kernel(what, a.axes, along, axes, bool(replace), p is not None)
    arrays = (a.array,) if p is None else (a.array, p.array)
    return kernel.apply(key, *arrays)


@_kernels.shared("from_axes", "along", "axes")
def _choice_kernel(
    what: str, from_axes: tuple[Axis, ...], along: Axis, axes: tuple[Axis, ...], replace: bool, weighted: bool
) -> _kernels.Kernel:
    position = from_axes.index(along)
    rest = tuple(a for a in from_axes if a is not along)
    sizes = tuple(a.size for a in axes)
    before = tuple(range(position))
    chosen = tuple(range(position, position + len(axes)))
    after = tuple(range(position + len(axes), len(axes) + len(rest)))

    def positional(key, a, p=None):
        if p is not None:
            p = at_least_float32(p)
        index = jax.random.choice(key, along.size, sizes, replace=replace, p=p)
        chosen_names = [axis.name for axis in axes]
        index = evenly_sharded(what, chosen_names, index, beside=[a])
        found = jnp.take(a, index, axis=position, mode="clip")
        names = [axis.name for axis in (*rest[:position], *axes, *rest[position:])]
        found = evenly_sharded(what, names, found, chosen_names)
        return jnp.transpose(found, (*chosen, *before, *after)) if before else found

    in_names = [tuple(a.name for a in from_axes)] + [(along.name,)] * weighted
    return sharded_kernel(what, positional, [(), *in_names], new_axes(what, (*axes, *rest)))


def permutation(key: Key, x: NamedArray, axis: AxisSelector, independent: bool = False) -> NamedArray:
    """Permute an array at random along an axis.

    Arguments:
        independent: whether to permute independently for each index of the other axes, so that slices do not stay
            together.

    >>> axn.random.permutation(jax.random.key(0), axn.arange(axn.Axis("x", 5)), "x").sum()
    NamedArray(int32[], 10)
    """
    what = "random.permutation"
    key = one_key(what, key)
    along = axis_of(what, x, axis)
    return _permutation_kernel(what, x.axes, along, bool(independent)).apply(key, x.array)


@_kernels.shared("axes", "along")
def _permutation_kernel(what: str, axes: tuple[Axis, ...], along: Axis, independent: bool) -> _kernels.Kernel:
    position = axes.index(along)

    def positional(key, x):
        if not independent and len(axes) > 1:
            # As JAX does, but with positions of 32 bits: see `as_positions`.
            order = jax.random.permutation(key, jnp.arange(x.shape[position], dtype=jnp.int32))
            order = evenly_sharded(what, [along.name], order, beside=[x])
            found = jnp.take(x, order, position, unique_indices=True)
            return evenly_sharded(what, [a.name for a in axes], found, [along.name])
        # Here JAX sorts the elements themselves, the gradient of which XLA cannot partition: see `sort_along`.
        order = jax.random.permutation(key, positions_along(position, x), axis=position, independent=independent)
        return take_in_order(x, order, position)

    return sharded_kernel(what, positional, [(), tuple(a.name for a in axes)], axes)
