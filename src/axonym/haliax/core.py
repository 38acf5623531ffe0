"""Haliax's `core`: named arrays, their layout and their parts."""

from __future__ import annotations

# ruff: noqa: I001
# fmt: off
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import (
    Axis as Axis, NamedArray as NamedArray, NamedRef, broadcast_arrays as broadcast_arrays,
    broadcast_axis as broadcast_axis, broadcast_to as broadcast_to, conj, flatten as flatten,
    flatten_axes as flatten_axes, index as index, is_named_array as is_named_array, named as named, prod,
    rearrange as _rearrange, rename as _rename, slice as _slice, split as split, top_k as _top_k, unbind as unbind,
    unflatten_axis as unflatten_axis, updated_slice as _updated_slice,
)
from ..named_array import SHAPE_CHECKS as _CHECKS, raw, wrap_like
from ..axis import (
    axis_name as axis_name, axis_spec_to_shape_dict as axis_spec_to_shape_dict, rearrange_for_partial_order,
    selects_axis as selects_axis,
)
from ..typing import (
    AxisSelection as AxisSelection, AxisSelector as AxisSelector, AxisSpec as AxisSpec,
    NamedArrayAxes as NamedArrayAxes, NamedArrayAxesSpec as NamedArrayAxesSpec, NamedOrNumeric as NamedOrNumeric,
    PartialShapeDict as PartialShapeDict, ShapeDict as ShapeDict,
)
from ._signatures import with_parameters as _with_parameters
from .axis import axis_name as _name, dslice as dslice, eliminate_axes as eliminate_axes
from .ops import order_of, roll as roll
from .types import (
    GatherScatterModeStr as GatherScatterModeStr, IntScalar as IntScalar, PrecisionLike as PrecisionLike,
    Scalar as Scalar,
)
# fmt: on

NamedIndex: TypeAlias = int | NamedArray | dslice | list[int] | jax.Array | Any
"""The index of one axis, which may be a Python slice, too."""
SliceSpec: TypeAlias = Mapping[AxisSelector, NamedIndex] | tuple[Any, ...]
"""An index: by axis, or axes and indices in turn."""
NamedArrayMeta = type(NamedArray)

ravel = flatten
top_k = _with_parameters(_top_k, array="arr")


@contextlib.contextmanager
def enable_shape_checks(enabled: bool) -> Iterator[None]:
    """Choose whether `NamedArray(array, axes)` compares the axes with the array, inside a with-block.

    Pytrees are rebuilt without checks anyway; this is for code that builds named arrays around placeholders.

    >>> with hax.enable_shape_checks(False):
    ...     x = hax.NamedArray(None, hax.Axis("x", 2))
    """
    token = _CHECKS.set(enabled)
    try:
        yield
    finally:
        _CHECKS.reset(token)


def are_shape_checks_enabled() -> bool:
    """Return whether `NamedArray(array, axes)` compares the axes with the array.

    >>> hax.are_shape_checks_enabled()
    True
    """
    return _CHECKS.get()


def broadcast_arrays_and_return_axes(
    *arrays: NamedOrNumeric | None, require_subset: bool = True, ensure_order: bool = True
) -> tuple[tuple[Any, ...], tuple[Axis, ...]]:
    """Broadcast as `broadcast_arrays` does, and return the axes of the results, too.

    >>> hax.core.broadcast_arrays_and_return_axes(hax.ones({"x": 2}), 1.0)[1]
    (Axis(name='x', size=2),)
    """
    made = tuple(broadcast_arrays(*arrays, require_subset=require_subset, ensure_order=ensure_order))
    return made, next((x.axes for x in made if isinstance(x, NamedArray)), ())


def ndim(a: NamedOrNumeric) -> int:
    """Return the number of axes of a named array, a raw array or a number.

    >>> hax.ndim(hax.ones({"x": 2, "y": 3})), hax.ndim(1.0)
    (2, 0)
    """
    return a.ndim if isinstance(a, NamedArray) else jnp.ndim(a)


