"""Decide whether a loss can be computed from shards of some axes: whether only the cross-entropy reduces them.

The function is traced twice, with the complete axes and with their shards. The sharded axes have different sizes
in the two programs. Both must have the same operations, with the same numbers. Operations on such an axis must be
elementwise, or products that keep the axis, except for `axonym.nn.cross_entropy_loss`, which reduces shards itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_REDUCES_SHARDS = re.compile(r"\bcross_entropy_loss\w*\[")
"""The scope of operations that reduce shards on all devices."""

_KEEPS_SHARDS = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div "
    "eq erf erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not "
    "optimization_barrier or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh "
    "transpose xor".split()
)
_CALLS = frozenset(("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"))
_SAYS_VARYING = frozenset(("pcast", "pvary"))


def is_computed_from_shards(whole: Any, shards: Any) -> bool:
    """Return whether a program on shards of some axes computes the same as the program on the complete axes.

    Arguments:
        whole: the jaxpr for the complete axes, with its constants.
        shards: the jaxpr for their shards.
    """
    if len(whole.consts) != len(shards.consts):
        return False
    same = all(x is y or _same(x, y) for x, y in zip(whole.consts, shards.consts, strict=True))
    return same and _alike(whole.jaxpr, shards.jaxpr)


def _alike(whole: Any, shards: Any) -> bool:
    first, second = list(_operations(whole)), list(_operations(shards))
    return len(first) == len(second) and all(map(_is_right, first, second))


def _operations(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the operations of a program, each with its operands, except the operations of the cross-entropy."""
    same: dict[Any, Any] = {}
    for operation in jaxpr.eqns:
        operands = [x if hasattr(x, "val") else same.get(x, x) for x in operation.invars]
        if operation.primitive.name in _SAYS_VARYING:
            # The two programs may differ in these, which change no value: their results stand for their operands.
            same.update(zip(operation.outvars, operands, strict=True))
        elif not _REDUCES_SHARDS.search(str(operation.source_info.name_stack)):
            yield operation, operands


def _is_right(whole: tuple[Any, list[Any]], shards: tuple[Any, list[Any]]) -> bool:
    """Return whether an operation on shards computes the shards of the full result."""
    (first, all_operands), (second, own_operands) = whole, shards
    name = first.primitive.name
    if name != second.primitive.name or len(all_operands) != len(own_operands):
        return False
    for x, y in zip(all_operands, own_operands, strict=True):
        if hasattr(x, "val") != hasattr(y, "val") or (hasattr(x, "val") and not _same(x.val, y.val)):
            return False
    if name in _CALLS:
        inner = [[*_inner(operation)] for operation in (first, second)]
        return len(inner[0]) == len(inner[1]) and all(map(_alike, *inner))
    operands = list(map(_differs, all_operands, own_operands))
    if any((*operands, *map(_differs, first.outvars, second.outvars))):
        if name == "broadcast_in_dim":
            return True  # values broadcast along a new axis are the same everywhere
        if name == "dot_general":
            numbers = first.params["dimension_numbers"]
            return all(axes.isdisjoint(summed) for axes, summed in zip(operands, numbers[0], strict=True))
        if name not in _KEEPS_SHARDS:
            return False
    return _parameters(first) == _parameters(second)


def _differs(whole: Any, shards: Any) -> set[int]:
    """Return the positions of the axes whose sizes differ; -1 if the numbers of axes differ."""
    sizes = whole.aval.shape, shards.aval.shape
    if len(sizes[0]) != len(sizes[1]):
        return {-1}
    return {place for place, (x, y) in enumerate(zip(*sizes, strict=True)) if x != y}


def _inner(operation: Any) -> Iterator[Any]:
    for value in operation.params.values():
        found = getattr(value, "jaxpr", value)
        if hasattr(found, "eqns"):
            yield found


def _parameters(operation: Any) -> dict[str, Any]:
    plain = int, float, str, tuple, np.dtype, type(None)
    return {key: value for key, value in operation.params.items() if isinstance(value, plain)}


def _same(x: Any, y: Any) -> bool:
    return np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
