"""Operations along a sharded axis that work on blocks, and exchange what blocks need of others.

They need halos, totals, or the elements at certain places: near ones are in a halo, and for others it takes all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..axis import Axis, Names
from ..distribution.active_settings import is_mapped
from ..distribution.axis_marks import exchanged
from ..distribution.mesh_axes import entry_of, has_manual, mapped_axes, mesh_around, types_of
from ..distribution.operation_scope import DerivedName
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray
from . import _blocks, _kernels
from ._blocks import Blocks, Widths, make_kernel
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
        before = _blocks.everywhere(before, position, every)
        return _blocks.merge(combine(within, before), every)

    return _blocks.make_kernel(what, positional, (names,), names)


@_kernels.shared("names", "axis")
def differences_kernel(what: str, names: Names, axis: str, blocks: Blocks, times: int) -> _kernels.Kernel:
    """Make a kernel for differences: a block needs as many elements of the next one as often as they are taken."""
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def positional(x):
        size = x.shape[position]
        wide = _blocks.with_halo(x, position, blocks, (0, times))
        found = _blocks.merge(jnp.diff(_blocks.split(wide, every), n=times, axis=position + 1), every)
        # The last ones have no neighbors. A slice of the first elements moves nothing.
        return jax.lax.slice_in_dim(found, 0, size - times, axis=position)

    return _blocks.make_kernel(what, positional, (names,), names)


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
        wide = _blocks.split(_blocks.with_halo(x, position, blocks, (1, 1)), every)
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

    return _blocks.make_kernel(what, positional, (names, spacing_names), names)


# --- look-ups ---


class Reach:
    """The distance between the shards of an axis and the elements that the shards of another one look up."""

    def __init__(self, places: np.ndarray, size: int):
        """Arguments:
        places: for each element of the other axis, which comes first, the positions along the axis; they are in range.
        size: the size of the axis.
        """
        self._places, self._size = places.astype(np.int64), size

    def widths(self, shards: int) -> Widths | None:
        """Return the widths of the halo that has them; None if all elements are fewer, or come from further away."""
        size, own = self._size, self._size // shards
        places = self._places.reshape(shards, -1) - own * np.arange(shards)[:, None]
        middle = (size - own) // 2  # of two ways around the axis, the shorter one
        places = (places + middle) % size - middle
        before, after = max(0, -int(places.min(initial=0))), max(0, int(places.max(initial=0)) + 1 - own)
        return (before, after) if max(before, after) <= own and before + after < size - own else None


def looked_up(name: str) -> str:
    """Return the name of an axis along which elements are looked up: in a kernel, no other axis is called so."""
    return DerivedName(name, f"{name} (looked up)")


def look_up(
    what: str,
    fn: Callable[..., jax.Array],
    arrays: Sequence[Any],
    in_names: Sequence[Names],
    out_names: Names,
    along: tuple[str, str],
    over: Mapping[str, Blocks],
    new: Axis,
    reach: Reach | None,
    *options: tuple[str, Any],
) -> NamedArray | None:
    """Apply a function that looks up elements along a sharded axis, for places along an axis that is sharded alike.

    Each device computes its shard of the results. Return None if the axes are not sharded so.

    Arguments:
        fn: a positional function of the operands, and of `start=` and `size=`: the position of the first element that
            it gets along the axis, and the size of the axis. Positions go on from the end of the axis at its start.
        along: the axis, as operands call it, which all others do not have, and as it is called in `over`.
        over: the blocks of each sharded axis of the first operand.
        new: the axis of the places, which the result has.
        reach: where the places are, if that is known.
        *options: further keywords of the function.
    """
    axis, name = along
    blocks = over.get(name)
    if blocks is None or new.size % blocks.shards:
        return None
    shardings: tuple[tuple[str, Blocks], ...] = ()
    if blocks.shards > 1:
        if (new.name != name and mapped_axes(new.name) != blocks.axes) or not can_run_per_device(arrays, over):
            return None
        others = [(n, over[n]) for n in in_names[0] if n in over and n != new.name]
        shardings = ((axis, blocks), (new.name, blocks), *others)
    widths = None if reach is None else reach.widths(blocks.shards)
    details = (new, reach) if blocks.shards == 1 else ()
    kernel = _look_up_kernel(what, fn, tuple(in_names), out_names, along, shardings, widths, details, options)
    return kernel.apply(*arrays)


@_kernels.cached
def _look_up_kernel(
    what: str,
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, ...],
    out_names: Names,
    along: tuple[str, str],
    shardings: tuple[tuple[str, Blocks], ...],
    widths: Widths | None,
    details: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
) -> _kernels.Kernel:
    axis, over, given = along[0], dict(shardings), dict(options)
    specs = [PartitionSpec(*(entry_of(over[n].axes) if n in over else None for n in o)) for o in (*in_names, out_names)]
    position = in_names[0].index(axis)

    def per_device(*shards: jax.Array) -> jax.Array:
        blocks, own = over[axis]._replace(manual=True), shards[0].shape[position]

        def wide(x: jax.Array, names: Names) -> jax.Array:
            if axis not in names:
                return x
            if widths is None:
                return jax.lax.all_gather(x, blocks.axes, axis=names.index(axis), tiled=True)
            return _blocks.with_halo(x, names.index(axis), blocks, widths)

        start = 0 if widths is None else jax.lax.axis_index(blocks.axes) * own - widths[0]
        seen = [wide(x, names) for x, names in zip(shards, in_names, strict=True)]
        return fn(*seen, start=start, size=own * blocks.shards, **given)

    def positional(*arrays):
        if not over:  # a trace that follows names
            shown = []
            for x, own in zip(arrays, in_names, strict=True):
                lacking = [n for n in (*in_names[0], details[0].name) if n not in (axis, *own)]
                if axis in own:
                    x = exchanged(x, "elements", along[1], *details)
                elif lacking:
                    x = exchanged(x, "parts", along[1], *lacking)
                shown.append(x)
            return fn(*shown, start=0, size=arrays[0].shape[position], **given)
        return run_per_device(per_device, arrays, specs[:-1], specs[-1], mesh_around(arrays))

    return _blocks.make_kernel(what, positional, in_names, out_names, mesh_aware=True, same_sizes=False)


# --- pencils ---
#
# An all-to-all makes the axis complete on each device, which gets a shard of another axis instead; after the operation,
# a second one goes back. A device sends its shard twice, where an all-gather would deliver the shards of all others.


Shardings = tuple[tuple[str, Blocks], ...]


def pencils(
    what: str,
    fn: Callable[..., jax.Array],
    arrays: Sequence[NamedArray],
    axis: str,
    over: Mapping[str, Blocks],
    *options: tuple[str, object],
) -> NamedArray | None:
    """Apply a function along a sharded axis, which its result keeps, on pencils; return None if there can be none.

    Arguments:
        fn: a positional function of arrays in the layout of the first one, and of `axis=`, a position. The others may
            lack axes of the first, which then have size one.
        arrays: the operands; the first has all axes, and all of them have the axis.
        over, *options: as in `look_up`.
    """
    if axis not in over:
        return None
    names, in_names, pivot = arrays[0].names, tuple(x.names for x in arrays), None
    if over[axis].shards == 1:  # a trace that follows names
        return _pencils_kernel(what, in_names, fn, axis, pivot, (), options).apply(*[x.array for x in arrays])
    if not can_run_per_device([x.array for x in arrays], over):
        return None
    shards, sizes = over[axis].shards, arrays[0].shape
    pivot = pivot_of({n: sizes[n] // (over[n].shards if n in over else 1) for n in names if n != axis}, shards)
    if pivot is None:
        return None
    shardings = tuple((n, over[n]) for n in names if n in over)
    kernel = _pencils_kernel(what, in_names, fn, axis, pivot, shardings, options)
    return kernel.apply(*[x.array for x in arrays])


def can_run_per_device(arrays: Sequence[Any], over: Mapping[str, Blocks]) -> bool:
    """Return whether devices can exchange shards of these blocks in code of their own."""
    mesh = mesh_around(arrays)
    # A full `shard_map` is needed, over axes of one type, and not under `jax.vmap`, which would add axes to it.
    if mesh.empty or has_manual(mesh) or is_mapped() or len({*types_of(mesh).values()}) > 1:
        return False
    # `all_to_all` orders devices as the mesh does, so blocks in another order would be put together wrongly.
    return all(blocks.axes == tuple(a for a in mesh.axis_names if a in blocks.axes) for blocks in over.values())


def pivot_of(local: Mapping[str, int], shards: int) -> str | None:
    """Return the axis that is sharded instead of another, given the sizes of all others in a shard.

    One that needs no padding, if there is one.
    """
    found = sorted((n for n in local if local[n] >= shards), key=lambda n: (local[n] % shards > 0, -local[n]))
    return found[0] if found else None


@_kernels.cached
def _pencils_kernel(
    what: str,
    in_names: tuple[Names, ...],
    fn: Callable[..., jax.Array],
    axis: str,
    pivot: str | None,
    shardings: Shardings,
    options: tuple[tuple[str, object], ...],
) -> _kernels.Kernel:
    names, over = in_names[0], dict(shardings)
    position, other = names.index(axis), 0 if pivot is None else names.index(pivot)
    along = over[axis].axes if over else ()
    specs = [PartitionSpec(*(entry_of(over[n].axes) if n in over else None for n in own)) for own in in_names]
    apply = functools.partial(fn, axis=position, **dict(options))

    def moved(x: jax.Array, own: Names) -> jax.Array:
        x = _kernels.align(x, own, names)
        if pivot not in own:
            return jax.lax.all_gather(x, along, axis=position, tiled=True)
        # Padded by copies of the edge, for which any function is defined; they are cut off again.
        missing = -x.shape[other] % over[axis].shards
        x = jnp.pad(x, [(0, missing if i == other else 0) for i in range(x.ndim)], mode="edge")
        return jax.lax.all_to_all(x, along, other, position, tiled=True)

    def per_device(*shards: jax.Array) -> jax.Array:
        found = apply(*[moved(x, own) for x, own in zip(shards, in_names, strict=True)])
        found = jax.lax.all_to_all(found, along, position, other, tiled=True)
        return jax.lax.slice_in_dim(found, 0, shards[0].shape[other], axis=other)

    def positional(*arrays):
        if not over:
            shown = [exchanged(x, "shards", axis) for x in arrays]
            found = apply(*[_kernels.align(x, own, names) for x, own in zip(shown, in_names, strict=True)])
            return exchanged(found, "shards", axis)
        return run_per_device(per_device, arrays, specs, specs[0], mesh_around(arrays))

    return make_kernel(what, positional, in_names, names, mesh_aware=True)
