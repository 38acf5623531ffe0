"""Axes, and slices of them."""

from __future__ import annotations

from types import EllipsisType
from typing import Any, TypeAlias

from .. import ds as _ds
from ..axis import *  # noqa: F403  # the same names, but for those below  # pyright: ignore[reportAssignmentType]
from ..axis import (
    Axis,
    AxisSelection,
    AxisSelector,
    AxisSpec,
    axes_of_spec,
    axis_spec_to_shape_dict,
    check_present,
    concat_axes,
    intersect_axes,
    selectors,
    without_axes as _without_axes,
)

PartialAxisSpec: TypeAlias = AxisSelection
overlapping_axes = intersect_axes


class dslice(_ds):
    """A slice with a known size, whose start may be traced, and which may reach outside its axis.

    Reading gives zeros for elements outside, and writing leaves them out. Negative positions count from the end.

    >>> hax.arange(hax.Axis("x", 8))["x", hax.dslice(2, 3)]
    NamedArray(int32[x=3], [2 3 4])
    >>> hax.arange(hax.Axis("x", 8))["x", hax.dslice(7, 3)]
    NamedArray(int32[x=3], [7 0 0])
    """

    __slots__ = ()
    must_fit = False

    def to_slice(self) -> slice:
        """Return the same slice as a Python slice.

        >>> hax.dslice(2, 3).to_slice()
        slice(2, 5, None)
        """
        return slice(self.start, self.start + self.size)


ds = dslice


def dblock(idx: Any, size: int) -> dslice:
    """Return the slice of block `idx`, which may be traced, of `size` elements.

    >>> hax.arange(hax.Axis("x", 8))["x", hax.dblock(1, 4)]
    NamedArray(int32[x=4], [4 5 6 7])
    """
    return dslice.block(idx, size)


def concat_axis_specs(a1: AxisSpec, a2: AxisSpec) -> Any:
    """Join axes as `concat_axes` does, for axes whose sizes are known.

    >>> hax.concat_axis_specs({"batch": 8}, {"embed": 4})
    {'batch': 8, 'embed': 4}
    """
    axes_of_spec(a1, "concat_axis_specs"), axes_of_spec(a2, "concat_axis_specs")
    return concat_axes(a1, a2)


def without_axes(axis_spec: AxisSelection, to_remove: AxisSelection, allow_mismatched_sizes: bool = False) -> Any:
    """Remove axes as `axonym.axis.without_axes` does; with `allow_mismatched_sizes`, by their names alone.

    >>> hax.axis.without_axes(hax.make_axes(batch=8, pos=3), hax.Axis("pos", 4), allow_mismatched_sizes=True)
    (Axis(name='batch', size=8),)
    """
    return _without_axes(axis_spec, tuple(axis_spec_to_shape_dict(to_remove)) if allow_mismatched_sizes else to_remove)


def eliminate_axes(axis_spec: AxisSelection, to_remove: AxisSelection) -> Any:
    """Return the axes that are not in `to_remove`, all of which must exist.

    >>> hax.eliminate_axes(hax.make_axes(batch=8, pos=3), "pos")
    (Axis(name='batch', size=8),)
    """
    check_present("eliminate_axes", axis_spec_to_shape_dict(to_remove), axis_spec)
    return _without_axes(axis_spec, to_remove)


def axis_spec_to_tuple(axis_spec: AxisSelection) -> tuple[AxisSelector, ...]:
    """Return a selection of any form as a tuple, with an axis where a mapping gives a size, and else the name.

    >>> hax.axis_spec_to_tuple({"batch": 8, "pos": None})
    (Axis(name='batch', size=8), 'pos')
    """
    return selectors(axis_spec)


def to_jax_shape(shape: AxisSpec) -> Any:
    """Return the size of an axis, or the sizes of several as a tuple, which is a shape of JAX.

    >>> hax.to_jax_shape(hax.Axis("batch", 8)), hax.to_jax_shape({"batch": 8, "pos": 3})
    (8, (8, 3))
    """
    return shape.size if isinstance(shape, Axis) else tuple(a.size for a in axes_of_spec(shape, "to_jax_shape"))


def replace_missing_with_ellipsis(ax1: AxisSelection, ax2: AxisSelection) -> tuple[AxisSelector | EllipsisType, ...]:
    """Return the first axes, with `...` for each that the second lack; sizes come from the second.

    >>> hax.axis.replace_missing_with_ellipsis(("batch", "pos"), hax.Axis("pos", 3))
    (Ellipsis, Axis(name='pos', size=3))
    """
    intersect_axes(ax1, ax2)  # raises where the sizes differ
    found: dict[str, AxisSelector] = dict(zip(axis_spec_to_shape_dict(ax2), selectors(ax2), strict=True))
    return tuple(found.get(n, ...) for n in axis_spec_to_shape_dict(ax1))
