"""Medians and quantiles, and differences along an axis."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelection, AxisSelector, Names
from ..core import errors
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._blocks import differences_kernel, kernel_of_blocks, slopes_kernel
from ._operands import (
    apply_along,
    as_float,
    at_least_float32,
    distinct,
    operand,
    require_named,
)
from .sorting import sort_along

# --- order statistics ---


def median(array: NamedArray, axis: AxisSelection | None = None) -> NamedArray:
    """Compute the median of the elements.

    Arguments:
        axis: the axes to reduce; all of them by default.

    >>> axn.median(axn.named([[1., 2., 9.], [3., 4., 5.]], ("x", "y")), "y")
    NamedArray(float32[x=2], [2. 4.])
    """
    require_named("median", array)
    return _order_kernel("median", array.names, _kernels.hashable(axis), (), "midpoint").apply(array.array, 0.5)


def quantile(
    array: NamedArray, q: NamedOrNumeric, axis: AxisSelection | None = None, *, method: str = "linear"
) -> NamedArray:
    """Return the value below which a given share of the elements falls.

    Arguments:
        q: which one, from 0 (the smallest element) to 1 (the largest). A named array with one axis gives several: its
            axis comes first in the result.
        axis: the axes to reduce; all of them by default.
        method: what to do between two elements: "linear", "lower", "higher", "midpoint", "nearest" or "inverted_cdf".

    >>> axn.quantile(axn.named([[1., 2., 9.], [3., 4., 5.]], ("x", "y")), 0.25, "y")
    NamedArray(float32[x=2], [1.5 3.5])
    """
    require_named("quantile", array)
    q, q_names = operand(q)
    return _order_kernel("quantile", array.names, _kernels.hashable(axis), q_names, method).apply(array.array, q)


@_kernels.shared("names", "axis", "q_names")
def _order_kernel(name: str, names: Names, axis: Any, q_names: Names, method: str) -> _kernels.Kernel:
    reduced = _kernels.select(name, names, axis)
    kept = tuple(n for n in names if n not in reduced)
    if method not in _METHODS:
        raise ValueError(f"{name}: `method` is one of {errors.quoted(_METHODS)}, got {method!r}.")
    if len(q_names) > 1:
        raise ValueError(f"{name}: `q` must be a scalar or have one axis, got {errors.describe_axes(q_names)}.")

    def positional(x, q):
        sizes = [x.shape[names.index(n)] for n in reduced]
        if 0 in sizes:
            raise ValueError(f"{name}: there are no elements along {errors.describe_axes(reduced, sizes)}.")
        if jnp.iscomplexobj(x):
            raise ValueError(f"{name}: complex numbers have no order.")
        q = at_least_float32(q if jnp.issubdtype(q.dtype, jnp.floating) else q * 1.0)
        # The sum of the two elements in the middle may overflow in float16, which cannot count elements either.
        wide = at_least_float32(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        found = _ordered(wide, q, tuple(names.index(n) for n in reduced), method)
        return found if wide is x else found.astype(x.dtype)

    out_names = distinct(name, (*q_names, *kept))
    return _kernels.make_kernel(name, positional, (names, q_names), out_names, same_sizes=False, selection=axis)


# How each method turns a share of `n` elements into a position.
_METHODS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "linear": lambda q, n: q * (n - 1),
    "lower": lambda q, n: jnp.floor(q * (n - 1)),
    "higher": lambda q, n: jnp.ceil(q * (n - 1)),
    "midpoint": lambda q, n: (jnp.floor(q * (n - 1)) + jnp.ceil(q * (n - 1))) / 2,
    "nearest": lambda q, n: jnp.ceil(q * (n - 1) - 0.5),
    "inverted_cdf": lambda q, n: jnp.ceil(q * n) - 1,
}


def _ordered(x: jax.Array, q: jax.Array, axes: tuple[int, ...], method: str) -> jax.Array:
    """Compute quantiles along some axes.

    The functions of JAX give the same, but XLA ends the process for their gradients of a slice of a sharded axis: here
    the sort is `axonym.sort`, with its gradient.
    """
    axis = axes[0] if len(axes) == 1 else -1
    if axis < 0:
        kept = [i for i in range(x.ndim) if i not in axes]
        x = jnp.reshape(jnp.transpose(x, (*kept, *axes)), (*(x.shape[i] for i in kept), -1))
        axis = len(kept)
    x = sort_along(axis, as_float(x))
    along = jnp.reshape(q, [-1 if i == axis else 1 for i in range(x.ndim)])
    position = jnp.clip(_METHODS[method](along, x.shape[axis]), 0, x.shape[axis] - 1)
    below = jnp.floor(position)
    low, high = (jnp.take_along_axis(x, i.astype(jnp.int32), axis, mode="clip") for i in (below, jnp.ceil(position)))
    share = (position - below).astype(x.dtype)
    found = jnp.where(share == 0, low, low * (1 - share) + high * share)
    # NaN is last.
    found = jnp.where(jnp.isnan(jax.lax.index_in_dim(x, -1, axis)), jnp.nan, found)
    return jnp.moveaxis(found, axis, 0) if q.ndim else jnp.squeeze(found, axis)


# --- differences along an axis ---


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
