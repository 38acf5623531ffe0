"""Statistics: order statistics, averages, covariances, and differences along an axis.

Reductions remove one, several or (by default) all axes, like the functions of `axonym.ops.reductions`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..axis import AxisSelection, AxisSelector, Names, name_of
from ..core import errors
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._blockwise import differences_kernel, kernel_of_blocks, slopes_kernel
from ._op_types import publish
from ._operands import (
    apply_along,
    as_float,
    at_least_float32,
    check_new_axis,
    distinct,
    operand,
    require_named,
    require_subset,
    scalar,
)
from ._sort_gradient import sort_along

# --- order statistics ---


class Median(Protocol):
    """`f(array, axis)`: reduce the axes, all of them by default."""

    def __call__(self, array: NamedArray, axis: AxisSelection | None = None) -> NamedArray: ...


class Quantile(Protocol):
    """`f(array, q, axis)`: the same, for one quantile, or for several along an axis of their own."""

    def __call__(
        self, array: NamedArray, q: NamedOrNumeric, axis: AxisSelection | None = None, *, method: str = "linear"
    ) -> NamedArray: ...


def _positions(names: Names, reduced: Names) -> Any:
    """Return the axes to reduce in JAX's fastest form: one axis, or all of them, need no transpose."""
    if len(reduced) == len(names):
        return None
    return names.index(reduced[0]) if len(reduced) == 1 else tuple(names.index(n) for n in reduced)


@_kernels.shared("names", "axis", "q_names")
def _order_kernel(
    fn: Callable[..., Any], name: str, names: Names, axis: Any, q_names: Names | None, method: str | None
) -> _kernels.Kernel:
    reduced = _kernels.select(name, names, axis)
    kept = tuple(n for n in names if n not in reduced)
    positions = _positions(names, reduced)

    def computed(x, *q, **options):
        sizes = [x.shape[names.index(n)] for n in reduced]
        if 0 in sizes and fn is not jnp.mean:
            raise ValueError(f"{name}: there are no elements along {errors.describe_axes(reduced, sizes)}.")
        if jnp.iscomplexobj(x) and fn is not jnp.mean:
            raise ValueError(f"{name}: complex numbers have no order.")
        # The sum of the two elements in the middle may overflow in float16, which cannot count elements either.
        wide = at_least_float32(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        found = fn(wide, *q, axis=positions, **options)
        return found if wide is x else found.astype(x.dtype)

    if q_names is None:
        return _kernels.make_kernel(name, computed, (names,), kept, selection=axis)
    if method not in _METHODS:
        raise ValueError(f"{name}: `method` is one of {errors.quoted(_METHODS)}, got {method!r}.")
    if len(q_names) > 1:
        raise ValueError(f"{name}: `q` must be a scalar or have one axis, got {errors.describe_axes(q_names)}.")

    def positional(x, q):
        q = at_least_float32(q if jnp.issubdtype(q.dtype, jnp.floating) else q * 1.0)
        return computed(x, q, method=method)

    out_names = distinct(name, (*q_names, *kept))
    return _kernels.make_kernel(name, positional, (names, q_names), out_names, same_sizes=False, selection=axis)


# How each method turns a share of `n` elements into a position; `of` gives the share of a number.
_METHODS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "linear": lambda of, n: of(n - 1),
    "lower": lambda of, n: jnp.floor(of(n - 1)),
    "higher": lambda of, n: jnp.ceil(of(n - 1)),
    "midpoint": lambda of, n: (jnp.floor(of(n - 1)) + jnp.ceil(of(n - 1))) / 2,
    "nearest": lambda of, n: jnp.ceil(of(n - 1) - 0.5),
    "inverted_cdf": lambda of, n: jnp.ceil(of(n)) - 1,
}


