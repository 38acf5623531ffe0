"""Names for the types of arguments, under the name that existing code imports them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.lax import Precision as Precision
from jax.typing import DTypeLike as DTypeLike
from jaxtyping import PyTree

__all__ = ["FilterSpec", "FilterTree", "GatherScatterModeStr", "IntScalar", "PrecisionLike", "Scalar"]

DType: TypeAlias = np.dtype

Scalar: TypeAlias = float | int | jax.Array
"""A number, or an array that holds one."""

IntScalar: TypeAlias = int | jax.Array
"""An integer, or an array that holds one."""

PrecisionLike: TypeAlias = str | Precision | tuple[str, str] | tuple[Precision, Precision] | None
"""What contractions take as `precision`, as those of JAX do."""

GatherScatterModeStr: TypeAlias = Literal["promise_in_bounds", "clip", "drop", "fill"]
"""What indexing does with positions out of range, in JAX's words."""

FilterSpec: TypeAlias = bool | Callable[[Any], bool]
"""Which leaves of a tree are meant: all, none, or those for which a function returns True."""

FilterTree: TypeAlias = FilterSpec | PyTree[FilterSpec]
"""A filter for a whole tree, or a tree prefix of filters."""
