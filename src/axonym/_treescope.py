"""Named arrays in treescope: names on the picture, and the sharding in the line. Treescope itself calls this module."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from treescope import ndarray_adapters, rendering_parts, type_registries

from ._display import shown_array
from .named_array import NamedArray, describe_array, raw
from .sharding.leaves import Leaf


class NamedArrayAdapter(ndarray_adapters.NDArrayAdapter[NamedArray]):
    """Describe a named array to treescope, which draws it."""

    def get_axis_info_for_array_data(self, array: NamedArray) -> tuple[ndarray_adapters.AxisInfo, ...]:
        return tuple(ndarray_adapters.NamedPositionlessAxisInfo(a.name, a.size) for a in array.axes)

    def get_array_data_with_truncation(
        self, array: NamedArray, mask: Any, edge_items_per_axis: tuple[int | None, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        return _inner(array).get_array_data_with_truncation(array.array, raw(mask), edge_items_per_axis)

    def get_array_summary(self, array: NamedArray, fast: bool) -> str:
        return f"NamedArray {summary(array)}"

    def get_numpy_dtype(self, array: NamedArray) -> np.dtype | None:
        return _inner(array).get_numpy_dtype(array.array)

    def get_sharding_info_for_array_data(self, array: NamedArray) -> ndarray_adapters.ShardingInfo | None:
        return _inner(array).get_sharding_info_for_array_data(array.array)

    def should_autovisualize(self, array: NamedArray) -> bool:
        x = array.array
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            return _is_whole(array) and not x.is_deleted() and (x.is_fully_addressable or x.is_fully_replicated)
        return _is_whole(array) and isinstance(x, np.ndarray)


def _inner(array: NamedArray) -> Any:
    return type_registries.lookup_ndarray_adapter(array.array)


def _is_whole(array: NamedArray) -> bool:
    return isinstance(array.array, (jax.Array, np.ndarray)) and array.array.ndim == len(array.names)


def summary(array: NamedArray) -> str:
    """Return the dtype, the axes with their mesh axes, and where the array lies; nothing is computed."""
    if not _is_whole(array):
        return describe_array(array)
    shown = shown_array(Leaf((), array, array.names, array.array.shape))
    return f"{shown}, {shown.lies()}"


def render(array: NamedArray, path: str | None) -> Any:
    """Write an array in one line."""
    text = rendering_parts.text(f"<NamedArray {summary(array)}>")
    return rendering_parts.build_one_line_tree_node(rendering_parts.abbreviation_color(text), path)
