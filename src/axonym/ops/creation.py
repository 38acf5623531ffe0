"""Make arrays from axes: filled, counted, spaced, and by the position of their elements.

The active mapping shards the new arrays, as it shards random draws; without one, JAX places them. The `*_like`
functions make an array with the axes, dtype and sharding of another.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelection, AxisSelector, AxisSpec, Names, axes_of_spec, name_of
from ..core import errors
from ..core.jax_versions import INLINE
from ..distribution.padded_array import refuse_padded
from ..named_array import NamedArray, NamedOrNumeric, wrap
from . import _kernels
from ._new_array import new_array
from ._operands import distinct, dtype_key, one_axis, require_named, scalar


@functools.lru_cache(maxsize=4096)
def _names_and_sizes(what: str, spec: Any) -> tuple[Names, tuple[int, ...]]:
    axes = axes_of_spec(spec, what)
    return distinct(what, tuple(sys.intern(a.name) for a in axes)), tuple(a.size for a in axes)


# --- filled ---


@errors.say_how_to_call
def zeros(shape: AxisSpec, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array of zeros, of JAX's default float by default.

    >>> axn.zeros({"batch": 2, "embed": 2})
    NamedArray(float32[batch=2, embed=2], [[0. 0.] [0. 0.]])
    """
    names, sizes = _names_and_sizes("zeros", _kernels.hashable(shape))
    return new_array("zeros", jnp.zeros, names, sizes, shape=sizes, dtype=dtype)


