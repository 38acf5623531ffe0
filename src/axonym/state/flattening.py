"""What layers need for their `flatten_for_export` and `unflatten_from_export`."""

from __future__ import annotations

from typing import overload

from ..array import NamedArray
from ..axis import Axis, AxisSpec, Names, axes_of_spec, axis_size
from ..jax_utils import is_jax_array_like
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, unflatten_axis

IN, OUT = "__IN__", "__OUT__"
"""What the axes of a flattened layer are called. Existing code looks for these names."""


def flat_axis(spec: AxisSpec, name: str) -> Axis:
    """The axis that several are merged into."""
    return Axis(name, axis_size(spec))


@overload
def merged(x: NamedArray, spec: AxisSpec, name: str) -> NamedArray: ...
@overload
def merged(x: NamedArray | None, spec: AxisSpec, name: str) -> NamedArray | None: ...
def merged(x: NamedArray | None, spec: AxisSpec, name: str) -> NamedArray | None:
    """An array of a layer with some axes merged into one. What is not there, or only a placeholder, stays as it is."""
    if x is None or not is_jax_array_like(x):
        return x
    return flatten_axes(x, tuple(a.name for a in axes_of_spec(spec)), name)


@overload
def split(x: NamedArray, name: str, spec: AxisSpec, order: Names | None = None) -> NamedArray: ...
@overload
def split(x: NamedArray | None, name: str, spec: AxisSpec, order: Names | None = None) -> NamedArray | None: ...
def split(x: NamedArray | None, name: str, spec: AxisSpec, order: Names | None = None) -> NamedArray | None:
    """The array that `merged` made, with the axis split again, and its axes in another order if one is given."""
    if x is None or not is_jax_array_like(x):
        return x
    x = unflatten_axis(x, name, axes_of_spec(spec))
    return x if order is None or order == x.names else rearrange(x, order)
