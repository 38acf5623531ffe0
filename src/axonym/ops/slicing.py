"""Return and replace slices by name, with starts that may be traced.

As in `jax.lax.dynamic_slice`, a start that is an array, traced or not, is moved so that the slice fits. A start that is
a Python integer must fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _errors, _kernels
from ..array import NamedArray, wrap
from ..axis import Axis, AxisSelector, Names, name_of
from ._operands import distinct, private, require_named
from .dynamic_slice import ds
from .indexing import index


def slice(
    array: NamedArray,
    axis: AxisSelector | Mapping[Any, Any] | None = None,
    new_axis: AxisSelector | Mapping[Any, int | Axis] | None = None,
    *,
    start: Any = None,
    length: Any = None,
) -> NamedArray:
    """Return a slice along one or several axes, with a known size and a start that may be traced.

    Arguments:
        array: a named array.
        axis: the axis to slice, or a mapping from axes to the starts of their slices.
        new_axis: the axis of the slice, or a mapping from axes to the sizes or axes of their slices.
        start: the start of the slice, 0 by default; or a mapping, in place of `axis`.
        length: the size of the slice, or its axis; or a mapping, in place of `new_axis`.

    >>> x = axn.arange(axn.Axis("x", 5))
    >>> axn.slice(x, "x", start=1, length=2)
    NamedArray(int32[x=2], [1 2])
    >>> axn.slice(x, {"x": 1}, {"x": axn.Axis("window", 2)})
    NamedArray(int32[window=2], [1 2])
    """
    starts = start if isinstance(start, Mapping) else axis if isinstance(axis, Mapping) else None
    sizes: Any = length if isinstance(length, Mapping) else new_axis if isinstance(new_axis, Mapping) else None
    if starts is None and isinstance(axis, (str, Axis)):
        starts = {axis: 0 if start is None else start}
        if sizes is None:
            sizes = {name_of(axis): new_axis if length is None else _sized(new_axis, length)}
    if starts is None or sizes is None:
        raise TypeError(f"slice of {array}: give an axis with start and length, or mappings of starts and of lengths.")
    lengths: dict[str, Any] = {name_of(k): v for k, v in sizes.items()}
    starts = {name_of(k): v for k, v in starts.items()}
    if set(lengths) != set(starts) or any(not isinstance(v, (int, np.integer, Axis)) for v in lengths.values()):
        raise ValueError(
            f"slice of {array}: each axis needs a start and a size; got starts for {sorted(starts)} and sizes for "
            f"{sorted(n for n, v in lengths.items() if v is not None)}."
        )
    result = index(array, {n: ds(s, lengths[n]) for n, s in starts.items()})
    renames = {n: v.name for n, v in lengths.items() if isinstance(v, Axis) and v.name != n}
    if not renames:
        return result
    return wrap(result.array, distinct("slice", tuple(renames.get(n, n) for n in result.names)))


def _sized(axis: Any, length: Any) -> Any:
    """Return the axis of a slice: `axis`, if there is one, in the size that `length` says."""
    if not isinstance(axis, (str, Axis)):
        return length
    size = length.size if isinstance(length, Axis) else length
    if isinstance(axis, Axis) and axis.size != size:
        raise ValueError(f"slice: the new axis {axis} is not of the length {size}.")
    return Axis(name_of(axis), size)


def updated_slice(array: NamedArray, start: Mapping[Any, Any], update: NamedArray) -> NamedArray:
    """Replace a slice of the array.

    Arguments:
        array: a named array.
        start: the start of the slice along each of its axes; may be traced, and may be a named array with a start for
            each element of an axis. Axes that are not named start at 0.
        update: the new slice, which gives the sizes. Along an axis that `start` names and the update lacks, the slice
            has size one.
    """
    require_named("updated_slice", update)
    starts = {name_of(s): v for s, v in start.items()}
    layout = tuple((n, v.names if isinstance(v, NamedArray) else ()) for n, v in starts.items())
    kernel = _updated_slice_kernel(array.names, update.names, layout)
    values = [_checked_start(array, update, n, v) for n, v in starts.items()]
    return wrap(kernel.call(array.array, update.array, *values), kernel.names)


def _checked_start(array: NamedArray, update: NamedArray, name: str, start: Any) -> Any:
    start = start.array if isinstance(start, NamedArray) else start
    if not jnp.issubdtype(jnp.result_type(start), jnp.integer):
        raise TypeError(f"updated_slice: the start along {name!r} is an integer, got {jnp.result_type(start)}.")
    if isinstance(start, (int, np.integer)) and array.has_axis(name):
        room = array.axis_size(name) - (update.axis_size(name) if update.has_axis(name) else 1)
        if 0 <= room and not 0 <= start <= room:  # if the update is too large, the kernel raises the error
            raise IndexError(
                f"updated_slice: the start {start} is out of range for axis {name!r} of size {array.axis_size(name)}: "
                f"it must lie in 0..{room}."
            )
    return start


@_kernels.cached
def _updated_slice_kernel(names: Names, update_names: Names, starts: tuple[tuple[str, Names], ...]) -> _kernels.Kernel:
    what = "updated_slice"
    _kernels.select(what, names, tuple(n for n, _ in starts))
    _kernels.select(what, names, update_names)
    per_element = tuple(dict.fromkeys(n for _, layout in starts for n in layout))
    _kernels.select(what, names, per_element)
    clash = [n for n, _ in starts if n in per_element]
    if clash:
        raise ValueError(f"{what}: a start is given along {_errors.describe_axes(clash)}, which start arrays have too.")
    inner = tuple(n for n in names if n not in per_element)
    moved = tuple(n for n, _ in starts)

    def place(a, update, *values):
        at = dict(zip(moved, values, strict=True))
        zero = np.int32(0)
        return jax.lax.dynamic_update_slice(a, update, [jnp.asarray(at.get(n, zero), jnp.int32) for n in inner])

    def positional(a, update, *values):
        sizes = dict(zip(update_names, update.shape, strict=True))
        _check_per_element(names, a, starts, values, sizes)
        too_large = [n for n, s in zip(names, a.shape, strict=True) if sizes.get(n, 1) > s]
        if too_large:
            raise ValueError(
                f"{what}: {_errors.describe_axes(too_large, [sizes[n] for n in too_large])} of the update does not fit "
                f"{_errors.describe_axes(names, a.shape)}."
            )
        full = [sizes.get(n, 1 if n in moved else s) for n, s in zip(names, a.shape, strict=True)]
        update = jnp.broadcast_to(_kernels.align(update, update_names, names), full).astype(a.dtype)
        fn = place
        for depth in reversed(range(len(per_element))):
            name, outer = per_element[depth], per_element[:depth]
            position = [n for n in names if n not in outer].index(name)
            left = [[n for n in layout if n not in outer] for _, layout in starts]
            axes = (position, position, *(n.index(name) if name in n else None for n in left))
            fn = jax.vmap(fn, in_axes=axes, out_axes=position)
        return fn(a, update, *values)

    # The result has the sharding of the array, whatever the shardings of the update and the starts.
    in_names = [names, private("`update`", update_names), *(private(f"the start of {n}", s) for n, s in starts)]
    return _kernels.make_kernel(what, positional, in_names, names)


def _check_per_element(
    names: Names, a: jax.Array, starts: Sequence[tuple[str, Names]], values: Sequence[jax.Array], update: dict[str, int]
) -> None:
    """Check that an axis of a start has one size in the array, in the start and, if present, in the update."""
    known = dict(zip(names, a.shape, strict=True))
    for (moved, layout), value in zip(starts, values, strict=True):
        for n, size in zip(layout, value.shape, strict=True):
            places = [("the array", known[n]), (f"the start of {moved!r}", size)]
            places += [("the update", update[n])] if n in update else []
            if len({s for _, s in places}) > 1:
                raise ValueError(_errors.size_mismatch("updated_slice", n, places))
