"""Compute values between the elements along an axis: `interp`, and `regrid` onto another grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of, names_without, selectors
from ..core import errors
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric, raw
from . import _kernels
from ._blocks import Blocks, Reach, blocks_of, look_up, looked_up
from ._operands import known_values, operand, private, replaced, require_named, require_subset, scalar, vectors
from .selection import where


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
        fp, (xp, own) = require_named("interp", fp), operand(xp)
        if axis is None and len(own) != 1:
            raise ValueError(
                f"interp: which axis of `xp` {errors.describe_axes(own, np.shape(xp))} do the points lie along? Pass "
                "it as `axis`."
            )
        chosen = _kernels.one_selector("interp", own[0] if axis is None else axis)
        along = name_of(chosen)
        for label, n, shape in (("xp", own or fp.names, np.shape(xp)), ("fp", fp.names, fp.array.shape)):
            if along not in n:
                raise ValueError(f"interp: `{label}` has no axis {along!r}: {errors.describe_axes(n, shape)}.")
        if isinstance(chosen, Axis) and fp.axis_size(along) != chosen.size:
            places = [("`fp`", fp.axis_size(along)), ("the argument", chosen.size)]
            raise ValueError(errors.size_mismatch("interp", along, places))
        require_subset("interp", "xp", own, fp.names)
        points, layouts = [xp, fp.array], (own or (along,), fp.names)
    extra = {"left": left, "right": right, "period": period}
    static = tuple((k, v) for k, v in extra.items() if isinstance(v, str))
    given = {k: scalar("interp", k, v) for k, v in extra.items() if v is not None and not isinstance(v, str)}
    found = None
    if isinstance(fp, NamedArray) and (over := blocks_of("interp", fp)):
        found = _interp_by_shards(fp, x, names, points[0], layouts, along, over, static, given)
    if found is None:
        # With few positions, values for them are less than all values of the function.
        many = 8 * np.size(x) > np.shape(points[1])[layouts[1].index(along)]
        found = _interp_kernel(names, *layouts, along, tuple(given), static, many).apply(x, *points, *given.values())
    known = known_values(points[0]) if period is None else None  # read after the work has started
    if known is not None and known.ndim == 1 and (known[1:] < known[:-1]).any():
        raise ValueError(
            f"interp: the points have to rise along {along!r}, and they go from {known[0]} to {known[-1]}. Flip or "
            "sort them, and the values alike: by `axonym.flip`, or by the positions that `coords.sort` returns."
        )
    return found


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
    in_names, out_names = _axes_of_operands(names, point_names, value_names, along, inner, len(given))

    def positional(x, xp, fp, *values):
        x = evenly_sharded("interp", names, x, beside=[xp, fp])
        found = _interpolate(fp, x, xp, *values, in_names=in_names, out_names=out_names, given=given, static=static)
        return evenly_sharded("interp", out_names, found, names)

    on_auto = "replicated" if many else ""
    return _kernels.make_kernel("interp", positional, in_names, out_names, {inner: "whole"}, on_auto=on_auto)


def _axes_of_operands(
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
    return look_up(what, _weighted_sum, arrays, in_names, out_names, (inner, name), over, new, reach, *options)


def _weighted_sum(
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
    others = [*range(at), *range(at + len(names), len(names) + x.ndim - 1)]
    weights = jax.lax.expand_dims(_kernels.align(weights, own, names), others)
    return jnp.sum(found * weights, axis=[at + names.index(n) for n in summed])


def _interp_by_shards(
    fp: NamedArray,
    x: Any,
    names: Names,
    xp: Any,
    layouts: tuple[Names, Names],
    along: str,
    over: Mapping[str, Blocks],
    static: tuple[tuple[str, str], ...],
    given: Mapping[str, Any],
) -> NamedArray | None:
    """Interpolate along a sharded axis; return None if the positions are not sharded alike."""
    what, name = "interp", fp.names[layouts[1].index(along)]
    in_names, out_names = _axes_of_operands(names, *layouts, along, inner := looked_up(name), len(given))
    places = [n for n in names if n not in in_names[2]]
    if len(places) != 1:
        return None
    new = Axis(places[0], np.shape(x)[names.index(places[0])])
    at, points = (v if v is not None and v.ndim == 1 else None for v in map(known_values, (x, xp)))
    if at is None or points is None or len(points) < 2 or "period" in given:
        options = ("in_names", in_names), ("out_names", out_names), ("given", tuple(given)), ("static", static)
        arrays, own = (fp.array, x, xp, *given.values()), (in_names[2], *in_names[:2], *in_names[3:])
        return look_up(what, _interpolate, arrays, own, out_names, (inner, name), over, new, None, *options)
    kind: Any = jnp.result_type(x, xp, float)
    at, points = at.astype(kind), points.astype(kind)
    ends = [np.clip(np.searchsorted(points, at, side="right"), 1, len(points) - 1) - i for i in (1, 0)]
    first, last = points[ends[0]].astype(float), points[ends[1]].astype(float)
    part = np.divide(at - first, last - first, out=np.zeros(at.shape, float), where=last > first)
    beyond = {"left": at < points[0], "right": at > points[-1]}
    for side, end in (("left", 0), ("right", len(points) - 1)):
        if (side, "extrapolate") not in static:  # the value at the end alone: its neighbor may be NaN
            for i in ends:
                i[beyond[side]] = end
            part[beyond[side]] = 0.5
    corner = private("`corners`", (new.name,))[0]
    indices: Any = NamedArray(np.stack(ends, 1), (new.name, corner))
    weights = NamedArray(np.stack([1 - part, part], 1).astype(kind), (new.name, corner))
    found = _regrid_by_shards(what, fp, name, indices, indices.array, weights, (corner,), new, over)
    for side, outside in beyond.items():
        if found is not None and side in given:
            found = where(NamedArray(outside, (new.name,)), given[side], found)
    return found
