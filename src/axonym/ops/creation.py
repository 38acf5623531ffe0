"""Make arrays from axes: filled, counted, spaced, and by the position of their elements.

Nothing here has an operand of any size, so these call `jax.numpy` directly; what is made is placed as JAX places it.
The `*_like` functions make an array with the axes, dtype and placement of another.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from .. import _errors, _kernels
from ..array import NamedArray, wrap
from ..axis import Axis, AxisSelector, AxisSpec, Names, axes_of_spec, name_of
from ._op_types import publish
from ._operands import distinct, dtype_key, one_axis, require_named, scalar


@functools.lru_cache(maxsize=4096)
def _layout(what: str, spec: Any) -> tuple[Names, tuple[int, ...]]:
    axes = axes_of_spec(spec, what)
    return distinct(what, tuple(sys.intern(a.name) for a in axes)), tuple(a.size for a in axes)


# --- filled ---


class Filled(Protocol):
    """`f(shape, dtype)`: one value everywhere."""

    def __call__(self, shape: AxisSpec, dtype: Any = None) -> NamedArray: ...


class FilledLike(Protocol):
    """`f(a, dtype)`: one value everywhere, with the axes, dtype and sharding of another array."""

    def __call__(self, a: NamedArray, dtype: Any = None) -> NamedArray: ...


def _filled(name: str, fn: Callable[..., jax.Array], summary: str, shown: str) -> Filled:
    def op(shape, dtype=None):
        names, sizes = _layout(name, _kernels.hashable(shape))
        return wrap(fn(sizes, dtype), names)

    doc = f"""{summary}

    Arguments:
        shape: the axes.
        dtype: the dtype; JAX's default float by default.

    >>> axn.{name}({{"batch": 2, "embed": 2}})
    NamedArray(float32[batch=2, embed=2], {shown})
    """
    return publish(op, name, __name__, doc)


def _filled_like(name: str, fn: Callable[..., jax.Array], summary: str, shown: str) -> FilledLike:
    def op(a, dtype=None):
        _check_rank(name, a)
        return wrap(fn(a.array, dtype), a.names)

    doc = f"""{summary}

    Arguments:
        a: the array that has the axes, dtype and sharding of the result.
        dtype: another dtype.

    >>> axn.{name}(axn.named([1, 2], "x"))
    NamedArray(int32[x=2], {shown})
    """
    return publish(op, name, __name__, doc)


def _check_rank(what: str, a: Any) -> None:
    require_named(what, a)
    if len(a.names) != jnp.ndim(a.array):
        raise ValueError(f"{what}: {_errors.wrong_rank(a.names, jnp.shape(a.array))}")


zeros = _filled("zeros", jnp.zeros, "Make an array of zeros.", "[[0. 0.] [0. 0.]]")
ones = _filled("ones", jnp.ones, "Make an array of ones.", "[[1. 1.] [1. 1.]]")
zeros_like = _filled_like("zeros_like", jnp.zeros_like, "Make an array of zeros like another.", "[0 0]")
ones_like = _filled_like("ones_like", jnp.ones_like, "Make an array of ones like another.", "[1 1]")


def full(shape: AxisSpec, fill_value: Any, dtype: Any = None) -> NamedArray:
    """Make an array with one value everywhere.

    Arguments:
        shape: the axes.
        fill_value: the value, a scalar. An array with axes is broadcast with `broadcast_to` instead.
        dtype: the dtype; that of the value by default.

    >>> axn.full(axn.Axis("x", 2), 3)
    NamedArray(int32[x=2], [3 3])
    """
    names, sizes = _layout("full", _kernels.hashable(shape))
    return wrap(jnp.full(sizes, scalar("full", "fill_value", fill_value), dtype), names)


def full_like(a: NamedArray, fill_value: Any, dtype: Any = None) -> NamedArray:
    """Make an array with one value everywhere, like another.

    Arguments:
        a: the array that has the axes, dtype and sharding of the result.
        fill_value: the value, a scalar.
        dtype: another dtype.

    >>> axn.full_like(axn.zeros({"x": 2}), 3)
    NamedArray(float32[x=2], [3. 3.])
    """
    _check_rank("full_like", a)
    return wrap(jnp.full_like(a.array, scalar("full_like", "fill_value", fill_value), dtype), a.names)


# --- counted and spaced ---


def arange(axis: AxisSpec, *, start: Any = 0, step: Any = 1, dtype: Any = None) -> NamedArray:
    """Count up from `start`, with as many numbers as the axis is long.

    Arguments:
        axis: the axis to count along; several are counted through in order, the last one fastest.
        start: the first number. It may be traced.
        step: what to add each time. It may be traced.
        dtype: the dtype; that of `start` and `step` by default.

    >>> axn.arange(axn.Axis("x", 3), start=1, step=2)
    NamedArray(int32[x=3], [1 3 5])
    >>> axn.arange({"x": 2, "y": 2})
    NamedArray(int32[x=2, y=2], [[0 1] [2 3]])
    """
    names, sizes = _layout("arange", _kernels.hashable(axis))
    if type(start) is int and type(step) is int and start == 0 and step == 1:
        counted = jnp.arange(math.prod(sizes), dtype=dtype)
        return wrap(counted if len(sizes) == 1 else counted.reshape(sizes), names)
    kernel = _arange_kernel(names, sizes, dtype_key(dtype))
    return wrap(kernel.call(scalar("arange", "start", start), scalar("arange", "step", step)), kernel.names)


@_kernels.cached
def _arange_kernel(names: Names, sizes: tuple[int, ...], dtype: Any) -> _kernels.Kernel:
    def positional(start, step):
        natural = jnp.result_type(start, step)
        # A short float cannot hold the positions, so count in one that can.
        exact = natural if dtype is None else jnp.promote_types(natural, dtype)
        if jnp.issubdtype(exact, jnp.floating):
            exact = jnp.promote_types(exact, jnp.float32)
        positions = jax.lax.broadcasted_iota(exact, (math.prod(sizes),), 0)
        counted = start.astype(exact) + step.astype(exact) * positions
        return counted.reshape(sizes).astype(natural if dtype is None else dtype)

    return _kernels.make_kernel("arange", positional, ((), ()), names)


_NUMPY_COUNT = 50
"""The number of points of `linspace`, `geomspace` and `logspace` for an axis without a size, as in NumPy."""


def _spaced(
    what: str,
    fn: Callable[..., Any],
    axis: AxisSelector,
    start: Any,
    stop: Any,
    endpoint: bool,
    dtype: Any,
    **more: Any,
) -> NamedArray:
    along = Axis(axis, _NUMPY_COUNT) if isinstance(axis, str) else one_axis(what, "axis", axis)
    start, stop = scalar(what, "start", start), scalar(what, "stop", stop)
    return wrap(fn(start, stop, along.size, endpoint=endpoint, dtype=dtype, **more), (sys.intern(along.name),))


def linspace(axis: AxisSelector, *, start: Any, stop: Any, endpoint: bool = True, dtype: Any = None) -> NamedArray:
    """Make evenly spaced numbers from `start` to `stop`.

    Arguments:
        axis: the axis of the numbers; a name without a size means 50 of them.
        start: the first number.
        stop: the last number.
        endpoint: whether `stop` is one of the numbers.
        dtype: the dtype; a float by default.

    >>> axn.linspace(axn.Axis("x", 3), start=0, stop=1)
    NamedArray(float32[x=3], [0. 0.5 1. ])
    """
    return _spaced("linspace", jnp.linspace, axis, start, stop, endpoint, dtype)


def geomspace(axis: AxisSelector, *, start: Any, stop: Any, endpoint: bool = True, dtype: Any = None) -> NamedArray:
    """Make numbers from `start` to `stop`, each the same multiple of the one before.

    Arguments:
        axis: the axis of the numbers; a name without a size means 50 of them.
        start: the first number.
        stop: the last number.
        endpoint: whether `stop` is one of the numbers.
        dtype: the dtype; a float by default.

    >>> axn.geomspace(axn.Axis("x", 3), start=1, stop=4)
    NamedArray(float32[x=3], [1. 2. 4.])
    """
    return _spaced("geomspace", jnp.geomspace, axis, start, stop, endpoint, dtype)


def logspace(
    axis: AxisSelector, *, start: Any, stop: Any, endpoint: bool = True, base: Any = 10.0, dtype: Any = None
) -> NamedArray:
    """Make powers of `base`, with exponents evenly spaced from `start` to `stop`.

    Arguments:
        axis: the axis of the numbers; a name without a size means 50 of them.
        start: the first exponent.
        stop: the last exponent.
        endpoint: whether the power `stop` is one of the numbers.
        base: the base of the powers.
        dtype: the dtype; a float by default.

    >>> axn.logspace(axn.Axis("x", 3), start=0, stop=2)
    NamedArray(float32[x=3], [ 1. 10. 100.])
    """
    return _spaced("logspace", jnp.logspace, axis, start, stop, endpoint, dtype, base=base)


# --- by position ---


class Banded(Protocol):
    """`f(Row, Col, k, dtype)`: a matrix whose elements depend only on their distance from the diagonal."""

    def __call__(self, Row: Axis, Col: Axis, k: int = 0, dtype: Any = None) -> NamedArray: ...


def _banded(name: str, fn: Callable[..., jax.Array], summary: str, shown: str) -> Banded:
    def op(Row, Col, k=0, dtype=None):
        row, col = one_axis(name, "Row", Row), one_axis(name, "Col", Col)
        names, sizes = _layout(name, (row, col))
        return wrap(fn(*sizes, k=operator.index(k), dtype=dtype), names)

    doc = f"""{summary}

    Arguments:
        Row: the axis of the rows.
        Col: the axis of the columns.
        k: which diagonal is meant: 0 the main one, positive ones above it, negative ones below.
        dtype: the dtype; JAX's default float by default.

    >>> axn.{name}(axn.Axis("row", 2), axn.Axis("col", 2))
    NamedArray(float32[row=2, col=2], {shown})
    """
    return publish(op, name, __name__, doc)


eye = _banded("eye", jnp.eye, "Make a matrix of zeros with ones on a diagonal.", "[[1. 0.] [0. 1.]]")
tri = _banded("tri", jnp.tri, "Make a matrix of zeros with ones on and below a diagonal.", "[[1. 0.] [1. 1.]]")


def vander(x: NamedArray, degree: AxisSelector, *, increasing: bool = False) -> NamedArray:
    """Compute the powers of each element, along a new last axis.

    Arguments:
        x: a named array.
        degree: the new axis, whose size is the number of powers. If it has no size, it gets that of `x`, which must
            then have one axis.
        increasing: start with the power zero rather than end with it.

    >>> axn.vander(axn.named([2, 3], "x"), axn.Axis("degree", 3))
    NamedArray(int32[x=2, degree=3], [[4 2 1] [9 3 1]])
    """
    require_named("vander", x)
    degree = _kernels.one_selector("vander", degree)
    if isinstance(degree, str) and len(x.names) != 1:
        raise ValueError(
            f"vander: how many powers of {_errors.describe_shape(x.shape)}? Pass Axis({degree!r}, size) for them."
        )
    kernel = _vander_kernel(x.names, degree, bool(increasing))
    return wrap(kernel.call(x.array), kernel.names)


@_kernels.cached
def _vander_kernel(names: Names, degree: AxisSelector, increasing: bool) -> _kernels.Kernel:
    def positional(x):
        count = x.shape[0] if isinstance(degree, str) else degree.size
        powers = jax.lax.expand_dims(jnp.arange(count), range(x.ndim))
        powers = powers if increasing else count - 1 - powers
        natural = x.dtype if x.dtype != jnp.bool_ else powers.dtype
        return jnp.power(jax.lax.expand_dims(x, (x.ndim,)), powers).astype(natural)

    return _kernels.make_kernel("vander", positional, (names,), distinct("vander", (*names, name_of(degree))))
