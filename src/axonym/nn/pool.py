"""Pooling: reduce the values in a window that moves over the input.

The window is given as axes: their names are the axes of the input that the window moves along, their sizes the size
of the window. The result has the axes of the input in the same order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import AxisSpec, Names, axes_of_spec
from ..core.jax_versions import set_apart
from ..named_array import NamedArray, NamedOrNumeric
from ..ops import _kernels
from ..ops._operands import distinct, extreme, require_named, scalar
from ..ops._prefixes import strided_slice
from ._window_arguments import Padding, PaddingSpec, Pair, PerAxis, check_spans, parse_padding, per_axis, same_padding

__all__ = ["max_pool", "mean_pool", "min_pool", "pool"]


def max_pool(
    inputs: NamedArray,
    Window: AxisSpec,
    stride: PerAxis | None = None,
    padding: PaddingSpec = "VALID",
    use_ceil: bool = False,
) -> NamedArray:
    """Return the largest value of each window.

    Arguments:
        inputs: a named array with the axes of the window; other axes are kept.
        Window: the window, as axes with its sizes.
        stride: the step between windows: an integer, one for each axis in the order of the window, or a mapping by
            name; 1 by default.
        padding: "VALID" for none; "SAME" pads so that a window starts at every stride; or numbers of elements before
            and after: an integer, or for each axis an integer or a pair. Padding is never the result.
        use_ceil: whether to include a last window that extends beyond the end.

    >>> axn.nn.max_pool(axn.named([3., 1., 4., 1., 5.], "x"), axn.Axis("x", 2), stride=2, use_ceil=True)
    NamedArray(float32[x=3], [3. 4. 5.])
    """
    return _pool_windows("max_pool", inputs, Window, stride, padding, use_ceil, "max_pool")


def min_pool(
    inputs: NamedArray,
    Window: AxisSpec,
    stride: PerAxis | None = None,
    padding: PaddingSpec = "VALID",
    use_ceil: bool = False,
) -> NamedArray:
    """Return the smallest value of each window; the arguments are as in `max_pool`.

    >>> axn.nn.min_pool(axn.named([3., 1., 4., 1., 5.], "x"), axn.Axis("x", 2), stride=2, use_ceil=True)
    NamedArray(float32[x=3], [1. 1. 5.])
    """
    return _pool_windows("min_pool", inputs, Window, stride, padding, use_ceil, "min_pool")


def mean_pool(
    inputs: NamedArray,
    Window: AxisSpec,
    stride: PerAxis | None = None,
    padding: PaddingSpec = "VALID",
    *,
    use_ceil: bool = False,
    count_include_pad: bool = False,
) -> NamedArray:
    """Compute the mean of each window.

    Arguments:
        inputs, Window, stride, padding, use_ceil: as in `max_pool`.
        count_include_pad: whether to divide by the size of the window everywhere, as if the padding were zeros, instead
            of by the number of input elements in the window.

    >>> axn.nn.mean_pool(axn.named([3., 1., 4., 1., 5.], "x"), axn.Axis("x", 2), stride=2, padding=((0, 1),))
    NamedArray(float32[x=3], [2.  2.5 5. ])
    """
    kind = _WITH_PADDING if count_include_pad else "mean_pool"
    return _pool_windows("mean_pool", inputs, Window, stride, padding, use_ceil, kind)


def pool(
    inputs: NamedArray,
    Window: AxisSpec,
    init: NamedOrNumeric,
    reduce_fn: Callable[[Any, Any], Any],
    stride: PerAxis | None = None,
    padding: PaddingSpec = "VALID",
    use_ceil: bool = False,
) -> NamedArray:
    """Reduce each window with any function.

    Arguments:
        inputs, Window, stride, padding, use_ceil: as in `max_pool`.
        init: a number: the initial value of each window's reduction, and the value of padding.
        reduce_fn: a function that combines two raw arrays elementwise. It must be associative and commutative, and
            differentiable if the result is differentiated.

    >>> axn.nn.pool.pool(axn.named([3., 1., 4., 1., 5.], "x"), axn.Axis("x", 2), 0.0, jax.lax.add)
    NamedArray(float32[x=4], [4. 5. 5. 6.])
    """
    return _pool_windows("pool", inputs, Window, stride, padding, use_ceil, reduce_fn, scalar("pool", "init", init))


def _pool_windows(
    what: str,
    inputs: NamedArray,
    Window: AxisSpec,
    stride: PerAxis | None,
    padding: PaddingSpec,
    use_ceil: bool,
    reduction: Any,
    *init: Any,
) -> NamedArray:
    require_named(what, inputs)
    window = axes_of_spec(Window, what)
    names = distinct(what, tuple(a.name for a in window))
    sizes = per_axis(what, "Window", tuple(a.size for a in window), names, at_least=1)
    strides = per_axis(what, "stride", 1 if stride is None else stride, names, at_least=1)
    pads = parse_padding(what, padding, names)
    return _pool_kernel(what, inputs.names, names, sizes, strides, pads, use_ceil, reduction).apply(inputs.array, *init)


@_kernels.shared("names", "along")
def _pool_kernel(
    what: str,
    names: Names,
    along: Names,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    padding: Padding,
    use_ceil: bool,
    reduction: Any,
) -> _kernels.Kernel:
    _kernels.select(what, names, along)

    def for_all_axes(values: Sequence[Any], default: Any) -> tuple[Any, ...]:
        """Extend values for the axes of the window to all axes of the input."""
        by_name = dict(zip(along, values, strict=True))
        return tuple(by_name.get(n, default) for n in names)

    def positional(x, *init):
        sizes = tuple(x.shape[names.index(n)] for n in along)
        if padding == "SAME":
            pads = tuple(map(same_padding, sizes, window, strides))
        else:
            pads = ((0, 0),) * len(sizes) if isinstance(padding, str) else padding
            pads = tuple(map(_with_last_window, sizes, window, strides, pads)) if use_ceil else pads
        check_spans(what, along, sizes, window, pads)
        windows = _Windows(for_all_axes(window, 1), for_all_axes(strides, 1), for_all_axes(pads, (0, 0)))
        if init:
            # One elementwise operation for each position in the window: so the reduction can be any function, and the
            # result is differentiable if that is. Not padded with `init` directly: JAX cannot differentiate
            # `jax.lax.pad` for its padding value alone.
            start = jnp.asarray(init[0], x.dtype)
            inside = windows.pad(jnp.ones(x.shape, bool), np.zeros((), bool))
            padded = jnp.where(inside, windows.pad(x, np.zeros((), x.dtype)), start)
            return functools.reduce(reduction, _each_position(padded, windows), start)
        if wrong := [
            f"{max(own)} for a window of {size} along {name!r}"
            for name, size, own in zip(along, window, pads, strict=True)
            if max(own) >= size
        ]:
            raise ValueError(f"{what}: with this padding, a window contains nothing else: {', '.join(wrong)}.")
        if reduction not in _EXTREMES:
            return _mean_of_windows(x, windows, count_padding=reduction == _WITH_PADDING)
        axes = [i for i, (size, step, own) in enumerate(zip(*windows, strict=True)) if size > 1 or step > 1 or any(own)]
        overlapping = [i for i in axes if windows.overlap(x.shape, i)]
        if not jnp.issubdtype(x.dtype, jnp.inexact) or not overlapping:
            return _reduced_windows(x, *_EXTREMES[reduction], windows)
        # One axis after another, the last one first: of equal values, the first gets the gradient, as in JAX.
        for i in reversed(axes):
            reduce = _reduced_where_windows_overlap if i in overlapping else _reduced_windows
            x = reduce(x, *_EXTREMES[reduction], windows.along(i))
        return x

    in_names = (names, ()) if what == "pool" else (names,)
    return _kernels.make_kernel(what, positional, in_names, names)


class _Windows(NamedTuple):
    """The windows of an array: their size, strides and padding for every axis."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[Pair, ...]

    def along(self, axis: int) -> _Windows:
        """Return the windows along one axis only."""
        each: Any = zip(self, (1, 1, (0, 0)), strict=True)
        return _Windows(*(tuple(v if i == axis else none for i, v in enumerate(values)) for values, none in each))

    def overlap(self, shape: Sequence[int], axis: int) -> bool:
        """Return whether there are several windows along an axis, each at least two strides long."""
        size, stride = self.window[axis], self.strides[axis]
        several = shape[axis] + sum(self.padding[axis]) - size >= stride
        return several and size > 2 * stride - 1

    def pad(self, x: jax.Array, value: Any) -> jax.Array:
        return jax.lax.pad(set_apart(x), value, [(*pads, 0) for pads in self.padding])


