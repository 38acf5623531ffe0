"""Evaluate in NumPy the types, constants, elements, windows and indices that the text of a program describes.

Floating-point numbers are float64, so that two orders of the same sum agree to 15 digits; integers keep their widths.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._hlo import HloShape, Instruction, UnknownForm

Array = np.ndarray

# --- types ---


@functools.lru_cache(maxsize=64)
def value_dtype(name: str) -> np.dtype:
    """Return the dtype in which an array is evaluated."""
    kind, bits = _kind_and_bits(name)
    if kind in "su":
        return np.dtype(f"{'int' if kind == 's' else 'uint'}{max(bits, 8)}")
    return np.dtype({"pred": "bool", "c": "complex128"}.get(kind, "float64"))


def _kind_and_bits(name: str) -> tuple[str, int]:
    if (found := re.fullmatch(r"(pred|bf|f|c|s|u)(\d*)(?:e.*)?", name)) is None:
        raise UnknownForm(f"the type {name}")
    return found[1], int(found[2] or 8)


def stored_dtype(name: str) -> np.dtype:
    kind, bits = _kind_and_bits(name)
    if kind in "su" and bits < 8:
        raise UnknownForm(f"the bits of {name}")
    words = {"pred": "bool", "bf": "bfloat", "f": "float", "c": "complex", "s": "int", "u": "uint"}
    return np.dtype(words[kind] + name.removeprefix(kind).replace("e", "_e", 1))


def literal(text: str, shape: HloShape) -> Array:
    """Return the value of a constant."""
    dtype = value_dtype(shape.dtype)
    if "..." in text:
        raise UnknownForm("a constant that is not written out")
    words = re.findall(r"\([^)]*\)|[^\s,{}]+", re.sub(r"/\*[^*]*\*/", "", text))
    read = {
        "b": lambda word: word in ("true", "1"),
        "f": float,
        "c": lambda pair: complex(*map(float, pair[1:-1].split(","))),
    }
    return np.array([read.get(dtype.kind, int)(word) for word in words], dtype).reshape(1, *shape.sizes)


def wrapped(x: Array, shape: HloShape) -> Array:
    """Return values of a type, without the high bits of integers of fewer than 8."""
    if shape.dtype[0] in "su" and shape.bits < 8:
        low = -(2 ** (shape.bits - 1)) if shape.dtype[0] == "s" else 0
        x = (x.astype(int) - low) % 2**shape.bits + low
    return x.astype(value_dtype(shape.dtype), copy=False)


def converted(x: Array, shape: HloShape) -> Array:
    """Return values as another type has them."""
    (kind, bits), dtype = _kind_and_bits(shape.dtype), value_dtype(shape.dtype)
    if dtype.kind == "b":
        return x != 0
    if dtype.kind in "iu":
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "s" else (0, 2**bits - 1)
        if x.dtype.kind == "f":
            whole = np.clip(np.trunc(np.nan_to_num(x, nan=0)), float(low), float(high))
            return np.where(whole >= high, np.array(high, dtype), np.where(whole >= high, 0, whole).astype(dtype))
    return wrapped(x, shape)


# --- elementwise ---


def same_devices(values: Sequence[Array]) -> tuple[Array, ...]:
    count = max(len(v) for v in values)
    return tuple(np.broadcast_to(v, (count, *v.shape[1:])) for v in values)


def widened(x: Array, like: Array) -> Array:
    """Give a scalar the rank of another array."""
    return x if x.ndim >= like.ndim else x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    return np.where(y == 0, np.array(-1).astype(x.dtype), (x - np.fmod(x, safe)) // safe)


def _remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, y) if x.dtype.kind == "f" else np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _shift(how: np.ufunc, kind: str, x: Array, y: Array) -> Array:
    bits, unsigned = x.dtype.itemsize * 8, y.astype(f"u{y.dtype.itemsize}")
    found = how(x.astype(f"{kind}{bits // 8}"), np.minimum(unsigned, bits - 1).astype(f"{kind}{bits // 8}"))
    return (found if kind == "i" else np.where(unsigned >= bits, 0, found)).astype(x.dtype)


def in_order(x: Array) -> Array:
    """Return numbers in the total order of floating-point numbers, in which -0 is below 0."""
    bits = x.view(np.int64) if x.dtype.kind == "f" else x
    return np.where(bits < 0, -1 - (bits & np.int64(2**63 - 1)), bits) if x.dtype.kind == "f" else x


_IN_NUMPY = """
and=bitwise_and atan2=arctan2 cosine=cos exponential=exp exponential-minus-one=expm1 is-finite=isfinite
log-plus-one=log1p negate=negative not=invert or=bitwise_or popcnt=bitwise_count round-nearest-even=rint sine=sin
xor=bitwise_xor abs add cbrt ceil floor imag log maximum minimum multiply power real sign sqrt subtract tan tanh
"""
ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, widened(low, x)), widened(high, x)),
    "complex": lambda x, y: np.stack(same_devices((x, y)), -1).view(complex)[..., 0],
    "divide": _divide,
    "erf": np.vectorize(math.erf, [float]),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "remainder": _remainder,
    "round-nearest-afz": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": lambda p, x, y: np.where(widened(p, x), x, y),
    "shift-left": functools.partial(_shift, np.left_shift, "u"),
    "shift-right-arithmetic": functools.partial(_shift, np.right_shift, "i"),
    "shift-right-logical": functools.partial(_shift, np.right_shift, "u"),
} | {word.partition("=")[0]: getattr(np, word.rpartition("=")[2]) for word in _IN_NUMPY.split()}
COMBINING = "add", "and", "maximum", "minimum", "multiply", "or"
"""The elementwise operations that are functions of NumPy, and whose operands may be in any order."""


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
