"""Shared parts of families of operations: identity, signatures, and trees.

The operations of a family (elementwise, reductions, ...) are made by a factory, each from one row of a table. They are
plain functions all the same: `publish` gives them a name, module and docstring, and the protocols below tell type
checkers and editors how they are called, as a function and as a method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import jax
from jax.typing import DTypeLike

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray, NamedOrNumeric, is_named_array

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])


def publish(op: F, name: str, module: str, doc: str) -> F:
    """Give a function from a factory the identity of one written by hand."""
    op.__name__ = op.__qualname__ = name
    op.__module__ = module
    op.__doc__ = doc
    return op


def map_tree(op: Callable[..., Any], tree: Any) -> Any:
    """Apply an operation to every leaf of a tree; a named array is one leaf."""
    return jax.tree.map(op, tree, is_leaf=is_named_array)


def is_tree(x: Any) -> bool:
    """Return whether an operand is a container of arrays rather than an array or a number."""
    return not (isinstance(x, NamedArray) or jax.tree_util.all_leaves([x]))


class Unary(Protocol):
    """`f(a)`, elementwise, on a named array, a scalar, a raw array or a tree of them."""

    def __call__(self, a: A, /) -> A: ...
    def __get__(self, instance: Any, owner: Any = None) -> Callable[[], NamedArray]: ...


class Binary(Protocol):
    """`f(a, b)`, elementwise, broadcasting by name."""

    @overload
    def __call__(self, a: NamedArray, b: NamedOrNumeric, /) -> NamedArray: ...
    @overload
    def __call__(self, a: NamedOrNumeric, b: NamedArray, /) -> NamedArray: ...
    @overload
    def __call__(self, a: Any, b: Any, /) -> Any: ...


class _BoundTypedReduction(Protocol):
    def __call__(
        self, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None, dtype: DTypeLike | None = None
    ) -> NamedArray: ...


class TypedReduction(Protocol):
    """A reduction that can accumulate in another dtype."""

    def __call__(
        self,
        array: A,
        axis: AxisSelection | None = None,
        *,
        where: NamedOrNumeric | None = None,
        dtype: DTypeLike | None = None,
    ) -> A: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundTypedReduction: ...


class _BoundSpreadReduction(Protocol):
    def __call__(
        self,
        axis: AxisSelection | None = None,
        *,
        where: NamedOrNumeric | None = None,
        ddof: int = 0,
        dtype: DTypeLike | None = None,
    ) -> NamedArray: ...


class SpreadReduction(Protocol):
    """Variance and standard deviation."""

    def __call__(
        self,
        array: A,
        axis: AxisSelection | None = None,
        *,
        where: NamedOrNumeric | None = None,
        ddof: int = 0,
        dtype: DTypeLike | None = None,
    ) -> A: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundSpreadReduction: ...


class _BoundCumulative(Protocol):
    def __call__(self, axis: AxisSelector, dtype: DTypeLike | None = None) -> NamedArray: ...


class Cumulative(Protocol):
    """A running reduction along one axis, which stays."""

    def __call__(self, a: NamedArray, axis: AxisSelector, dtype: DTypeLike | None = None) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> _BoundCumulative: ...
