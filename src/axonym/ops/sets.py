"""Distinct values, counts, and packed bits.

The number of distinct values of an array is not known when a program is compiled. So the axis of the result is given
with its size: values that do not fit are left out, and empty places are filled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSelector, Names
from ..core import errors
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import (
    apply_along,
    at_least_float32,
    one_axis,
    operand,
    replaced,
    require_named,
    require_subset,
    scalar,
    vectors,
)

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
    weight, own = _weights("bincount", weights, x.names)
    return _bincount_kernel(x.names, Counts, own).apply(x.array, *weight)


def _require_dtype(what: str, x: jax.Array, kind: Any, expected: str) -> None:
    if not jnp.issubdtype(x.dtype, kind) and (kind is jnp.uint8 or x.dtype != jnp.bool_):
        raise TypeError(f"{what}: expected {expected}, got {x.dtype}.")


def _weights(what: str, weights: NamedOrNumeric | None, names: Names) -> tuple[tuple[Any, ...], tuple[Names, ...]]:
    """Return the weights as operands of a kernel (none or one), and their names, which the array must also have."""
    if weights is None:
        return (), ()
    array, own = operand(weights)
    require_subset(what, "weights", own, names)
    return (array,), (own,)


@_kernels.shared("names", "Counts", "own")
def _bincount_kernel(names: Names, Counts: Axis, own: tuple[Names, ...]) -> _kernels.Kernel:
    def positional(x, *weights):
        _require_dtype("bincount", x, jnp.integer, "integers")
        if jnp.issubdtype(x.dtype, jnp.signedinteger):  # negative ones would count as zero
            x = jnp.where(x < 0, Counts.size, x.astype(jnp.promote_types(x.dtype, jnp.int32)))
        x = evenly_sharded("bincount", names, x, beside=weights)
        spread = _spread(weights, own, names, x.shape)
        if spread is None:
            return jnp.bincount(x.reshape(-1), length=Counts.size)
        kind = jax.eval_shape(jnp.sum, spread).dtype
        spread = evenly_sharded("bincount", names, spread, beside=[x])
        spread = spread.reshape(-1).astype(kind)  # sums overflow in a small dtype
        if jnp.issubdtype(kind, jnp.inexact):  # and a small number added to a larger one is lost
            spread = at_least_float32(spread)
        return jnp.bincount(x.reshape(-1), spread, length=Counts.size).astype(kind)

    return _kernels.make_kernel("bincount", positional, (names, *own), (Counts.name,))


def _spread(weights: Any, own: tuple[Names, ...], names: Names, shape: tuple[int, ...]) -> jax.Array | None:
    """Broadcast the weights, if any, to the shape of the array."""
    return jnp.broadcast_to(_kernels.align(weights[0], own[0], names), shape) if own else None


def histogram(
    array: NamedArray,
    Bins: Axis | NamedArray,
    *,
    range: tuple[Any, Any] | None = None,
    weights: NamedOrNumeric | None = None,
    density: bool = False,
) -> tuple[NamedArray, NamedArray]:
    """Count the elements in each bin, over all axes, and return the counts and the edges of the bins.

    Arguments:
        Bins: the axis of the counts, for bins of one width. Or the edges of the bins, rising, as a named array with one
            axis; the axis of the counts has the same name and is shorter by one.
        range: the lowest and the highest edge; the smallest and the largest element by default.
        weights: the weight of each element, by name; one by default.
        density: scale the counts so that the integral over the bins is one.

    >>> axn.histogram(axn.named([1., 2., 2., 5.], "x"), axn.Axis("bin", 2))
    (NamedArray(float32[bin=2], [3. 1.]), NamedArray(float32[bin=3], [1. 3. 5.]))
    """
    require_named("histogram", array)
    weight, of_weight = _weights("histogram", weights, array.names)
    if isinstance(Bins, NamedArray):
        if range is not None:
            raise ValueError("histogram: `range` is for bins of one width; given edges already define the bins.")
        limits, own = vectors("histogram", Bins=Bins)
        bins = Bins.names[0]
    else:
        bins = one_axis("histogram", "Bins", Bins)
        limits, own = [scalar("histogram", "range", limit) for limit in (() if range is None else range)], ()
        if len(limits) not in (0, 2):
            raise ValueError(
                f"histogram: `range` is the lowest and the highest edge, got {errors.counted(len(limits), 'value')}."
            )
    kernel = _histogram_kernel(array.names, bins, len(limits), own, of_weight, bool(density))
    return kernel.apply(array.array, *limits, *weight)


@_kernels.shared("names", "bins", "own", "of_weight")
def _histogram_kernel(
    names: Names, bins: Axis | str, limits: int, own: Names, of_weight: tuple[Names, ...], density: bool
) -> _kernels.Kernel:
    """Make a kernel; `bins` is an axis, with two limits or none, or the axis name of the edges, as the only limit.

    `own` are the axes of a limit.
    """
    name = bins.name if isinstance(bins, Axis) else bins

    def positional(x, *rest):
        among, weights = rest[:limits], rest[limits:]
        x = at_least_float32(x)  # JAX counts in this dtype, and bfloat16 has no number between 256 and 258
        spread = _spread(weights, of_weight, names, x.shape)
        if isinstance(bins, Axis):
            return jnp.histogram(x, bins.size, among or None, spread, density)
        return jnp.histogram(x, *among, weights=spread, density=density)

    return _kernels.make_kernel("histogram", positional, (names, *[own] * limits, *of_weight), ((name,), (name,)))


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
    _require_dtype("packbits", x, jnp.integer, "integers or bools")
    return jnp.packbits(x, axis, bitorder)


def _unpacked(x: jax.Array, axis: int, bitorder: str, count: int | None = None) -> jax.Array:
    _require_dtype("unpackbits", x, jnp.uint8, "bytes, of dtype uint8")
    return jnp.unpackbits(x, axis, count, bitorder)