def rearrange(array: NamedArray, *args: Any, **kwargs: Any) -> NamedArray:
    """Rearrange as `axonym.rearrange` does, but ignore keywords that the expression does not use.

    The output may have several `...`, as a sequence of axes may. In an input in order, groups may have any name.

    >>> hax.rearrange(hax.ones({"x": 2, "y": 3}), "x y -> y x", z=4).shape
    {'y': 3, 'x': 2}
    >>> hax.rearrange(hax.ones({"x": 2, "y": 3, "z": 4}), "{y} -> ... y ...").shape
    {'x': 2, 'y': 3, 'z': 4}
    """
    if len(args) == 1 and isinstance(args[0], str):
        before, arrow, after = args[0].partition("->")
        by_name = before.strip().startswith("{")
        if after.count("...") > 1 and "(" not in before:
            words = kwargs if by_name else _in_order(before, array.names)
            for name, members in re.findall(_NAMED_GROUP, after):
                array = flatten_axes(array, order_of(members, words), name)
            return _rearrange(array, order_of(re.sub(_NAMED_GROUP, r"\1", after), words))
        args = (args[0] if by_name else re.sub(r"\(\s*\w+\s*:", "(", before) + arrow + after,)
        kwargs = {k: v for k, v in kwargs.items() if k in re.findall(r"\w+", args[0])}
    return _rearrange(array, *args, **kwargs)


_NAMED_GROUP = r"\(\s*(\w+)\s*:([^)]*)\)"


