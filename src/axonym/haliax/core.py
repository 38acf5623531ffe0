"""Named arrays, their layout and their parts."""

# ruff: noqa: I001
# fmt: off
import contextlib
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from .. import (
    Axis as Axis, NamedArray as NamedArray, broadcast_arrays as broadcast_arrays, broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to, flatten as flatten, flatten_axes as flatten_axes, index as index,
    is_named_array as is_named_array, named as named, rename as rename, roll as roll, slice as slice, split as split,
    take as take, top_k as top_k, unbind as unbind, unflatten_axis as unflatten_axis,
)
from ..array import shape_checks
from ..axis import (
    axis_name as axis_name, axis_spec_to_shape_dict as axis_spec_to_shape_dict, eliminate_axes as eliminate_axes,
    rearrange_for_partial_order, selects_axis as selects_axis,
)
from ..ops.rearranging import rearrange
from ..ops.slicing import updated_slice as updated_slice
from ..typing import (
    AxisSelection as AxisSelection, AxisSelector as AxisSelector, AxisSpec as AxisSpec,
    GatherScatterModeStr as GatherScatterModeStr, IntScalar as IntScalar, NamedArrayAxes as NamedArrayAxes,
    NamedArrayAxesSpec as NamedArrayAxesSpec, NamedOrNumeric as NamedOrNumeric, PartialShapeDict as PartialShapeDict,
    PrecisionLike as PrecisionLike, Scalar as Scalar, ShapeDict as ShapeDict,
)
from .axis import dslice as dslice
# fmt: on

ravel = flatten


@contextlib.contextmanager
def enable_shape_checks(enabled: bool) -> Iterator[None]:
    """Choose whether `NamedArray(array, axes)` compares the axes with the array, inside a with-block.

    Pytrees are rebuilt without checks anyway; this is for code that builds named arrays around placeholders.

    Arguments:
        enabled: False turns the comparison off.

    >>> import axonym.haliax as hax
    >>> with hax.enable_shape_checks(False):
    ...     x = hax.NamedArray(None, hax.Axis("x", 2))
    """
    token = shape_checks.set(enabled)
    try:
        yield
    finally:
        shape_checks.reset(token)


def are_shape_checks_enabled() -> bool:
    """Whether `NamedArray(array, axes)` compares the axes with the array.

    >>> import axonym.haliax as hax
    >>> hax.are_shape_checks_enabled()
    True
    """
    return shape_checks.get()


def ndim(a: NamedOrNumeric) -> int:
    """How many axes something has.

    Arguments:
        a: a named array, a raw array or a number.

    >>> import axonym.haliax as hax
    >>> hax.ndim(hax.ones({"x": 2, "y": 3})), hax.ndim(1.0)
    (2, 0)
    """
    return a.ndim if isinstance(a, NamedArray) else jnp.ndim(a)


def flatten_all_axes_but(
    a: NamedArray, axis_name: str, axis: AxisSelection, reorder_to_front: bool = False
) -> tuple[NamedArray, Callable[[NamedArray], NamedArray]]:
    """Merge axes into one, and get a function that brings them back afterwards.

    Despite the name, `axis` says which axes are merged. The function takes an array that has the merged axis, and may
    have lost other axes or won some; those axes that it shares with `a` stand in the order of `a` again.

    Arguments:
        a: a named array.
        axis_name: the name of the merged axis.
        axis: the axes to merge.
        reorder_to_front: put the merged axis first.

    >>> import axonym.haliax as hax
    >>> x = hax.ones({"batch": 2, "pos": 3, "embed": 4})
    >>> flat, restore = hax.core.flatten_all_axes_but(x, "rows", ("batch", "pos"))
    >>> print(flat, restore(flat.sum("embed")))
    float32[rows=6, embed=4] float32[batch=2, pos=3]
    """
    merged = a.resolve_axis(axis)
    flat = flatten_axes(a, merged, axis_name)

    def restore(new: NamedArray) -> NamedArray:
        new = unflatten_axis(new, axis_name, merged)
        order = [name if name in new.names else ... for name in a.names]
        order = order if ... in order else [*order, ...]
        return rearrange(new, rearrange_for_partial_order(order, new.axes))

    return rearrange(flat, (axis_name, ...)) if reorder_to_front else flat, restore
