"""Evaluate elements in NumPy: the types and constants in the text of a program, and the elementwise operations.

Floating-point numbers are float64, so that two orders of the same sum agree to 15 digits; integers keep their widths.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from ._hlo import HloShape, UnknownForm

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