def _ordered(
    x: jax.Array,
    q: Any = 0.5,
    *,
    axis: int | tuple[int, ...] | None,
    method: str = "midpoint",
    nan: bool = True,
    percent: bool = False,
) -> jax.Array:
    """Compute quantiles, of numbers alone without `nan`, of percentages with `percent`.

    The functions of JAX give the same, but XLA ends the process for their gradients of a slice of a sharded axis: here
    the sort is `axonym.sort`, with its gradient.
    """
    if axis is None:
        axis = tuple(range(x.ndim))
    if isinstance(axis, tuple):
        kept = [i for i in range(x.ndim) if i not in axis]
        x = jnp.reshape(jnp.transpose(x, (*kept, *axis)), (*(x.shape[i] for i in kept), -1))
        axis = len(kept)
    x, q = sort_along(axis, as_float(x)), jnp.asarray(q)
    count = x.shape[axis] if nan else jnp.sum(~jnp.isnan(x), axis, keepdims=True, dtype=q.dtype)
    along = jnp.reshape(q, [-1 if i == axis else 1 for i in range(x.ndim)])
    # Exact positions stay exact: the division comes last, since GPUs round shares down; and XLA would multiply by 0.01
    # instead of a division by a constant, so it must not know that it is one.
    whole = jnp.where(jnp.isnan(along), along, 100) if percent else None
    position = _METHODS[method](lambda n: along * n if whole is None else along * n / whole, count)
    position = jnp.clip(position, 0, jnp.maximum(count - 1, 0))
    below = jnp.floor(position)
    low, high = (jnp.take_along_axis(x, i.astype(jnp.int32), axis, mode="clip") for i in (below, jnp.ceil(position)))
    share = (position - below).astype(x.dtype)
    found = jnp.where(share == 0, low, low * (1 - share) + high * share)
    if nan:  # which is last
        found = jnp.where(jnp.isnan(jax.lax.index_in_dim(x, -1, axis)), jnp.nan, found)
    return jnp.moveaxis(found, axis, 0) if q.ndim else jnp.squeeze(found, axis)


# For each operation, the elements that it uses, in words, and an example.
_EVERY = ("the elements", "[[1., 2., 9.], [3., 4., 5.]]")
_NUMBERS = ("the elements that are not NaN", "[[1., 2., jnp.nan], [3., 4., 5.]]")


