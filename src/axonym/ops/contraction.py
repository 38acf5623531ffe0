"""Products of arrays, summed over some of their axes.

`dot` takes the axes to sum over; `einsum` (in `axonym.ops.einsum`) takes an equation. Both use `jax.lax.dot_general`,
two operands at a time, in the order that costs least if there are more. By default the result has the axes of the first
operand in order, then those that only the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from .. import _errors, _kernels
from ..array import NamedArray, wrap
from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of, rearrange_for_partial_order, selectors
from ._contraction_plan import DotGeneral, Plan, contract_with, make_contraction_kernel
from ._operands import dtype_key


class _Required:
    def __repr__(self) -> str:
        return "<required>"


_REQUIRED = _Required()


def dot(
    *arrays: Any,
    axis: AxisSelection | _Required | None = _REQUIRED,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_axes: Sequence[AxisSelector | EllipsisType] | None = None,
    dot_general: DotGeneral = jax.lax.dot_general,
) -> NamedArray:
    """Multiply arrays and sum over some axes. Axes of the same name are matched; all other axes are kept.

    Arguments:
        *arrays: named arrays.
        axis: the axes to sum over; None for all of them, `()` for none.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: the dtype to accumulate in and return.
        out_axes: the order of the result's axes, with `...` for those not named.
        dot_general: a replacement for `jax.lax.dot_general`. If it uses arrays of its own, make it a pytree that holds
            them, such as `jax.tree_util.Partial(fn, array)`; on Explicit mesh axes it must be one.

    >>> x = axn.ones({"batch": 2, "embed": 3})
    >>> w = axn.ones({"embed": 3, "mlp": 4})
    >>> axn.dot(x, w, axis="embed").shape
    {'batch': 2, 'mlp': 4}
    >>> axn.dot(x, w, axis=None)
    NamedArray(float32[], 24.)
    """
    if len(arrays) == 2 and axis is not _REQUIRED and type(arrays[0]) is type(arrays[1]) is NamedArray:
        left, right = arrays  # the common case; loops over the operands would cost as much as all the rest
        names, raw = (left.names, right.names), (left.array, right.array)
    else:
        arrays, axis = _operands_and_axis(arrays, axis)
        names, raw = tuple(a.names for a in arrays), tuple(a.array for a in arrays)
    if type(axis) is not str:
        axis = _kernels.hashable(axis)  # pyright: ignore[reportArgumentType]  # not the marker any more
    if out_axes is not None:
        out_axes = (out_axes,) if isinstance(out_axes, (str, Axis)) else tuple(out_axes)
    if preferred_element_type is not None:
        preferred_element_type = dtype_key(preferred_element_type)
    if dot_general is jax.lax.dot_general:
        kernel = _dot_kernel(names, axis, out_axes, precision, preferred_element_type)
        return wrap(kernel.call(*raw), kernel.names)
    plan = _dot_plan(names, axis, out_axes, precision, preferred_element_type)
    return wrap(contract_with(plan, raw, dot_general), plan.out_names)


@_kernels.cached
def _dot_kernel(*key: Any) -> _kernels.Kernel:
    return make_contraction_kernel(_dot_plan(*key))


def _dot_plan(
    all_names: tuple[Names, ...],
    axis: Any,
    out_axes: tuple[Any, ...] | None,
    precision: Any,
    preferred_element_type: Any,
) -> Plan:
    union = tuple(dict.fromkeys(n for names in all_names for n in names))
    summed = union if axis is None else _summed(union, axis, all_names)
    kept = tuple(n for n in union if n not in summed)
    out_names = kept if out_axes is None else _ordered(kept, out_axes)
    sized = tuple(s for s in (*selectors(axis), *(out_axes or ())) if isinstance(s, Axis))
    return Plan("dot", all_names, out_names, precision, preferred_element_type, sized)


def _operands_and_axis(arrays: tuple[Any, ...], axis: Any) -> tuple[tuple[NamedArray, ...], Any]:
    """Return the operands and the axes, which may also come first: `dot("embed", x, w)`."""
    operands = [a for a in arrays if isinstance(a, NamedArray)]
    others = [a for a in arrays if not isinstance(a, NamedArray)]
    if others and axis is _REQUIRED and len(others) == 1 and isinstance(others[0], (str, Axis, tuple, list)):
        axis, others = others[0], []
    if others:
        kinds = ", ".join(type(a).__name__ for a in others)
        raise TypeError(f"dot: expected NamedArrays, got {kinds}. Name raw arrays with axonym.named(array, axes).")
    if axis is _REQUIRED:
        listed = " and ".join(_errors.describe_axes(x.names, jnp.shape(x.array)) for x in operands)
        raise TypeError(f"dot of {listed}: say which axes to sum over, `axis=...`; None means all of them.")
    if not operands:
        raise TypeError("dot: expected at least one NamedArray.")
    return tuple(operands), axis


def _summed(union: Names, axis: AxisSelection, all_names: Sequence[Names]) -> Names:
    chosen = tuple(name_of(s) for s in selectors(axis))
    missing = [n for n in chosen if n not in union]
    if missing:
        operands = " and ".join(_errors.describe_axes(n) for n in all_names)
        listed = ", ".join(repr(n) for n in missing)
        hints = "".join(_errors.suggestion(n, union) for n in missing)
        raise ValueError(f"dot: no operand has axis {listed}; the operands are {operands}.{hints}")
    return chosen


def _ordered(kept: Names, out_axes: tuple[Any, ...]) -> Names:
    wanted = [s if isinstance(s, EllipsisType) else name_of(s) for s in out_axes]
    unknown = [n for n in wanted if isinstance(n, str) and n not in kept]
    if unknown:
        listed = ", ".join(repr(n) for n in unknown)
        raise ValueError(
            f"dot: out_axes names {listed}, which the result does not have: summing leaves "
            f"{_errors.describe_axes(kept)}."
        )
    left_out = [n for n in kept if n not in wanted]
    if left_out and ... not in wanted:
        listed = ", ".join(repr(n) for n in left_out)
        raise ValueError(f"dot: out_axes leaves out {listed} of the result; name every axis, or add `...`.")
    named = [n for n in wanted if isinstance(n, str)]
    if len({*named}) < len(named):
        raise ValueError(f"dot: out_axes names an axis twice: {_errors.describe_axes(map(str, wanted))}.")
    return rearrange_for_partial_order(wanted, kept)
