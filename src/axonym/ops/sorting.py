"""Sort along one axis.

The order is that of NumPy: NaN comes last. The axis can be left out for arrays with only one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _kernels
from .._per_device import vary_like
from ..array import NamedArray, wrap
from ..axis import AxisSelector, Names
from ._operands import only_axis, require_named


@_kernels.cached
def _along_kernel(
    fn: Callable[..., Any], name: str, names: Names, axis: AxisSelector, options: tuple[tuple[str, Any], ...]
) -> _kernels.Kernel:
    along = _kernels.select_one(name, names, axis)
    position, keywords = names.index(along), dict(options)

    def positional(x):
        kth = keywords.get("kth")
        if kth is not None and not -x.shape[position] <= kth < x.shape[position]:
            raise ValueError(f"{name}: no element {kth} along axis {along!r} of size {x.shape[position]}.")
        return fn(x, axis=position, **keywords)

    return _kernels.make_kernel(name, positional, (names,), names, selection=axis)


def _along(fn: Callable[..., Any], name: str, a: NamedArray, axis: AxisSelector | None, **options: Any) -> NamedArray:
    require_named(name, a)
    kernel = _along_kernel(
        fn, name, a.names, _kernels.one_selector(name, only_axis(name, a, axis)), tuple(options.items())
    )
    return wrap(kernel.call(a.array), kernel.names)


def sort(a: NamedArray, axis: AxisSelector | None = None, *, descending: bool = False) -> NamedArray:
    """Sort elements along an axis.

    Arguments:
        a: a named array.
        axis: the axis to sort along.
        descending: the largest first.

    >>> axn.sort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 3])
    """
    return _along(jnp.sort, "sort", a, axis, descending=bool(descending))


def argsort(
    a: NamedArray, axis: AxisSelector | None = None, *, stable: bool = False, descending: bool = False
) -> NamedArray:
    """Return the positions along an axis of the sorted elements.

    Arguments:
        a: a named array.
        axis: the axis to sort along.
        stable: keep equal elements in the order they have.
        descending: the largest first.

    >>> axn.argsort(axn.named([3, 1, 2], "x"), "x")
    NamedArray(int32[x=3], [1 2 0])
    """
    return _along(_positions, "argsort", a, axis, stable=bool(stable), descending=bool(descending))


def _positions(x: jax.Array, **options: Any) -> jax.Array:
    # Inside `shard_map`, JAX sorts positions together with values, and takes them for the same on all devices.
    return vary_like(jnp.argsort(x, **options), x)


def partition(a: NamedArray, kth: int, axis: AxisSelector | None = None) -> NamedArray:
    """Reorder elements so that the `kth` is the one that sorting would put there, and those before it are no larger.

    Arguments:
        a: a named array.
        kth: the position whose element is as in the sorted array.
        axis: the axis to partition along.

    >>> axn.partition(axn.named([3, 1, 2], "x"), 0, "x")[{"x": 0}]
    NamedArray(int32[], 1)
    """
    return _along(jnp.partition, "partition", a, axis, kth=operator.index(kth))


def argpartition(a: NamedArray, kth: int, axis: AxisSelector | None = None) -> NamedArray:
    """Return the positions along an axis of the elements in the order of `partition`.

    Arguments:
        a: a named array.
        kth: the position whose element is as in the sorted array.
        axis: the axis to partition along.

    >>> axn.argpartition(axn.named([3, 1, 2], "x"), 0, "x")[{"x": 0}]
    NamedArray(int32[], 1)
    """
    return _along(jnp.argpartition, "argpartition", a, axis, kth=operator.index(kth))


def lexsort(keys: Sequence[NamedArray], axis: AxisSelector | None = None) -> NamedArray:
    """Return the positions that sort by several keys along an axis: by the last key, ties by the one before, ...

    Arguments:
        keys: named arrays; one of them has all the axes of the others.
        axis: the axis to sort along.

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
    return wrap(kernel.call(*(k.array for k in keys)), kernel.names)


@_kernels.cached
def _lexsort_kernel(all_names: tuple[Names, ...], axis: AxisSelector) -> _kernels.Kernel:
    names = _kernels.broadcast_names("lexsort", all_names)
    widest = all_names.index(names)
    position = names.index(_kernels.select_one("lexsort", names, axis, widest))

    def positional(*keys):
        aligned = [_kernels.align(k, own, names) for k, own in zip(keys, all_names, strict=True)]
        return jnp.lexsort(jnp.broadcast_arrays(*aligned), position)

    return _kernels.make_kernel("lexsort", positional, all_names, names, selection=axis)