def _with_last_window(size: int, window: int, stride: int, padding: Pair) -> Pair:
    """Increase the padding at the end for a last window that starts before the end and extends beyond it."""
    before, after = padding
    last = -(-(size + before + after - window) // stride) * stride
    return (before, max(after, last + window - size - before)) if last < size + before else padding


# --- the reductions ---

_WITH_PADDING = "mean_pool, padding included"
_EXTREMES = {"max_pool": (jax.lax.max, False), "min_pool": (jax.lax.min, True)}
"""The function that combines two values, and whether it starts from the dtype's largest value, not the smallest."""


def _reduced_windows(x: jax.Array, fn: Callable[..., Any], from_largest: bool, windows: _Windows) -> jax.Array:
    return jax.lax.reduce_window(set_apart(x), extreme(x.dtype, from_largest), fn, *windows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _reduced_where_windows_overlap(
    x: jax.Array, fn: Callable[..., Any], from_largest: bool, windows: _Windows
) -> jax.Array:
    """Reduce windows that overlap, with a gradient that is also correct along a sharded axis.

    XLA partitions the gradient of `jax.lax.reduce_window` with wrong values for such windows.
    """
    return _reduced_windows(x, fn, from_largest, windows)


@_reduced_where_windows_overlap.defjvp
def _tangent_of_extremes(
    fn: Callable[..., Any], from_largest: bool, windows: _Windows, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    result = _reduced_where_windows_overlap(x, fn, from_largest, windows)
    tangent, found = jnp.zeros_like(result), jnp.zeros(result.shape, bool)
    values = _each_position(windows.pad(x, extreme(x.dtype, from_largest)), windows)
    changes = _each_position(windows.pad(dx, np.zeros((), dx.dtype)), windows)
    # Of equal values in a window the first one gets the gradient, as in JAX; so `found` stops the others.
    for value, change in zip(values, changes, strict=True):
        first = ((value == result) | (jnp.isnan(value) & jnp.isnan(result))) & ~found
        tangent, found = jnp.where(first, change, tangent), found | first
    return result, tangent


def _mean_of_windows(x: jax.Array, windows: _Windows, count_padding: bool) -> jax.Array:
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.canonicalize_dtype(float)
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))  # as in `jax.numpy.mean`
    total = jax.lax.reduce_window(wide, np.zeros((), wide.dtype), jax.lax.add, *windows)
    count = np.ones((1,) * x.ndim, wide.dtype)
    for axis, (size, window, stride, pads) in enumerate(zip(x.shape, *windows, strict=True)):
        starts = np.arange(-pads[0], size + pads[1] - window + 1, stride)
        here = np.minimum(starts + window, size) - np.maximum(starts, 0)
        here = np.full(total.shape[axis], window) if count_padding else here
        # A count that is the same everywhere is stored once.
        count = count * np.expand_dims(
            here[:1] if (here == here[:1]).all() else here, [i for i in range(x.ndim) if i != axis]
        )
    return (total / count.astype(wide.dtype)).astype(dtype)


def _each_position(padded: jax.Array, windows: _Windows) -> Iterator[jax.Array]:
    """Yield the elements at each position in the window, for all windows of a padded array."""
    for offsets in itertools.product(*map(range, windows.window)):
        sizes = zip(padded.shape, windows.window, offsets, strict=True)
        ends = [size - span + offset + 1 for size, span, offset in sizes]
        yield strided_slice(padded, offsets, ends, windows.strides)
