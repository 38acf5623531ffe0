"""Type aliases for the parameters of functions."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.lax import Precision as Precision
from jax.typing import DTypeLike as DTypeLike

DType: TypeAlias = np.dtype

Scalar: TypeAlias = float | int | jax.Array
"""A number, or an array that holds one."""

IntScalar: TypeAlias = int | jax.Array
"""An integer, or an array that holds one."""

PrecisionLike: TypeAlias = str | Precision | tuple[str, str] | tuple[Precision, Precision] | None
"""The `precision` of contractions, as in JAX."""

GatherScatterModeStr: TypeAlias = Literal["promise_in_bounds", "clip", "drop", "fill"]
"""The modes of indexing for positions out of range, in JAX's words."""

FilterSpec: TypeAlias = bool | Callable[[Any], bool]
"""Which leaves of a tree are meant: all, none, or those for which a function returns True."""

FilterTree: TypeAlias = Any
"""A filter for a whole tree, or a tree prefix of filters."""
