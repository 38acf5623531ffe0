"""Join arrays and make them longer: stack, concatenate, pad, repeat, tile; also roll and flip."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..axis import Axis, AxisSelection, AxisSelector, Names, interned, name_of
from ..core import errors
from ..core.jax_versions import set_apart
from ..core.tree_spec import StaticLeaf
from ..distribution.mesh_axes import evenly_sharded
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._operands import by_axis, check_new_axis, distinct, operand, replaced, require_named, scalar, static_number

# --- several arrays into one ---


@errors.say_how_to_call
def stack(arrays: Sequence[NamedOrNumeric], axis: AxisSelector) -> NamedArray:
    """Join arrays with the same axes, or scalars, along a new axis, which comes first.

    The other axes are in the order of the first array. If `axis` is an `Axis`, its size must be the number of arrays.

    >>> axn.stack([axn.named([1, 2], "y"), axn.named([3, 4], "y")], "x")
    NamedArray(int32[x=2, y=2], [[1 2] [3 4]])
    """
    raw, names = _operands_along("stack", arrays, axis)
    return _stack_kernel(names, axis).apply(*raw)


@errors.say_how_to_call
def concatenate(arrays: Sequence[NamedArray], axis: AxisSelector) -> NamedArray:
    """Join arrays with the same axes along one of them.

    The result has the layout of the first array. If `axis` is an `Axis`, its size must be the size of the result.

    >>> axn.concatenate([axn.named([1, 2], "x"), axn.named([3], "x")], "x")
    NamedArray(int32[x=3], [1 2 3])
    """
    raw, names = _operands_along("concatenate", arrays, axis)
    return _concatenate_kernel(names, axis).apply(*raw)


def _operands_along(what: str, arrays: Sequence[Any], axis: AxisSelector) -> tuple[list[Any], tuple[Names, ...]]:
    if isinstance(arrays, (str, Axis)) or not isinstance(axis, (str, Axis)):
        raise TypeError(
            f"{what}: the arrays come first, and then the axis, as in "
            f"axonym.{what}([x, y], {'new' if what == 'stack' else 'batch'!r}); got "
            f"{type(arrays).__name__} and {type(axis).__name__}."
        )
    if isinstance(arrays, (NamedArray, Mapping)):
        raise TypeError(f"{what}: expected a sequence of arrays, got {type(arrays).__name__}.")
    for i, x in enumerate(arrays):
        if not isinstance(x, (NamedArray, int, float, complex)) and getattr(x, "ndim", 1):
            require_named(what, x, f"arrays[{i}]")
    found = [operand(x) for x in arrays]
    if not found:
        raise ValueError(f"{what}: expected at least one array.")
    return [x for x, _ in found], tuple(names for _, names in found)


def _same_axes(what: str, every: tuple[Names, ...]) -> Names:
    """Return the axes of the first operand, which all operands must have."""
    first = every[0]
    others = {i: names for i, names in enumerate(every) if set(names) != set(first)}
    if others:
        listed = ", ".join(f"array {i} has {errors.describe_axes(names)}" for i, names in others.items())
        raise ValueError(
            f"{what}: all arrays must have the same axes. Array 0 has {errors.describe_axes(first)}, but {listed}. "
            "Give them the axes they lack with `broadcast_to`, or rename them."
        )
    return first


@_kernels.shared("every", "axis")
def _stack_kernel(every: tuple[Names, ...], axis: AxisSelector) -> _kernels.Kernel:
    names = _same_axes("stack", every)
    out_names = distinct("stack", (interned(axis), *names))
    check_new_axis("stack", axis, len(every))

    def positional(*arrays):
        return jnp.stack([_kernels.transpose_to(x, n, names) for x, n in zip(arrays, every, strict=True)])

    return _kernels.make_kernel("stack", positional, every, out_names)


@_kernels.shared("every", "axis")
def _concatenate_kernel(every: tuple[Names, ...], axis: AxisSelector) -> _kernels.Kernel:
    what = "concatenate"
    joined = name_of(axis)
    for i, names in enumerate(every):
        _kernels.select(what, names, joined, i)
    names = _same_axes(what, every)
    where = names.index(joined)

    def positional(*arrays):
        aligned = [_kernels.transpose_to(x, n, names) for x, n in zip(arrays, every, strict=True)]
        for i, x in enumerate(aligned):
            for n, first, size in zip(names, aligned[0].shape, x.shape, strict=True):
                if n != joined and size != first:
                    places = [("array 0", first), (f"array {i}", size)]
                    raise ValueError(errors.size_mismatch(what, n, places))
        check_new_axis(what, axis, sum(x.shape[where] for x in aligned))
        return jnp.concatenate(aligned, axis=where)

    return _kernels.make_kernel(what, positional, every, names, same_sizes=False)


# --- longer ---


def pad(
    array: NamedArray,
    pad_width: Mapping[AxisSelector, tuple[int, int] | int],
    *,
    mode: str | Callable[..., Any] = "constant",
    constant_values: NamedOrNumeric | Sequence[NamedOrNumeric] = 0,
    **kwargs: Any,
) -> NamedArray:
    """Add elements before and after some axes.

    Arguments:
        pad_width: how many elements to add before and after each axis; one number is for both.
        mode: one of the modes of `jax.numpy.pad`: "constant", "edge", "linear_ramp", "maximum", "mean", "median",
            "minimum", "reflect", "symmetric", "wrap" or "empty".
        constant_values: the value to add in mode "constant": a scalar, or one for before and one for after.
        **kwargs: the further options of `jax.numpy.pad`, such as `stat_length`, `end_values` or `reflect_type`.

    >>> axn.pad(axn.named([1, 2], "x"), {"x": (1, 2)}, constant_values=7)
    NamedArray(int32[x=5], [7 1 2 7 7])
    """
    require_named("pad", array)
    pad_width = by_axis("pad", "pad_width", pad_width, "{'batch': (1, 2)}")
    widths = []
    for axis, width in pad_width.items():
        try:
            low, high = map(operator.index, width if isinstance(width, (tuple, list)) else (width, width))
        except (TypeError, ValueError):
            raise TypeError(
                f"pad: axis {name_of(axis)!r} takes two integers, before and after, got {width!r}."
            ) from None
        if low < 0 or high < 0:
            raise ValueError(
                f"pad: axis {name_of(axis)!r} cannot be padded by {(low, high)}: widths cannot be negative. Slice the "
                "array instead."
            )
        widths.append((axis, (low, high)))
    if mode == "constant":
        values = _fill_values("constant_values", constant_values)
    else:
        values = ()
        if "end_values" in kwargs:
            ends = _fill_values("end_values", kwargs["end_values"])
            kwargs["end_values"] = (*ends, ends[-1])[:2]
    options = tuple((name, _static_option(name, option)) for name, option in sorted(kwargs.items()))
    return _pad_kernel(array.names, tuple(widths), mode, len(values), options).apply(array.array, *values)


def _fill_values(argument: str, given: Any) -> tuple[Any, ...]:
    values = tuple(scalar("pad", argument, v) for v in (given if isinstance(given, (tuple, list)) else [given]))
    if len(values) not in (1, 2):
        raise ValueError(f"pad: `{argument}` is one scalar, or one for before and one for after, got {len(values)}.")
    return values


def _static_option(argument: str, option: Any) -> StaticLeaf:
    def number(x: Any) -> Any:
        x = x.tolist() if isinstance(x, np.ndarray) else x
        if isinstance(x, (tuple, list)):
            return tuple(map(number, x))
        return x if x is None or isinstance(x, str) else static_number("pad", argument, x)

    return StaticLeaf(number(option)).checked(f"pad: `{argument}`")


@_kernels.shared("names", "widths")
def _pad_kernel(
    names: Names, widths: tuple[tuple[AxisSelector, tuple[int, int]], ...], mode: Any, constants: int, options: Any
) -> _kernels.Kernel:
    selection = tuple(axis for axis, _ in widths)
    chosen = dict(zip(_kernels.select("pad", names, selection), (w for _, w in widths), strict=True))
    every = [chosen.get(n, (0, 0)) for n in names]
    keywords = {name: option.value for name, option in options}

    def positional(x, *values):
        fill = {"constant_values": values if len(values) == 2 else values[0]} if values else {}
        return jnp.pad(set_apart(x), every, mode=mode, **fill, **keywords)

    return _kernels.make_kernel("pad", positional, (names, *[()] * constants), names, selection=selection)


def pad_left(array: NamedArray, axis: AxisSelector, new_axis: Axis, value: NamedOrNumeric = 0) -> NamedArray:
    """Pad one axis in front with a value, up to the size of another axis, which replaces it.

    >>> axn.pad_left(axn.named([1, 2], "x"), "x", axn.Axis("y", 4))
    NamedArray(int32[y=4], [0 0 1 2])
    """
    if not isinstance(new_axis, Axis):
        raise TypeError(
            f"pad_left: `new_axis` says how long to make the axis, so pass Axis(name, size), got {new_axis!r}."
        )
    kernel = _pad_left_kernel(require_named("pad_left", array).names, _kernels.one_selector("pad_left", axis), new_axis)
    return kernel.apply(array.array, scalar("pad_left", "value", value))


@_kernels.shared("names", "axis", "new_axis")
def _pad_left_kernel(names: Names, axis: AxisSelector, new_axis: Axis) -> _kernels.Kernel:
    old = _kernels.select_one("pad_left", names, axis)
    where = names.index(old)
    out_names = replaced("pad_left", names, old, (new_axis,))

    def positional(x, value):
        missing = new_axis.size - x.shape[where]
        if missing < 0:
            raise ValueError(
                f"pad_left: axis {old!r} of size {x.shape[where]} is longer than {new_axis}. Slice it instead."
            )
        return jnp.pad(set_apart(x), [(missing if i == where else 0, 0) for i in range(x.ndim)], constant_values=value)

    successors = {old: (new_axis.name,)}
    return _kernels.make_kernel("pad_left", positional, (names, ()), out_names, selection=axis, successors=successors)


@errors.say_how_to_call
def repeat(
    a: NamedArray, repeats: NamedOrNumeric | Sequence[int], axis: AxisSelector, total_repeat_length: int | None = None
) -> NamedArray:
    """Repeat each element along an axis.

    Arguments:
        repeats: how often: an integer, or one for each index of the axis, as a sequence, an array or a named array.
        total_repeat_length: the size of the result. Needed in jit if `repeats` is an array; a result that is too long
            is cut off, one that is too short ends in repetitions of the last element.

    >>> axn.repeat(axn.named([1, 2], "x"), 2, "x")
    NamedArray(int32[x=4], [1 1 2 2])
    >>> axn.repeat(axn.named([1, 2], "x"), [1, 3], "x")
    NamedArray(int32[x=4], [1 2 2 2])
    """
    names, axis = require_named("repeat", a).names, _kernels.one_selector("repeat", axis)
    raw, repeats_names = operand(repeats)
    if not repeats_names and jnp.ndim(raw) == 0 and not isinstance(raw, jax.Array):
        return _repeat_kernel(names, operator.index(raw), axis, total_repeat_length).apply(a.array)
    if not repeats_names and jnp.ndim(raw) == 1:
        repeats_names = (name_of(axis),)
    if repeats_names not in ((), (name_of(axis),)):
        described = errors.describe_axes(repeats_names, jnp.shape(raw))
        raise ValueError(f"repeat: `repeats` must be a scalar or have the one axis {name_of(axis)!r}, got {described}.")
    if not isinstance(raw, Tracer) and np.any(np.asarray(raw) < 0):
        raise ValueError(f"repeat: `repeats` cannot be negative, got {np.min(np.asarray(raw))}.")
    if total_repeat_length is None:
        if isinstance(raw, Tracer):
            raise ValueError(
                f"repeat: how long axis {name_of(axis)!r} becomes depends on the values of `repeats`, which are not "
                "known in jit. Pass total_repeat_length."
            )
        each = np.asarray(raw)
        total_repeat_length = int(each.sum()) if each.ndim else int(each) * a.shape.get(name_of(axis), 0)
    return _repeat_kernel(names, repeats_names, axis, total_repeat_length).apply(a.array, raw)


@_kernels.shared("names", "repeats", "axis")
def _repeat_kernel(names: Names, repeats: int | Names, axis: AxisSelector, total: int | None) -> _kernels.Kernel:
    """Make a kernel; the repeats are static numbers, or an operand with the given names."""
    where = names.index(_kernels.select_one("repeat", names, axis))
    if isinstance(repeats, int) and repeats < 0:
        raise ValueError(f"repeat: `repeats` cannot be negative, got {repeats}.")

    def positional(x, times: Any = repeats):
        if not isinstance(times, int) and times.dtype.itemsize < 4 and jnp.issubdtype(times.dtype, jnp.integer):
            times = times.astype(jnp.int32)  # a small dtype may not hold their sum
        if not isinstance(repeats, int) and not isinstance(times, int):
            # On several mesh axes, XLA takes the wrong elements if the axis is sharded unevenly.
            x, times = evenly_sharded("repeat", names, x), evenly_sharded("repeat", repeats, times, beside=[x])
            found = jnp.repeat(x, times, axis=where, total_repeat_length=total)
            return evenly_sharded("repeat", names, found, [names[where]])
        return jnp.repeat(x, times, axis=where, total_repeat_length=total)

    in_names = (names,) if isinstance(repeats, int) else (names, repeats)
    return _kernels.make_kernel("repeat", positional, in_names, names, selection=axis)


def tile(a: NamedArray, reps: Mapping[AxisSelector, int]) -> NamedArray:
    """Repeat the array along some axes, a number of times for each.

    An axis that the array lacks gets that size and comes in front.

    >>> axn.tile(axn.named([1, 2], "x"), {"x": 2})
    NamedArray(int32[x=4], [1 2 1 2])
    >>> axn.tile(axn.named([1, 2], "x"), {"y": 2})
    NamedArray(int32[y=2, x=2], [[1 2] [1 2]])
    """
    names = require_named("tile", a).names
    reps = by_axis("tile", "reps", reps, "{'batch': 2}")
    return _tile_kernel(names, tuple((axis, operator.index(n)) for axis, n in reps.items())).apply(a.array)


@_kernels.shared("names", "reps")
def _tile_kernel(names: Names, reps: tuple[tuple[AxisSelector, int], ...]) -> _kernels.Kernel:
    distinct("tile", tuple(name_of(axis) for axis, _ in reps))
    times = {name_of(axis): n for axis, n in reps}
    negative = [n for n, k in times.items() if k < 0]
    if negative:
        listed = errors.describe_axes(negative, [times[n] for n in negative])
        raise ValueError(f"tile: the number of repetitions cannot be negative, got {listed}.")
    new = tuple(n for n in times if n not in names)
    out_names = (*new, *names)
    every = [times.get(n, 1) for n in out_names]

    known = tuple(axis for axis, _ in reps if name_of(axis) in names)
    return _kernels.make_kernel("tile", lambda x: jnp.tile(x, every), (names,), out_names, selection=known)


# --- moving elements ---


@errors.say_how_to_call
def roll(array: NamedArray, shift: NamedOrNumeric | Sequence[NamedOrNumeric], axis: AxisSelection) -> NamedArray:
    """Move elements along an axis, or several; elements that leave at one end enter at the other.

    `shift` is the number of places: an integer, a scalar array, or one of them for each axis.

    >>> axn.roll(axn.named([1, 2, 3], "x"), 1, "x")
    NamedArray(int32[x=3], [3 1 2])
    """
    names = require_named("roll", array).names
    if type(shift) is int:
        return _roll_kernel(names, (shift,), _kernels.hashable(axis)).apply(array.array)
    shifts: Any = shift if isinstance(shift, (tuple, list)) else (shift,)
    if len(shifts) == 1 and not isinstance(shifts[0], NamedArray) and jnp.ndim(shifts[0]) == 1:
        shifts = tuple(shifts[0])
    values = tuple(scalar("roll", "shift", s) for s in shifts)
    static = all(isinstance(v, (int, np.integer)) for v in values)
    key = tuple(int(v) for v in values) if static else len(values)
    return _roll_kernel(names, key, _kernels.hashable(axis)).apply(array.array, *(() if static else values))


@_kernels.shared("names", "axis")
def _roll_kernel(names: Names, shifts: tuple[int, ...] | int, axis: Any) -> _kernels.Kernel:
    """Make a kernel for static shifts, or for as many operands that hold them."""
    chosen = _kernels.select("roll", names, axis)
    count = shifts if isinstance(shifts, int) else len(shifts)
    if count not in (1, len(chosen)):
        raise ValueError(f"roll: {count} shifts for the axes {errors.describe_axes(chosen)}.")
    where = tuple(names.index(n) for n in chosen)

    def positional(x, *operands):
        if isinstance(shifts, int):
            return jnp.roll(x, operands[0] if shifts == 1 else operands, where)
        # The gradient rolls back, as the gradient of a split is a concatenation. `jax.numpy.roll` slices, and the
        # gradient of each slice pads the whole array: along a sharded axis this takes twice the communication.
        for axis, shift in zip(where, shifts * (len(where) if len(shifts) == 1 else 1), strict=True):
            size = x.shape[axis]
            if last := shift % size if size else 0:
                x = jax.lax.concatenate(jax.lax.split(x, (size - last, last), axis)[::-1], axis)
        return x

    in_names = (names, *[()] * (count if isinstance(shifts, int) else 0))
    return _kernels.make_kernel("roll", positional, in_names, names, selection=axis)


@errors.say_how_to_call
def flip(array: NamedArray, axis: AxisSelection | None = None) -> NamedArray:
    """Reverse the order of elements along an axis, or several, or all by default.

    >>> axn.flip(axn.named([1, 2, 3], "x"), "x")
    NamedArray(int32[x=3], [3 2 1])
    """
    return _flip_kernel(require_named("flip", array).names, _kernels.hashable(axis)).apply(array.array)


@_kernels.shared("names", "axis")
def _flip_kernel(names: Names, axis: Any) -> _kernels.Kernel:
    chosen = _kernels.select("flip", names, axis)
    where, turned = tuple(map(names.index, chosen)), dict.fromkeys(chosen, "turned")
    return _kernels.make_kernel("flip", lambda x: jnp.flip(x, where), (names,), names, turned, selection=axis)
