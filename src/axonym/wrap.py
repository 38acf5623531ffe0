"""Protocols of reductions, under the path that existing code imports them by."""

from .ops.reductions import (
    ReductionFunction as ReductionFunction,
    SimpleReductionFunction as SimpleReductionFunction,
)
