"""Pooling: what stands in a window is reduced to one value, and the window moves along its axes.

The window is given as axes: the names say along which axes of the input it moves, the sizes how far it reaches. The
axes of the result are those of the input, in its order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .. import _kernels
from .._jax_versions import set_apart
from ..array import NamedArray, wrap
from ..axis import AxisSpec, Names, axes_of_spec
from ..ops._op_types import publish
from ..ops._operands import distinct, require_named, scalar
from ._window_arguments import Padding, PaddingSpec, Pair, PerAxis, check_spans, parse_padding, per_axis, same_padding

__all__ = ["max_pool", "mean_pool", "min_pool", "pool"]

Stride: TypeAlias = PerAxis | None


class _Pool(Protocol):
    def __call__(
        self,
        Window: AxisSpec,
        inputs: NamedArray,
        stride: Stride = None,
        padding: PaddingSpec = "VALID",
        use_ceil: bool = False,
    ) -> NamedArray: ...


def _extreme_pool(name: str, summary: str, shown: str) -> _Pool:
    def op(
        Window: AxisSpec,
        inputs: NamedArray,
        stride: Stride = None,
        padding: PaddingSpec = "VALID",
        use_ceil: bool = False,
    ) -> NamedArray:
        return _pool(name, Window, inputs, stride, padding, use_ceil, name)

    doc = f"""{summary}

    Arguments:
        Window: the window, as axes of the sizes it has.
        inputs: a named array with these axes; other axes are kept.
        stride: how far the window moves each time: an integer, one for each axis in the order of the window, or a
            mapping by name; 1 by default.
        padding: "VALID" for none; "SAME" for as much as it takes for a window to start at every stride; or in elements,
            before and after: an integer, or for each axis an integer or a pair. Padding is never the result.
        use_ceil: also take in a last window that reaches beyond the end.

    >>> axn.nn.{name}(axn.Axis("x", 2), axn.named([3., 1., 4., 1., 5.], "x"), stride=2, use_ceil=True)
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


max_pool = _extreme_pool(
    "max_pool", "The largest value in a window that moves over the input.", "float32[x=3], [3. 4. 5.]"
)
min_pool = _extreme_pool(
    "min_pool", "The smallest value in a window that moves over the input.", "float32[x=3], [1. 1. 5.]"
)


def mean_pool(
    Window: AxisSpec,
    inputs: NamedArray,
    stride: Stride = None,
    padding: PaddingSpec = "VALID",
    *,
    use_ceil: bool = False,
    count_include_pad: bool = False,
) -> NamedArray:
    """The mean of the values in a window that moves over the input.

    Arguments:
        Window: the window, as axes of the sizes it has.
        inputs: a named array with these axes; other axes are kept.
        stride: how far the window moves each time; as in `max_pool`.
        padding: what is added around the input; as in `max_pool`.
        use_ceil: also take in a last window that reaches beyond the end.
        count_include_pad: divide by the size of the window wherever it is, as if there were zeros around the input;
            otherwise, by the number of elements of the input in it.

    >>> axn.nn.mean_pool(axn.Axis("x", 2), axn.named([3., 1., 4., 1., 5.], "x"), stride=2, padding=((0, 1),))
    NamedArray(float32[x=3], [2.  2.5 5. ])
    """
    kind = _WITH_PADDING if count_include_pad else "mean_pool"
    return _pool("mean_pool", Window, inputs, stride, padding, use_ceil, kind)


def pool(
    Window: AxisSpec,
    inputs: NamedArray,
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    stride: Stride = None,
    padding: PaddingSpec = "VALID",
    use_ceil: bool = False,
) -> NamedArray:
    """The values in a window that moves over the input, combined by any function.

    Arguments:
        Window: the window, as axes of the sizes it has.
        inputs: a named array with these axes; other axes are kept.
        init: a number: what to start from in each window, and what padding consists of.
        reduce_fn: combines two raw arrays elementwise. It is associative and commutative, and can be differentiated
            where the result is to be.
        stride: how far the window moves each time; as in `max_pool`.
        padding: what is added around the input; as in `max_pool`.
        use_ceil: also take in a last window that reaches beyond the end.

    >>> axn.nn.pool.pool(axn.Axis("x", 2), axn.named([3., 1., 4., 1., 5.], "x"), 0.0, jax.lax.add)
    NamedArray(float32[x=4], [4. 5. 5. 6.])
    """
    return _pool("pool", Window, inputs, stride, padding, use_ceil, reduce_fn, scalar("pool", "init", init))


