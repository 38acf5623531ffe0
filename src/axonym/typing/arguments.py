"""Protocols for functions that reduce axes."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray, NamedOrNumeric

A = TypeVar("A")


class _BoundReduction(Protocol):
    def __call__(self, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> NamedArray: ...


class ReductionFunction(Protocol):
    """`f(array, axis)`: the axes are reduced away; all of them by default.

    >>> reduction: axn.typing.ReductionFunction = axn.mean
    """

    def __call__(self, array: A, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> A: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundReduction: ...


class _BoundArgReduction(Protocol):
    def __call__(self, axis: AxisSelector | None = None) -> NamedArray: ...


class SimpleReductionFunction(Protocol):
    """The index of an element along an axis, or in the flattened array.

    >>> search: axn.typing.SimpleReductionFunction = axn.argmax
    """

    def __call__(self, array: NamedArray, axis: AxisSelector | None = None) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundArgReduction: ...
