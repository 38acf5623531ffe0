"""Parse the arguments of convolutions and pools that have a value for each axis.

Kernel sizes, strides, padding and so on can be one value for all axes, a sequence with a value for each, or a mapping
by name.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..axis import AxisSelector, Names, name_of
from ..core import errors

PerAxis: TypeAlias = int | Sequence[int] | Mapping[AxisSelector, int]
PaddingSpec: TypeAlias = str | int | Sequence[int | tuple[int, int]] | Mapping[AxisSelector, int | tuple[int, int]]

Pair = tuple[int, int]
Padding: TypeAlias = tuple[Pair, ...] | str
"""The padding before and after each axis; or "SAME" or "VALID", which depend on the sizes of the input."""


def per_axis(what: str, argument: str, value: Any, names: Names, *, at_least: int) -> tuple[int, ...]:
    """Return an integer for each axis."""
    found = tuple(_checked_integer(what, argument, v) for v in _values_by_axis(what, argument, value, names))
    if any(v < at_least for v in found):
        listed = ", ".join(f"{v} for {n!r}" for n, v in zip(names, found, strict=True))
        raise ValueError(f"{what}: `{argument}` must be at least {at_least}, got {listed}.")
    return found


def parse_padding(what: str, value: Any, names: Names) -> Padding:
    """Return the padding of each axis, given as "SAME", "VALID", or an integer or pair, for all axes or for each."""
    if isinstance(value, str):
        if value.upper() not in ("SAME", "VALID"):
            raise ValueError(f"{what}: `padding` must be 'SAME', 'VALID' or numbers of elements, got {value!r}.")
        return value.upper()
    pairs: list[Pair] = []
    for v in _values_by_axis(what, "padding", value, names):
        if not _is_integer(v) and (not isinstance(v, Sequence) or len(v) != 2):
            raise TypeError(f"{what}: the `padding` of an axis must be an integer or a pair of them, got {v!r}.")
        before, after = (v, v) if _is_integer(v) else v
        pairs.append((_checked_integer(what, "padding", before), _checked_integer(what, "padding", after)))
    return tuple(pairs)


def same_padding(size: int, span: int, stride: int) -> Pair:
    """Return the padding with which a window starts at every stride; if it is odd, the extra element comes after."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def check_spans(what: str, names: Names, sizes: Sequence[int], spans: Sequence[int], padding: Sequence[Pair]) -> None:
    """Raise an error unless the window fits into each axis with its padding."""
    wrong = [
        f"it spans {span} elements of axis {name!r}, which has {size}" + (f", and {sum(pads)} of padding" * any(pads))
        for name, size, span, pads in zip(names, sizes, spans, padding, strict=True)
        if size + sum(pads) < span
    ]
    if wrong:
        raise ValueError(f"{what}: the window is larger than the input: {'; '.join(wrong)}.")


def _values_by_axis(what: str, argument: str, value: Any, names: Names) -> Sequence[Any]:
    if _is_integer(value):
        return (value,) * len(names)
    if isinstance(value, Mapping):
        by_name = {name_of(axis): v for axis, v in value.items()}
        if by_name.keys() != set(names):
            raise ValueError(
                f"{what}: `{argument}` is given for {errors.describe_axes(by_name)}, but the axes are "
                f"{errors.describe_axes(names)}."
            )
        return tuple(by_name[n] for n in names)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{what}: `{argument}` must be an integer or one for each axis, got {value!r}.")
    if len(value) != len(names):
        many = errors.counted(len(value), "entry", "entries")
        raise ValueError(f"{what}: `{argument}` has {many} for the axes {errors.describe_axes(names)}.")
    return value


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__")


def _checked_integer(what: str, argument: str, value: Any) -> int:
    if not _is_integer(value):
        raise TypeError(f"{what}: `{argument}` must consist of integers, got {value!r}.")
    return operator.index(value)
