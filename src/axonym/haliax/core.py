"""Haliax's `core`: named arrays, their layout and their parts."""

# ruff: noqa: I001
# fmt: off
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import (
    Axis as Axis, NamedArray as NamedArray, broadcast_arrays as broadcast_arrays, broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to, flatten as flatten, flatten_axes as flatten_axes, index as index,
    is_named_array as is_named_array, named as named, rename as _rename, roll as roll, slice as _slice, split as split,
    take as take, top_k as _top_k, unbind as unbind, unflatten_axis as unflatten_axis,
)
from ..named_array import shape_checks
from ..axis import (
    axis_name as axis_name, axis_spec_to_shape_dict as axis_spec_to_shape_dict, rearrange_for_partial_order,
    selects_axis as selects_axis,
)
from .._parsing import parse
from ..ops.rearranging import rearrange as _rearrange
from ..ops.updating import updated_slice as _updated_slice
from ..typing import (
    AxisSelection as AxisSelection, AxisSelector as AxisSelector, AxisSpec as AxisSpec,
    NamedArrayAxes as NamedArrayAxes, NamedArrayAxesSpec as NamedArrayAxesSpec, NamedOrNumeric as NamedOrNumeric,
    PartialShapeDict as PartialShapeDict, ShapeDict as ShapeDict,
)
from ._signatures import with_parameters as _with_parameters
from .axis import axis_name as _name, dslice as dslice, eliminate_axes as eliminate_axes
from .types import (
    GatherScatterModeStr as GatherScatterModeStr, IntScalar as IntScalar, PrecisionLike as PrecisionLike,
    Scalar as Scalar,
)
# fmt: on

ravel = flatten
top_k = _with_parameters(_top_k, array="arr")


@contextlib.contextmanager
def enable_shape_checks(enabled: bool) -> Iterator[None]:
    """Choose whether `NamedArray(array, axes)` compares the axes with the array, inside a with-block.

    Pytrees are rebuilt without checks anyway; this is for code that builds named arrays around placeholders.

    >>> with hax.enable_shape_checks(False):
    ...     x = hax.NamedArray(None, hax.Axis("x", 2))
    """
    token = shape_checks.set(enabled)
    try:
        yield
    finally:
        shape_checks.reset(token)


def are_shape_checks_enabled() -> bool:
    """Return whether `NamedArray(array, axes)` compares the axes with the array.

    >>> hax.are_shape_checks_enabled()
    True
    """
    return shape_checks.get()


def ndim(a: NamedOrNumeric) -> int:
    """Return the number of axes of a named array, a raw array or a number.

    >>> hax.ndim(hax.ones({"x": 2, "y": 3})), hax.ndim(1.0)
    (2, 0)
    """
    return a.ndim if isinstance(a, NamedArray) else jnp.ndim(a)


def rearrange(array: NamedArray, *args: Any, **kwargs: Any) -> NamedArray:
    """Rearrange as `axonym.rearrange` does, but ignore keywords that the expression does not use.

    >>> hax.rearrange(hax.ones({"x": 2, "y": 3}), "x y -> y x", z=4).shape
    {'y': 3, 'x': 2}
    """
    if kwargs and len(args) == 1 and isinstance(args[0], str):
        expression = parse("rearrange", args[0], comma="elements")
        terms = (*expression.lhs, *expression.rhs)
        used = {v.name for t in terms for v in t.variables}
        used |= {g.name.name for t in terms for g in t.groups if g.name is not None}
        kwargs = {k: v for k, v in kwargs.items() if k in used}
    return _rearrange(array, *args, **kwargs)


def tree_flatten(array: NamedArray) -> tuple[tuple[Any], tuple[Axis, ...]]:
    """Flatten a named array into a tuple of the raw array, and the axes.

    >>> hax.ones({"x": 2}).tree_flatten()
    ((Array([1., 1.], dtype=float32),), (Axis(name='x', size=2),))
    """
    return (array.array,), array.axes


