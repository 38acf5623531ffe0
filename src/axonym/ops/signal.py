"""Convolve and correlate along an axis, unwrap phases; cross, outer and Kronecker products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelection, AxisSelector, Names, names_without
from ..core import errors
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import apply_along, operand, private, require_named, static_number


def _union(a_names: Names, b_names: Names) -> Names:
    """Return the axes of the first operand, then the axes that only the second has."""
    return a_names + tuple(n for n in b_names if n not in a_names)


def _privately(argument: str, names: Names, chosen: Names) -> Names:
    """Return the names of an operand, with unique ones for the axes that must not be matched."""
    return tuple(private(argument, (n,))[0] if n in chosen else n for n in names)


# --- along one axis ---


@_kernels.shared("a_names", "v_names", "axis")
def _convolution_kernel(
    fn: Callable[..., Any], what: str, a_names: Names, v_names: Names, axis: AxisSelector, mode: str, precision: Any
) -> _kernels.Kernel:
    chosen = _kernels.select_one(what, a_names, axis)
    _kernels.select_one(what, v_names, chosen, operand=1)
    out_names = _union(a_names, v_names)
    batch = names_without(out_names, chosen)
    positional, by_products = (
        _kernels.map_over(one, batch, (a_names, v_names), out_names)
        for one in (
            functools.partial(fn, mode=mode, precision=precision),
            functools.partial(convolve_by_products, fn, mode=mode),
        )
    )
    in_names = (a_names, _privately("`v`", v_names, (chosen,)))
    along = (chosen, *private("`v`", (chosen,)))
    return _kernels.make_along_kernel(
        what, positional, in_names, out_names, along, replicated=True, by_products=by_products, selection=axis
    )


def _convolve(fn: Callable[..., Any], what: str, a: Any, v: Any, axis: Any, mode: str, precision: Any) -> NamedArray:
    require_named(what, a), require_named(what, v)
    kernel = _convolution_kernel(fn, what, a.names, v.names, _kernels.one_selector(what, axis), mode, precision)
    return kernel.apply(a.array, v.array)


def convolve_by_products(fn: Callable[..., Any], a: jax.Array, v: jax.Array, mode: str = "full") -> jax.Array:
    """Apply `jnp.convolve` or `jnp.correlate` to vectors as a sum of products, one for each element of the shorter one.

    In a loop, since they can be long; `make_along_kernel` says where it is needed.
    """
    wanted = jax.eval_shape(functools.partial(fn, mode=mode), a, v)
    dtype = jnp.promote_types(wanted.dtype, jnp.float32)  # a convolution, too, sums small dtypes in float32
    correlates, swapped = fn is jnp.correlate, a.shape[0] < v.shape[0]
    operands = a.astype(dtype), (jnp.conj(jnp.flip(v)) if correlates else v).astype(dtype)
    short, long = sorted(operands, key=jnp.size)
    last, size = short.shape[0] - 1, long.shape[0] + short.shape[0] - 1
    long = jnp.pad(long, last)

    def add(total, i):
        return total + short[i] * jax.lax.dynamic_slice(long, (last - i,), (size,)), None

    total = jax.lax.scan(jax.checkpoint(add), jnp.zeros(size, dtype), jnp.arange(last + 1))[0]
    start = (size - wanted.shape[0] + (correlates and swapped)) // 2
    return total[start : start + wanted.shape[0]].astype(wanted.dtype)


def convolve(
    a: NamedArray, v: NamedArray, axis: AxisSelector, mode: str = "full", *, precision: jax.lax.PrecisionLike = None
) -> NamedArray:
    """Compute the convolution of two arrays along an axis.

    Axes that the operands share are matched; the operands broadcast along the others. The result has the axes of `a`,
    then the axes that only `v` has.

    Arguments:
        v: a named array; its axis may have another size.
        mode: "full" for every position where the operands overlap, "same" for as many as the longer one has elements,
            "valid" for the positions where they overlap completely.
        precision: how exactly to multiply, as in `jax.lax`.

    >>> axn.convolve(axn.named([1., 2., 3.], "t"), axn.named([1., 10.], "t"), "t")
    NamedArray(float32[t=4], [ 1. 12. 23. 30.])
    """
    return _convolve(jnp.convolve, "convolve", a, v, axis, mode, precision)


def correlate(
    a: NamedArray, v: NamedArray, axis: AxisSelector, mode: str = "full", *, precision: jax.lax.PrecisionLike = None
) -> NamedArray:
    """Compute the correlation of two arrays along an axis. The arguments and the axes are as for `convolve`.

    >>> axn.correlate(axn.named([1., 2., 3.], "t"), axn.named([1., 10.], "t"), "t")
    NamedArray(float32[t=4], [10. 21. 32. 3.])
    """
    return _convolve(jnp.correlate, "correlate", a, v, axis, mode, precision)


def unwrap(
    array: NamedArray, axis: AxisSelector, *, discont: float | None = None, period: float | None = None
) -> NamedArray:
    """Remove jumps from angles: add periods where neighbors differ by more than `discont`, by default half a period.

    >>> axn.unwrap(axn.named([0., 3., 6., 1., 4.], "t"), "t", period=8.)
    NamedArray(float32[t=5], [ 0. 3. 6. 9. 12.])
    """
    given = {"discont": discont, "period": period}
    options = {name: None if x is None else static_number("unwrap", name, x) for name, x in given.items()}
    return apply_along(_unwrap, "unwrap", array, axis, **options)


def _unwrap(x: jax.Array, axis: int, discont: Any = None, period: Any = None) -> jax.Array:
    given = {name: value for name, value in (("discont", discont), ("period", period)) if value is not None}
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # differences overflow in small dtypes, and in unsigned ones
        x = x.astype(jnp.result_type(x, jnp.int32))
        if isinstance(period, int) and period % 2:
            return _unwrap_by_odd(x, axis, period / 2 if discont is None else discont, period)
    return jnp.unwrap(x, axis=axis, **given)


def _unwrap_by_odd(x: jax.Array, axis: int, discont: Any, period: int) -> jax.Array:
    """Unwrap integers with an odd period, where JAX takes a jump by the larger half for a jump by the smaller half."""
    jumps = jnp.diff(x, axis=axis)
    nearest = jnp.mod(jumps + period // 2, period) - period // 2
    added = jnp.cumsum(jnp.where(jnp.abs(jumps) < discont, 0, nearest - jumps), axis=axis)
    return x + jnp.pad(added, [(int(i == axis and x.shape[axis] > 0), 0) for i in range(x.ndim)])


def cross(a: NamedArray, b: NamedArray, axis: AxisSelector) -> NamedArray:
    """Compute the cross product of vectors in three dimensions, along an axis of size 3. The operands broadcast.

    >>> axn.cross(axn.named([1., 0., 0.], "xyz"), axn.named([0., 1., 0.], "xyz"), "xyz")
    NamedArray(float32[xyz=3], [0. 0. 1.])
    """
    require_named("cross", a), require_named("cross", b)
    return _cross_kernel(a.names, b.names, _kernels.one_selector("cross", axis)).apply(a.array, b.array)


@_kernels.shared("a_names", "b_names", "axis")
def _cross_kernel(a_names: Names, b_names: Names, axis: AxisSelector) -> _kernels.Kernel:
    chosen = _kernels.select_one("cross", a_names, axis)
    _kernels.select_one("cross", b_names, chosen, operand=1)
    names = _kernels.broadcast_names("cross", (a_names, b_names))
    position = names.index(chosen)

    def positional(a, b):
        a, b = _kernels.align(a, a_names, names), _kernels.align(b, b_names, names)
        if a.shape[position] != 3:
            size = a.shape[position]
            raise ValueError(f"cross: axis {chosen!r} has size {size}; vectors in three dimensions have size 3.")
        return jnp.cross(a, b, axis=position)

    return _kernels.make_kernel("cross", positional, (a_names, b_names), names, selection=axis)


# --- products of arrays ---


def outer(a: NamedOrNumeric, b: NamedOrNumeric) -> NamedArray:
    """Multiply each element of one array by each element of another, which shares no axis with it.

    The result has the axes of `a`, then the axes of `b`.

    >>> axn.outer(axn.named([1, 2], "x"), axn.named([1, 10, 100], "y"))
    NamedArray(int32[x=2, y=3], [[ 1 10 100] [ 2 20 200]])
    """
    (a_array, a_names), (b_array, b_names) = operand(a), operand(b)
    return _outer_kernel(a_names, b_names).apply(a_array, b_array)


@_kernels.shared("a_names", "b_names")
def _outer_kernel(a_names: Names, b_names: Names) -> _kernels.Kernel:
    shared = [n for n in a_names if n in b_names]
    if shared:
        listed = errors.quoted(shared)
        raise ValueError(
            f"outer: {errors.describe_axes(a_names)} and {errors.describe_axes(b_names)} share {listed}. "
            "Rename it in one of them, or use `multiply`, which matches shared axes."
        )
    names = a_names + b_names

    def positional(a, b):
        return jnp.multiply(_kernels.align(a, a_names, names), _kernels.align(b, b_names, names))

    return _kernels.make_kernel("outer", positional, (a_names, b_names), names)


def kron(a: NamedArray, b: NamedArray, axis: AxisSelection | None = None) -> NamedArray:
    """Compute the Kronecker product: replace each element of `a` by the element times `b`.

    Along the chosen axes, by default all that the operands share, the sizes multiply. Other shared axes are matched,
    and an axis that only `b` has comes after the axes of `a`.

    >>> axn.kron(axn.named([1, 2], "x"), axn.named([1, 10, 100], "x"))
    NamedArray(int32[x=6], [ 1 10 100 2 20 200])
    """
    require_named("kron", a), require_named("kron", b)
    return _kron_kernel(a.names, b.names, _kernels.hashable(axis)).apply(a.array, b.array)


@_kernels.shared("a_names", "b_names", "axis")
def _kron_kernel(a_names: Names, b_names: Names, axis: Any) -> _kernels.Kernel:
    chosen = tuple(n for n in a_names if n in b_names) if axis is None else _kernels.select("kron", a_names, axis)
    _kernels.select("kron", b_names, chosen, operand=1)
    names = _union(a_names, b_names)
    # Until the end, a chosen axis counts as two: `a`'s, and `b`'s as the minor one. Each operand lacks one.
    inner = [names.index(n) + 1 + k for k, n in enumerate(n for n in names if n in chosen)]
    matched = {n for n in a_names if n in b_names and n not in chosen}

    def positional(a, b):
        a, b = _kernels.align(a, a_names, names), _kernels.align(b, b_names, names)
        shape = [m if name in matched else m * n for name, m, n in zip(names, a.shape, b.shape, strict=True)]
        a = jax.lax.expand_dims(a, inner)
        b = jax.lax.expand_dims(b, [i - 1 for i in inner])
        return jnp.multiply(a, b).reshape(shape)

    in_names = (a_names, _privately("`b`", b_names, chosen))
    return _kernels.make_kernel("kron", positional, in_names, names, selection=axis)
