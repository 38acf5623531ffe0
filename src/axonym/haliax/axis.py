"""Axes, and slices of them."""

from __future__ import annotations

from typing import Any, TypeAlias

from .. import ds as _ds
from ..axis import *  # noqa: F403  # the same names, but for those below  # pyright: ignore[reportAssignmentType]
from ..axis import (
    AxisSelection,
    AxisSpec,
    _check_present,
    axes_of_spec,
    axis_spec_to_shape_dict,
    concat_axes,
    intersect_axes,
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
    _check_present("eliminate_axes", axis_spec_to_shape_dict(to_remove), axis_spec)
    return _without_axes(axis_spec, to_remove)
