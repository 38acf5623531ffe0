"""Make functions of arrays by position into functions of named arrays; `axonym.lift` does it by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import broadcast_arrays, broadcast_to, is_named_array, named
from ..named_array import NamedArray, raw
from ..typing import (
    AxisSelection,
    NamedOrNumeric,
    ReductionFunction as ReductionFunction,
    SimpleReductionFunction as SimpleReductionFunction,
)
from .axis import eliminate_axes


def unwrap_namedarrays(*a: NamedOrNumeric) -> tuple[Any, ...]:
    """Return the arrays of named arrays, and anything else as it is.

    >>> hax.wrap.unwrap_namedarrays(hax.ones({"x": 2}), 3)
    (Array([1., 1.], dtype=float32), 3)
    """
    return tuple(map(raw, a))


def wrap_elemwise_unary(f: Callable[..., Any], a: NamedOrNumeric, *args: Any, **kwargs: Any) -> Any:
    """Call a function on the array of a named array, and give the result its axes.

    >>> hax.wrap.wrap_elemwise_unary(jnp.sin, hax.zeros({"x": 2}))
    NamedArray(float32[x=2], [0. 0.])
    """
    result = f(raw(a), *args, **kwargs)
    return NamedArray(result, a.axes) if isinstance(a, NamedArray) else result


def wrap_elemwise_binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a function of two named arrays, which are matched by name; a scalar goes with any array.

    >>> hax.wrap.wrap_elemwise_binary(jnp.add)(hax.ones({"x": 2}), hax.ones({"y": 1, "x": 2})).shape
    {'y': 1, 'x': 2}
    """

    def call(a: Any, b: Any) -> Any:
        a, b = broadcast_arrays(a, b) if is_named_array(a) and is_named_array(b) else (a, b)
        full = a if is_named_array(a) else b
        if not is_named_array(full):
            return op(a, b)
        result = op(raw(a), raw(b))
        # A scalar and a raw array with axes give a raw array.
        return result if not full.axes and jax.numpy.ndim(result) else named(result, full.axes)

    return call


def _positions(what: str, a: NamedArray, axis: AxisSelection, single: bool) -> Any:
    found = [a.names.index(x.name) for x in a.resolve_axis(() if axis is None else _several(axis))]
    if single and len(found) > 1:
        raise ValueError(f"{what} takes one axis, got {axis}.")
    return found[0] if single or len(found) == 1 else tuple(found)


def _several(axis: Any) -> Any:
    return axis if isinstance(axis, (tuple, list, dict)) else (axis,)


def wrap_axiswise_call(
    fn: Callable[..., Any], a: NamedOrNumeric, axis: AxisSelection | None, *, single_axis_only: bool, **kwargs: Any
) -> Any:
    """Call a function of an array and an axis that keeps the axes of the array; without an axis, return a raw array.

    >>> hax.wrap.wrap_axiswise_call(jnp.cumsum, hax.ones({"x": 2}), "x", single_axis_only=True)
    NamedArray(float32[x=2], [1. 2.])
    """
    if not isinstance(a, NamedArray) or axis is None:
        return fn(raw(a), axis=axis, **kwargs)
    return NamedArray(fn(a.array, axis=_positions(fn.__name__, a, axis, single_axis_only), **kwargs), a.axes)


def wrap_reduction_call(
    fn: Callable[..., Any],
    a: Any,
    axis: AxisSelection | None,
    where: NamedArray | None = None,
    single_axis_only: bool = False,
    supports_where: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function of an array that removes axes, on every array of a tree.

    >>> hax.wrap.wrap_reduction_call(jnp.max, hax.ones({"x": 2, "y": 3}), "x")
    NamedArray(float32[y=3], [1. 1. 1.])
    """
    if where is not None and not supports_where:
        raise ValueError(f"{fn.__name__} does not take `where`.")

    def reduced(a: Any) -> Any:
        mask = {} if where is None else {"where": broadcast_to(where, a.axes).array if is_named_array(a) else where}
        if not isinstance(a, NamedArray):
            return fn(a, axis=axis, **mask, **kwargs)
        place = None if axis is None else _positions(fn.__name__, a, axis, single_axis_only)
        result = fn(a.array, axis=place, **mask, **kwargs)
        return NamedArray(result, () if axis is None else eliminate_axes(a.axes, axis))

    return jax.tree.map(reduced, a, is_leaf=is_named_array)
