"""Pooling, with Haliax's order of arguments: the window comes first."""

from ...nn import pool as _pool
from .._signatures import with_parameters as _with_parameters

max_pool = _with_parameters(_pool.max_pool, "Window")
mean_pool = _with_parameters(_pool.mean_pool, "Window")
min_pool = _with_parameters(_pool.min_pool, "Window")
pool = _with_parameters(_pool.pool, "Window")