def _median(name: str, fn: Callable[..., Any], among: tuple[str, str], shown: str) -> Median:
    def op(array, axis=None):
        require_named(name, array)
        return _order_kernel(fn, name, array.names, _kernels.hashable(axis), None, None).apply(array.array)

    elements, example = among
    doc = f"""Compute the median of {elements}.

    Arguments:
        axis: the axes to reduce; all of them by default.

    >>> axn.{name}(axn.named({example}, ("x", "y")), "y")
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


def _quantile(
    name: str, fn: Callable[..., Any], among: tuple[str, str], share: tuple[str, int], q: str, shown: str
) -> Quantile:
    (elements, example), (kind, highest) = among, share
    fn = fn if highest == 1 else functools.partial(fn, percent=True)

    def op(array, q, axis=None, *, method="linear"):
        require_named(name, array)
        q, q_names = operand(q)
        return _order_kernel(fn, name, array.names, _kernels.hashable(axis), q_names, method).apply(array.array, q)

    doc = f"""Return the value below which a given {kind} of {elements} falls.

    Arguments:
        q: which one, from 0 (the smallest element) to {highest} (the largest). A named array with one axis gives
            several: its axis comes first in the result.
        axis: the axes to reduce; all of them by default.
        method: what to do between two elements: "linear", "lower", "higher", "midpoint", "nearest" or "inverted_cdf".

    >>> axn.{name}(axn.named({example}, ("x", "y")), {q}, "y")
    NamedArray({shown})
    """
    return publish(op, name, __name__, doc)


_of_numbers = functools.partial(_ordered, nan=False)
_SHARE, _PERCENT = ("share", 1), ("percentage", 100)

# fmt: off
median = _median("median", _ordered, _EVERY, "float32[x=2], [2. 4.]")
nanmedian = _median("nanmedian", _of_numbers, _NUMBERS, "float32[x=2], [1.5 4. ]")
quantile = _quantile("quantile", _ordered, _EVERY, _SHARE, "0.25", "float32[x=2], [1.5 3.5]")
nanquantile = _quantile("nanquantile", _of_numbers, _NUMBERS, _SHARE, "0.5", "float32[x=2], [1.5 4. ]")
percentile = _quantile("percentile", _ordered, _EVERY, _PERCENT, "25", "float32[x=2], [1.5 3.5]")
nanpercentile = _quantile("nanpercentile", _of_numbers, _NUMBERS, _PERCENT, "50", "float32[x=2], [1.5 4. ]")
# fmt: on


# --- averages ---


def average(
    array: NamedArray, axis: AxisSelection | None = None, *, weights: NamedOrNumeric | None = None
) -> NamedArray:
    """Compute the weighted mean over some axes, all of them by default.

    The weights broadcast by name to the array; they are equal by default.

    >>> axn.average(axn.named([1., 2.], "x"), weights=axn.named([3., 1.], "x"))
    NamedArray(float32[], 1.25)
    """
    require_named("average", array)
    axis = _kernels.hashable(axis)
    if weights is None:
        return _order_kernel(jnp.mean, "average", array.names, axis, None, None).apply(array.array)
    weights, weight_names = operand(weights)
    return _average_kernel(array.names, axis, weight_names).apply(array.array, weights)


@_kernels.shared("names", "axis", "weight_names")
def _average_kernel(names: Names, axis: Any, weight_names: Names) -> _kernels.Kernel:
    reduced = _kernels.select("average", names, axis)
    positions = tuple(names.index(n) for n in reduced)
    kept = tuple(n for n in names if n not in reduced)
    require_subset("average", "weights", weight_names, names)

    def positional(x, weights):
        kind = jnp.result_type(x, weights, 0.5)
        x, weights = at_least_float32(x), at_least_float32(weights)
        spread = jnp.broadcast_to(_kernels.align(weights, weight_names, names), x.shape)
        return jnp.average(x, positions, spread).astype(kind)

    return _kernels.make_kernel("average", positional, (names, weight_names), kept, selection=axis)


# --- covariances ---


def cov(
    array: NamedArray, variables: AxisSelector, observations: AxisSelection, *, new_axis: AxisSelector, ddof: int = 1
) -> NamedArray:
    """Compute the covariance of each pair of variables.

    Arguments:
        variables: the axis of the variables. It becomes two, the rows and the columns of the matrix.
        observations: the axis of the observations, or several, which the result lacks. All other axes are batch axes.
        new_axis: the axis of the columns; the rows keep the axis of the variables.
        ddof: the number to subtract from the number of observations before dividing by it.

    >>> x = axn.named([[1., 2., 3.], [6., 4., 2.]], ("feature", "batch"))
    >>> axn.cov(x, "feature", "batch", new_axis="feature2")
    NamedArray(float32[feature=2, feature2=2], [[ 1. -2.] [-2. 4.]])
    """
    return _covariance("cov", array, variables, observations, new_axis, operator.index(ddof))


def corrcoef(
    array: NamedArray, variables: AxisSelector, observations: AxisSelection, *, new_axis: AxisSelector
) -> NamedArray:
    """Compute the correlation of each pair of variables, from -1 to 1. The arguments are as for `cov`.

    >>> x = axn.named([[1., 2., 3.], [6., 4., 2.]], ("feature", "batch"))
    >>> axn.corrcoef(x, "feature", "batch", new_axis="feature2")
    NamedArray(float32[feature=2, feature2=2], [[ 1. -1.] [-1. 1.]])
    """
    return _covariance("corrcoef", array, variables, observations, new_axis, None)


def _covariance(
    what: str, array: Any, variables: Any, observations: Any, new_axis: Any, ddof: int | None
) -> NamedArray:
    require_named(what, array)
    variables = _kernels.one_selector(what, variables)
    kernel = _covariance_kernel(what, array.names, variables, _kernels.hashable(observations), new_axis, ddof)
    return kernel.apply(array.array)


@_kernels.shared("names", "variables", "observations", "new_axis")
def _covariance_kernel(
    what: str, names: Names, variables: AxisSelector, observations: Any, new_axis: AxisSelector, ddof: int | None
) -> _kernels.Kernel:
    """Make a kernel; `ddof` is None for correlations, where the number of observations cancels."""
    variable = _kernels.select_one(what, names, variables)
    observed = _kernels.select(what, names, observations)
    if variable in observed:
        raise ValueError(f"{what}: axis {variable!r} cannot be the axis of both the variables and the observations.")
    batch = tuple(n for n in names if n != variable and n not in observed)
    # The layouts of the contraction and of the result, in which the matrix takes the place of the variables.
    made = (*batch, variable, name_of(new_axis))
    kept = tuple(n for n in names if n not in observed)
    out_names = distinct(what, tuple(m for n in kept for m in ((n, name_of(new_axis)) if n == variable else (n,))))
    summed, shared = tuple(names.index(n) for n in observed), tuple(names.index(n) for n in batch)

    def positional(x):
        check_new_axis(what, new_axis, x.shape[names.index(variable)])
        x = as_float(x)
        kind = x.dtype
        x = at_least_float32(x)
        centered = x - jnp.mean(x, summed, keepdims=True)
        if ddof is None:
            length = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(centered)), summed, keepdims=True))
            centered = centered / length
        product = jax.lax.dot_general(centered, jnp.conj(centered), ((summed, summed), (shared, shared)))
        if ddof is None:
            product = _clipped(product)
        else:
            product = product / max(math.prod(x.shape[i] for i in summed) - ddof, 0)
        return _kernels.transpose_to(product.astype(kind), made, out_names)

    selection = (variables, *_kernels.selectors(observations))
    return _kernels.make_kernel(what, positional, (names,), out_names, selection=selection)


def _clipped(x: jax.Array) -> jax.Array:
    """Clip correlations to [-1, 1], which rounding may exceed."""
    if jnp.iscomplexobj(x):
        return jax.lax.complex(jnp.clip(x.real, -1, 1), jnp.clip(x.imag, -1, 1))
    return jnp.clip(x, -1, 1)


# --- differences and integrals along an axis ---


def diff(array: NamedArray, axis: AxisSelector, *, n: int = 1) -> NamedArray:
    """Compute the differences of neighbors along an axis, `n` times; each time, the axis becomes shorter by one.

    >>> axn.diff(axn.named([1, 3, 6], "x"), "x")
    NamedArray(int32[x=2], [2 3])
    """
    n = operator.index(n)
    if n < 0:
        raise ValueError(f"diff: `n` says how often to take the difference, got {n}.")
    kernel = kernel_of_blocks(differences_kernel, "diff", require_named("diff", array), axis, n, least=n) if n else None
    return apply_along(jnp.diff, "diff", array, axis, n=n) if kernel is None else kernel.apply(array.array)


def gradient(array: NamedArray, axis: AxisSelector, *, spacing: NamedOrNumeric = 1.0) -> NamedArray:
    """Compute the slope along an axis, from the neighbors on both sides.

    `spacing` is the distance of the elements, or their coordinates along `axis`.

    >>> axn.gradient(axn.named([0., 1., 4., 9.], "x"), "x")
    NamedArray(float32[x=4], [1. 2. 4. 5.])
    """
    require_named("gradient", array)
    axis, (spacing, spacing_names) = _kernels.one_selector("gradient", axis), operand(spacing)
    kernel = None
    if spacing_names in ((), (getattr(axis, "name", axis),)):
        kernel = kernel_of_blocks(slopes_kernel, "gradient", array, axis, spacing_names, least=2)
    if kernel is None:
        kernel = _gradient_kernel(array.names, axis, spacing_names)
    return kernel.apply(array.array, spacing)


@_kernels.shared("names", "axis", "spacing_names")
def _gradient_kernel(names: Names, axis: AxisSelector, spacing_names: Names) -> _kernels.Kernel:
    along = _kernels.select_one("gradient", names, axis)
    if spacing_names not in ((), (along,)):
        raise ValueError(
            f"gradient: `spacing` must be a scalar or have axis {along!r} alone, got "
            f"{errors.describe_axes(spacing_names)}."
        )
    position = names.index(along)

    def positional(x, spacing):
        if x.shape[position] < 2:
            raise ValueError(f"gradient: axis {along!r} has size {x.shape[position]}; a slope needs two elements.")
        return jnp.gradient(as_float(x), spacing, axis=position)

    return _kernels.make_kernel("gradient", positional, (names, spacing_names), names, selection=axis)


def trapezoid(
    array: NamedArray, axis: AxisSelector, *, x: NamedArray | None = None, dx: NamedOrNumeric = 1.0
) -> NamedArray:
    """Compute the integral along an axis, by the trapezoidal rule.

    `x` holds the coordinates of the elements: it has `axis`, and may have other axes of the array. Without `x`, the
    distance between elements is `dx`.

    >>> axn.trapezoid(axn.named([1., 2., 3.], "x"), "x", dx=0.5)
    NamedArray(float32[], 2.)
    """
    require_named("trapezoid", array)
    if x is None:
        kernel = _trapezoid_kernel(array.names, _kernels.one_selector("trapezoid", axis), None)
        return kernel.apply(array.array, scalar("trapezoid", "dx", dx))
    x = require_named("trapezoid", x)
    return _trapezoid_kernel(array.names, _kernels.one_selector("trapezoid", axis), x.names).apply(array.array, x.array)


@_kernels.shared("names", "axis", "x_names")
def _trapezoid_kernel(names: Names, axis: AxisSelector, x_names: Names | None) -> _kernels.Kernel:
    along = _kernels.select_one("trapezoid", names, axis)
    position = names.index(along)
    if x_names is not None:
        require_subset("trapezoid", "x", x_names, names)
        if along not in x_names:
            raise ValueError(f"trapezoid: `x` must have axis {along!r}, got {errors.describe_axes(x_names)}.")

    def positional(y, x):
        # Compute with floats: small integers would overflow, and unsigned ones have no negative differences.
        kind = jnp.result_type(y, x, 0.5)
        y, x = at_least_float32(y.astype(kind)), at_least_float32(x.astype(kind))
        size = y.shape[position]
        after = jax.lax.slice_in_dim(y, min(size, 1), None, axis=position)
        before = jax.lax.slice_in_dim(y, 0, max(size - 1, 0), axis=position)
        width = x if x_names is None else jnp.diff(_kernels.align(x, x_names, names), axis=position)
        return (0.5 * jnp.sum(width * (after + before), position)).astype(kind)

    kept = tuple(n for n in names if n != along)
    return _kernels.make_kernel("trapezoid", positional, (names, x_names or ()), kept, selection=axis)
