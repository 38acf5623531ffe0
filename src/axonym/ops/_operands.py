"""Check and convert the arguments of operations before a kernel gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from ..axis import Axis, AxisSelector, AxisSpec, Names, axes_of_spec, name_of
from ..core import errors
from ..core.errors import distinct
from ..distribution.mesh_axes import axes_of_type, mesh_around
from ..distribution.operation_scope import DerivedName
from ..named_array import NamedArray, raw
from . import _kernels

ArrayT = TypeVar("ArrayT", jax.Array, NamedArray)


def require_named(what: str, array: Any, argument: str = "") -> NamedArray:
    """Return an argument, which must be a named array."""
    if not isinstance(array, NamedArray):
        raise TypeError(
            f"{what}: expected a NamedArray{f' for `{argument}`' if argument else ''}, got {type(array).__name__}."
            + errors.HOW_TO_NAME
        )
    return array


def operand(x: Any) -> tuple[Any, Names]:
    """Return an argument as kernels take it, and its names; arguments that are not named arrays have none."""
    if isinstance(x, NamedArray):
        return x.array, x.names
    return np.asarray(x) if isinstance(x, (list, tuple)) else x, ()


def scalar(what: str, argument: str, x: Any) -> Any:
    """Return an argument that must be a single value: a number, or an array without axes."""
    if isinstance(x, (int, float, complex)):
        return x
    x, names = operand(x)
    if names:
        described = errors.describe_axes(names, np.shape(x))
        raise ValueError(f"{what}: `{argument}` must be a scalar, got an array with axes {described}.")
    if np.ndim(x) != 0:
        raise ValueError(f"{what}: `{argument}` must be a scalar, got an array of shape {np.shape(x)}.")
    return x


def unsigned_nan(x: jax.Array) -> jax.Array:
    """Clear the sign bit of NaN, which inf - inf sets: JAX's partition sorts such a NaN first, its top-k last."""
    return jnp.where(jnp.isnan(x), jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def as_float(x: ArrayT) -> ArrayT:
    """Convert integers to floats, because their sums, differences and squares overflow in small dtypes."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jax.dtypes.canonicalize_dtype(float))


def at_least_int32(x: ArrayT) -> ArrayT:
    """Convert integers of a small dtype, which may not hold the positions along an axis, or its size."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def as_positions(x: jax.Array, size: int) -> jax.Array:
    """Convert positions along an axis to int32 on Auto mesh axes; positions out of range stay so.

    If XLA scatters by positions of another dtype, and their axis is sharded unevenly, it ends the process. Unsigned
    positions of 32 bits and more are converted everywhere, since JAX takes the largest of them for negative ones.
    """
    if x.dtype == jnp.int32 or not jnp.issubdtype(x.dtype, jnp.integer) or size >= 2**31 - 1:
        return x
    mesh, unsigned = mesh_around(), jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    if not (unsigned and x.dtype.itemsize >= 4) and all(mesh.shape[a] == 1 for a in axes_of_type(mesh, AxisType.Auto)):
        return x
    lowest = 0 if unsigned else -size - 1
    return jnp.clip(at_least_int32(x), lowest, size).astype(jnp.int32)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Convert numbers of a small dtype, which is too coarse for sums, squares, positions and probabilities."""
    return x if jnp.result_type(x).itemsize >= 4 else x.astype(jnp.promote_types(x.dtype, jnp.float32))


def extreme(dtype: Any, largest: bool) -> np.ndarray:
    """Return the largest or the smallest value of a dtype: the start of a minimum, or of a maximum."""
    if dtype == np.bool_:
        return np.asarray(largest)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min, dtype)
    infinite = np.asarray(np.inf if largest else -np.inf, dtype)
    if np.isinf(infinite):
        return infinite
    return np.asarray(jnp.finfo(dtype).max if largest else jnp.finfo(dtype).min, dtype)


def static_number(what: str, argument: str, x: Any) -> Any:
    """Return a number that must be known at compile time, as a Python number."""
    x = scalar(what, argument, x)
    if isinstance(x, Tracer):
        raise TypeError(f"{what}: `{argument}` is part of the program, so it cannot be traced. Pass a number.")
    return x.item() if hasattr(x, "item") else x


def by_axis(what: str, argument: str, given: Any, example: str) -> Mapping[AxisSelector, Any]:
    """Return an argument that must be a mapping with axes for keys."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}: `{argument}` is a mapping by axis, such as {example}, got {type(given).__name__}.")
    return given


def vectors(what: str, **arguments: Any) -> tuple[list[Any], Names]:
    """Return arguments with one axis that the result does not keep; they may be raw arrays.

    The axis gets a name that no other operand has, so that it is never matched.
    """
    arrays, found, sizes = [], {}, {}
    for argument, x in arguments.items():
        x, names = operand(x)
        shape = np.shape(x)
        if len(shape) != 1:
            described = errors.describe_axes(names, shape) if names else f"shape {shape}"
            raise ValueError(f"{what}: `{argument}` must have exactly one axis, got {described}.")
        arrays.append(x)
        sizes[f"`{argument}`"] = shape[0]
        found.update({f"`{argument}`": names[0]} if names else {})
    if len(set(found.values())) > 1:
        listed = " and ".join(f"{argument} has {name!r}" for argument, name in found.items())
        raise ValueError(f"{what}: {' and '.join(sizes)} must have the same axis, but {listed}.")
    if len(set(sizes.values())) > 1:
        raise ValueError(errors.size_mismatch(what, next(iter(found.values()), "axis"), list(sizes.items())))
    return arrays, private(next(iter(sizes)), tuple(found.values())[:1] or ("axis",))


