"""`axonym.array` under the name that existing code imports it by."""

from .array import NamedArray as NamedArray, is_named_array as is_named_array, named as named
from .ops.broadcasting import (
    broadcast_arrays as broadcast_arrays,
    broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to,
)