def _in_order(words: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the axis that each word of an input in order stands for."""
    first, _, last = (re.findall(r"\w+", part) for part in words.partition("..."))
    if len(first) + len(last) > len(names) or ("..." not in words and len(first) != len(names)):
        raise ValueError(f"rearrange: {words.strip()!r} does not fit the axes {names}.")
    return dict(zip([*first, *last], [*names[: len(first)], *names[len(names) - len(last) :]], strict=True))


def tree_flatten(array: NamedArray) -> tuple[tuple[Any], tuple[Axis, ...]]:
    """Flatten a named array into a tuple of the raw array, and the axes.

    >>> hax.ones({"x": 2}).tree_flatten()
    ((Array([1., 1.], dtype=float32),), (Axis(name='x', size=2),))
    """
    return (array.array,), array.axes


def rename(array: NamedArray, renames: Mapping[AxisSelector, AxisSelector]) -> NamedArray:
    """Rename as `axonym.rename` does, but ignore names that the array lacks.

    >>> hax.rename(hax.ones({"x": 2}), {"x": "y", "z": "w"}).shape
    {'y': 2}
    """
    return _rename(array, {old: new for old, new in renames.items() if _name(old) in array.names})


def take(array: NamedArray, axis: AxisSelector, index: Any) -> NamedArray:
    """Take as `axonym.take` does; out of range there is NaN, the least integer of a signed dtype, or the largest.

    >>> hax.take(hax.arange(hax.Axis("x", 3), dtype=float), "x", hax.named([2, 5], "picked"))
    NamedArray(float32[picked=2], [ 2. nan])
    """
    index = index if isinstance(index, NamedArray) else named(index, (_name(axis),)[: np.ndim(index)])
    taken = array.at[axis, index].get(mode="fill")
    kept = [n for n in array.names if n != _name(axis)]
    if not any(n in kept for n in index.names):
        return taken
    return _rearrange(taken, (*(n for n in index.names if n not in kept), *kept))


def slice(array: NamedArray, axis: Any = None, new_axis: Any = None, *, start: Any = None, length: Any = None) -> Any:
    """Slice as `axonym.slice` does, but move a slice that does not fit until it does, if no mapping gives its start.

    >>> hax.slice(hax.arange(hax.Axis("x", 4)), "x", start=3, length=2)
    NamedArray(int32[x=2], [2 3])
    """
    starts = axis if isinstance(axis, Mapping) else start
    if not isinstance(starts, Mapping):
        size = new_axis if length is None else length
        return _slice(array, axis, new_axis, start=_start_that_fits(array, axis, start, size), length=length)
    lengths = new_axis if isinstance(new_axis, Mapping) else length
    sizes = {_name(k): v for k, v in lengths.items()} if isinstance(lengths, Mapping) else {}
    _check_room("slice", array, starts, sizes)
    return _slice(array, {k: _start_that_fits(array, k, v, sizes.get(_name(k))) for k, v in starts.items()}, lengths)


def updated_slice(array: NamedArray, start: Mapping[Any, Any], update: NamedArray) -> NamedArray:
    """Replace a slice. A negative start, and any that is traced, is moved until the slice fits.

    >>> hax.updated_slice(hax.zeros({"x": 4}), {"x": -1}, hax.ones({"x": 2}))
    NamedArray(float32[x=4], [0. 0. 1. 1.])
    """
    _check_room("updated_slice", array, start, update.shape)
    sizes = update.shape
    return _updated_slice(
        array, {k: _start_that_fits(array, k, v, sizes.get(_name(k), 1)) for k, v in start.items()}, update
    )


def _check_room(what: str, array: NamedArray, starts: Mapping[Any, Any], sizes: Mapping[str, Any]) -> None:
    """Check that slices whose starts are known end inside of their axes."""
    for axis, first in starts.items():
        name = _name(axis)
        size = sizes[name] if name in sizes else None
        size = size.size if isinstance(size, Axis) else size
        if isinstance(first, int) and size is not None and array.has_axis(name):
            room = array.axis_size(name)
            if first + size > room:
                raise ValueError(f"{what}: {size} elements from {first} on do not fit axis {name!r} of size {room}.")


def check_shape(jnp_shape: Sequence[int], hax_axes: AxisSelection) -> tuple[Axis, ...]:
    """Return the axes of an array with a shape; axes that are given with a size must fit it.

    >>> hax.core.check_shape((2, 3), ("x", hax.Axis("y", 3)))
    (Axis(name='x', size=2), Axis(name='y', size=3))
    """
    return named(jax.ShapeDtypeStruct(tuple(jnp_shape), bool), hax_axes).axes


def _start_that_fits(array: NamedArray, axis: Any, start: Any, length: Any) -> Any:
    """Return the start of a slice, moved until the slice fits where it is known; there, native code raises an error."""
    size = length.size if isinstance(length, Axis) else length
    if start is None or isinstance(raw(start), Tracer) or not isinstance(size, int):
        return start
    known = np.asarray(raw(start))
    if not array.has_axis(_name(axis)) or not np.issubdtype(known.dtype, np.integer):
        return start  # native code raises the error
    room = array.axis_size(_name(axis))
    return wrap_like(np.clip(np.where(known < 0, known + room, known), 0, max(room - size, 0)), start)


def flatten_all_axes_but(
    a: NamedArray, axis_name: str, axis: AxisSelection, reorder_to_front: bool = False
) -> tuple[NamedArray, Callable[[NamedArray], NamedArray]]:
    """Merge axes into one, and get a function that brings them back afterwards.

    Despite the name, `axis` says which axes are merged. The function takes an array that has the merged axis, and may
    have lost other axes or gained some; the axes that it shares with `a` are in the order of `a` again.

    >>> x = hax.ones({"batch": 2, "pos": 3, "embed": 4})
    >>> flat, restore = hax.core.flatten_all_axes_but(x, "rows", ("batch", "pos"))
    >>> flat.shape, restore(flat.sum("embed")).shape
    ({'rows': 6, 'embed': 4}, {'batch': 2, 'pos': 3})
    """
    merged = a.resolve_axis(axis)
    flat = flatten_axes(a, merged, axis_name)

    def restore(new: NamedArray) -> NamedArray:
        new = unflatten_axis(new, axis_name, merged)
        order = [name if name in new.names else ... for name in a.names]
        order = order if ... in order else [*order, ...]
        return rearrange(new, rearrange_for_partial_order(order, new.axes))

    return rearrange(flat, (axis_name, ...)) if reorder_to_front else flat, restore


# --- names that named arrays get, and nothing that they have changes ---


_SCALAR = named(np.zeros(()), ())  # computes nothing, which would start JAX's backend
for _cls, _attributes in (
    (NamedArray, {"conjugate": conj, "product": prod, "ravel": flatten}),
    (NamedArray, {"tree_flatten": tree_flatten, "updated_slice": updated_slice}),
    (type(_SCALAR.at[...]), {"mul": type(_SCALAR.at[...]).multiply}),
    (NamedRef, {"named_shape": NamedRef.shape}),
):
    for _attribute, _value in _attributes.items():
        if not hasattr(_cls, _attribute):
            setattr(_cls, _attribute, _value)
