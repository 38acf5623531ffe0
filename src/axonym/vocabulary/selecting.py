"""The largest elements along an axis that is split."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _kernels
from ..array import NamedArray, NamedOrNumeric, resolve, wrap, wrap_result
from ..axis import Axis, AxisSelector, Names, name_of
from ..custom_partitioning.decorator import Partitioned, partitioned
from ..ops._operands import check_new_axis, one_axis, operand, replaced, require_named, require_subset
from ._candidates import best


def top_k(
    logits: NamedArray,
    Vocab: AxisSelector,
    k: int | NamedOrNumeric,
    new_axis: AxisSelector | None = None,
    *,
    max_k: int | None = None,
    replacement: NamedOrNumeric | None = None,
) -> tuple[NamedArray, NamedArray]:
    """The largest elements along an axis, the largest first, and their positions; the axis may be split.

    Each device finds `k` candidates in its part of the axis, and only these, with their positions, move. Equal elements
    come in the order in which they stand. NaN is larger than everything, if its sign bit is not set.

    With `max_k`, `k` need not be known when the program is compiled, and each example can have one of its own. The
    result then has `max_k` elements, of which those beyond `k` have `replacement` for a value. Their positions are
    those of the elements that come next, so they can be looked up.

    Arguments:
        logits: a named array.
        Vocab: the axis to search.
        k: how many to find; with `max_k`, also a named array or a traced number.
        new_axis: what the axis is called afterwards; its old name by default.
        max_k: how many to find at most.
        replacement: the value of what is beyond `k`; by default the lowest of the dtype, which is -inf for floats.

    >>> logits = axn.named([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]], ("batch", "vocab"))
    >>> values, places = axn.vocabulary.top_k(logits, "vocab", axn.named([2, 1], "batch"), max_k=2, replacement=0.0)
    >>> print(values.array, places.array)
    [[3. 2.]
     [5. 0.]] [[0 2]
     [1 2]]
    """
    what = "vocabulary.top_k"
    require_named(what, logits)
    axis = one_axis(what, "Vocab", resolve(logits.names, jnp.shape(logits.array), Vocab, what))
    count = number_of_candidates(what, "k", k, max_k, axis)
    new = axis.name if new_axis is None else new_axis
    check_new_axis(what, new, count)
    if max_k is None:
        if replacement is not None:
            raise TypeError(f"{what}: `replacement` stands for what is beyond `k`, so it needs `max_k`.")
        kernel = _top_k_kernel(what, logits.names, axis.name, count, name_of(new))
        return wrap_result(kernel.call(logits.array), kernel.names)
    if replacement is None:
        replacement = _lowest(logits.dtype)
    (k_array, k_names), (r_array, r_names) = operand(k), operand(replacement)
    batch = tuple(n for n in logits.names if n != axis.name)
    for argument, names in (("k", k_names), ("replacement", r_names)):
        require_subset(what, argument, names, batch, " There is one for all examples, or one for each.")
    kernel = _top_k_kernel(what, logits.names, axis.name, count, name_of(new), k_names, r_names)
    return wrap_result(kernel.call(logits.array, k_array, r_array), kernel.names)


def number_of_candidates(what: str, argument: str, k: Any, max_k: int | None, axis: Axis) -> int:
    """How many elements of an axis are asked for, at most, as it has to be known when a program is compiled.

    Arguments:
        what: the operation, for messages.
        argument: what `k` is called.
        k: how many, or an array that says it.
        max_k: how many at most.
        axis: the axis.
    """
    count, asked = max_k, f"max_k={max_k}"
    if count is None:
        if isinstance(k, (NamedArray, jax.Array, np.ndarray)):
            raise TypeError(
                f"{what}: `{argument}` is an array, so how many candidates there are is not known when the program is "
                "compiled. Say with `max_k` how many there are at most."
            )
        count, asked = operator.index(k), f"{argument}={k}"
    if not 0 <= count <= axis.size:
        raise ValueError(f"{what}: {asked}, but axis {axis.name!r} has {axis.size} elements.")
    return count


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


@_kernels.cached
def _top_k_kernel(
    what: str, names: Names, axis: str, k: int, new: str, k_names: Names | None = None, r_names: Names = ()
) -> _kernels.Kernel:
    out_names = replaced(what, names, axis, (new,))

    def positional(x, *limits):
        if k_names is None:
            found = _operation(axis)(wrap(x, names), k=k)
        else:
            limit, replacement = limits
            replacement = jnp.asarray(replacement, x.dtype)
            found = _operation(axis)(wrap(x, names), wrap(limit, k_names), wrap(replacement, r_names), k=k)
        return tuple(y.array for y in found)

    in_names = (names,) if k_names is None else (names, k_names, r_names)
    return _kernels.make_kernel(what, positional, in_names, (out_names, out_names), mesh_aware=True)


@functools.lru_cache(maxsize=256)
def _operation(axis: str) -> Partitioned:
    """The operation for an axis of this name."""
    found = f"{axis} found"  # one axis in operands, and another in results

    def top_k(logits: NamedArray, *limits: NamedArray, k: int) -> tuple[NamedArray, NamedArray]:
        values, places = best(logits, axis, k)
        if limits:
            limit, replacement = (_kernels.align(x.array, x.names, values.names) for x in limits)
            rank = jax.lax.broadcasted_iota(jnp.int32, values.array.shape, values.names.index(axis))
            values = wrap(jnp.where(rank < limit, values.array, replacement), values.names)
        return values.rename({axis: found}), places.rename({axis: found})

    return partitioned(reduced=axis)(top_k)
