"""Choose elements by a condition, by position along an axis, and by comparison with other values.

Operands are matched by name. Operands that are only searched (the values of `isin`, the sorted array of `searchsorted`,
the points of `interp`) are not matched: the result does not have their axes, which may have any name and size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of, names_without, selectors
from ..core import errors
from ..core.jax_versions import varying_axes
from ..named_array import NamedArray, NamedOrNumeric, raw
from . import _kernels
from ._blocks import Blocks, blocks_of
from ._blockwise import Reach, look_up, looked_up
from ._operands import (
    known_values,
    one_axis,
    operand,
    private,
    replaced,
    require_named,
    require_subset,
    scalar,
    vectors,
)

# --- by a condition ---


@overload
def where(condition: NamedArray, x: NamedOrNumeric, y: NamedOrNumeric) -> NamedArray: ...
@overload
def where(condition: NamedOrNumeric, x: NamedArray, y: NamedOrNumeric) -> NamedArray: ...
@overload
def where(condition: NamedOrNumeric, x: NamedOrNumeric, y: NamedArray) -> NamedArray: ...
@overload
def where(
    condition: NamedArray, *, fill_value: NamedOrNumeric | tuple[NamedOrNumeric, ...], new_axis: Axis
) -> tuple[NamedArray, ...]: ...
@overload
def where(
    condition: NamedOrNumeric,
    x: NamedOrNumeric | None = None,
    y: NamedOrNumeric | None = None,
    fill_value: NamedOrNumeric | tuple[NamedOrNumeric, ...] | None = None,
    new_axis: Axis | None = None,
) -> Any: ...
@errors.say_how_to_call
def where(condition: Any, x: Any = None, y: Any = None, fill_value: Any = None, new_axis: Axis | None = None) -> Any:
    """Return elements of `x` where the condition is true, and of `y` where it is not.

    With the condition alone, return the positions of the true elements along each axis, like `nonzero`.

    Arguments:
        condition: a named array or a scalar. A Python bool chooses one operand, so that the other is not part of the
            program or its gradient.
        y: a named array or a scalar. One of the three operands has all the axes of the others.
        fill_value: for the condition alone: the position that fills places without a true element.
        new_axis: for the condition alone: the axis of the positions. Positions that do not fit are left out.

    >>> axn.where(axn.named([True, False], "x"), axn.named([1, 2], "x"), 0)
    NamedArray(int32[x=2], [1 0])
    >>> axn.where(axn.named([True, False], "x"), fill_value=-1, new_axis=axn.Axis("found", 2))
    (NamedArray(int32[found=2], [ 0 -1]),)
    """
    if x is None and y is None:
        if fill_value is None or new_axis is None:
            raise ValueError(
                "where: a condition alone needs both `fill_value` and `new_axis`, the axis of the positions found; "
                "otherwise pass `x` and `y` to choose from."
            )
        return _positions("where", condition, new_axis, fill_value)
    if x is None or y is None:
        raise ValueError(f"where: `x` and `y` go together, but `{'x' if x is None else 'y'}` is missing.")
    if fill_value is not None or new_axis is not None:
        raise ValueError(
            "where: `fill_value` and `new_axis` are for a condition alone; do not pass them with `x` and `y`."
        )
    if not any(isinstance(a, NamedArray) for a in (condition, x, y)):
        return jnp.where(condition, x, y)
    (x, x_names), (y, y_names) = operand(x), operand(y)
    if isinstance(condition, (bool, np.bool_)):
        return _chosen_kernel(bool(condition), x_names, y_names).apply(x, y)
    condition, names = operand(condition)
    return _broadcast_kernel(jnp.where, "where", (names, x_names, y_names)).apply(condition, x, y)


@_kernels.shared("all_names")
def _broadcast_kernel(fn: Callable[..., Any], name: str, all_names: tuple[Names, ...]) -> _kernels.Kernel:
    names = _kernels.broadcast_names(name, all_names)

    def positional(*arrays):
        return fn(*(_kernels.align(x, own, names) for x, own in zip(arrays, all_names, strict=True)))

    return _kernels.make_kernel(name, positional, all_names, names, native=True)


@_kernels.shared("x_names", "y_names")
def _chosen_kernel(first: bool, x_names: Names, y_names: Names) -> _kernels.Kernel:
    names = _kernels.broadcast_names("where", (x_names, y_names))

    def positional(x, y):
        shape = jnp.broadcast_shapes(*(_kernels.align(a, own, names).shape for a, own in ((x, x_names), (y, y_names))))
        chosen = _kernels.align(x, x_names, names) if first else _kernels.align(y, y_names, names)
        kind = jax.eval_shape(jnp.where, True, x, y)
        if chosen.dtype != kind.dtype or chosen.weak_type != kind.weak_type:
            # A weak type comes only from an operation on a weak type. This one keeps nothing of the other operand.
            other = jax.lax.full_like(y if first else x, 0, shape=())
            chosen = jnp.where(True, chosen, other) if kind.weak_type else chosen.astype(kind.dtype)
        return jnp.broadcast_to(chosen, shape)

    return _kernels.make_kernel("where", positional, (x_names, y_names), names)


def nonzero(
    array: NamedArray, *, size: Axis, fill_value: NamedOrNumeric | tuple[NamedOrNumeric, ...] = 0
) -> tuple[NamedArray, ...]:
    """Return the positions of the elements that are not zero: one array of indices for each axis.

    Arguments:
        size: the axis of the positions. Positions that do not fit are left out.
        fill_value: the position that fills empty places: a number, or one for each axis.

    >>> axn.nonzero(axn.named([[0, 2], [3, 0]], ("x", "y")), size=axn.Axis("found", 3), fill_value=-1)
    (NamedArray(int32[found=3], [ 0 1 -1]), NamedArray(int32[found=3], [ 1 0 -1]))
    """
    return _positions("nonzero", array, size, fill_value)


def _positions(what: str, array: Any, size: Axis, fill_value: Any) -> tuple[NamedArray, ...]:
    array = require_named(what, array)
    if not array.names:
        raise ValueError(f"{what}: an array without axes has no positions.")
    fill = fill_value if isinstance(fill_value, tuple) else (fill_value,) * len(array.names)
    if len(fill) != len(array.names):
        raise ValueError(
            f"{what}: {errors.counted(len(fill), 'fill value')} for the axes {errors.describe_shape(array.shape)}."
        )
    fill = [scalar(what, "fill_value", x) for x in fill]
    return _positions_kernel(what, array.names, one_axis(what, "size", size)).apply(array.array, *fill)


@_kernels.shared("names", "size")
def _positions_kernel(what: str, names: Names, size: Axis) -> _kernels.Kernel:
    in_names, out_names = (names, *[()] * len(names)), ((size.name,),) * len(names)
    return _kernels.make_kernel(
        what, lambda x, *fill: jnp.nonzero(x, size=size.size, fill_value=fill), in_names, out_names
    )


@errors.say_how_to_call
def clip(array: NamedOrNumeric, a_min: NamedOrNumeric | None = None, a_max: NamedOrNumeric | None = None) -> NamedArray:
    """Clip each element to a range, whose bounds may be arrays or None. The operands broadcast by name.

    >>> axn.clip(axn.named([1, 5, 9], "x"), 2, 6)
    NamedArray(int32[x=3], [2 5 6])
    """
    arrays, names = zip(*(operand(x) for x in (array, a_min, a_max) if x is not None), strict=True)
    return _broadcast_kernel(jnp.clip if a_min is not None else _clip_above, "clip", names).apply(*arrays)


def _clip_above(x: jax.Array, upper: jax.Array | None = None) -> jax.Array:
    return jnp.clip(x, None, upper)


def select(
    conditions: Sequence[NamedOrNumeric], choices: Sequence[NamedOrNumeric], default: NamedOrNumeric = 0
) -> NamedArray:
    """Take each element from the choice of the first condition that is true there, or from the default.

    One of all the operands must have the axes of all others.

    >>> x = axn.arange(axn.Axis("x", 4))
    >>> axn.select([x < 1, x > 2], [-1, x * 10])
    NamedArray(int32[x=4], [-1 0 0 30])
    """
    if len(conditions) != len(choices) or not conditions:
        raise ValueError(
            f"select: there must be one choice for each condition, and at least one; got "
            f"{errors.counted(len(conditions), 'condition')} and {errors.counted(len(choices), 'choice')}."
        )
    arrays, names = zip(*map(operand, (*conditions, *choices, default)), strict=True)
    return _broadcast_kernel(_select, "select", names).apply(*arrays)


def _select(*operands: jax.Array) -> jax.Array:
    count = len(operands) // 2
    return jnp.select(operands[:count], operands[count:-1], operands[-1])


# --- by position along an axis ---


def take_along_axis(
    array: NamedArray, indices: NamedOrNumeric, axis: AxisSelector, *, mode: str | None = None
) -> NamedArray:
    """Return the elements at the given positions along an axis, separately for each index of the other axes.

    Arguments:
        indices: the positions. If they have `axis`, the result has as many elements along it; if not, one element is
            taken and the result lacks `axis`. Along any other axis that they lack, the positions are the same.
        mode: what to do with positions out of range, as for `jax.numpy.take_along_axis`; NaN by default.

    >>> x = axn.named([[10, 30, 20], [60, 40, 50]], ("batch", "token"))
    >>> axn.take_along_axis(x, axn.named([1, 0], "batch"), "token")
    NamedArray(int32[batch=2], [30 60])
    >>> axn.take_along_axis(x, axn.named([[2, 0], [0, 1]], ("batch", "token")), "token")
    NamedArray(int32[batch=2, token=2], [[20 10] [60 40]])
    """
    require_named("take_along_axis", array)
    indices, names = operand(indices)
    kernel = _take_along_kernel(array.names, names, _kernels.one_selector("take_along_axis", axis), mode)
    return kernel.apply(array.array, indices)


@_kernels.shared("names", "index_names", "axis")
def _take_along_kernel(names: Names, index_names: Names, axis: AxisSelector, mode: str | None) -> _kernels.Kernel:
    what = "take_along_axis"
    along = _kernels.select_one(what, names, axis)
    way_out = f" Index it instead, as in array[{{{along!r}: indices}}], which can also add axes."
    require_subset(what, "indices", index_names, names, way_out)
    position = names.index(along)
    kept = names if along in index_names else tuple(n for n in names if n != along)

    def positional(x, indices):
        _kernels.check_operands(what, (_apart(names, along), index_names), (x, indices))
        if jnp.result_type(indices) == jnp.uint32:  # JAX treats the largest as negative
            indices = jnp.minimum(indices, x.shape[position])
        taken = jnp.take_along_axis(x, _kernels.align(indices, index_names, names), position, mode)
        return taken if along in index_names else jax.lax.squeeze(taken, (position,))

    in_names = (names, index_names)
    return _kernels.make_kernel(what, positional, in_names, kept, same_sizes=False, selection=axis)


def _apart(names: Names, along: str) -> Names:
    """Return the names with a unique one for the axis that has another size in the other operands."""
    own = private("the array", (along,))[0]
    return tuple(own if n == along else n for n in names)


def put_along_axis(
    array: NamedArray, indices: NamedOrNumeric, values: NamedOrNumeric, axis: AxisSelector, *, mode: str | None = None
) -> NamedArray:
    """Replace the elements at the given positions along an axis, separately for each index of the other axes.

    Arguments:
        indices: the positions, as for `take_along_axis`.
        mode: what to do with positions out of range, as for `jax.numpy.put_along_axis`; they are dropped by default.

    >>> x = axn.named([[10, 30, 20], [60, 40, 50]], ("batch", "token"))
    >>> axn.put_along_axis(x, axn.named([1, 0], "batch"), 99, "token")
    NamedArray(int32[batch=2, token=3], [[10 99 20] [99 40 50]])
    """
    require_named("put_along_axis", array)
    (indices, index_names), (values, value_names) = operand(indices), operand(values)
    kernel = _put_along_kernel(
        array.names, index_names, value_names, _kernels.one_selector("put_along_axis", axis), mode
    )
    return kernel.apply(array.array, indices, values)


@_kernels.shared("names", "index_names", "value_names", "axis")
def _put_along_kernel(
    names: Names, index_names: Names, value_names: Names, axis: AxisSelector, mode: str | None
) -> _kernels.Kernel:
    what = "put_along_axis"
    along = _kernels.select_one(what, names, axis)
    require_subset(what, "indices", index_names, names)
    require_subset(what, "values", value_names, names)
    if along in value_names and along not in index_names:
        raise ValueError(
            f"{what}: `values` have axis {along!r}, but `indices` lack it, so there is one place to put them."
        )
    position = names.index(along)
    in_names = (names, index_names, value_names)

    def positional(x, indices, values):
        _kernels.check_operands(what, (_apart(names, along), index_names, value_names), (x, indices, values))
        if jnp.iinfo(indices.dtype).bits < 32:  # a small dtype may not hold the size of the axis
            indices = indices.astype(jnp.int32)
        indices = _kernels.align(indices, index_names, names)
        shape = tuple(indices.shape[i] if i == position else s for i, s in enumerate(x.shape))
        indices, values = jnp.broadcast_to(indices, shape), _kernels.align(values, value_names, names)
        return jnp.put_along_axis(x, indices, jnp.broadcast_to(values, shape), position, inplace=False, mode=mode)

    return _kernels.make_kernel(what, positional, in_names, names, same_sizes=False, selection=axis)


# --- by comparison with other values ---


@_kernels.shared("all_names")
def _lookup_kernel(
    fn: Callable[..., Any], name: str, all_names: tuple[Names, ...], options: tuple[tuple[str, Any], ...]
) -> _kernels.Kernel:
    """Make a kernel that looks up the first operand in the others, whose axes the result does not have."""

    return _kernels.make_kernel(name, lambda *arrays: fn(*arrays, **dict(options)), all_names, all_names[0])


def isin(array: NamedOrNumeric, values: NamedOrNumeric | Sequence[Any], *, invert: bool = False) -> NamedArray:
    """Return which elements are among some values, of any shape and axes; with `invert`, which are not.

    >>> axn.isin(axn.named([1, 2, 3], "x"), [3, 1])
    NamedArray(bool[x=3], [ True False True])
    """
    array, names = operand(array)
    values, value_names = operand(values)
    value_names = private("`values`", value_names or tuple(map(str, range(np.ndim(values)))))
    return _lookup_kernel(jnp.isin, "isin", (names, value_names), (("invert", bool(invert)),)).apply(array, values)


def searchsorted(
    a: NamedArray,
    v: NamedOrNumeric,
    *,
    side: str = "left",
    sorter: NamedOrNumeric | Sequence[int] | None = None,
    method: str = "scan",
) -> NamedArray:
    """Return the positions in a sorted array at which elements can be inserted so that it stays sorted.

    Arguments:
        a: the sorted array; it has one axis.
        v: what to look up, a named array or a scalar; the result has its axes.
        side: "left" for the first suitable place, "right" for the last.
        sorter: the order that sorts `a`, if it is not sorted.
        method: how to search, as for `jax.numpy.searchsorted`.

    >>> axn.searchsorted(axn.named([1, 3, 5], "x"), axn.named([0, 3, 9], "query"))
    NamedArray(int32[query=3], [0 1 3])
    """
    v, names = operand(v)
    among, own = vectors("searchsorted", a=a) if sorter is None else vectors("searchsorted", a=a, sorter=sorter)
    options = (("side", side), ("method", method))
    return _lookup_kernel(_searchsorted, "searchsorted", (names, *[own] * len(among)), options).apply(v, *among)


def _searchsorted(v: jax.Array, a: jax.Array, sorter: jax.Array | None = None, **options: Any) -> jax.Array:
    if not any(map(varying_axes, (v, a))):
        return jnp.searchsorted(a, v, sorter=sorter, **options)
    # JAX refuses device-varying arrays. The place of a value is its rank among
    # all values, less its rank among the values looked up.
    dtype, left = jnp.promote_types(a.dtype, v.dtype), options["side"] == "left"
    a, flat = (a if sorter is None else a[sorter]).astype(dtype), v.ravel().astype(dtype)
    ranks = _ranks(jnp.concatenate([flat, a] if left else [a, flat]))
    return ((ranks[: v.size] if left else ranks[a.size :]) - _ranks(flat)).reshape(v.shape)


def _ranks(x: jax.Array) -> jax.Array:
    return jnp.argsort(jnp.argsort(x))


def digitize(x: NamedOrNumeric, bins: NamedOrNumeric | Sequence[float], *, right: bool = False) -> NamedArray:
    """Return the bin of each element: the number of edges below it.

    Arguments:
        bins: the edges, rising or falling; they have one axis.
        right: whether a bin contains its right edge rather than its left one.

    >>> axn.digitize(axn.named([0.5, 2., 9.], "x"), axn.named([1., 2., 3.], "edge"))
    NamedArray(int32[x=3], [0 2 3])
    """
    x, names = operand(x)
    (edges,), own = vectors("digitize", bins=bins)
    return _lookup_kernel(jnp.digitize, "digitize", (names, own), (("right", bool(right)),)).apply(x, edges)


def interp(
    x: NamedOrNumeric,
    xp: NamedOrNumeric | Sequence[float],
    fp: NamedOrNumeric | Sequence[float],
    *,
    axis: AxisSelector | None = None,
    left: NamedOrNumeric | str | None = None,
    right: NamedOrNumeric | str | None = None,
    period: NamedOrNumeric | None = None,
) -> NamedArray:
    """Interpolate linearly between given points, along one axis of an array that may have others.

    Arguments:
        x: where to evaluate the function, a named array or a scalar. The result has its axes in place of `axis`. Axes
            that it shares with `fp`, other than `axis`, are matched: there, each column has its own positions.
        xp: the points where the function is given, rising along `axis`. It may have other axes of `fp`, too.
        fp: the values of the function there: along `axis`, and along any number of other axes.
        axis: the axis of the points; by default the only axis of `xp`.
        left, right: the value below the first and above the last point, by default the value there. Or "extrapolate".
        period: the period of the function, if it has one.

    >>> axn.interp(axn.named([0.5, 2.], "x"), axn.named([0., 1.], "point"), axn.named([10., 20.], "point"))
    NamedArray(float32[x=2], [15. 20.])
    >>> field = axn.named([[10., 20.], [30., 50.]], ("city", "hour"))
    >>> axn.interp(axn.named([0.5], "hour"), axn.named([0., 1.], "hour"), field)
    NamedArray(float32[city=2, hour=1], [[15.] [40.]])
    """
    x, names = operand(x)
    if axis is None and np.ndim(raw(xp)) == np.ndim(raw(fp)) == 1:
        points, own = vectors("interp", xp=xp, fp=fp)
        layouts, along = (own, own), own[0]
    else:
        points, layouts, along = _field("interp", xp, fp, axis)
    extra = {"left": left, "right": right, "period": period}
    static = tuple((k, v) for k, v in extra.items() if isinstance(v, str))
    given = tuple(k for k, v in extra.items() if v is not None and not isinstance(v, str))
    values = [scalar("interp", k, extra[k]) for k in given]
    if isinstance(fp, NamedArray) and (over := blocks_of("interp", fp)):
        found = _interp_by_shards(fp, x, names, points[0], layouts, along, over, extra, values)
        if found is not None:
            return found
    # With few positions, values for them are less than all values of the function.
    many = 8 * np.size(x) > np.shape(points[1])[layouts[1].index(along)]
    kernel = _interp_kernel(names, *layouts, along, given, static, many)
    return kernel.apply(x, *points, *values)


def _field(what: str, xp: Any, fp: Any, axis: AxisSelector | None) -> tuple[list[Any], tuple[Names, Names], str]:
    """Return the points of a function and its values as arrays, their names, and the axis along which they lie."""
    fp, (xp, point_names) = require_named(what, fp), operand(xp)
    if axis is None and len(point_names) != 1:
        raise ValueError(
            f"{what}: which axis of `xp` {errors.describe_axes(point_names, np.shape(xp))} do the points lie along? "
            "Pass it as `axis`."
        )
    chosen = _kernels.one_selector(what, point_names[0] if axis is None else axis)
    for label, n, shape in (("xp", point_names or fp.names, np.shape(xp)), ("fp", fp.names, fp.array.shape)):
        if name_of(chosen) not in n:
            raise ValueError(f"{what}: `{label}` has no axis {name_of(chosen)!r}: {errors.describe_axes(n, shape)}.")
    if isinstance(chosen, Axis) and fp.axis_size(chosen.name) != chosen.size:
        places = [("`fp`", fp.axis_size(chosen.name)), ("the argument", chosen.size)]
        raise ValueError(errors.size_mismatch(what, chosen.name, places))
    require_subset(what, "xp", point_names, fp.names)
    return [xp, fp.array], (point_names or (name_of(chosen),), fp.names), name_of(chosen)


@_kernels.shared("names", "point_names", "value_names", "along")
def _interp_kernel(
    names: Names,
    point_names: Names,
    value_names: Names,
    along: str,
    given: tuple[str, ...],
    static: tuple[tuple[str, str], ...],
    many: bool,
) -> _kernels.Kernel:
    inner = looked_up(along)
    in_names, out_names = _layouts(names, point_names, value_names, along, inner, len(given))

    def positional(x, xp, fp, *values):
        return _interpolate(fp, x, xp, *values, in_names=in_names, out_names=out_names, given=given, static=static)

    return _kernels.make_along_kernel("interp", positional, in_names, out_names, (inner,), replicated=many)


def _layouts(
    names: Names, point_names: Names, value_names: Names, along: str, inner: str, extra: int
) -> tuple[tuple[Names, ...], Names]:
    """Return the axes of the operands of an interpolation, and of its result.

    The positions may have an axis with the name of the points' axis, which is therefore called otherwise inside.
    """
    out_names = replaced("interp", value_names, along, names_without(names, *names_without(value_names, along)))
    of_points, of_values = (tuple(inner if n == along else n for n in own) for own in (point_names, value_names))
    return (names, of_points, of_values, *[()] * extra), out_names


def _interpolate(
    fp: jax.Array,
    x: jax.Array,
    xp: jax.Array,
    *values: Any,
    in_names: tuple[Names, ...],
    out_names: Names,
    given: tuple[str, ...],
    static: tuple[tuple[str, str], ...],
    **_: Any,
) -> jax.Array:
    def one(x, xp, fp, *values):
        return jnp.interp(x, xp, fp, **dict(static), **dict(zip(given, values, strict=True)))

    batch = tuple(n for n in in_names[2] if n in out_names)
    return _kernels.map_over(one, batch, in_names, out_names)(x, xp, fp, *values)


# --- on another grid ---


def regrid(
    array: NamedArray, axis: AxisSelector, indices: NamedArray, weights: NamedArray, over: AxisSelection
) -> NamedArray:
    """Return weighted sums of elements along an axis, such as values on another grid.

    This is `(array[axis, indices] * weights).sum(over)`, and devices exchange less for it if the axis is sharded, and
    the axis of the result alike. If `indices` is known when the function is traced, as a NumPy array is, and points to
    elements near the same place of the axis, or around its ends, they receive a halo with these elements from
    their neighbors, and else all elements along the axis.

    Arguments:
        indices: positions along the axis. It has the axis of the result, which may have the name of `axis` and another
            size, and the axes of the sum.
        weights: has the axes of `indices`, or some of them.
        over: the axes of the sum.

    >>> x = axn.named([0., 10., 40., 90.], "x")
    >>> indices = axn.named(np.array([[0, 1], [2, 3]]), ("x", "corner"))
    >>> axn.regrid(x, "x", indices, axn.named([0.5, 0.5], "corner"), "corner")
    NamedArray(float32[x=2], [ 5. 65.])
    """
    what = "regrid"
    for x in (array, indices, weights):
        require_named(what, x)
    name, summed = name_of(axis := _kernels.one_selector(what, axis)), tuple(map(name_of, selectors(over)))
    for x, own in ((array, (axis,)), (indices, selectors(over))):
        if missing := [name_of(a) for a in own if name_of(a) not in x.names]:
            raise ValueError(errors.missing_axes(what, missing, x.names, x.array.shape))
        _kernels.check_selection(what, [x.names], [x.array], [a for a in own if isinstance(a, Axis)])
    require_subset(what, "weights", weights.names, indices.names)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"{what}: `indices` needs integers, got an array of {indices.dtype}.")
    new, blocks = names_without(indices.names, *summed), blocks_of(what, array)
    known = known_values(indices.array) if blocks or isinstance(indices.array, np.ndarray) else None
    if known is not None and known.size:
        size = array.axis_size(name)
        if known.min() < -size or known.max() >= size:
            raise ValueError(f"{what}: `indices` has positions outside of axis {name!r} of size {size}.")
    if name in blocks and len(new) == 1 and not {*indices.names} & {*names_without(array.names, name)}:
        places = indices.resolve_axis(new[0])
        found = _regrid_by_shards(what, array, name, indices, known, weights, summed, places, blocks)
        if found is not None:
            return found
    return (array[axis, indices] * weights).sum(over)


def _regrid_by_shards(
    what: str,
    array: NamedArray,
    name: str,
    indices: NamedArray,
    known: np.ndarray | None,
    weights: NamedArray,
    summed: Names,
    new: Axis,
    over: Mapping[str, Blocks],
) -> NamedArray | None:
    """Return weighted sums along a sharded axis; None if the new axis is not sharded alike."""
    reach = None
    if known is not None:
        reach = Reach(np.moveaxis(known, indices.names.index(new.name), 0), array.axis_size(name))
    inner = looked_up(name)
    own = tuple(inner if n == name else n for n in array.names)
    out_names = replaced(what, array.names, name, (new.name,))
    options = ("at", own.index(inner)), ("names", indices.names), ("own", weights.names), ("summed", summed)
    arrays, in_names = (array.array, indices.array, weights.array), (own, indices.names, weights.names)
    return look_up(what, _weighted, arrays, in_names, out_names, (inner, name), over, new, reach, *options)


def _weighted(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    *,
    start: Any,
    size: int,
    at: int,
    names: Names,
    own: Names,
    summed: Names,
) -> jax.Array:
    indices = jnp.clip(indices.astype(jnp.int32), -size, size - 1)  # as indexing does
    found = jnp.take(x, (indices - start) % size, axis=at, mode="clip")
    weights = jax.lax.expand_dims(_kernels.align(weights, own, names), range(len(names), len(names) + x.ndim - 1 - at))
    return jnp.sum(found * weights, axis=[at + names.index(n) for n in summed])


def _interp_by_shards(
    fp: NamedArray,
    x: Any,
    names: Names,
    xp: Any,
    layouts: tuple[Names, Names],
    along: str,
    over: Mapping[str, Blocks],
    extra: Mapping[str, Any],
    values: Sequence[Any],
) -> NamedArray | None:
    """Interpolate along a sharded axis; return None if the positions are not sharded alike."""
    what, given = "interp", tuple(k for k, v in extra.items() if v is not None and not isinstance(v, str))
    name = fp.names[layouts[1].index(along)]
    in_names, out_names = _layouts(names, *layouts, along, inner := looked_up(name), len(given))
    places = [n for n in names if n not in in_names[2]]
    if len(places) != 1:
        return None
    new = Axis(places[0], np.shape(x)[names.index(places[0])])
    at, points = (v if v is not None and v.ndim == 1 else None for v in map(known_values, (x, xp)))
    if at is None or points is None or len(points) < 2 or extra["period"] is not None:
        static = tuple((k, v) for k, v in extra.items() if isinstance(v, str))
        options = ("in_names", in_names), ("out_names", out_names), ("given", given), ("static", static)
        arrays, own = (fp.array, x, xp, *values), (in_names[2], *in_names[:2], *in_names[3:])
        return look_up(what, _interpolate, arrays, own, out_names, (inner, name), over, new, None, *options)
    kind: Any = jnp.result_type(x, xp, float)
    at, points = at.astype(kind), points.astype(kind)
    ends = [np.clip(np.searchsorted(points, at, side="right"), 1, len(points) - 1) - i for i in (1, 0)]
    first, last = points[ends[0]].astype(float), points[ends[1]].astype(float)
    part = np.divide(at - first, last - first, out=np.zeros(at.shape, float), where=last > first)
    beyond = {"left": at < points[0], "right": at > points[-1]}
    for side, end in (("left", 0), ("right", len(points) - 1)):
        if extra[side] != "extrapolate":  # the value at the end alone: its neighbor may be NaN
            for i in ends:
                i[beyond[side]] = end
            part[beyond[side]] = 0.5
    corner = private("`corners`", (new.name,))[0]
    indices: Any = NamedArray(np.stack(ends, 1), (new.name, corner))
    weights = NamedArray(np.stack([1 - part, part], 1).astype(kind), (new.name, corner))
    found = _regrid_by_shards(what, fp, name, indices, indices.array, weights, (corner,), new, over)
    for side, outside in beyond.items():
        if found is not None and side in given:
            found = where(NamedArray(outside, (new.name,)), values[given.index(side)], found)
    return found
