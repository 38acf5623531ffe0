"""Creation, comparing, choosing, padding, diagonals and sets."""

# ruff: noqa: I001
# fmt: off
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax.typing import DTypeLike
import jax
import jax.numpy as jnp

from .. import (
    Axis, NamedArray, allclose as allclose, arange as _arange, argsort as _argsort, array_equal as array_equal,
    array_equiv as array_equiv, axis_mapping, bincount as bincount, clip as clip, concatenate as _concatenate,
    dot as _dot, einsum as _einsum, full as _full, geomspace as _geomspace, isclose as isclose, linspace as _linspace,
    logspace as _logspace,
    nonzero as nonzero, ones as _ones, packbits as packbits, pad as pad, pad_left as pad_left,
    searchsorted as searchsorted, stack as _stack, trace as trace, tril as tril, triu as triu, unique as unique,
    unpackbits as unpackbits, where as where, zeros as _zeros,
)
from ..fft import fftfreq as _fftfreq, rfftfreq as _rfftfreq
from ..typing import AxisSelector
from ._signatures import with_parameters
# fmt: on

F = TypeVar("F", bound=Callable[..., Any])


def unsharded(fn: F) -> F:
    """Wrap a function so that JAX places the array that it makes, whatever mapping is active."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with axis_mapping({}):
            return fn(*args, **kwargs)

    call.__module__ = sys._getframe(1).f_globals["__name__"]  # where pickle looks it up
    return cast(F, call)


arange, full, ones, zeros = unsharded(_arange), unsharded(_full), unsharded(_ones), unsharded(_zeros)
geomspace, linspace, logspace = unsharded(_geomspace), unsharded(_linspace), unsharded(_logspace)
fftfreq, rfftfreq = unsharded(_fftfreq), unsharded(_rfftfreq)


def argsort(a: NamedArray, axis: AxisSelector | None, *, stable: bool = False) -> Any:
    """Return the positions that sort an axis; without an axis, the positions that sort all elements, as a raw array.

    >>> hax.argsort(hax.named([[3, 1], [2, 0]], ("x", "y")), None)
    Array([3, 1, 2, 0], dtype=int32)
    """
    return jnp.argsort(a.array, axis=None, stable=stable) if axis is None else _argsort(a, axis, stable=stable)


@functools.wraps(_dot, assigned=("__name__", "__qualname__", "__doc__"))
def dot(*arrays: Any, **options: Any) -> NamedArray:
    if "axis" not in options:
        warnings.warn("dot: `axis` is a keyword argument now.", DeprecationWarning, stacklevel=2)
    return _dot(*arrays, **options)


def einsum(
    equation: str,
    *arrays: NamedArray,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Any = jax.lax.dot_general,
    **axis_aliases: AxisSelector,
) -> NamedArray:
    """Contract as `axonym.einsum` does; `_dot_general` replaces `jax.lax.dot_general`.

    >>> hax.einsum("{a b} -> a", hax.ones({"a": 2, "b": 3})).shape
    {'a': 2}
    """
    options: Any = {"precision": precision, "preferred_element_type": preferred_element_type, **axis_aliases}
    return _einsum(equation, *arrays, dot_general=_dot_general, **options)


def unique_values(
    array: NamedArray, Unique: Axis, *, axis: AxisSelector | None = None, fill_value: Any = None
) -> NamedArray:
    """Return the values of `unique` alone.

    >>> hax.unique_values(hax.named([3, 1, 3], "x"), hax.Axis("value", 2))
    NamedArray(int32[value=2], [1 3])
    """
    return unique(array, Unique, axis=axis, fill_value=fill_value)


def unique_counts(
    array: NamedArray, Unique: Axis, *, axis: AxisSelector | None = None, fill_value: Any = None
) -> tuple[NamedArray, NamedArray]:
    """Return the values of `unique`, and how often each is found.

    >>> hax.unique_counts(hax.named([3, 1, 3], "x"), hax.Axis("value", 2))
    (NamedArray(int32[value=2], [1 3]), NamedArray(int32[value=2], [1 2]))
    """
    return unique(array, Unique, axis=axis, fill_value=fill_value, return_counts=True)


def unique_inverse(
    array: NamedArray, Unique: Axis, *, axis: AxisSelector | None = None, fill_value: Any = None
) -> tuple[NamedArray, NamedArray]:
    """Return the values of `unique`, and where the value of each element is among them.

    >>> hax.unique_inverse(hax.named([3, 1, 3], "x"), hax.Axis("value", 2))
    (NamedArray(int32[value=2], [1 3]), NamedArray(int32[x=3], [1 0 1]))
    """
    return unique(array, Unique, axis=axis, fill_value=fill_value, return_inverse=True)


def unique_all(
    array: NamedArray, Unique: Axis, *, axis: AxisSelector | None = None, fill_value: Any = None
) -> tuple[NamedArray, NamedArray, NamedArray, NamedArray]:
    """Return the values of `unique`, where each is found first, where each element is among them, and how often.

    >>> values, index, inverse, counts = hax.unique_all(hax.named([3, 1, 3], "x"), hax.Axis("value", 2))
    >>> index, inverse, counts
    (NamedArray(int32[value=2], [1 0]), NamedArray(int32[x=3], [1 0 1]), NamedArray(int32[value=2], [1 2]))
    """
    return unique(
        array, Unique, axis=axis, fill_value=fill_value, return_index=True, return_inverse=True, return_counts=True
    )


concatenate = with_parameters(_concatenate, "axis")
stack = with_parameters(_stack, "axis")
