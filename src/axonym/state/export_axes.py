"""Merge and split the axes of a module's arrays, where PyTorch's module has one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ..axis import Axis, AxisSpec, axes_of_spec, axis_size
from ..named_array import is_jax_array_like
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, unflatten_axis

T = TypeVar("T")

ExportAxes = Mapping[str, Mapping[str, AxisSpec]]
"""The axes that become one: by the field that has them in the module, their form in each array that has them, too."""


def _merged_name(field: str) -> str:
    """Return the name of the axis that the axes of a field become. Existing code looks for these names."""
    return "__IN__" if field == "In" else "__OUT__"


def merge_axes(module: T, declared: ExportAxes) -> T:
    """Return a module with one axis for each field; the module itself if no field has several."""
    if all(isinstance(getattr(module, field), Axis) for field in declared):
        return module
    changed: dict[str, Any] = {}
    for field, arrays in declared.items():
        name = _merged_name(field)
        changed[field] = Axis(name, axis_size(getattr(module, field)))
        for array, spec in arrays.items():
            x = changed.get(array, getattr(module, array))
            merged = tuple(a.name for a in axes_of_spec(spec))
            changed[array] = flatten_axes(x, merged, name) if is_jax_array_like(x) else x
    return dataclasses.replace(module, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def split_axes(module: T, template: Any, declared: ExportAxes) -> T:
    """Undo `merge_axes`, with the axes that the template declares, in its order."""
    if all(isinstance(getattr(template, field), Axis) for field in declared):
        return module
    changed: dict[str, Any] = {}
    for field, arrays in declared.items():
        changed[field] = getattr(template, field)
        for array, spec in arrays.items():
            x = changed.get(array, getattr(module, array))
            split = axes_of_spec(spec)
            changed[array] = unflatten_axis(x, _merged_name(field), split) if is_jax_array_like(x) else x
    for array in {array for arrays in declared.values() for array in arrays}:
        x, like = changed[array], getattr(template, array)
        if is_jax_array_like(x) and like is not None and x.names != like.names:
            changed[array] = rearrange(x, like.names)
    return dataclasses.replace(module, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
