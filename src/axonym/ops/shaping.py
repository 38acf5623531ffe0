"""Rename, split and merge axes, and split an array along an axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSelection, AxisSelector, AxisSpec, Names, axes_of_spec, interned, name_of, selectors
from ..core import errors
from ..named_array import NamedArray, resolve_axes, wrap
from . import _kernels
from ._operands import by_axis, check_new_axis, distinct, replaced, require_named


def rename(array: NamedArray, renames: Mapping[AxisSelector, AxisSelector]) -> NamedArray:
    """Rename axes: each key becomes its value. Names can be swapped, and nothing is computed.

    >>> axn.rename(axn.ones({"x": 2, "y": 3}), {"x": "rows"}).shape
    {'rows': 2, 'y': 3}
    >>> axn.rename(axn.ones({"x": 2, "y": 3}), {"x": "y", "y": "x"}).shape
    {'y': 2, 'x': 3}
    """
    raw = require_named("rename", array).array
    renames = by_axis("rename", "renames", renames, "{'embed': 'mlp'}")
    return wrap(raw, _renamed_axes(array.names, getattr(raw, "shape", None), tuple(renames.items())))


@functools.lru_cache(maxsize=_kernels.CACHE_SIZE)
def _renamed_axes(
    names: Names, shape: tuple[int, ...] | None, renames: tuple[tuple[AxisSelector, AxisSelector], ...]
) -> Names:
    new = {name_of(old): interned(new) for old, new in renames}
    missing = [n for n in new if n not in names]
    if missing:
        raise ValueError(errors.missing_axes("rename", missing, names, shape))
    distinct("rename", tuple(name_of(old) for old, _ in renames))
    if shape is not None:
        sizes = dict(zip(names, shape, strict=False))
        wrong = [
            f"{old} to {new}"
            for old, new in renames
            if any(isinstance(s, Axis) and s.size != sizes[name_of(old)] for s in (old, new))
        ]
        if wrong:
            described = errors.describe_shape(sizes)
            raise ValueError(f"rename: cannot rename {', '.join(wrong)} in {described}: the sizes differ.")
    return distinct("rename", tuple(new.get(n, n) for n in names))


@overload
def flatten_axes(array: NamedArray, old_axes: AxisSelection, new_axis: AxisSelector) -> NamedArray: ...
@overload
def flatten_axes(array: AxisSpec, old_axes: AxisSelection, new_axis: AxisSelector) -> Any: ...
def flatten_axes(array: NamedArray | AxisSpec, old_axes: AxisSelection, new_axis: AxisSelector) -> Any:
    """Merge several axes into one.

    Arguments:
        array: a named array, or only the axes of one.
        old_axes: the axes to merge, the major one first. None at all gives a new axis of size one, in front.
        new_axis: the axis they become, at the position of the first of them.

    >>> x = axn.named([[1, 2], [3, 4]], ("x", "y"))
    >>> axn.flatten_axes(x, ("x", "y"), "flat"), axn.flatten_axes(x, ("y", "x"), "flat")
    (NamedArray(int32[flat=4], [1 2 3 4]), NamedArray(int32[flat=4], [1 3 2 4]))
    >>> axn.flatten_axes({"x": 2, "y": 3, "z": 4}, ("x", "y"), "flat")
    {'flat': 6, 'z': 4}
    """
    what = "flatten_axes"
    if isinstance(array, NamedArray):
        return _flatten_kernel(what, array.names, _kernels.hashable(old_axes), new_axis).apply(array.array)
    sizes = {a.name: a.size for a in axes_of_spec(array, what)}
    old = resolve_axes(tuple(sizes), tuple(sizes.values()), old_axes, what)
    new = Axis(name_of(new_axis), math.prod(a.size for a in old))
    check_new_axis(what, new_axis, new.size)
    _, out_names = _flattened_axes(what, tuple(sizes), distinct(what, tuple(a.name for a in old)), new.name)
    found = tuple(new if n == new.name else Axis(n, sizes[n]) for n in out_names)
    return {a.name: a.size for a in found} if isinstance(array, Mapping) else found


@errors.say_how_to_call
def flatten(array: NamedArray, new_axis_name: AxisSelector) -> NamedArray:
    """Merge all axes into one, in their order.

    >>> axn.flatten(axn.named([[1, 2], [3, 4]], ("x", "y")), "flat")
    NamedArray(int32[flat=4], [1 2 3 4])
    """
    return _flatten_kernel("flatten", require_named("flatten", array).names, None, new_axis_name).apply(array.array)


def unflatten_axis(array: NamedArray, axis: AxisSelector, new_axes: AxisSelection) -> NamedArray:
    """Split one axis into several, which take its place, the major one first. One of the sizes can be left out.

    >>> x = axn.named([1, 2, 3, 4], "flat")
    >>> axn.unflatten_axis(x, "flat", axn.make_axes(x=2, y=2))
    NamedArray(int32[x=2, y=2], [[1 2] [3 4]])
    >>> axn.unflatten_axis(x, "flat", ("x", axn.Axis("y", 1))).shape
    {'x': 4, 'y': 1}
    """
    names = require_named("unflatten_axis", array).names
    kernel = _unflatten_kernel(names, _kernels.one_selector("unflatten_axis", axis), _kernels.hashable(new_axes))
    return kernel.apply(array.array)


def unbind(array: NamedArray, axis: AxisSelector) -> list[NamedArray]:
    """Return the slices along an axis, one for each index, without that axis.

    >>> axn.unbind(axn.named([[1, 2], [3, 4]], ("x", "y")), "x")
    [NamedArray(int32[y=2], [1 2]), NamedArray(int32[y=2], [3 4])]
    """
    raw = require_named("unbind", array).array
    kernel = _unbind_kernel(array.names, _kernels.one_selector("unbind", axis), jnp.shape(raw))
    return list(kernel.apply(raw))


@errors.say_how_to_call
def split(a: NamedArray, axis: AxisSelector, new_axes: AxisSpec) -> list[NamedArray]:
    """Split the array along an axis into consecutive parts, given by their axes with sizes; names may repeat.

    >>> axn.split(axn.arange(axn.Axis("x", 5)), "x", [axn.Axis("x", 3), axn.Axis("rest", 2)])
    [NamedArray(int32[x=3], [0 1 2]), NamedArray(int32[rest=2], [3 4])]
    """
    names = require_named("split", a).names
    if not isinstance(new_axes, (Axis, Mapping, Sequence)):
        raise TypeError(f"split: expected the axis of each part, with its size, got {type(new_axes).__name__}.")
    kernel = _split_kernel(
        names, _kernels.one_selector("split", axis), axes_of_spec(_kernels.hashable(new_axes), "split")
    )
    return list(kernel.apply(a.array))


# --- kernels ---


def _flattened_axes(what: str, names: Names, old: Names, new: str) -> tuple[Names, Names]:
    """Return the axes in an order with `old` adjacent, and the axes of the result."""
    where = min((names.index(n) for n in old), default=0)
    before, after = names[:where], tuple(n for n in names[where:] if n not in old)
    return (*before, *old, *after), distinct(what, (*before, new, *after))


@_kernels.shared("names", "old_axes", "new_axis")
def _flatten_kernel(what: str, names: Names, old_axes: Any, new_axis: AxisSelector) -> _kernels.Kernel:
    old = _kernels.select(what, names, old_axes)
    new = interned(new_axis)
    together, out_names = _flattened_axes(what, names, old, new)
    where = out_names.index(new)

    def positional(x):
        x = _kernels.transpose_to(x, names, together)
        size = math.prod(x.shape[where : where + len(old)])
        check_new_axis(what, new_axis, size)
        if len(old) == 1:
            return x
        return jax.lax.reshape(x, (*x.shape[:where], size, *x.shape[where + len(old) :]))

    successors = dict.fromkeys(old, (new,))
    return _kernels.make_kernel(what, positional, (names,), out_names, selection=old_axes, successors=successors)


@_kernels.shared("names", "axis", "new_axes")
def _unflatten_kernel(names: Names, axis: AxisSelector, new_axes: Any) -> _kernels.Kernel:
    what = "unflatten_axis"
    old = _kernels.select_one(what, names, axis)
    new = selectors(new_axes)
    unknown = [s for s in new if isinstance(s, str)]
    if len(unknown) > 1:
        listed = " and ".join(repr(n) for n in unknown)
        raise ValueError(f"{what}: the sizes of {listed} are not known; one can be left out at most.")
    known = math.prod(s.size for s in new if isinstance(s, Axis))
    out_names = replaced(what, names, old, new)
    where = names.index(old)

    def positional(x):
        size = x.shape[where]
        rest, remainder = divmod(size, known) if known else (0, size)
        if remainder or (unknown and not known) or (not unknown and size != known):
            sizes = ["?" if isinstance(s, str) else s.size for s in new]
            described = errors.describe_axes([name_of(s) for s in new], sizes)
            raise ValueError(f"{what}: axis {old!r} of size {size} does not split into {described}.")
        if len(new) == 1:
            return x
        sizes = [rest if isinstance(s, str) else s.size for s in new]
        return jax.lax.reshape(x, (*x.shape[:where], *sizes, *x.shape[where + 1 :]))

    # Of the new axes, the first that its mesh axes divide stays sharded as the old one was.
    successors = {old: tuple(name_of(s) for s in new)}
    return _kernels.make_kernel(what, positional, (names,), out_names, selection=axis, successors=successors)


@_kernels.shared("names", "axis")
def _unbind_kernel(names: Names, axis: AxisSelector, shape: tuple[int, ...]) -> _kernels.Kernel:
    old = _kernels.select_one("unbind", names, axis)
    where = names.index(old)
    count = shape[where] if len(shape) == len(names) else 0  # a wrong rank is reported when the kernel is called
    out_names = tuple(n for n in names if n != old)

    def positional(x):
        return jnp.unstack(x, axis=where)

    return _kernels.make_kernel("unbind", positional, (names,), (out_names,) * count, selection=axis)


@_kernels.shared("names", "axis", "new_axes")
def _split_kernel(names: Names, axis: AxisSelector, new_axes: tuple[Axis, ...]) -> _kernels.Kernel:
    old = _kernels.select_one("split", names, axis)
    where = names.index(old)
    sizes = tuple(a.size for a in new_axes)
    out_names = tuple(replaced("split", names, old, (a,)) for a in new_axes)

    def positional(x):
        if sum(sizes) != x.shape[where]:
            described = errors.describe_selectors(new_axes)
            raise ValueError(
                f"split: axis {old!r} has size {x.shape[where]}, but the parts {described} make {sum(sizes)} together."
            )
        return tuple(jax.lax.split(x, sizes, axis=where))

    successors = {old: tuple(dict.fromkeys(a.name for a in new_axes))}
    return _kernels.make_kernel("split", positional, (names,), out_names, selection=axis, successors=successors)
