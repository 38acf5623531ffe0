"""Merge and split the axes of a layer, for its `flatten_for_export` and `unflatten_from_export`."""

from __future__ import annotations

from typing import Any, TypeVar

from ..axis import Axis, AxisSpec, Names, axes_of_spec, axis_size
from ..named_array import NamedArray, is_jax_array_like
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, unflatten_axis

MaybeArray = TypeVar("MaybeArray", bound=NamedArray | None)

IN, OUT = "__IN__", "__OUT__"
"""The names of a flattened layer's axes. Existing code looks for these names."""


def merged_axis(spec: AxisSpec, name: str) -> Axis:
    """Return the axis that several axes are merged into."""
    return Axis(name, axis_size(spec))


def merge_axes(x: MaybeArray, spec: AxisSpec, name: str) -> MaybeArray:
    """Merge some axes of a layer's array into one. None and placeholders are returned unchanged."""
    if x is None or not is_jax_array_like(x):
        return x
    merged: Any = flatten_axes(x, tuple(a.name for a in axes_of_spec(spec)), name)
    return merged


def split_axis(x: MaybeArray, name: str, spec: AxisSpec, order: Names | None = None) -> MaybeArray:
    """Undo `merge_axes`; transpose the result if an order is given."""
    if x is None or not is_jax_array_like(x):
        return x
    split: Any = unflatten_axis(x, name, axes_of_spec(spec))
    ordered: Any = split if order is None or order == split.names else rearrange(split, order)
    return ordered
