"""What convolutions and pools are told for each of their axes: by position, by name, or one value for all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from .. import _errors
from ..axis import AxisSelector, Names, name_of

PerAxis: TypeAlias = int | Sequence[int] | Mapping[AxisSelector, int]
PaddingSpec: TypeAlias = str | int | Sequence[int | tuple[int, int]] | Mapping[AxisSelector, int | tuple[int, int]]

Pair = tuple[int, int]
Padding: TypeAlias = tuple[Pair, ...] | str
"""Before and after each axis; or "SAME" or "VALID", for which it depends on the sizes of the input."""


def per_axis(what: str, argument: str, value: Any, names: Names, *, at_least: int) -> tuple[int, ...]:
    """An integer for each axis.

    Arguments:
        what: the operation, for messages.
        argument: what is given, for messages.
        value: an integer for all axes, a sequence with one for each, or a mapping by name.
        names: the axes.
        at_least: the smallest that is allowed.
    """
    found = tuple(_integer(what, argument, v) for v in _spread(what, argument, value, names, _is_integer))
    if any(v < at_least for v in found):
        raise ValueError(f"{what}: `{argument}` is at least {at_least}, got {_listed(names, found)}.")
    return found


def padding_of(what: str, value: Any, names: Names) -> Padding:
    """The padding of each axis.

    Arguments:
        what: the operation, for messages.
        value: "SAME" or "VALID"; or for all axes, or for each, an integer or a pair of them.
        names: the axes.
    """
    if isinstance(value, str):
        if value.upper() not in ("SAME", "VALID"):
            raise ValueError(f"{what}: `padding` is 'SAME', 'VALID', or given in elements, got {value!r}.")
        return value.upper()
    return tuple(_pair(what, v) for v in _spread(what, "padding", value, names, _is_integer))


def same_padding(size: int, span: int, stride: int) -> Pair:
    """The padding with which windows of this span start at every stride; what is odd of it comes after."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def check_spans(what: str, names: Names, sizes: Sequence[int], spans: Sequence[int], padding: Sequence[Pair]) -> None:
    """A window must fit into each axis, padding included."""
    wrong = [
        f"it spans {span} elements of axis {name!r}, which has {size}" + (f", and {sum(pads)} of padding" * any(pads))
        for name, size, span, pads in zip(names, sizes, spans, padding, strict=True)
        if size + sum(pads) < span
    ]
    if wrong:
        raise ValueError(f"{what}: the window is larger than the input: {'; '.join(wrong)}.")


def _spread(what: str, argument: str, value: Any, names: Names, is_one: Callable[[Any], bool]) -> Sequence[Any]:
    if is_one(value):
        return (value,) * len(names)
    if isinstance(value, Mapping):
        by_name = {name_of(axis): v for axis, v in value.items()}
        if by_name.keys() != set(names):
            raise ValueError(
                f"{what}: `{argument}` is given for {_errors.describe_axes(by_name)}, but the axes are "
                f"{_errors.describe_axes(names)}."
            )
        return tuple(by_name[n] for n in names)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{what}: `{argument}` is an integer, or one for each axis, got {value!r}.")
    if len(value) != len(names):
        raise ValueError(f"{what}: `{argument}` has {len(value)} entries for the axes {_errors.describe_axes(names)}.")
    return value


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__")


def _integer(what: str, argument: str, value: Any) -> int:
    if not _is_integer(value):
        raise TypeError(f"{what}: `{argument}` is made of integers, got {value!r}.")
    return operator.index(value)


def _pair(what: str, value: Any) -> Pair:
    if _is_integer(value):
        return operator.index(value), operator.index(value)
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{what}: the `padding` of an axis is an integer or a pair of them, got {value!r}.")
    before, after = (_integer(what, "padding", v) for v in value)
    return before, after


def _listed(names: Names, values: Sequence[int]) -> str:
    return ", ".join(f"{v} for {n!r}" for n, v in zip(names, values, strict=True))
