"""Choose elements by a condition and by position along an axis, and find places in a sorted array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelector, Names
from ..core import errors
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import as_positions, one_axis, operand, private, require_named, require_subset, scalar, vectors
from .elementwise import elementwise_kernel

# --- by a condition ---


@overload
def where(condition: NamedArray, x: NamedOrNumeric, y: NamedOrNumeric) -> NamedArray: ...
@overload
def where(condition: NamedOrNumeric, x: NamedArray, y: NamedOrNumeric) -> NamedArray: ...
@overload
def where(condition: NamedOrNumeric, x: NamedOrNumeric, y: NamedArray) -> NamedArray: ...
@overload
def where(condition: NamedOrNumeric, x: NamedOrNumeric, y: NamedOrNumeric) -> Any: ...
@errors.say_how_to_call
def where(condition: Any, x: Any, y: Any) -> Any:
    """Return elements of `x` where the condition is true, and of `y` where it is not.

    Arguments:
        condition: a named array or a scalar. A Python bool chooses one operand, so that the other is not part of the
            program or its gradient.
        y: a named array or a scalar. One of the three operands has all the axes of the others.

    >>> axn.where(axn.named([True, False], "x"), axn.named([1, 2], "x"), 0)
    NamedArray(int32[x=2], [1 0])
    """
    if not any(isinstance(a, NamedArray) for a in (condition, x, y)):
        return jnp.where(condition, x, y)
    (x, x_names), (y, y_names) = operand(x), operand(y)
    if isinstance(condition, (bool, np.bool_)):
        return _chosen_kernel(bool(condition), x_names, y_names).apply(x, y)
    condition, names = operand(condition)
    return elementwise_kernel(jnp.where, "where", (names, x_names, y_names)).apply(condition, x, y)


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
    what = "nonzero"
    names = require_named(what, array).names
    if not names:
        raise ValueError(f"{what}: an array without axes has no positions.")
    fill = fill_value if isinstance(fill_value, tuple) else (fill_value,) * len(names)
    if len(fill) != len(names):
        raise ValueError(
            f"{what}: {errors.counted(len(fill), 'fill value')} for the axes {errors.describe_shape(array.shape)}."
        )
    fill = [scalar(what, "fill_value", x) for x in fill]
    return _nonzero_kernel(names, one_axis(what, "size", size)).apply(array.array, *fill)


@_kernels.shared("names", "size")
def _nonzero_kernel(names: Names, size: Axis) -> _kernels.Kernel:
    def positional(x, *fill):
        return jnp.nonzero(x, size=size.size, fill_value=fill)

    return _kernels.make_kernel("nonzero", positional, (names, *[()] * len(names)), ((size.name,),) * len(names))


@errors.say_how_to_call
def clip(array: NamedOrNumeric, a_min: NamedOrNumeric | None = None, a_max: NamedOrNumeric | None = None) -> NamedArray:
    """Clip each element to a range, whose bounds may be arrays or None. The operands broadcast by name.

    >>> axn.clip(axn.named([1, 5, 9], "x"), 2, 6)
    NamedArray(int32[x=3], [2 5 6])
    """
    arrays, names = zip(*(operand(x) for x in (array, a_min, a_max) if x is not None), strict=True)
    return elementwise_kernel(jnp.clip if a_min is not None else _clip_above, "clip", names).apply(*arrays)


def _clip_above(x: jax.Array, upper: jax.Array | None = None) -> jax.Array:
    return jnp.clip(x, None, upper)


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
    own = private("the array", (along,))[0]
    apart = tuple(own if n == along else n for n in names)  # the axis has another size in the indices
    kept = names if along in index_names else tuple(n for n in names if n != along)

    def positional(x, indices):
        _kernels.check_operands(what, (apart, index_names), (x, indices))
        indices = as_positions(indices, x.shape[position])
        indices = evenly_sharded(what, index_names, indices, (along,), beside=[x])
        taken = jnp.take_along_axis(x, _kernels.align(indices, index_names, names), position, mode)
        taken = evenly_sharded(what, names, taken, (along,))
        return taken if along in index_names else jax.lax.squeeze(taken, (position,))

    in_names = (names, index_names)
    return _kernels.make_kernel(what, positional, in_names, kept, same_sizes=False, selection=axis)


# --- by comparison with other values ---


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
    return _search_kernel(names, own, len(among), side, method).apply(v, *among)


@_kernels.shared("names", "own")
def _search_kernel(names: Names, own: Names, count: int, side: str, method: str) -> _kernels.Kernel:
    def positional(v, a, sorter=None):
        return jnp.searchsorted(a, v, sorter=sorter, side=side, method=method)

    return _kernels.make_kernel("searchsorted", positional, (names, *[own] * count), names)
