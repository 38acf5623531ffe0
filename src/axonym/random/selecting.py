"""Draw categories, slices of an array, and permutations at random."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import _errors, _kernels
from ..array import NamedArray, wrap
from ..axis import Axis, AxisSelector, AxisSpec, Names, axis_size
from ..ops._operands import distinct, require_named
from ._draw import Key, axis_of, check_parameters, describe, new_axes, one_key, placed_kernel


def categorical(
    key: Key, logits: NamedArray, axis: AxisSelector, shape: AxisSpec | None = None, *, replace: bool = True
) -> NamedArray:
    """Draw indices along an axis, with probabilities from logits.

    The values do not depend on the order of the axes of `logits`.

    Arguments:
        key: a random key.
        logits: the logarithms of the probabilities, up to a constant.
        axis: the axis of `logits` for the categories.
        shape: the axes of the result: those of `logits` except `axis`, in any order, and others for several draws from
            the same logits. By default there is one draw from each.
        replace: whether several draws from the same logits may be equal.

    >>> logits = axn.log(axn.named([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], ("batch", "vocab")))
    >>> x = axn.random.categorical(jax.random.key(0), logits, "vocab", {"batch": 2, "draw": 5})
    >>> x["batch", 1]
    NamedArray(int32[draw=5], [2 2 2 2 2])
    """
    what = "random.categorical"
    key = one_key(what, key)
    categories = axis_of(what, "logits", logits, axis)
    axes = tuple(a for a in logits.axes if a is not categories) if shape is None else new_axes(what, shape)
    missing = [n for n in logits.names if n != categories.name and n not in {a.name for a in axes}]
    if missing:
        raise ValueError(
            f"{what}: the shape {describe(axes)} lacks {_errors.describe_axes(missing)} of the logits "
            f"{describe(logits.axes)}. Add it, or reduce it away first."
        )
    distinct(what, tuple(a.name for a in (*axes, categories)))
    if not replace:
        _check_enough(what, tuple(a for a in axes if a.name not in logits.names), categories)
    kernel = _categorical_kernel(what, logits.names, categories, axes, bool(replace))
    return wrap(kernel.call(key, logits.array), kernel.names)


@_kernels.cached
def _categorical_kernel(
    what: str, names: Names, categories: Axis, axes: tuple[Axis, ...], replace: bool
) -> _kernels.Kernel:
    sizes = {a.name: a.size for a in axes}
    batch = tuple(n for n in sizes if n in names)
    draws = tuple(n for n in sizes if n not in names)

    def positional(key, logits):
        check_parameters(what, axes, [("logits", names, (categories,))], [logits])
        if replace:
            aligned = _kernels.align(logits, names, (*sizes, categories.name))
            return jax.random.categorical(key, aligned, axis=-1, shape=tuple(sizes.values()))
        aligned = _kernels.align(logits, names, (*batch, categories.name))
        shape = tuple(sizes[n] for n in (*draws, *batch))
        found = jax.random.categorical(key, aligned, axis=-1, shape=shape, replace=False)
        return _kernels.transpose_to(found, (*draws, *batch), tuple(sizes))

    return placed_kernel(what, positional, (names,), axes)


def choice(
    key: Key,
    shape: AxisSpec,
    a: NamedArray,
    axis: AxisSelector,
    replace: bool = True,
    p: NamedArray | None = None,
) -> NamedArray:
    """Choose slices of an array at random along an axis.

    Arguments:
        key: a random key.
        shape: the axes of the choices. `axis` may be one of them; other axes of `a` may not.
        a: the array to choose from.
        axis: the axis of `a` along which to choose.
        replace: whether the same slice may be chosen more than once.
        p: the probability of each slice, along `axis`; equal by default.

    The result has the axes of `shape`, then those of `a` except `axis`.

    >>> print(axn.random.choice(jax.random.key(0), {"draw": 5}, axn.ones({"batch": 8, "embed": 4}), "batch"))
    float32[draw=5, embed=4]
    """
    what = "random.choice"
    key = one_key(what, key)
    along = axis_of(what, "a", a, axis)
    axes = new_axes(what, shape)
    if not replace:
        _check_enough(what, axes, along)
    if p is None:
        kernel = _choice_kernel(what, a.axes, along, axes, bool(replace), None)
        return wrap(kernel.call(key, a.array), kernel.names)
    if require_named(what, p).axes != (along,):
        raise ValueError(f"{what}: `p` has exactly the axis {along} of `a`, got {_errors.describe_shape(p.shape)}.")
    kernel = _choice_kernel(what, a.axes, along, axes, bool(replace), p.names)
    return wrap(kernel.call(key, a.array, p.array), kernel.names)


@_kernels.cached
def _choice_kernel(
    what: str,
    from_axes: tuple[Axis, ...],
    along: Axis,
    axes: tuple[Axis, ...],
    replace: bool,
    p_names: Names | None,
) -> _kernels.Kernel:
    position = from_axes.index(along)
    rest = tuple(a for a in from_axes if a is not along)
    sizes = tuple(a.size for a in axes)
    before = tuple(range(position))
    chosen = tuple(range(position, position + len(axes)))
    after = tuple(range(position + len(axes), len(axes) + len(rest)))

    def positional(key, a, p=None):
        index = jax.random.choice(key, along.size, sizes, replace=replace, p=p)
        found = jnp.take(a, index, axis=position, mode="clip")
        return jnp.transpose(found, (*chosen, *before, *after)) if before else found

    in_names = (tuple(a.name for a in from_axes), *(() if p_names is None else (p_names,)))
    return placed_kernel(what, positional, in_names, new_axes(what, (*axes, *rest)))


def permutation(key: Key, x: NamedArray, axis: AxisSelector, independent: bool = False) -> NamedArray:
    """Permute an array at random along an axis.

    Arguments:
        key: a random key.
        x: the array.
        axis: the axis to permute.
        independent: whether to permute independently for each index of the other axes, so that slices do not stay
            together.

    >>> axn.random.permutation(jax.random.key(0), axn.arange(axn.Axis("x", 5)), "x").sum()
    NamedArray(int32[], 10)
    """
    what = "random.permutation"
    key = one_key(what, key)
    along = axis_of(what, "x", x, axis)
    kernel = _permutation_kernel(what, x.axes, along, bool(independent))
    return wrap(kernel.call(key, x.array), kernel.names)


@_kernels.cached
def _permutation_kernel(what: str, axes: tuple[Axis, ...], along: Axis, independent: bool) -> _kernels.Kernel:
    position = axes.index(along)

    def positional(key, x):
        return jax.random.permutation(key, x, axis=position, independent=independent)

    return placed_kernel(what, positional, (tuple(a.name for a in axes),), axes)


def _check_enough(what: str, draws: Sequence[Axis], along: Axis) -> None:
    if axis_size(draws) > along.size:
        raise ValueError(
            f"{what}: there are more draws {describe(draws)} than axis {along} has positions. Draw fewer, or with "
            "replace=True."
        )
