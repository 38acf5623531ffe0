"""Operations along a sharded axis that work on blocks, and exchange what blocks need of others: halos or totals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import Axis, Names
from ..named_array import NamedArray
from . import _blocks, _kernels
from ._blocks import Blocks
from ._operands import as_float


def kernel_of_blocks(
    make: Callable[..., Any], what: str, array: NamedArray, axis: Any, *options: Any, least: int = 1
) -> Any:
    """Return a kernel for the blocks of a sharded axis; None if the axis is not sharded, or blocks are too small.

    Arguments:
        make: the builder of the kernel, of `what`, names, the axis, its blocks, and the options.
        least: how many elements a block must have.
    """
    found = _blocks.blocks_of(what, array)
    axis = _kernels.one_selector(what, axis) if found else None
    name: Any = axis.name if isinstance(axis, Axis) and array.shape.get(axis.name) == axis.size else axis
    if name not in found or array.axis_size(name) < least * found[name].shards:
        return None
    return make(what, array.names, name, found[name], *options)


@_kernels.shared("names", "axis")
def running_kernel(
    what: str,
    names: Names,
    axis: str,
    blocks: Blocks,
    local: Callable[..., Any],
    of_totals: Callable[..., Any],
    combine: Callable[..., Any],
    dtype: Any,
) -> _kernels.Kernel:
    """Make a kernel for a running reduction: within blocks, then over the totals of blocks, which all devices get."""
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def positional(x):
        within = local(_blocks.split(x, every), axis=position + 1, dtype=dtype)
        last = within.shape[position + 1] - 1
        totals = _blocks.gathered(jax.lax.slice_in_dim(within, last, None, axis=position + 1), position, every)
        totals = of_totals(totals, axis=position, dtype=within.dtype)
        before = jax.lax.slice_in_dim(totals, 0, blocks.shards - 1, axis=position)
        unit = (jnp.ones if combine is jnp.multiply else jnp.zeros)((), within.dtype)
        before = jax.lax.pad(before, unit, [(int(i == position), 0, 0) for i in range(before.ndim)])
        # On both sides, or the gradient would be summed up along the blocks where they lie.
        before = _blocks.gathered(before, position, every)
        return _blocks.merge(combine(within, before), every)

    return _kernels.make_kernel(what, positional, (names,), names)


@_kernels.shared("names", "axis")
def differences_kernel(what: str, names: Names, axis: str, blocks: Blocks, times: int) -> _kernels.Kernel:
    """Make a kernel for differences: a block needs as many elements of the next one as often as they are taken."""
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def positional(x):
        size = x.shape[position]
        wide = _blocks.with_halo(x, position, blocks, (0, times), ("periodic", "periodic"), (None, None))
        found = _blocks.merge(jnp.diff(_blocks.split(wide, every), n=times, axis=position + 1), every)
        # The last ones have no neighbors. A slice of the first elements moves nothing.
        return jax.lax.slice_in_dim(found, 0, size - times, axis=position)

    return _kernels.make_kernel(what, positional, (names,), names)


@_kernels.shared("names", "axis", "spacing_names")
def slopes_kernel(what: str, names: Names, axis: str, blocks: Blocks, spacing_names: Names) -> _kernels.Kernel:
    """Make a kernel for slopes; at the ends of the axis, they are the slopes that the block alone has."""
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def slopes(x: jax.Array, spacing: jax.Array) -> Any:  # JAX's type is a list, too, for several axes
        if not spacing_names:
            return jnp.gradient(x, spacing, axis=position + 1)
        one = functools.partial(jnp.gradient, axis=position)
        return jax.vmap(one, in_axes=(position, 0), out_axes=position)(x, spacing)

    def positional(x, spacing):
        x, coordinates = as_float(x), spacing
        ends = ("periodic", "periodic"), (None, None)
        wide = _blocks.split(_blocks.with_halo(x, position, blocks, (1, 1), *ends), every)
        if spacing_names:
            apart = _blocks.split(spacing, [blocks])
            # Behind the ends they go on: two equal neighbors would make the gradient NaN.
            first, second, last, before = (jax.lax.index_in_dim(apart, i, 1, keepdims=False) for i in (0, 1, -1, -2))
            beyond = (2 * first - second, 2 * last - before)
            wide_spacing = _blocks.with_halo(spacing, 0, blocks, (1, 1), (None, None), beyond)
            coordinates, spacing = _blocks.split(wide_spacing, [blocks]), apart
        size = wide.shape[position + 1] - 2
        inner = jax.lax.slice_in_dim(slopes(wide, coordinates), 1, size + 1, axis=position + 1)
        alone = slopes(_blocks.split(x, every), spacing)
        shape = [d if i in (position, position + 1) else 1 for i, d in enumerate(alone.shape)]
        block, place = (jax.lax.broadcasted_iota(jnp.int32, shape, position + i) for i in (0, 1))
        is_end = ((block == 0) & (place == 0)) | ((block == blocks.shards - 1) & (place == size - 1))
        return _blocks.merge(jnp.where(is_end, alone, inner), every)

    return _kernels.make_kernel(what, positional, (names, spacing_names), names)
