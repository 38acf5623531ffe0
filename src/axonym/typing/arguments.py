"""Protocols for functions that reduce axes."""

from __future__ import annotations

from typing import Protocol, TypeVar

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray, NamedOrNumeric

A = TypeVar("A")


class ReductionFunction(Protocol):
    """`f(array, axis)`: the axes are reduced away; all of them by default.

    >>> reduction: axn.typing.ReductionFunction = axn.mean
    """

    def __call__(self, array: A, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> A: ...


class SimpleReductionFunction(Protocol):
    """The index of an element along an axis, or in the flattened array.

    >>> search: axn.typing.SimpleReductionFunction = axn.argmax
    """

    def __call__(self, array: NamedArray, axis: AxisSelector | None = None) -> NamedArray: ...