@errors.say_how_to_call
def ones(shape: AxisSpec, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array of ones, of JAX's default float by default.

    >>> axn.ones({"batch": 2, "embed": 2})
    NamedArray(float32[batch=2, embed=2], [[1. 1.] [1. 1.]])
    """
    names, sizes = _names_and_sizes("ones", _kernels.hashable(shape))
    return new_array("ones", jnp.ones, names, sizes, shape=sizes, dtype=dtype)


def full(shape: AxisSpec, fill_value: NamedOrNumeric, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array filled with a scalar. To repeat an array with axes, use `broadcast_to`.

    >>> axn.full(axn.Axis("x", 2), 3)
    NamedArray(int32[x=2], [3 3])
    """
    names, sizes = _names_and_sizes("full", _kernels.hashable(shape))
    value = scalar("full", "fill_value", fill_value)
    return new_array("full", _full, names, sizes, value, shape=sizes, dtype=dtype)


def _full(value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, value, dtype)


def zeros_like(a: NamedArray, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array of zeros with the axes, sharding and, by default, the dtype of another array.

    >>> axn.zeros_like(axn.named([1, 2], "x"))
    NamedArray(int32[x=2], [0 0])
    """
    return _array_like("zeros_like", a, jnp.zeros_like, dtype)


def ones_like(a: NamedArray, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array of ones with the axes, sharding and, by default, the dtype of another array.

    >>> axn.ones_like(axn.named([1, 2], "x"))
    NamedArray(int32[x=2], [1 1])
    """
    return _array_like("ones_like", a, jnp.ones_like, dtype)


def full_like(a: NamedArray, fill_value: NamedOrNumeric, dtype: DTypeLike | None = None) -> NamedArray:
    """Make an array filled with one value, with the axes, sharding and, by default, the dtype of another array.

    >>> axn.full_like(axn.zeros({"x": 2}), 3)
    NamedArray(float32[x=2], [3. 3.])
    """
    return _array_like("full_like", a, jnp.full_like, scalar("full_like", "fill_value", fill_value), dtype)


def _array_like(what: str, a: Any, fn: Callable[..., jax.Array], *arguments: Any) -> NamedArray:
    refuse_padded([require_named(what, a).array])
    if len(a.names) != jnp.ndim(a.array):
        raise ValueError(f"{what}: {errors.wrong_rank(a.names, jnp.shape(a.array))}")
    return wrap(fn(a.array, *arguments), a.names)


# --- from another library ---


def from_dlpack(x: Any, axis: AxisSelection) -> NamedArray:
    """Name the axes of an array from another library, such as a PyTorch tensor, without a copy if possible.

    In the other direction, functions called `from_dlpack` take named arrays: the axes keep their order.

    Arguments:
        x: an array that supports DLPack.
        axis: a name or an axis for each axis of `x` in order; the sizes of axes are checked.

    >>> x = axn.from_dlpack(np.ones((2, 3)), ("batch", "embed"))
    >>> x.shape
    {'batch': 2, 'embed': 3}
    >>> np.from_dlpack(x.rearrange(("embed", "batch"))).shape
    (3, 2)
    """
    return NamedArray(jnp.from_dlpack(x), axis)


# --- counted and spaced ---


@errors.say_how_to_call
def arange(
    axis: AxisSpec, *, start: NamedOrNumeric = 0, step: NamedOrNumeric = 1, dtype: DTypeLike | None = None
) -> NamedArray:
    """Count up from `start` by `step`, one number for each element of the axis. Both may be traced.

    Arguments:
        axis: the axis to count along; several are counted through in order, the last one fastest.
        dtype: the dtype; by default the dtype of `start` and `step`.

    >>> axn.arange(axn.Axis("x", 3), start=1, step=2)
    NamedArray(int32[x=3], [1 3 5])
    >>> axn.arange({"x": 2, "y": 2})
    NamedArray(int32[x=2, y=2], [[0 1] [2 3]])
    """
    names, sizes = _names_and_sizes("arange", _kernels.hashable(axis))
    if type(start) is int and type(step) is int and start == 0 and step == 1:
        return new_array("arange", _count, names, sizes, shape=sizes, dtype=dtype)
    start, step = scalar("arange", "start", start), scalar("arange", "step", step)
    return new_array("arange", _count_from, names, sizes, start, step, shape=sizes, dtype=dtype_key(dtype))


def _count(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    counted = jnp.arange(math.prod(shape), dtype=dtype)
    return counted if len(shape) == 1 else counted.reshape(shape)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"), inline=INLINE)
def _count_from(start: Any, step: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    natural = jnp.result_type(start, step)
    # A small float cannot hold the positions, so count in one that can.
    exact = natural if dtype is None else jnp.promote_types(natural, dtype)
    if jnp.issubdtype(exact, jnp.floating):
        exact = jnp.promote_types(exact, jnp.float32)
    positions = jax.lax.broadcasted_iota(exact, (math.prod(shape),), 0)
    counted = jnp.asarray(start, exact) + jnp.asarray(step, exact) * positions  # numbers under `jax.disable_jit`
    return counted.reshape(shape).astype(natural if dtype is None else dtype)


_NUMPY_COUNT = 50
"""The number of points of `linspace`, `geomspace` and `logspace` for an axis without a size, as in NumPy."""


def _spaced_array(
    what: str, fn: Callable[..., Any], axis: AxisSelector, start: NamedOrNumeric, stop: NamedOrNumeric, **options: Any
) -> NamedArray:
    along = Axis(axis, _NUMPY_COUNT) if isinstance(axis, str) else one_axis(what, "axis", axis)
    start, stop = scalar(what, "start", start), scalar(what, "stop", stop)
    names = (sys.intern(along.name),)
    return new_array(what, fn, names, (along.size,), start, stop, num=along.size, **options)


@errors.say_how_to_call
def linspace(
    axis: AxisSelector,
    *,
    start: NamedOrNumeric,
    stop: NamedOrNumeric,
    endpoint: bool = True,
    dtype: DTypeLike | None = None,
) -> NamedArray:
    """Make evenly spaced numbers from `start` to `stop`; `endpoint=False` excludes `stop`.

    An axis without a size gets 50 points, as in NumPy.

    >>> axn.linspace(axn.Axis("x", 3), start=0, stop=1)
    NamedArray(float32[x=3], [0. 0.5 1. ])
    """
    return _spaced_array("linspace", jnp.linspace, axis, start, stop, endpoint=endpoint, dtype=dtype)


def geomspace(
    axis: AxisSelector,
    *,
    start: NamedOrNumeric,
    stop: NamedOrNumeric,
    endpoint: bool = True,
    dtype: DTypeLike | None = None,
) -> NamedArray:
    """Make a geometric sequence from `start` to `stop`, with the arguments of `linspace`.

    >>> axn.geomspace(axn.Axis("x", 3), start=1, stop=4)
    NamedArray(float32[x=3], [1. 2. 4.])
    """
    return _spaced_array("geomspace", jnp.geomspace, axis, start, stop, endpoint=endpoint, dtype=dtype)


def logspace(
    axis: AxisSelector,
    *,
    start: NamedOrNumeric,
    stop: NamedOrNumeric,
    endpoint: bool = True,
    base: NamedOrNumeric = 10.0,
    dtype: DTypeLike | None = None,
) -> NamedArray:
    """Make powers of `base` with evenly spaced exponents, which `linspace` makes from the other arguments.

    >>> axn.logspace(axn.Axis("x", 3), start=0, stop=2)
    NamedArray(float32[x=3], [ 1. 10. 100.])
    """
    return _spaced_array("logspace", jnp.logspace, axis, start, stop, endpoint=endpoint, dtype=dtype, base=base)


# --- by position ---


@errors.say_how_to_call
def eye(Row: Axis, Col: Axis, k: int = 0, dtype: DTypeLike | None = None) -> NamedArray:
    """Make a matrix of zeros with ones on diagonal `k`: 0 is the main one, positive ones are above it, negative below.

    >>> axn.eye(axn.Axis("row", 2), axn.Axis("col", 2))
    NamedArray(float32[row=2, col=2], [[1. 0.] [0. 1.]])
    """
    names, sizes = _names_and_sizes("eye", (one_axis("eye", "Row", Row), one_axis("eye", "Col", Col)))
    return new_array("eye", jnp.eye, names, sizes, N=sizes[0], M=sizes[1], k=operator.index(k), dtype=dtype)


def vander(x: NamedArray, degree: AxisSelector, *, increasing: bool = False) -> NamedArray:
    """Compute the powers of each element, along a new last axis.

    Arguments:
        degree: the new axis, whose size is the number of powers. If it has no size, it gets the size of `x`, which must
            then have one axis.
        increasing: start with the power zero rather than end with it.

    >>> axn.vander(axn.named([2, 3], "x"), axn.Axis("degree", 3))
    NamedArray(int32[x=2, degree=3], [[4 2 1] [9 3 1]])
    """
    require_named("vander", x)
    degree = _kernels.one_selector("vander", degree)
    if isinstance(degree, str) and len(x.names) != 1:
        raise ValueError(
            f"vander: how many powers of {errors.describe_shape(x.shape)}? Pass Axis({degree!r}, size) for them."
        )
    return _vander_kernel(x.names, degree, bool(increasing)).apply(x.array)


@_kernels.shared("names", "degree")
def _vander_kernel(names: Names, degree: AxisSelector, increasing: bool) -> _kernels.Kernel:
    def positional(x):
        count = x.shape[0] if isinstance(degree, str) else degree.size
        powers = jax.lax.expand_dims(jnp.arange(count), range(x.ndim))
        powers = powers if increasing else count - 1 - powers
        natural = x.dtype if x.dtype != jnp.bool_ else powers.dtype
        return jnp.power(jax.lax.expand_dims(x, (x.ndim,)), powers).astype(natural)

    return _kernels.make_kernel("vander", positional, (names,), distinct("vander", (*names, name_of(degree))))
