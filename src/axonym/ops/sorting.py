"""Sort along one axis.

Elements are ordered as in NumPy: NaN comes last. The axis can be left out for arrays with only one.
`axonym.top_k` brings its own partitioning, so it is in `axonym.custom_partitioning`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axis import AxisSelector, Names, name_of
from ..core import errors
from ..distribution.per_device import vary_like
from ..named_array import NamedArray
from . import _kernels
from ._operands import apply_along, only_axis, require_named, unsigned_nan
from ._sort_gradient import sort_along


@errors.say_how_to_call
def sort(a: NamedArray, axis: AxisSelector | None = None, *, descending: bool = False) -> NamedArray:
    """Sort elements along an axis, the largest first if `descending`.

    >>> axn.sort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 3])
    """
    axis = only_axis("sort", require_named("sort", a), axis)
    return apply_along(_sort, "sort", a, axis, descending=bool(descending))


def _sort(x: jax.Array, axis: int, descending: bool) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.sort(x, axis=axis, descending=descending)
    return jnp.flip(sort_along(axis, x), axis) if descending else sort_along(axis, x)


def argsort(
    a: NamedArray, axis: AxisSelector | None = None, *, stable: bool = True, descending: bool = False
) -> NamedArray:
    """Return the positions that sort the elements along an axis, as `sort` does.

    Equal elements keep their order. With `stable=False` they need not, which can be faster.

    >>> axn.argsort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 0])
    """
    axis = only_axis("argsort", require_named("argsort", a), axis)
    return apply_along(_positions, "argsort", a, axis, stable=bool(stable), descending=bool(descending))


def _positions(x: jax.Array, **options: Any) -> jax.Array:
    # Inside `shard_map`, JAX sorts positions together with values, and assumes that they are the same on all devices.
    return vary_like(jnp.argsort(x, **options), x)


def partition(a: NamedArray, kth: int, axis: AxisSelector | None = None) -> NamedArray:
    """Reorder elements along an axis so that the `kth` is where sorting puts it, and no element before it is larger.

    >>> axn.partition(axn.named([3, 1, 2], "x"), 0, "x")[{"x": 0}]
    NamedArray(int32[], 1)
    """
    return _partition(_partitioned, "partition", a, kth, axis)


def argpartition(a: NamedArray, kth: int, axis: AxisSelector | None = None) -> NamedArray:
    """Return the positions that reorder elements along an axis as `partition` does, with the same arguments.

    >>> axn.argpartition(axn.named([3, 1, 2], "x"), 0, "x")[{"x": 0}]
    NamedArray(int32[], 1)
    """
    return _partition(_argpartitioned, "argpartition", a, kth, axis)


# JAX's partition takes the largest and the smallest elements, and on GPUs not each NaN is among the largest.


def _partitioned(x: jax.Array, axis: int, kth: int) -> jax.Array:
    return _sort(x, axis, False) if jax.default_backend() == "gpu" else jnp.partition(unsigned_nan(x), kth, axis)


def _argpartitioned(x: jax.Array, axis: int, kth: int) -> jax.Array:
    if jax.default_backend() == "gpu":
        return _positions(x, axis=axis)
    return jnp.argpartition(unsigned_nan(x), kth, axis)


def _partition(fn: Callable[..., Any], what: str, a: NamedArray, kth: int, axis: Any) -> NamedArray:
    axis, kth = _kernels.one_selector(what, only_axis(what, require_named(what, a), axis)), operator.index(kth)
    size = a.shape.get(name_of(axis))
    if size is not None and not -size <= kth < size:
        raise ValueError(f"{what}: no element {kth} along axis {name_of(axis)!r} of size {size}.")
    return apply_along(fn, what, a, axis, kth=kth)


def lexsort(keys: Sequence[NamedArray], axis: AxisSelector | None = None) -> NamedArray:
    """Return the positions that sort by several keys along an axis: by the last key, ties by the one before, ...

    One of the keys has all the axes of the others.

    >>> family, given = axn.named([1, 0, 1], "person"), axn.named([2, 9, 1], "person")
    >>> axn.lexsort((given, family), "person")
    NamedArray(int32[person=3], [1 2 0])
    """
    if not keys:
        raise ValueError("lexsort: there must be at least one key.")
    keys = [require_named("lexsort", k) for k in keys]
    widest = max(keys, key=lambda key: len(key.names))
    kernel = _lexsort_kernel(
        tuple(k.names for k in keys), _kernels.one_selector("lexsort", only_axis("lexsort", widest, axis))
    )
    return kernel.apply(*(k.array for k in keys))


@_kernels.shared("all_names", "axis")
def _lexsort_kernel(all_names: tuple[Names, ...], axis: AxisSelector) -> _kernels.Kernel:
    names = _kernels.broadcast_names("lexsort", all_names)
    widest = all_names.index(names)
    position = names.index(_kernels.select_one("lexsort", names, axis, widest))

    def positional(*keys):
        aligned = [_kernels.align(k, own, names) for k, own in zip(keys, all_names, strict=True)]
        return jnp.lexsort(jnp.broadcast_arrays(*aligned), position)

    return _kernels.make_kernel("lexsort", positional, all_names, names, selection=axis)