def tree_unflatten(cls: type[NamedArray], aux: Any, tree: Any) -> NamedArray:
    """Rebuild a named array from what `tree_flatten` returned.

    >>> hax.NamedArray.tree_unflatten(hax.Axis("x", 2), (jnp.ones(2),))
    NamedArray(float32[x=2], [1. 1.])
    """
    (array,) = tree
    return cls(array, aux)


def rename(array: NamedArray, renames: Mapping[AxisSelector, AxisSelector]) -> NamedArray:
    """Rename as `axonym.rename` does, but ignore names that the array lacks.

    >>> hax.rename(hax.ones({"x": 2}), {"x": "y", "z": "w"}).shape
    {'y': 2}
    """
    return _rename(array, {old: new for old, new in renames.items() if _name(old) in array.names})


def slice(array: NamedArray, axis: Any = None, new_axis: Any = None, *, start: Any = None, length: Any = None) -> Any:
    """Slice as `axonym.slice` does, but move a slice that does not fit until it does.

    >>> hax.slice(hax.arange(hax.Axis("x", 4)), "x", start=3, length=2)
    NamedArray(int32[x=2], [2 3])
    """
    if isinstance(axis, Mapping):
        return _slice(array, {k: _as_movable(v) for k, v in axis.items()}, new_axis, start=start, length=length)
    start = {k: _as_movable(v) for k, v in start.items()} if isinstance(start, Mapping) else _as_movable(start)
    return _slice(array, axis, new_axis, start=start, length=length)


def updated_slice(array: NamedArray, start: Mapping[Any, Any], update: NamedArray) -> NamedArray:
    """Replace a slice. A negative start, and any that is traced, is moved until the slice fits.

    >>> hax.updated_slice(hax.zeros({"x": 4}), {"x": -1}, hax.ones({"x": 2}))
    NamedArray(float32[x=4], [0. 0. 1. 1.])
    """
    for axis, first in start.items():
        if isinstance(first, int) and update.has_axis(_name(axis)) and array.has_axis(_name(axis)):
            size, room = update.axis_size(_name(axis)), array.axis_size(_name(axis))
            if first + size > room:
                raise ValueError(
                    f"updated_slice: {size} elements from {first} on do not fit axis {_name(axis)!r} of size {room}."
                )
    return _updated_slice(array, {k: _as_movable(v) for k, v in start.items()}, update)


def _as_movable(start: Any) -> Any:
    """Turn an integer position into an array: arrays out of range are clamped, where integers raise an error."""
    return np.asarray(start, np.int32) if isinstance(start, (int, np.integer)) else start


def flatten_all_axes_but(
    a: NamedArray, axis_name: str, axis: AxisSelection, reorder_to_front: bool = False
) -> tuple[NamedArray, Callable[[NamedArray], NamedArray]]:
    """Merge axes into one, and get a function that brings them back afterwards.

    Despite the name, `axis` says which axes are merged. The function takes an array that has the merged axis, and may
    have lost other axes or won some; those axes that it shares with `a` stand in the order of `a` again.

    >>> x = hax.ones({"batch": 2, "pos": 3, "embed": 4})
    >>> flat, restore = hax.core.flatten_all_axes_but(x, "rows", ("batch", "pos"))
    >>> flat.shape, restore(flat.sum("embed")).shape
    ({'rows': 6, 'embed': 4}, {'batch': 2, 'pos': 3})
    """
    merged = a.resolve_axis(axis)
    flat = flatten_axes(a, merged, axis_name)

    def restore(new: NamedArray) -> NamedArray:
        new = unflatten_axis(new, axis_name, merged)
        order = [name if name in new.names else ... for name in a.names]
        order = order if ... in order else [*order, ...]
        return rearrange(new, rearrange_for_partial_order(order, new.axes))

    return rearrange(flat, (axis_name, ...)) if reorder_to_front else flat, restore
