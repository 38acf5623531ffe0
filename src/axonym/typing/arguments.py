"""Protocols for functions that reduce axes."""

from __future__ import annotations

from typing import Any, Protocol, overload

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray, NamedOrNumeric


class _BoundReduction(Protocol):
    def __call__(self, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> NamedArray: ...


class ReductionFunction(Protocol):
    """`f(array, axis)`: the axes are reduced away; all of them by default.

    >>> reduction: axn.typing.ReductionFunction = axn.mean
    """

    @overload
    def __call__(
        self, array: NamedArray, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None
    ) -> NamedArray: ...
    @overload
    def __call__(
        self, array: Any, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None
    ) -> Any: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundReduction: ...


class _BoundArgReduction(Protocol):
    def __call__(self, axis: AxisSelector | None = None) -> NamedArray: ...


class SimpleReductionFunction(Protocol):
    """The index of an element along an axis, or in the flattened array.

    >>> search: axn.typing.SimpleReductionFunction = axn.argmax
    """

    def __call__(self, array: NamedArray, axis: AxisSelector | None = None) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundArgReduction: ...
