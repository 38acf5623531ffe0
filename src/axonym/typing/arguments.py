"""Type aliases and protocols for the parameters of public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, overload

import jax
from jax.lax import Precision

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray

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


class _BoundReduction(Protocol):
    def __call__(self, axis: AxisSelection | None = None, *, where: NamedArray | None = None) -> NamedArray: ...


class ReductionFunction(Protocol):
    """`f(array, axis)`: the axes are reduced away; all of them by default.

    >>> reduction: axn.typing.ReductionFunction = axn.mean
    """

    @overload
    def __call__(
        self, array: NamedArray, axis: AxisSelection | None = None, *, where: NamedArray | None = None
    ) -> NamedArray: ...
    @overload
    def __call__(self, array: Any, axis: AxisSelection | None = None, *, where: NamedArray | None = None) -> Any: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundReduction: ...


class _BoundArgReduction(Protocol):
    def __call__(self, axis: AxisSelector | None = None) -> NamedArray: ...


class SimpleReductionFunction(Protocol):
    """The index of an element along an axis, or in the flattened array.

    >>> search: axn.typing.SimpleReductionFunction = axn.argmax
    """

    def __call__(self, array: NamedArray, axis: AxisSelector | None = None) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundArgReduction: ...
