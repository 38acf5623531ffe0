"""Shared parts of families of operations: identity, signatures, and trees.

The operations of a family (elementwise, reductions, ...) are made by a factory, each from one row of a table. They are
plain functions all the same: `publish` gives them a name, module and docstring, and the functions below tell type
checkers and editors how they are called, as a function and as a method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
from jax.typing import DTypeLike

from ..axis import AxisSelection, AxisSelector
from ..named_array import NamedArray, NamedOrNumeric, is_named_array

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])


def publish(op: Callable[..., Any], name: str, module: str, doc: str) -> Any:
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


# --- how operations are called: factories return what they are given here, for type checkers and editors ---


def unary(a: A, /) -> A:
    """Compute each element of a named array, a scalar, a raw array or a tree of them."""
    raise NotImplementedError


@overload
def binary(a: NamedArray, b: NamedOrNumeric, /) -> NamedArray: ...
@overload
def binary(a: NamedOrNumeric, b: NamedArray, /) -> NamedArray: ...
@overload
def binary(a: Any, b: Any, /) -> Any: ...
def binary(a: Any, b: Any, /) -> Any:
    """Compute each element from two operands, which broadcast by name."""
    raise NotImplementedError


def reduction(array: A, axis: AxisSelection | None = None, *, where: NamedOrNumeric | None = None) -> A:
    """Reduce axes of an array, or of each array of a tree.

    Arguments:
        axis: the axes to reduce; all of them by default.
        where: which elements take part, by name.
    """
    raise NotImplementedError


def typed_reduction(
    array: A,
    axis: AxisSelection | None = None,
    *,
    where: NamedOrNumeric | None = None,
    dtype: DTypeLike | None = None,
) -> A:
    """Reduce axes of an array, or of each array of a tree.

    Arguments:
        axis: the axes to reduce; all of them by default.
        where: which elements take part, by name.
        dtype: the dtype to compute in.
    """
    raise NotImplementedError


def spread_reduction(
    array: A,
    axis: AxisSelection | None = None,
    *,
    where: NamedOrNumeric | None = None,
    ddof: int = 0,
    dtype: DTypeLike | None = None,
) -> A:
    """Compute how far elements spread along axes of an array, or of each array of a tree.

    Arguments:
        axis: the axes to reduce; all of them by default.
        where: which elements take part, by name.
        ddof: the number to subtract from the count.
        dtype: the dtype to compute in.
    """
    raise NotImplementedError


def arg_reduction(array: NamedArray, axis: AxisSelector | None = None) -> NamedArray:
    """Return the index of an element along an axis, or in the flattened array."""
    raise NotImplementedError


def cumulative(a: NamedArray, axis: AxisSelector, dtype: DTypeLike | None = None) -> NamedArray:
    """Compute a running reduction along one axis, which stays."""
    raise NotImplementedError
