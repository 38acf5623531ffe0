"""Reduce each segment of an array: the edges that end at a node, the members of a group, the tokens of a document.

An array of integers says which segment each element belongs to. It is matched with the array by name, and both may be
sharded: each device reduces its own elements, and results of the size of the segments are combined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSelection, Names
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray
from . import _kernels
from ._op_types import publish
from ._operands import (
    as_float,
    as_positions,
    at_least_float32,
    at_least_int32,
    distinct,
    extreme,
    one_axis,
    require_named,
    require_positions,
    require_subset,
)
from .creation import ones_like
from .elementwise import divide, maximum


class _SegmentReduction(Protocol):
    """`f(array, segments, new_axis)`: reduce the elements of each segment."""

    def __call__(
        self, array: NamedArray, segments: NamedArray, new_axis: Axis, *, axis: AxisSelection | None = None
    ) -> NamedArray: ...


def _make_segment_reduction(name: str, fn: Callable[..., NamedArray], summary: str, shown: str) -> _SegmentReduction:
    def op(array: NamedArray, segments: NamedArray, new_axis: Axis, *, axis: AxisSelection | None = None) -> NamedArray:
        return fn(name, array, segments, new_axis, axis)

    doc = f"""{summary}

    Arguments:
        array: a named array.
        segments: the number of the segment of each element: integers along some axes of `array`. Elements with -1
            belong to no segment. Other numbers out of range are an error outside jit, where they are checked; in jit,
            their elements belong to no segment.
        new_axis: the axis of the segments. In the result, it takes the place of the axes that are reduced.
        axis: the axes to reduce along; by default all axes of `segments`. Its others are batch axes, matched by name.

    >>> x = axn.named([1., 2., 3.], "edge")
    >>> axn.{name}(x, axn.named([0, 2, 0], "edge"), axn.Axis("node", 3))
    NamedArray(float32[node=3], {shown})
    """
    return publish(op, name, __name__, doc)


def _reduce_segments(what: str, array: Any, segments: Any, new_axis: Axis, axis: AxisSelection | None) -> NamedArray:
    array, segments = require_named(what, array), require_named(what, segments)
    new_axis = one_axis(what, "new_axis", new_axis)
    kernel = _segment_kernel(what, array.names, segments.names, new_axis, _kernels.hashable(axis))
    result = kernel.apply(array.array, segments.array)
    require_positions(what, "a segment", segments, new_axis, -1, " -1 is for elements of no segment.")
    return result


def _mean_of_segments(what: str, array: Any, segments: Any, new_axis: Axis, axis: AxisSelection | None) -> NamedArray:
    x = as_float(require_named(what, array))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # half precision can hold neither the sum nor the count
    total = _reduce_segments(what, wide, segments, new_axis, axis)
    count = _reduce_segments(what, ones_like(segments), segments, new_axis, axis)
    return divide(total, maximum(count, 1).astype(total.dtype)).astype(x.dtype)


# fmt: off
segment_sum = _make_segment_reduction("segment_sum", _reduce_segments, "Add up the elements of each segment. The sum of a segment without elements is zero.", "[4. 0. 2.]")
segment_mean = _make_segment_reduction("segment_mean", _mean_of_segments, "Compute the mean of the elements of each segment, zero if it has none.", "[2. 0. 2.]")
segment_max = _make_segment_reduction("segment_max", _reduce_segments, "Return the largest element of each segment.\n\n    A segment without elements gives the least value of the dtype: minus infinity for floats.", "[  3. -inf   2.]")
segment_min = _make_segment_reduction("segment_min", _reduce_segments, "Return the smallest element of each segment.\n\n    A segment without elements gives the greatest value of the dtype: infinity for floats.", "[ 1. inf  2.]")
# fmt: on


@_kernels.shared("names", "own", "new_axis", "axis")
def _segment_kernel(what: str, names: Names, own: Names, new_axis: Axis, axis: AxisSelection | None) -> _kernels.Kernel:
    along = _kernels.select(what, own, axis, operand=1)
    require_subset(what, "segments", own, names)
    if not along:
        raise ValueError(f"{what}: `segments` must have the axes to reduce along, got none.")
    first = next(n for n in names if n in along)
    out_names = tuple(new_axis.name if n == first else n for n in names if n == first or n not in along)
    at, batch = distinct(what, out_names).index(new_axis.name), [n for n in own if n not in along]
    ordered = tuple(n for n in names if n in own)
    scatter = functools.partial(
        _SCATTER[what.removeprefix("segment_")],
        # The axes of the array stay where they are.
        dimension_numbers=jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(i for i, n in enumerate(names) if n not in own),
            inserted_window_dims=(at,),
            scatter_dims_to_operand_dims=(at,),
            operand_batching_dims=tuple(out_names.index(n) for n in batch),
            scatter_indices_batching_dims=tuple(ordered.index(n) for n in batch),
        ),
        mode="drop",
    )

    def positional(x, segments):
        if not jnp.issubdtype(segments.dtype, jnp.integer):
            raise TypeError(f"{what}: `segments` must be integers, got {segments.dtype}.")
        sizes = dict(zip(names, x.shape, strict=True)) | {new_axis.name: new_axis.size}
        numbers = at_least_int32(as_positions(_kernels.transpose_to(segments, own, ordered), new_axis.size))
        numbers = evenly_sharded(what, ordered, numbers, along, beside=[x], fill=new_axis.size)  # which is dropped
        x = evenly_sharded(what, names, x, along, beside=[segments], fill=0)
        return scatter([sizes[n] for n in out_names], numbers[..., None], x)

    return _kernels.make_kernel(what, positional, (names, own), out_names, selection=axis)


# --- by position: from the shape of the result, the numbers and the elements ---


def _extreme(scatter: Callable[..., jax.Array], largest: bool, shape: Any, numbers: Any, x: Any, **how: Any) -> Any:
    return scatter(jnp.full(shape, extreme(x.dtype, largest)), numbers, x, **how)


def _accumulated(
    scatter: Callable[..., jax.Array], reduction: Any, start: int, shape: Any, numbers: Any, x: Any, **how: Any
) -> Any:
    """Reduce in the dtype in which a whole array is reduced, or in a wider one."""
    kind = jax.eval_shape(reduction, x).dtype
    x = at_least_float32(x.astype(kind)) if jnp.issubdtype(kind, jnp.inexact) else x.astype(kind)
    return scatter(jnp.full(shape, start, x.dtype), numbers, x, **how).astype(kind)


_SCATTER: dict[str, Callable[..., Any]] = {
    "sum": functools.partial(_accumulated, jax.lax.scatter_add, jnp.sum, 0),
    "mean": functools.partial(_accumulated, jax.lax.scatter_add, jnp.sum, 0),
    "max": functools.partial(_extreme, jax.lax.scatter_max, False),
    "min": functools.partial(_extreme, jax.lax.scatter_min, True),
}
