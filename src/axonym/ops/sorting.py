"""Sort along one axis, find distinct values, count, and pack bits.

Elements are ordered as in NumPy: NaN comes last. `axonym.top_k` brings its own partitioning, so it is in
`axonym.custom_partitioning`. The number of distinct values of an array is not known when a program is compiled, so the
axis of the result is given with its size: values that do not fit are left out, and empty places are filled.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelector, Names
from ..core import errors
from ..distribution.mesh_axes import evenly_sharded
from ..distribution.per_device import vary_like
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import (
    apply_along,
    at_least_float32,
    one_axis,
    only_axis,
    operand,
    replaced,
    require_named,
    require_subset,
    scalar,
)


@errors.say_how_to_call
def sort(a: NamedArray, axis: AxisSelector | None = None, *, descending: bool = False) -> NamedArray:
    """Sort elements along an axis, the largest first if `descending`.

    >>> axn.sort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 3])
    """
    axis = only_axis("sort", require_named("sort", a), axis)
    return apply_along(_sort, "sort", a, axis, descending=bool(descending))


def _sort(x: jax.Array, axis: int, descending: bool) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.sort(x, axis=axis, descending=descending)
    return jnp.flip(sort_along(axis, x), axis) if descending else sort_along(axis, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sort_along(axis: int, x: jax.Array) -> jax.Array:
    """Sort, with a gradient that XLA can partition: the gradient of `jnp.sort` looks up unsigned positions.

    For these XLA ends the process if an axis of the array is sharded unevenly, as a slice of a sharded axis is.
    """
    return jnp.sort(x, axis=axis)


@sort_along.defjvp
def _(axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    result, order = _with_positions(axis, *primals)
    return result, take_in_order(*tangents, order, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_positions(axis: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    result, order = jax.lax.sort((x, positions_along(axis, x)), dimension=axis, num_keys=1)
    return result, order


@_with_positions.defjvp
def _(axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    result, order = _with_positions(axis, *primals)
    return (result, order), (take_in_order(*tangents, order, axis), np.zeros(order.shape, jax.dtypes.float0))


def positions_along(axis: int, x: jax.Array) -> jax.Array:
    """Return the position of each element along an axis."""
    return vary_like(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis), x)


def take_in_order(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """Reorder elements along an axis by their positions, which are signed, so that XLA can partition the gradient."""
    names = ["" if i != axis else "order" for i in range(x.ndim)]
    order = evenly_sharded("sort", names, order, ["order"], beside=[x])
    found = jnp.take_along_axis(x, order, axis, mode="promise_in_bounds")
    return evenly_sharded("sort", names, found, ["order"])


def argsort(
    a: NamedArray, axis: AxisSelector | None = None, *, stable: bool = True, descending: bool = False
) -> NamedArray:
    """Return the positions that sort the elements along an axis, as `sort` does.

    Equal elements keep their order. With `stable=False` they need not, which can be faster.

    >>> axn.argsort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 0])
    """
    axis = only_axis("argsort", require_named("argsort", a), axis)
    return apply_along(_positions, "argsort", a, axis, stable=bool(stable), descending=bool(descending))


def _positions(x: jax.Array, **options: Any) -> jax.Array:
    # Inside `shard_map`, JAX sorts positions together with values, and assumes that they are the same on all devices.
    return vary_like(jnp.argsort(x, **options), x)


# --- distinct values ---


def unique(
    array: NamedArray,
    Unique: Axis,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: AxisSelector | None = None,
    fill_value: NamedOrNumeric | None = None,
) -> Any:
    """Return the distinct values of an array, in order.

    Arguments:
        Unique: the axis of the values. Values that do not fit are left out.
        return_index: also return the first position of each value, along `axis` or in the flattened array.
        return_inverse: also return, for each element, the position of its value among the distinct values.
        return_counts: also return how often each value occurs.
        axis: the axis whose slices are compared; by default single elements are compared.
        fill_value: the value of empty places; by default the smallest value.

    >>> axn.unique(axn.named([3, 1, 3], "x"), axn.Axis("value", 3), fill_value=-1)
    NamedArray(int32[value=3], [ 1 3 -1])
    """
    require_named("unique", array)
    returned = (bool(return_index), bool(return_inverse), bool(return_counts))
    fill = () if fill_value is None else (scalar("unique", "fill_value", fill_value),)
    kernel = _unique_kernel(array.names, one_axis("unique", "Unique", Unique), axis, returned, len(fill))
    return kernel.apply(array.array, *fill)


@_kernels.shared("names", "Unique", "axis")
def _unique_kernel(
    names: Names, Unique: Axis, axis: AxisSelector | None, returned: tuple[bool, bool, bool], fills: int
) -> _kernels.Kernel:
    each = (Unique.name,)
    if axis is None:
        position, values, slices = None, each, names
    else:
        along = _kernels.select_one("unique", names, axis)
        position, values, slices = names.index(along), replaced("unique", names, along, (Unique,)), (along,)
    index, inverse, counts = returned
    out_names = (values, *[n for n, wanted in ((each, index), (slices, inverse), (each, counts)) if wanted])

    def positional(x, fill=None):
        return jnp.unique(x, index, inverse, counts, position, size=Unique.size, fill_value=fill)

    in_names = (names, *[()] * fills)
    return _kernels.make_kernel("unique", positional, in_names, out_names if any(returned) else values, selection=axis)


# --- counting ---


def bincount(x: NamedArray, Counts: Axis, *, weights: NamedOrNumeric | None = None, minlength: int = 0) -> NamedArray:
    """Count how often each of the integers 0, 1, 2, ... occurs, over all axes.

    Arguments:
        x: a named array of integers. Negative ones, and ones beyond the axis of the counts, are not counted.
        weights: the weight of each element, by name; one by default.
        minlength: the least size of `Counts`, which is checked.

    >>> axn.bincount(axn.named([0, 2, 2], "x"), axn.Axis("value", 4))
    NamedArray(int32[value=4], [1 0 2 0])
    """
    require_named("bincount", x)
    Counts = one_axis("bincount", "Counts", Counts)
    if minlength > Counts.size:
        raise ValueError(f"bincount: `minlength` is {minlength}, but axis {Counts.name!r} only has size {Counts.size}.")
    array, own = (None, ()) if weights is None else operand(weights)
    require_subset("bincount", "weights", own, x.names)
    kernel = _bincount_kernel(x.names, Counts, None if weights is None else own)
    return kernel.apply(x.array) if weights is None else kernel.apply(x.array, array)


@_kernels.shared("names", "Counts", "own")
def _bincount_kernel(names: Names, Counts: Axis, own: Names | None) -> _kernels.Kernel:
    def positional(x, *weights):
        if not jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.bool_:
            raise TypeError(f"bincount: expected integers, got {x.dtype}.")
        if jnp.issubdtype(x.dtype, jnp.signedinteger):  # negative ones would count as zero
            x = jnp.where(x < 0, Counts.size, x.astype(jnp.promote_types(x.dtype, jnp.int32)))
        x = evenly_sharded("bincount", names, x, beside=weights)
        if own is None:
            return jnp.bincount(x.reshape(-1), length=Counts.size)
        spread = jnp.broadcast_to(_kernels.align(weights[0], own, names), x.shape)
        kind = jax.eval_shape(jnp.sum, spread).dtype
        spread = evenly_sharded("bincount", names, spread, beside=[x])
        spread = spread.reshape(-1).astype(kind)  # sums overflow in a small dtype
        if jnp.issubdtype(kind, jnp.inexact):  # and a small number added to a larger one is lost
            spread = at_least_float32(spread)
        return jnp.bincount(x.reshape(-1), spread, length=Counts.size).astype(kind)

    return _kernels.make_kernel("bincount", positional, (names,) if own is None else (names, own), (Counts.name,))


# --- bits ---


def packbits(a: NamedArray, axis: AxisSelector, *, bitorder: str = "big") -> NamedArray:
    """Pack every eight elements along an axis into the bits of one byte, padding with zeros at the end if needed.

    Arguments:
        a: a named array of integers or bools; an element that is not zero is a bit that is set.
        bitorder: "big" if the first element is the highest bit, "little" if it is the lowest.

    >>> axn.packbits(axn.named([1, 0, 0, 0, 0, 0, 1, 1], "bit"), "bit")
    NamedArray(uint8[bit=1], [131])
    """
    _check_order("packbits", bitorder)
    return apply_along(_packed, "packbits", a, axis, bitorder=bitorder)


def unpackbits(a: NamedArray, axis: AxisSelector, *, count: int | None = None, bitorder: str = "big") -> NamedArray:
    """Unpack the bits of each byte into eight elements along an axis.

    Arguments:
        a: a named array of bytes, `uint8`.
        count: how many elements to keep along the axis; all by default. A negative number leaves out as many at the
            end.
        bitorder: as for `packbits`.

    >>> axn.unpackbits(axn.named(jnp.array([131], "uint8"), "bit"), "bit", count=7)
    NamedArray(uint8[bit=7], [1 0 0 0 0 0 1])
    """
    _check_order("unpackbits", bitorder)
    return apply_along(_unpacked, "unpackbits", a, axis, bitorder=bitorder, count=count)


def _check_order(what: str, bitorder: str) -> None:
    if bitorder not in ("big", "little"):
        raise ValueError(f'{what}: `bitorder` is "big" or "little", got {bitorder!r}.')


def _packed(x: jax.Array, axis: int, bitorder: str) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.bool_:
        raise TypeError(f"packbits: expected integers or bools, got {x.dtype}.")
    return jnp.packbits(x, axis, bitorder)


def _unpacked(x: jax.Array, axis: int, bitorder: str, count: int | None = None) -> jax.Array:
    if x.dtype != jnp.uint8:
        raise TypeError(f"unpackbits: expected bytes, of dtype uint8, got {x.dtype}.")
    return jnp.unpackbits(x, axis, count, bitorder)
