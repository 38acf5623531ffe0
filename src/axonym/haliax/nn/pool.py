"""Pooling, with Haliax's order of arguments: the window comes first."""

from typing import Literal as _Literal, TypeAlias as _TypeAlias

from ...nn import pool as _pool
from .._signatures import with_parameters as _with_parameters

Padding: _TypeAlias = _Literal["SAME", "VALID"] | int | tuple[tuple[int, int], ...]
DEFAULT_PADDING: _Literal["VALID"] = "VALID"

max_pool = _with_parameters(_pool.max_pool, "Window")
mean_pool = _with_parameters(_pool.mean_pool, "Window")
min_pool = _with_parameters(_pool.min_pool, "Window")
pool = _with_parameters(_pool.pool, "Window")
