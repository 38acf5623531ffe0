"""Operations along a sharded axis that work on blocks, and exchange what blocks need of others.

*Blocks* are the shards of an axis, one on each device. To give every block a *halo*, elements of its neighbors on both
sides, the axis is split into blocks and elements of a block, the ends of blocks are rolled along the blocks, which
sends them from device to device, and blocks with halos are merged into one longer axis. Its shards are these blocks,
so the same names and the same mapping hold for it. All else is local, and JAX differentiates and maps all of it.

Besides halos, operations need totals, or the elements at certain places: near ones are in a halo, for others it takes
all. What is computed along an axis that cannot be cut goes on pencils.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..axis import Axis, Names
from ..core.jax_versions import followed_by
from ..distribution.active_settings import is_mapped
from ..distribution.axis_marks import exchanged, is_marking
from ..distribution.mesh_axes import (
    Axes,
    entry_of,
    has_manual,
    mapped_axes,
    mesh_around,
    mesh_axes,
    padded,
    shard_count,
    sharded_over,
    types_of,
)
from ..distribution.operation_scope import DerivedName
from ..distribution.per_device import permute, run_per_device
from ..named_array import NamedArray
from . import _kernels
from ._operands import as_float

WORDS = ("periodic", "edge", "reflect", "symmetric")
"""The boundaries that have a name: as `axonym.pad` calls them, but for "periodic"."""

SCOPE = "blocks!"
"""The scope of operations that themselves exchange what blocks need: all else in it is local. No axis is called so."""

Widths = tuple[int, int]
"""How many elements a halo has before and after a block."""


class Blocks(NamedTuple):
    """The blocks of one axis."""

    shards: int = 1
    axes: Axes = ()
    """The mesh axes over which they lie; in a trace that follows names, the axis itself, which has one block."""
    manual: bool = False
    """True inside `shard_map`, where an array has one block."""

    @property
    def local(self) -> int:
        """The number of blocks that an array has here."""
        return 1 if self.manual else self.shards


def blocks_of(what: str, x: NamedArray) -> dict[str, Blocks]:
    """Return the blocks of each sharded axis, as the array or else, for a tracer, the active mapping has them."""
    array: Any = x.array
    shape = getattr(array, "shape", ())
    if is_marking() and len(shape) == len(x.names):
        return {n: Blocks(1, (n,)) for n in x.names}
    if isinstance(array, Tracer):
        array = followed_by(array)
    known = array is not None and not isinstance(array, Tracer)
    sharding = getattr(array, "sharding", None) if known else None
    # An eager operation on one device must not look for a mesh, which takes longer than the operation.
    if len(shape) != len(x.names) or (known and not (isinstance(sharding, NamedSharding) and sharding.num_devices > 1)):
        return {}
    if isinstance(sharding, NamedSharding) and len(getattr(array, "shape", ())) == len(shape):
        mesh, over = sharding.mesh, tuple(map(mesh_axes, padded(sharding.spec, len(shape))))
    else:
        mesh = mesh_around([x.array])
        if mesh.empty or has_manual(mesh):
            return {}
        over = sharded_over(what, x.names, x.array, mesh, AxisType.Auto)
    found: dict[str, Blocks] = {}
    used: set[str] = set()  # a mapping may shard several axes of an array over a mesh axis: the first one has it
    for name, axes, size in zip(x.names, over, shape, strict=True):
        own = tuple(a for a in axes if a not in used)
        used.update(own)
        if (count := shard_count(mesh, own)) > 1 and size % count == 0:
            found[name] = Blocks(count, own)
    return found


# --- raw arrays ---


def split(x: jax.Array, every: Sequence[Blocks | None]) -> jax.Array:
    """Split axes into blocks and elements of a block; None leaves an axis as it is."""
    if all(blocks is None for blocks in every):
        return x
    shape: list[int] = []
    entries: list[Any] = []
    for size, blocks in zip(x.shape, every, strict=True):
        count = 1 if blocks is None else blocks.local
        shape += [size] if blocks is None else [count, size // count]
        unconstrained = [PartitionSpec.UNCONSTRAINED]
        entries += unconstrained if blocks is None else [entry_of(blocks.axes if count > 1 else ()), *unconstrained]
    return _constrained_blocks(x.reshape(shape), every, entries)


def _constrained_blocks(x: jax.Array, every: Sequence[Blocks | None], entries: Sequence[Any]) -> jax.Array:
    types = types_of(mesh_around())
    over = {a for blocks in every if blocks is not None and not blocks.manual for a in blocks.axes}
    # Eagerly there may be no active mesh, and operations keep the sharding.
    if over and all(types.get(a) == AxisType.Auto for a in over):
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
    return x


def gathered(x: jax.Array, axis: int, every: Sequence[Blocks | None]) -> jax.Array:
    """Return an array that is split into blocks along one axis, all of which each device gets."""
    if (blocks := every[axis]) is not None and blocks.shards == 1:
        return exchanged(x, "totals", blocks.axes[0])
    return everywhere(x, axis, every)


def everywhere(x: jax.Array, axis: int, every: Sequence[Blocks | None]) -> jax.Array:
    """Return an array that is split into blocks along one axis, all of which each device has."""
    return _constrained_blocks(
        x, every, [None if i in (axis, axis + 1) else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
    )


def merge(x: jax.Array, every: Sequence[Blocks | None]) -> jax.Array:
    """Undo `split`."""
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if blocks is None else next(sizes) * next(sizes) for blocks in every])


def _passed_blocks(x: jax.Array, axis: int, blocks: Blocks, step: int) -> jax.Array:
    """Pass an array that each block has to the next block, or the one before; the last and the first are neighbors."""
    if blocks.manual:
        return permute(x, blocks.axes, [(i, (i + step) % blocks.shards) for i in range(blocks.shards)])
    if blocks.shards == 1:
        return exchanged(x, "halo", blocks.axes[0])
    last = step % blocks.shards
    return jax.lax.concatenate(jax.lax.split(x, (blocks.shards - last, last), axis)[::-1], axis)


def _mirrored_halo(x: jax.Array, axis: int, width: int, last: bool, skipped: int = 0) -> jax.Array:
    """Return the elements next to a boundary in reverse order, as in a mirror at the boundary."""
    start = x.shape[axis] - width - skipped if last else skipped
    return jnp.flip(jax.lax.slice_in_dim(x, start, start + width, axis=axis), axis)


def _filled_halo(x: jax.Array, axis: int, kind: str | None, value: Any, width: int, last: bool) -> jax.Array:
    """Return the halo beyond a boundary; `axis` counts the elements of blocks. Without a kind, it is the value."""
    shape = [*x.shape[:axis], width, *x.shape[axis + 1 :]]
    if kind in ("reflect", "symmetric"):
        return _mirrored_halo(x, axis, width, last, skipped=kind == "reflect")
    if kind == "edge":
        return jnp.broadcast_to(_mirrored_halo(x, axis, 1, last), shape)
    count = 1 if value.shape[axis - 1] % x.shape[axis - 1] else x.shape[axis - 1]  # for all blocks, or for each
    value = value.reshape(*value.shape[: axis - 1], count, value.shape[axis - 1] // count, *value.shape[axis:])
    return jnp.broadcast_to(value, shape).astype(x.dtype)


def _is_end(x: jax.Array, axis: int, blocks: Blocks, last: bool) -> jax.Array:
    """Return for each block whether a boundary is at its end."""
    end = blocks.shards - 1 if last else 0
    if blocks.manual:
        return jax.lax.axis_index(blocks.axes) == end
    shape = [blocks.shards if i == axis else 1 for i in range(x.ndim)]
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) == end


def with_halo(
    x: jax.Array,
    axis: int,
    blocks: Blocks,
    widths: Widths,
    kinds: Sequence[str | None] = ("periodic", "periodic"),
    values: Sequence[Any] = (None, None),
    held: bool = False,
) -> jax.Array:
    """Return an array with halos around the blocks of an axis; `halo_kernel` has the arguments."""
    every = [blocks if i == axis else None for i in range(x.ndim)]
    x = split(x, every)
    part = functools.partial(jax.lax.slice_in_dim, axis=axis + 1)
    size, (before, after) = x.shape[axis + 1], widths
    # Where each halo begins: if blocks have halos already, in them, and else in the block before or after.
    starts = (0, size - after) if held else (size - before, 0)
    sides = [part(x, start, start + width) for start, width in zip(starts, widths, strict=True)]
    if held:
        x = part(x, before, size - after)
    for i, (kind, width) in enumerate(zip(kinds, widths, strict=True)):
        if not width:
            continue
        filled = None if kind == "periodic" else _filled_halo(x, axis + 1, kind, values[i], width, last=i == 1)
        if not blocks.axes:  # on one device
            sides[i] = sides[i] if filled is None else filled
            continue
        if not held:
            sides[i] = _passed_blocks(sides[i], axis, blocks, -1 if i else 1)
        if filled is not None:
            sides[i] = jnp.where(_is_end(x, axis, blocks, last=i == 1), filled, sides[i])
    parts = [side for side, width in zip(sides, widths, strict=True) if width]
    return merge(jax.lax.concatenate([*parts[: bool(before)], x, *parts[bool(before) :]], axis + 1), every)


# --- kernels ---


def make_kernel(what: str, fn: Callable[..., Any], in_names: Sequence[Names], out_names: Any, **options: Any) -> Any:
    """Make a kernel for an operation that itself exchanges what blocks need."""

    def positional(*arrays):
        with jax.named_scope(SCOPE):
            return fn(*arrays)

    return _kernels.make_kernel(what, positional, in_names, out_names, **options)


@_kernels.shared("names", "axis", "value_names")
def halo_kernel(
    names: Names,
    axis: str,
    value_names: tuple[Names | None, ...],
    blocks: Blocks,
    widths: Widths,
    kinds: tuple[str | None, str | None],
    held: bool,
) -> _kernels.Kernel:
    """Make a kernel that gives the blocks of an axis a halo.

    Arguments:
        value_names: for each side, the axes of the operand that fills the halo beyond a boundary there, or None.
        kinds: for each side, one of `WORDS`, or None for an operand.
        held: whether blocks have halos already, of which only those beyond a boundary are filled again.
    """
    position = names.index(axis)
    given = [n for n in value_names if n is not None]

    def positional(x, *operands):
        aligned = iter([_kernels.align(v, n, names) for v, n in zip(operands, given, strict=True)])
        values = [None if n is None else next(aligned) for n in value_names]
        return with_halo(x, position, blocks, widths, kinds, values, held)

    what = "boundary" if held else "halo"
    return make_kernel(what, positional, (names, *given), names, same_sizes=False)


@_kernels.shared("names", "axis")
def edge_kernel(names: Names, axis: str, blocks: Blocks, widths: Widths, width: int, last: bool) -> _kernels.Kernel:
    """Make a kernel for the elements next to an end, mirrored; blocks have halos of the given widths.

    Where a block does not lie at the end it has ones, so that the gradient of a function of them is finite.
    """
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def positional(x):
        x = split(x, every)
        x = jax.lax.slice_in_dim(x, widths[0], x.shape[position + 1] - widths[1], axis=position + 1)
        edge = _mirrored_halo(x, position + 1, width, last)
        if blocks.shards > 1:
            edge = jnp.where(_is_end(x, position, blocks, last), edge, jnp.ones((), x.dtype))
        return merge(edge, every)

    return make_kernel("boundary", positional, (names,), names)


@_kernels.shared("names")
def neighbors_kernel(
    names: Names,
    blocks: tuple[Blocks, ...],
    held: tuple[Widths, ...],
    kept: tuple[Widths, ...],
    offsets: tuple[tuple[int, ...], ...],
) -> _kernels.Kernel:
    """Make a kernel that returns, for each offset, the element of blocks with halos that is so far from each element.

    The halo has the widths `held` along each axis, and in the results the widths `kept`.
    """

    def positional(x):
        every = [b if any(h) and b.local > 1 else None for b, h in zip(blocks, held, strict=True)]
        x, found = split(x, every), []
        for offset in offsets:
            starts, ends, dimension = [], [], 0
            for each, h, k, o in zip(every, held, kept, offset, strict=True):
                if each is not None:  # all blocks
                    starts, ends, dimension = [*starts, 0], [*ends, x.shape[dimension]], dimension + 1
                starts.append(h[0] - k[0] + o)
                ends.append(x.shape[dimension] - h[1] + k[1] + o)
                dimension += 1
            found.append(merge(jax.lax.slice(x, starts, ends), every))
        return tuple(found)

    return make_kernel("neighbors", positional, (names,), (names,) * len(offsets))


# --- along an axis ---


def kernel_of_blocks(
    make: Callable[..., Any], what: str, array: NamedArray, axis: Any, *options: Any, least: int = 1
) -> Any:
    """Return a kernel for the blocks of a sharded axis; None if the axis is not sharded, or blocks are too small.

    Arguments:
        make: the builder of the kernel, of `what`, names, the axis, its blocks, and the options.
        least: how many elements a block must have.
    """
    found = blocks_of(what, array)
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
        within = local(split(x, every), axis=position + 1, dtype=dtype)
        last = within.shape[position + 1] - 1
        totals = gathered(jax.lax.slice_in_dim(within, last, None, axis=position + 1), position, every)
        totals = of_totals(totals, axis=position, dtype=within.dtype)
        before = jax.lax.slice_in_dim(totals, 0, blocks.shards - 1, axis=position)
        unit = (jnp.ones if combine is jnp.multiply else jnp.zeros)((), within.dtype)
        before = jax.lax.pad(before, unit, [(int(i == position), 0, 0) for i in range(before.ndim)])
        # On both sides, or the gradient would be summed up along the blocks where they lie.
        before = everywhere(before, position, every)
        return merge(combine(within, before), every)

    return make_kernel(what, positional, (names,), names)


@_kernels.shared("names", "axis")
def differences_kernel(what: str, names: Names, axis: str, blocks: Blocks, times: int) -> _kernels.Kernel:
    """Make a kernel for differences: a block needs as many elements of the next one as often as they are taken."""
    position = names.index(axis)
    every = [blocks if n == axis else None for n in names]

    def positional(x):
        size = x.shape[position]
        wide = with_halo(x, position, blocks, (0, times))
        found = merge(jnp.diff(split(wide, every), n=times, axis=position + 1), every)
        # The last ones have no neighbors. A slice of the first elements moves nothing.
        return jax.lax.slice_in_dim(found, 0, size - times, axis=position)

    return make_kernel(what, positional, (names,), names)


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
        wide = split(with_halo(x, position, blocks, (1, 1)), every)
        if spacing_names:
            apart = split(spacing, [blocks])
            # Behind the ends they go on: two equal neighbors would make the gradient NaN.
            first, second, last, before = (jax.lax.index_in_dim(apart, i, 1, keepdims=False) for i in (0, 1, -1, -2))
            beyond = (2 * first - second, 2 * last - before)
            wide_spacing = with_halo(spacing, 0, blocks, (1, 1), (None, None), beyond)
            coordinates, spacing = split(wide_spacing, [blocks]), apart
        size = wide.shape[position + 1] - 2
        inner = jax.lax.slice_in_dim(slopes(wide, coordinates), 1, size + 1, axis=position + 1)
        alone = slopes(split(x, every), spacing)
        shape = [d if i in (position, position + 1) else 1 for i, d in enumerate(alone.shape)]
        block, place = (jax.lax.broadcasted_iota(jnp.int32, shape, position + i) for i in (0, 1))
        is_end = ((block == 0) & (place == 0)) | ((block == blocks.shards - 1) & (place == size - 1))
        return merge(jnp.where(is_end, alone, inner), every)

    return make_kernel(what, positional, (names, spacing_names), names)


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
            return with_halo(x, names.index(axis), blocks, widths)

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

    return make_kernel(what, positional, in_names, out_names, mesh_aware=True, same_sizes=False)


# --- pencils ---
#
# An all-to-all makes the axis complete on each device, which gets a shard of another axis instead; after the operation,
# a second one goes back. A device sends its shard twice, where an all-gather would deliver the shards of all others.


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
    names, pivot, raw, shardings = arrays[0].names, None, [x.array for x in arrays], ()
    if over[axis].shards > 1:  # else in a trace that follows names
        shards, sizes = over[axis].shards, arrays[0].shape
        pivot = pivot_of({n: sizes[n] // (over[n].shards if n in over else 1) for n in names if n != axis}, shards)
        if pivot is None or not can_run_per_device(raw, over):
            return None
        shardings = tuple((n, over[n]) for n in names if n in over)
    return _pencils_kernel(what, tuple(x.names for x in arrays), fn, axis, pivot, shardings, options).apply(*raw)


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
    shardings: tuple[tuple[str, Blocks], ...],
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