def _pool(
    what: str,
    Window: AxisSpec,
    inputs: NamedArray,
    stride: Stride,
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
    kernel = _pool_kernel(what, inputs.names, names, sizes, strides, pads, use_ceil, reduction)
    return wrap(kernel.call(inputs.array, *init), kernel.names)


@_kernels.cached
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

    def everywhere(values: Sequence[Any], elsewhere: Any) -> tuple[Any, ...]:
        """What is known for each axis of the window, for all axes of the input."""
        known = dict(zip(along, values, strict=True))
        return tuple(known.get(n, elsewhere) for n in names)

    def positional(x, *init):
        sizes = tuple(x.shape[names.index(n)] for n in along)
        pads = _padding(sizes, window, strides, padding, use_ceil)
        check_spans(what, along, sizes, window, pads)
        moves = _Moves(everywhere(window, 1), everywhere(strides, 1), everywhere(pads, (0, 0)))
        if init:
            return _combined(x, jnp.asarray(init[0], x.dtype), reduction, moves)
        _check_not_empty(what, along, window, pads)
        if reduction in _EXTREMES:
            return _window_reduce(x, *_EXTREMES[reduction], moves)
        return _mean(x, moves, count_padding=reduction == _WITH_PADDING)

    in_names = (names, ()) if what == "pool" else (names,)
    return _kernels.make_kernel(what, positional, in_names, names)


class _Moves(NamedTuple):
    """How a window moves, for every axis of an array: its size, its strides, and the padding that it moves over."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[Pair, ...]


def _padding(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: Padding, use_ceil: bool
) -> tuple[Pair, ...]:
    if padding == "SAME":
        return tuple(map(same_padding, sizes, window, strides))
    given = ((0, 0),) * len(sizes) if isinstance(padding, str) else padding
    if not use_ceil:
        return given
    return tuple(_with_last(*known) for known in zip(sizes, window, strides, given, strict=True))


def _with_last(size: int, window: int, stride: int, padding: Pair) -> Pair:
    """More padding after, for a last window that reaches beyond the end but starts before it."""
    before, after = padding
    last = -(-(size + before + after - window) // stride) * stride
    return (before, max(after, last + window - size - before)) if last < size + before else padding


def _check_not_empty(what: str, names: Names, window: Sequence[int], padding: Sequence[Pair]) -> None:
    wrong = [
        f"{max(pads)} for a window of {size} along {name!r}"
        for name, size, pads in zip(names, window, padding, strict=True)
        if max(pads) >= size
    ]
    if wrong:
        raise ValueError(f"{what}: with so much padding, a window holds nothing else: {', '.join(wrong)}.")


# --- the reductions ---

_WITH_PADDING = "mean_pool, padding included"
_EXTREMES = {"max_pool": (jax.lax.max, False), "min_pool": (jax.lax.min, True)}
"""What combines two values, and whether what it starts from is the largest or the smallest value there is."""


def _window_reduce(x: jax.Array, fn: Callable[..., Any], from_largest: bool, moves: _Moves) -> jax.Array:
    return jax.lax.reduce_window(set_apart(x), _extreme(x.dtype, from_largest), fn, *moves)


def _extreme(dtype: Any, largest: bool) -> np.ndarray:
    if dtype == jnp.bool_:
        return np.asarray(largest)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min, dtype)
    return np.asarray(np.inf if largest else -np.inf, dtype)


def _mean(x: jax.Array, moves: _Moves, count_padding: bool) -> jax.Array:
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.canonicalize_dtype(float)
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))  # as in `jax.numpy.mean`
    total = jax.lax.reduce_window(wide, np.zeros((), wide.dtype), jax.lax.add, *moves)
    count = np.ones((1,) * x.ndim, wide.dtype)
    for axis, (size, window, stride, pads) in enumerate(zip(x.shape, *moves, strict=True)):
        here = np.full(total.shape[axis], window) if count_padding else _counts(size, window, stride, pads)
        # Where it is the same everywhere, one number will do.
        count = count * np.expand_dims(
            here[:1] if (here == here[:1]).all() else here, [i for i in range(x.ndim) if i != axis]
        )
    return (total / count.astype(wide.dtype)).astype(dtype)


def _counts(size: int, window: int, stride: int, padding: Pair) -> np.ndarray:
    """How many elements each window holds along an axis that are not padding."""
    before, after = padding
    starts = np.arange(-before, size + after - window + 1, stride)
    return np.minimum(starts + window, size) - np.maximum(starts, 0)


def _combined(x: jax.Array, init: jax.Array, fn: Callable[[Any, Any], Any], moves: _Moves) -> jax.Array:
    """What stands at each place in the window is one array, so any function can combine them, and be differentiated."""
    padding = [(*pads, 0) for pads in moves.padding]
    # `init` is not what JAX pads with: that could not be differentiated where the array is not.
    inside = jax.lax.pad(jnp.ones(x.shape, bool), jnp.zeros((), bool), padding)
    padded = jnp.where(inside, jax.lax.pad(x, jnp.zeros((), x.dtype), padding), init)
    result = init
    for offsets in itertools.product(*map(range, moves.window)):
        ends = [
            size - window + offset + 1 for size, window, offset in zip(padded.shape, moves.window, offsets, strict=True)
        ]
        result = fn(result, jax.lax.slice(padded, offsets, ends, moves.strides))
    return result