def private(argument: str, names: Names) -> Names:
    """Return new names for the axes of an operand, so that they match no axis of another operand."""
    return tuple(DerivedName(n, f"{n} of {argument}", private=True) for n in names)


def one_axis(what: str, argument: str, axis: AxisSpec) -> Axis:
    """Return an argument that must be one axis with its size."""
    if isinstance(axis, Axis):
        return axis
    if not isinstance(axis, (str, Sequence, dict)):
        written = f"axonym.Axis({argument.lower().removesuffix('_axis')!r}, {axis if type(axis) is int else 8})"
        raise TypeError(f"{what}: `{argument}` must be an Axis, got {type(axis).__name__}. Write `{written}`.")
    found = axes_of_spec(axis, what)
    if len(found) != 1:
        first = f" Write `{found[0].name!r}` or another of them." if found else ""
        raise ValueError(f"{what}: `{argument}` must be one axis, got {errors.describe_selectors(found)}.{first}")
    return found[0]


def check_new_axis(what: str, axis: AxisSelector, size: Any) -> None:
    """Check the size of the axis that an operation makes, if the user gave one."""
    if isinstance(axis, Axis) and axis.size != size:
        places = [("the argument", axis.size), ("the result", size)]
        raise ValueError(errors.size_mismatch(what, axis.name, places))


def replaced(what: str, names: Names, old: str, new: Sequence[AxisSelector]) -> Names:
    """Return the names, with new ones in place of an old one."""
    return distinct(what, tuple(m for n in names for m in ([name_of(s) for s in new] if n == old else [n])))


def require_subset(what: str, argument: str, inner: Names, outer: Names, way_out: str = "") -> None:
    """Check that an operand has no axes that the array lacks."""
    extra = [n for n in inner if n not in outer]
    if extra:
        raise ValueError(
            f"{what}: `{argument}` has axes {errors.describe_axes(extra)} that the array "
            f"{errors.describe_axes(outer)} lacks.{way_out}"
        )


def require_positions(
    what: str,
    label: str,
    x: Any,
    axis: Axis,
    ignored: int | None = None,
    way_out: str = "",
    from_end: bool = False,
    slack: int = 0,
) -> None:
    """Check that integers are positions along an axis, if their values are known, as outside of jit.

    This copies them to the host and waits for them, so call it after the work that needs them has started.

    Arguments:
        what: the operation, for the message.
        label: the words for one of the integers there.
        x: the integers, a named or raw array; not checked if they are traced, or if other processes hold some of them.
        ignored: another number that is allowed.
        way_out: advice, for the message.
        from_end: whether negative numbers count from the end.
        slack: the number of last positions that are out of range, too, such as for the starts of slices; -1 allows the
            end itself, at which an empty slice may start.
    """
    array = known_values(raw(x)) if jnp.issubdtype(x.dtype, jnp.integer) else None
    if array is None or not array.size:
        return
    least, end = -axis.size if from_end else 0, axis.size - slack
    if (0 if slack else least) <= array.min() and array.max() < end:
        return
    outside = (array < least) | (array >= end) | ((array < 0) & (array >= -slack))
    wrong = np.unique(array[outside & (array != ignored)])
    if wrong.size:
        listed = ", ".join(str(i) for i in wrong[:5]) + (", ..." if wrong.size > 5 else "")
        raise IndexError(
            f"{what}: {listed} out of range for axis {axis.name!r} of size {axis.size}: {label} lies in "
            f"{0 if slack else least}..{end - 1}.{way_out}"
        )


def known_values(array: Any) -> np.ndarray | None:
    """Return the values of an array; None if it is traced, or other processes hold shards of it."""
    if isinstance(array, jax.Array):
        if isinstance(array, Tracer) or not (array.is_fully_addressable or array.is_fully_replicated):
            return None
        config: Any = jax.config
        if config.jax_transfer_guard_device_to_host not in (None, "allow"):  # entering the context takes time
            with jax.transfer_guard_device_to_host("allow"):
                return np.asarray(array)
    return np.asarray(array) if isinstance(array, (jax.Array, np.ndarray)) else None


def only_axis(what: str, array: NamedArray, axis: AxisSelector | None) -> AxisSelector:
    """Return the selected axis, which may be omitted if the array has only one."""
    if axis is not None:
        return axis
    if len(array.names) != 1:
        raise ValueError(
            f"{what}: which axis of {errors.describe_shape(array.shape)}? Name one, or flatten the array first: "
            f"`array.flatten('name')`."
        )
    return array.names[0]


def apply_along(fn: Callable[..., Any], what: str, array: NamedArray, axis: AxisSelector, **options: Any) -> NamedArray:
    """Apply a function along one axis, which the result keeps. Options are static; None leaves one out."""
    require_named(what, array)
    given = {name: value for name, value in options.items() if value is not None}
    axis = _kernels.one_selector(what, axis)
    return _kernels.axis_kernel(fn, what, array.names, axis, tuple(given), *given.values()).apply(array.array)


def dtype_key(dtype: Any) -> Any:
    """Return a dtype in a form that can be part of a cache key; Python's types become JAX's default dtypes."""
    if dtype is None:
        return None
    if isinstance(dtype, type) and dtype in (bool, int, float, complex):
        return jax.dtypes.canonicalize_dtype(dtype)
    return np.dtype(dtype)
