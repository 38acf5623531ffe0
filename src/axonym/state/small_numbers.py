"""Round arrays to few bits, with scales."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..axis import AxisSelection
from ..named_array import NamedArray
from ..ops.elementwise import abs, round
from ..ops.reductions import max
from ..ops.selection import clip, where


def rounded(x: NamedArray, summed: AxisSelection, dtype: Any) -> tuple[NamedArray, NamedArray]:
    """Return small numbers and the scales that they are multiplied with, one for all elements along some axes."""
    numbers: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    low, high, half = float(numbers.min), float(numbers.max), 0.5 if jnp.issubdtype(dtype, jnp.integer) else 0
    largest = max(abs(x), summed)
    # Half a step beyond the largest integer is rounded to it. The scale of NaN is NaN, since small integers have none.
    scale = where(largest == 0, 1, largest / (high + half))
    wide = jnp.promote_types(x.dtype, jnp.float32)  # in bfloat16, quotients would be rounded twice
    values = x.astype(wide) / scale.astype(wide)
    return clip(round(values) if half else values, low, high).astype(dtype), scale
