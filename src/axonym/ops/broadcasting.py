"""Broadcast by name: give arrays axes that they lack.

Elementwise operations broadcast by themselves if one operand has all the axes. The functions here give a certain
layout, or an intended outer product.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSpec, Names, axes_of_spec
from ..core import errors
from ..named_array import NamedArray, NamedOrNumeric
from . import _kernels
from ._op_types import A, is_tree, map_tree
from ._operands import distinct, operand, require_named

MaybeArray = TypeVar("MaybeArray", bound="NamedOrNumeric | None")


def broadcast_to(
    a: NamedOrNumeric, axes: AxisSpec, ensure_order: bool = True, enforce_no_extra_axes: bool = True
) -> NamedArray:
    """Broadcast an array to the given axes, in their order.

    Arguments:
        ensure_order: False keeps the layout of the array, with the axes that it lacks in front.
        enforce_no_extra_axes: False lets the array keep axes that are not among `axes`. If it has any, it
            keeps its layout too.

    >>> axn.broadcast_to(axn.named([1, 2], "x"), axn.make_axes(x=2, y=3))
    NamedArray(int32[x=2, y=3], [[1 1 1] [2 2 2]])
    """
    array, names = operand(a)
    spec = axes_of_spec(_kernels.hashable(axes), "broadcast_to")
    return _broadcast_kernel("broadcast_to", names, spec, ensure_order, enforce_no_extra_axes).apply(array)


@overload
def broadcast_axis(a: NamedOrNumeric, axis: AxisSpec) -> NamedArray: ...
@overload
def broadcast_axis(a: A, axis: AxisSpec) -> A: ...
@errors.say_how_to_call
def broadcast_axis(a: Any, axis: AxisSpec) -> Any:
    """Add axes in front of those of an array, or of a tree of arrays; axes that it already has keep their positions.

    >>> axn.broadcast_axis(axn.named([1, 2], "x"), axn.Axis("y", 3))
    NamedArray(int32[y=3, x=2], [[1 2] [1 2] [1 2]])
    """
    if is_tree(a):
        return map_tree(lambda leaf: broadcast_axis(leaf, axis), a)
    array, names = operand(a)
    spec = axes_of_spec(_kernels.hashable(axis), "broadcast_axis")
    return _broadcast_kernel("broadcast_axis", names, spec, False, False).apply(array)


def broadcast_arrays(
    *arrays: MaybeArray, require_subset: bool = True, ensure_order: bool = True
) -> tuple[MaybeArray, ...]:
    """Broadcast arrays to the axes of all of them.

    The results have the layout of the first array with the most axes. Axes that it lacks come in front.

    Arguments:
        *arrays: named arrays. Scalars and None are returned unchanged.
        require_subset: one array must have all the axes; False also allows an outer product.
        ensure_order: False keeps the layout of each array, with the axes it lacks in front.

    >>> x, y = axn.broadcast_arrays(axn.named([1, 2], "x"), axn.ones({"x": 2, "y": 3}))
    >>> x
    NamedArray(int32[x=2, y=3], [[1 1 1] [2 2 2]])
    """
    what = "broadcast_arrays"
    found = [(i, x) for i, x in enumerate(arrays) if isinstance(x, NamedArray)]
    for x in arrays:
        if not isinstance(x, NamedArray) and x is not None and jnp.ndim(x) != 0:
            require_named(what, x)
    if not found:
        return arrays
    every = tuple(x.names for _, x in found)
    kernel = _together_kernel(what, every, tuple(i for i, _ in found), require_subset, ensure_order)
    result = list(arrays)
    broadcast = kernel.apply(*(x.array for _, x in found))
    for (i, _), x in zip(found, broadcast, strict=True):
        result[i] = x
    return tuple(result)


# --- kernels ---


@_kernels.shared("names", "spec")
def _broadcast_kernel(
    what: str, names: Names, spec: tuple[Axis, ...], ensure_order: bool, no_extra_axes: bool
) -> _kernels.Kernel:
    wanted = distinct(what, tuple(a.name for a in spec))
    extra = [n for n in names if n not in wanted]
    if extra and no_extra_axes:
        listed = errors.describe_selectors(spec)
        raise ValueError(
            f"{what}: the array {errors.describe_axes(names)} has axes {errors.describe_axes(extra)} that are not "
            f"among {listed}. Reduce or index them away, or pass enforce_no_extra_axes=False to keep them."
        )
    if ensure_order and not extra:
        out_names = wanted
    else:
        out_names = (*(n for n in wanted if n not in names), *names)
    sizes = {a.name: a.size for a in spec}

    def positional(x):
        return _broadcast(x, names, out_names, {**sizes, **dict(zip(names, x.shape, strict=True))})

    known = tuple(a for a in spec if a.name in names)
    return _kernels.make_kernel(what, positional, (names,), out_names, {}, selection=known)


@_kernels.shared("every")
def _together_kernel(
    what: str, every: tuple[Names, ...], positions: tuple[int, ...], require_subset: bool, ensure_order: bool
) -> _kernels.Kernel:
    """Make a kernel that broadcasts several arrays at once, so that new axes are sharded as in the other arrays."""
    full = max(every, key=len)
    if require_subset:
        _kernels.broadcast_names(what, every)  # raises an error if no array has all the axes
    for names in every:
        full = (*(n for n in names if n not in full), *full)
    if ensure_order:
        out_names = (full,) * len(every)
    else:
        out_names = tuple((*(n for n in full if n not in names), *names) for names in every)

    def positional(*arrays):
        sizes: dict[str, int] = {}
        for position, names, x in zip(positions, every, arrays, strict=True):
            for name, size in zip(names, x.shape, strict=True):
                if sizes.setdefault(name, size) != size:
                    places = [("the arrays before", sizes[name]), (f"array {position}", size)]
                    raise ValueError(errors.size_mismatch(what, name, places))
        return tuple(_broadcast(x, n, out, sizes) for x, n, out in zip(arrays, every, out_names, strict=True))

    return _kernels.make_kernel(what, positional, every, out_names, same_sizes=False)


def _broadcast(x: jax.Array, names: Names, out_names: Names, sizes: dict[str, Any]) -> jax.Array:
    """Return `x` in the layout of `out_names`, repeated along the axes that it lacks."""
    kept = tuple(n for n in out_names if n in names)
    x = _kernels.transpose_to(x, names, kept)
    if kept == out_names:
        return x
    return jax.lax.broadcast_in_dim(x, [sizes[n] for n in out_names], [out_names.index(n) for n in kept])
