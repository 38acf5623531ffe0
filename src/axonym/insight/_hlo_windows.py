"""Read the attributes of an instruction, and find the windows and indices that they describe, in NumPy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._hlo import Instruction
from ._hlo_elements import Array

# --- attributes ---


def numbers(i: Instruction, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"-?\d+", i.attribute(name) or ""))


def axes_of(i: Instruction, name: str = "dimensions") -> tuple[int, ...]:
    """Return the axes of values that an attribute lists."""
    return tuple(n + 1 for n in numbers(i, name))


# --- windows ---


def padded(x: Array, value: Any, amounts: Sequence[Sequence[int]]) -> Array:
    """Pad, crop and spread the last axes of an array, by (low, high, interior) for each."""
    for axis, (low, high, interior) in enumerate(amounts, x.ndim - len(amounts)):
        n, shape = x.shape[axis], list(x.shape)
        spread = n + max(n - 1, 0) * interior
        shape[axis] = max(low, 0) + spread + max(high, 0)
        out = np.full(shape, value, x.dtype)
        place: list[Any] = [slice(None)] * x.ndim
        place[axis] = slice(max(low, 0), max(low, 0) + spread, interior + 1)
        out[tuple(place)] = x
        place[axis] = slice(max(-low, 0), shape[axis] - max(-high, 0))
        x = out[tuple(place)]
    return x


def window_at(x: Array, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    clamped = [min(max(int(s), 0), n - k) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(s, s + k) for s, k in zip(clamped, sizes, strict=True))


def windows_of(i: Instruction, x: Array, value: Any) -> Array:
    """Pad the last axes of an array with a value, and return its windows: (..., numbers of the window, elements)."""
    window = i.window()
    rank = len(window.get("size", ()))

    def each(name: str, *default: int) -> list[list[int]]:
        return window.get(name, [[*default]] * rank)

    x = padded(x, value, [(*pad, n - 1) for pad, (n,) in zip(each("pad", 0, 0), each("lhs_dilate", 1), strict=True)])
    directions = zip(each("rhs_dilate", 1), each("rhs_reversal", 0), strict=True)
    steps = [-d if backwards else d for (d,), (backwards,) in directions]
    reach = [(n - 1) * abs(d) + 1 for (n,), d in zip(each("size"), steps, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, tuple(range(x.ndim - rank, x.ndim)))
    windows = windows[
        (..., *(slice(None, None, n) for (n,) in each("stride", 1)), *(slice(None, None, d) for d in steps))
    ]
    return windows.reshape(*windows.shape[: x.ndim], -1)


# --- indices ---


def indices(
    i: Instruction, names: Sequence[str], x: Array, found: Array, sizes: Sequence[int], kept: Sequence[int]
) -> tuple[list[Array], Array]:
    """Return where the elements of all windows are along each axis, and which windows are inside of the array."""
    over, batching, of_indices = (numbers(i, name) for name in names)
    vector = numbers(i, "index_vector_dim")[0]
    found = np.moveaxis(found[..., None] if vector == found.ndim else found, vector, -1)
    batch = found.shape[:-1]
    starts, inside, index = np.zeros((x.ndim, *batch), np.int64), np.ones(batch, bool), []
    for k, axis in enumerate(over):
        starts[axis] = found[..., k].astype(np.int64)
    for axis, of in zip(batching, of_indices, strict=True):
        # `of` counts the axes of the indices as they were, before the axis of vectors was moved to the end.
        starts[axis] = np.indices(batch)[of - (of > vector)]
    for axis, (at, n, size) in enumerate(zip(starts, x.shape, sizes, strict=True)):
        inside = inside & (at >= 0) & (at <= n - size)
        # A gather moves a window that leaves the array back inside; a scatter leaves it out: see `inside`.
        at = (np.clip(at, 0, n - size) if i.opcode == "gather" else at).reshape((*batch, *[1] * len(kept)))
        index.append(at + np.arange(size).reshape([-1 if d == axis else 1 for d in kept]) if axis in kept else at)
    return [*np.broadcast_arrays(*index)], inside
