"""Convolve along an axis."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelector, Names, names_without
from ..named_array import NamedArray
from . import _kernels
from ._operands import private, require_named


def convolve(
    a: NamedArray, v: NamedArray, axis: AxisSelector, mode: str = "full", *, precision: jax.lax.PrecisionLike = None
) -> NamedArray:
    """Compute the convolution of two arrays along an axis.

    Axes that the operands share are matched; the operands broadcast along the others. The result has the axes of `a`,
    then the axes that only `v` has. The correlation with `v` is the convolution with `axn.conj(axn.flip(v, axis))`;
    with "same", and a longer `v`, NumPy's may begin one position later.

    Arguments:
        v: a named array; its axis may have another size.
        mode: "full" for every position where the operands overlap, "same" for as many as the longer one has elements,
            "valid" for the positions where they overlap completely.
        precision: how exactly to multiply, as in `jax.lax`.

    >>> axn.convolve(axn.named([1., 2., 3.], "t"), axn.named([1., 10.], "t"), "t")
    NamedArray(float32[t=4], [ 1. 12. 23. 30.])
    """
    require_named("convolve", a), require_named("convolve", v)
    kernel = _convolution_kernel(a.names, v.names, _kernels.one_selector("convolve", axis), mode, precision)
    return kernel.apply(a.array, v.array)


@_kernels.shared("a_names", "v_names", "axis")
def _convolution_kernel(
    a_names: Names, v_names: Names, axis: AxisSelector, mode: str, precision: Any
) -> _kernels.Kernel:
    what = "convolve"
    chosen = _kernels.select_one(what, a_names, axis)
    _kernels.select_one(what, v_names, chosen, operand=1)
    out_names = a_names + tuple(n for n in v_names if n not in a_names)
    batch = names_without(out_names, chosen)
    positional, by_products = (
        _kernels.map_over(one, batch, (a_names, v_names), out_names)
        for one in (
            functools.partial(jnp.convolve, mode=mode, precision=precision),
            functools.partial(convolve_by_products, mode=mode),
        )
    )
    (along_v,) = private("`v`", (chosen,))  # it must not be matched: its size differs
    in_names = (a_names, tuple(along_v if n == chosen else n for n in v_names))
    whole = dict.fromkeys((chosen, along_v), "whole")
    return _kernels.make_kernel(
        what, positional, in_names, out_names, whole, selection=axis, on_auto="replicated", by_products=by_products
    )


def convolve_by_products(a: jax.Array, v: jax.Array, mode: str = "full") -> jax.Array:
    """Convolve vectors as a sum of products, one for each element of the shorter one.

    In a loop, since they can be long; `_along` in `axonym.ops._kernels` says where it is needed.
    """
    wanted = jax.eval_shape(functools.partial(jnp.convolve, mode=mode), a, v)
    dtype = jnp.promote_types(wanted.dtype, jnp.float32)  # a convolution, too, sums small dtypes in float32
    short, long = sorted((a.astype(dtype), v.astype(dtype)), key=jnp.size)
    last, size = short.shape[0] - 1, long.shape[0] + short.shape[0] - 1
    long = jnp.pad(long, last)

    def add(total, i):
        return total + short[i] * jax.lax.dynamic_slice(long, (last - i,), (size,)), None

    total = jax.lax.scan(jax.checkpoint(add), jnp.zeros(size, dtype), jnp.arange(last + 1))[0]
    start = (size - wanted.shape[0]) // 2
    return total[start : start + wanted.shape[0]].astype(wanted.dtype)
