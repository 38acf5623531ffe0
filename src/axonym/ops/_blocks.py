"""Blocks: the shards of an axis, each with a halo, as one axis of a named array.

A sharded axis is a row of blocks, one on each device. To give every block a *halo*, elements of its neighbors on both
sides, the axis is split into blocks and elements of a block, the ends of blocks are rolled along the blocks, which
sends them from device to device, and blocks with halos are merged into one longer axis. Its shards are these blocks,
so the same names and the same mapping hold for it. All else is local, and JAX differentiates and maps all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..axis import Names
from ..core.jax_versions import followed_by
from ..distribution.axis_marks import exchanged, is_marking
from ..distribution.mesh_axes import (
    Axes,
    entry_of,
    has_manual,
    mesh_around,
    mesh_axes,
    padded,
    shard_count,
    sharded_over,
    types_of,
)
from ..distribution.per_device import permute
from ..named_array import NamedArray
from . import _kernels

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
