"""`axonym.array` and what goes with it, under the name that existing code imports it by."""

from collections.abc import Callable

from .array import (
    NamedArray as NamedArray,
    NamedOrNumeric as NamedOrNumeric,
    are_shape_checks_enabled as are_shape_checks_enabled,
    enable_shape_checks as enable_shape_checks,
    is_named_array as is_named_array,
    named as named,
)
from .axis import (
    Axis as Axis,
    AxisSelection as AxisSelection,
    AxisSelector as AxisSelector,
    AxisSpec as AxisSpec,
    PartialShapeDict as PartialShapeDict,
    ShapeDict as ShapeDict,
    axis_name as axis_name,
    axis_spec_to_shape_dict as axis_spec_to_shape_dict,
    eliminate_axes as eliminate_axes,
    rearrange_for_partial_order,
    selects_axis as selects_axis,
)
from .ops.broadcasting import (
    broadcast_arrays as broadcast_arrays,
    broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to,
)
from .ops.dynamic_slice import dslice as dslice
from .ops.indexing import index as index, take as take
from .ops.joining import roll as roll
from .ops.rearranging import rearrange
from .ops.shaping import (
    flatten as flatten,
    flatten_axes as flatten_axes,
    ravel as ravel,
    rename as rename,
    split as split,
    unbind as unbind,
    unflatten_axis as unflatten_axis,
)
from .ops.slicing import slice as slice, updated_slice as updated_slice
from .types import (
    GatherScatterModeStr as GatherScatterModeStr,
    IntScalar as IntScalar,
    PrecisionLike as PrecisionLike,
    Scalar as Scalar,
)
from .typing import NamedArrayAxes as NamedArrayAxes, NamedArrayAxesSpec as NamedArrayAxesSpec


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

    >>> x = axn.ones({"batch": 2, "pos": 3, "embed": 4})
    >>> flat, restore = axn.core.flatten_all_axes_but(x, "rows", ("batch", "pos"))
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
