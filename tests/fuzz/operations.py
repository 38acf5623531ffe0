"""The operations of random programs: how to draw one, and its positional form.

Every operation is defined twice: as a call of the library, which the program prints, and as a function of positional
arrays and their names, for both `jax.numpy` and NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn

Names = tuple[str, ...]
Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Value:
    """A positional array and the names of its axes."""

    array: Any
    names: Names
    exact: bool = True
    """Whether it has no rounding errors, so that discontinuous operations may be applied to it."""

    def size(self, name: str) -> int:
        return self.array.shape[self.names.index(name)]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kind of step of a program."""

    code: str
    """The call, with `{0}`, `{1}` for the operands and the options by name."""
    draw: Callable[[random.Random, Sequence[Value]], tuple[Sequence[int], Options] | None]
    """Choose operands among the values, and options; None if none fits."""
    by_position: Callable[..., tuple[Any, Names]]
    """From a NumPy-like module, the operands and the options to the resulting array and its names."""
    jumps: bool = False
    """Whether a small change of an operand can change the result much, so that operands must be exact."""
    rounds: bool = True


def aligned(xp: Any, x: Value, names: Names) -> Any:
    """Return an array with its axes in the order of the names, and axes of size one for those it lacks."""
    array = xp.transpose(x.array, [x.names.index(n) for n in names if n in x.names])
    return array.reshape([x.size(n) if n in x.names else 1 for n in names])


def union(*values: Value) -> Names | None:
    """Return the names of the first operand that has all axes, if there is one."""
    everything = set().union(*(v.names for v in values))
    return next((v.names for v in values if len(v.names) == len(everything)), None)


def is_float(x: Value) -> bool:
    return jnp.issubdtype(x.array.dtype, jnp.floating)


def is_complex(x: Value) -> bool:
    return jnp.issubdtype(x.array.dtype, jnp.complexfloating)


# --- choosing operands ---


def one(suits: Callable[[Value], bool] = lambda x: True, **options: Callable[[random.Random, Value], Any]) -> Any:
    """Draw a suitable operand, and each option for it; an option that is None means that none fits."""

    def draw(rng: random.Random, values: Sequence[Value]) -> Any:
        fitting = [i for i, v in enumerate(values) if suits(v)]
        if not fitting:
            return None
        i = rng.choice(fitting[-4:])
        chosen = {name: option(rng, values[i]) for name, option in options.items()}
        return None if any(c is None for c in chosen.values()) else ((i,), chosen)

    return draw


def two(suits: Callable[[Value, Value], bool] = lambda a, b: True) -> Any:
    """Draw two operands of which one has all axes of the other, with the same sizes."""

    def draw(rng: random.Random, values: Sequence[Value]) -> Any:
        pairs = [
            (i, j)
            for i, a in enumerate(values)
            for j, b in enumerate(values)
            if union(a, b) is not None and all(a.size(n) == b.size(n) for n in a.names if n in b.names) and suits(a, b)
        ]
        return (rng.choice(pairs[-12:]), {}) if pairs else None

    return draw


def some_axis(rng: random.Random, x: Value) -> str | None:
    return rng.choice(x.names) if x.names else None


def some_axes(rng: random.Random, x: Value) -> Names | None:
    return tuple(rng.sample(x.names, rng.randint(1, len(x.names)))) if x.names else None


def long_axis(rng: random.Random, x: Value) -> str | None:
    fitting = [n for n in x.names if x.size(n) > 1]
    return rng.choice(fitting) if fitting else None


def _order(rng: random.Random, x: Value) -> Names | None:
    return tuple(rng.sample(x.names, len(x.names))) if len(x.names) > 1 else None


FRESH = "pqrstuv"


def _fresh(rng: random.Random, x: Value) -> str | None:
    free = [n for n in FRESH if n not in x.names]
    return rng.choice(free) if free else None


# --- positional forms ---


def _elementwise(name: str) -> Callable[..., Any]:
    return lambda xp, x: (getattr(xp, name)(x.array), x.names)


def _binary(name: str) -> Callable[..., Any]:
    def by_position(xp: Any, a: Value, b: Value) -> Any:
        names = union(a, b)
        assert names is not None
        return getattr(xp, name)(aligned(xp, a, names), aligned(xp, b, names)), names

    return by_position


def _reduction(name: str) -> Callable[..., Any]:
    def by_position(xp: Any, x: Value, axes: Names) -> Any:
        positions = tuple(x.names.index(n) for n in axes)
        # jnp.any and jnp.all look at the real parts alone of complex numbers
        array = x.array != 0 if name in ("any", "all") else x.array
        return getattr(xp, name)(array, axis=positions), tuple(n for n in x.names if n not in axes)

    return by_position


def _along(name: str, **keywords: Any) -> Callable[..., Any]:
    return lambda xp, x, axis: (getattr(xp, name)(x.array, axis=x.names.index(axis), **keywords), x.names)


def _associative_scan(xp: Any, x: Value, axis: str) -> Any:
    at = x.names.index(axis)
    run = functools.partial(jax.lax.associative_scan, jnp.add) if xp is jnp else xp.cumsum
    return run(x.array, axis=at), x.names


def _arg(name: str) -> Callable[..., Any]:
    def by_position(xp: Any, x: Value, axis: str) -> Any:
        return getattr(xp, name)(x.array, axis=x.names.index(axis)), tuple(n for n in x.names if n != axis)

    return by_position


def _take(xp: Any, x: Value, axis: str, i: int) -> Any:
    return xp.take(x.array, i, axis=x.names.index(axis)), tuple(n for n in x.names if n != axis)


def _slice(xp: Any, x: Value, axis: str, start: int, stop: int) -> Any:
    return x.array[(slice(None),) * x.names.index(axis) + (slice(start, stop),)], x.names


def _flatten(xp: Any, x: Value, axes: Names, new: str) -> Any:
    position = min(x.names.index(n) for n in axes)
    rest = [n for n in x.names if n not in axes]
    order = [*rest[:position], *axes, *rest[position:]]
    moved = xp.transpose(x.array, [x.names.index(n) for n in order])
    shape = moved.shape
    merged = int(np.prod(shape[position : position + len(axes)]))
    return moved.reshape(*shape[:position], merged, *shape[position + len(axes) :]), (
        *rest[:position],
        new,
        *rest[position:],
    )


def _softmax(xp: Any, x: Value, axis: str) -> Any:
    position = x.names.index(axis)
    if xp is jnp:
        return jax.nn.softmax(x.array, axis=position), x.names
    shifted = np.exp(x.array - np.max(x.array, axis=position, keepdims=True))
    return shifted / np.sum(shifted, axis=position, keepdims=True), x.names


def _dot(xp: Any, a: Value, b: Value, axes: Names) -> Any:
    letters = {n: chr(ord("a") + i) for i, n in enumerate(dict.fromkeys((*a.names, *b.names)))}
    names = tuple(n for n in letters if n not in axes)
    spec = ",".join("".join(letters[n] for n in v.names) for v in (a, b))
    return xp.einsum(f"{spec}->{''.join(letters[n] for n in names)}", a.array, b.array), names


def _draw_dot(rng: random.Random, values: Sequence[Value]) -> Any:
    def suits(a: Value, b: Value) -> bool:
        shared = [n for n in a.names if n in b.names]
        sizes = {n: v.size(n) for v in (a, b) for n in v.names}
        return bool(
            shared
            and all(a.size(n) == b.size(n) for n in shared)
            and np.prod(list(sizes.values())) <= 4096
            and a.array.dtype == b.array.dtype
            and a.array.dtype != bool
        )

    pairs = [(i, j) for i, a in enumerate(values) for j, b in enumerate(values) if suits(a, b)]
    if not pairs:
        return None
    i, j = rng.choice(pairs[-12:])
    shared = [n for n in values[i].names if n in values[j].names]
    return (i, j), {"axes": tuple(rng.sample(shared, rng.randint(1, len(shared))))}


def _where(xp: Any, c: Value, x: Value, y: Value) -> Any:
    names = union(c, x, y)
    assert names is not None
    return xp.where(*(aligned(xp, v, names) for v in (c, x, y))), names


def _draw_where(rng: random.Random, values: Sequence[Value]) -> Any:
    conditions = [i for i, v in enumerate(values) if v.array.dtype == bool]
    rng.shuffle(conditions)
    for i in conditions:
        condition = values[i]
        fitting = [
            j
            for j, v in enumerate(values)
            if set(v.names) <= set(condition.names) and all(v.size(n) == condition.size(n) for n in v.names)
        ]
        if fitting:
            return (i, rng.choice(fitting), rng.choice(fitting)), {}
    return None


def _draw_gather(rng: random.Random, values: Sequence[Value], suits: Callable[[Value], bool] = lambda x: True) -> Any:
    chosen = one(suits, axis=long_axis, new=_fresh)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    size = values[i].size(options["axis"])
    positions = [rng.randrange(-size, size) for _ in range(rng.randint(1, 4))]
    return (i,), {**options, "positions": positions}


def _draw_scatter(rng: random.Random, values: Sequence[Value]) -> Any:
    return _draw_gather(rng, values, _ordered)


def _gather(xp: Any, x: Value, axis: str, new: str, positions: list[int]) -> Any:
    at = x.names.index(axis)
    return xp.take(x.array, np.array(positions) % x.array.shape[at], axis=at), tuple(
        new if n == axis else n for n in x.names
    )


def _draw_slice(rng: random.Random, values: Sequence[Value]) -> Any:
    chosen = one(axis=long_axis)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    size = values[i].size(options["axis"])
    start = rng.randrange(size)
    return (i,), {**options, "start": start, "stop": rng.randint(start, size)}


def _draw_set(rng: random.Random, values: Sequence[Value]) -> Any:
    chosen = one(lambda x: x.array.dtype != bool, axis=long_axis)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    return (i,), {**options, "i": rng.randrange(values[i].size(options["axis"]))}


def _updated(method: str) -> Callable[..., Any]:
    def by_position(xp: Any, x: Value, axis: str, i: int) -> Any:
        index = (slice(None),) * x.names.index(axis) + (i,)
        if xp is jnp:
            return getattr(x.array.at[index], method)(2), x.names
        copy = np.array(x.array)
        copy[index] = 2 if method == "set" else copy[index] + np.array(2).astype(copy.dtype)
        return copy, x.names

    return by_position


def _top_k(xp: Any, x: Value, axis: str, new: str) -> Any:
    at = x.names.index(axis)
    # Of equal values the first comes first, so values are sorted backwards and then reversed.
    order = xp.flip(xp.argsort(xp.flip(x.array, axis=at), axis=at, stable=True), axis=at)
    largest = xp.take(x.size(axis) - 1 - order, np.arange(2), axis=at)
    found = xp.take_along_axis(x.array, largest, axis=at).astype(x.array.dtype)  # which is not weak
    return found, tuple(new if n == axis else n for n in x.names)


def _one_hot(xp: Any, x: Value, new: str) -> Any:
    return (x.array[..., None] == np.arange(4)).astype("float32"), (*x.names, new)


def _dtype_below(rng: random.Random, x: Value) -> str | None:
    kind = x.array.dtype
    if kind == np.bool_:
        return rng.choice(["int32", "float32", "bfloat16", "int8"])
    if jnp.issubdtype(kind, jnp.integer):
        return rng.choice(["float32", "int32"])
    return rng.choice(["bfloat16", "float32", "float16"]) if is_float(x) else None


def _cast(xp: Any, x: Value, dtype: str) -> Any:
    return x.array.astype(jnp.dtype(dtype)), x.names


def _axes_pair(rng: random.Random, x: Value) -> Names | None:
    return tuple(rng.sample(x.names, 2)) if len(x.names) > 1 else None


def _triangle(xp: Any, x: Value, pair: Names) -> Any:
    order = [*(n for n in x.names if n not in pair), *pair]
    kept = xp.tril(xp.transpose(x.array, [x.names.index(n) for n in order]))
    return xp.transpose(kept, [order.index(n) for n in x.names]), x.names


def _concatenate(xp: Any, a: Value, b: Value, axis: str) -> Any:
    return xp.concatenate([a.array, aligned(xp, b, a.names)], axis=a.names.index(axis)), a.names


def _draw_concatenate(rng: random.Random, values: Sequence[Value]) -> Any:
    pairs = [(i, j) for i, a in enumerate(values) for j, b in enumerate(values) if a.names and {*a.names} == {*b.names}]
    rng.shuffle(pairs)
    for i, j in pairs[:8]:
        a, b = values[i], values[j]
        different = [n for n in a.names if a.size(n) != b.size(n)]
        if len(different) < 2:
            return (i, j), {"axis": different[0] if different else rng.choice(a.names)}
    return None


def _pad(xp: Any, x: Value, axis: str, width: tuple[int, int], mode: str) -> Any:
    return xp.pad(x.array, [width if n == axis else (0, 0) for n in x.names], mode=mode), x.names


def _unflatten(xp: Any, x: Value, axis: str, new: str) -> Any:
    at, shape = x.names.index(axis), x.array.shape
    split = x.array.reshape(*shape[:at], 2, shape[at] // 2, *shape[at + 1 :])
    return split, (*x.names[:at], new, *x.names[at:])


def even_axis(rng: random.Random, x: Value) -> str | None:
    fitting = [n for n in x.names if x.size(n) and x.size(n) % 2 == 0]
    return rng.choice(fitting) if fitting else None


def _scatter(method: str) -> Callable[..., Any]:
    def by_position(xp: Any, x: Value, axis: str, new: str, positions: list[int]) -> Any:
        index = (slice(None),) * x.names.index(axis) + (np.array(positions),)
        if xp is jnp:
            return getattr(x.array.at[index], method)(3), x.names
        copy = np.array(x.array)
        getattr(np, {"add": "add", "max": "maximum"}[method]).at(copy, index, np.array(3).astype(copy.dtype))
        return copy, x.names

    return by_position


def _sorted_by_index(xp: Any, x: Value, axis: str) -> Any:
    at = x.names.index(axis)
    order = xp.argsort(x.array, axis=at, **({"stable": True} if xp is jnp else {"kind": "stable"}))
    return xp.take_along_axis(x.array, order, axis=at), x.names


def _running(xp: Any, x: Value, axis: str) -> Any:
    at = x.names.index(axis)
    # A loop keeps weak types, as the operations of `jax.lax` do.
    total = jax.lax.cumsum(x.array, at) if xp is jnp else np.cumsum(x.array, axis=at, dtype=x.array.dtype)
    return xp.moveaxis(total, at, 0), (axis, *(n for n in x.names if n != axis))


def _largest(xp: Any, x: Value, axis: str) -> Any:
    at = x.names.index(axis)
    found = jax.lax.reduce_max(x.array, (at,)) if xp is jnp else np.max(x.array, axis=at)
    return found, tuple(n for n in x.names if n != axis)


def _selected_sum(xp: Any, x: Value, axes: Names) -> Any:
    positions = tuple(x.names.index(n) for n in axes)
    return xp.sum(x.array, axis=positions, where=x.array > 0), tuple(n for n in x.names if n not in axes)


def _either(xp: Any, x: Value) -> Any:
    return xp.where(xp.any(x.array > 0), x.array + x.array, -x.array), x.names


def _norm(xp: Any, x: Value, axes: Names) -> Any:
    positions = tuple(x.names.index(n) for n in axes)
    squares = xp.sum(xp.square(x.array), axis=positions)
    return xp.sqrt(squares + 1), tuple(n for n in x.names if n not in axes)


def _fft(xp: Any, x: Value, axis: str) -> Any:
    return xp.fft.fft(x.array, axis=x.names.index(axis)), x.names


def _log_softmax(xp: Any, x: Value, axis: str) -> Any:
    return jax.nn.log_softmax(xp.asarray(x.array), axis=x.names.index(axis)), x.names


def _logsumexp(xp: Any, x: Value, axes: Names) -> Any:
    positions = tuple(x.names.index(n) for n in axes)
    result = jax.scipy.special.logsumexp(xp.asarray(x.array), axis=positions)
    return result, tuple(n for n in x.names if n not in axes)


def _draw_strided(rng: random.Random, values: Sequence[Value]) -> Any:
    chosen = one(axis=long_axis)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    start, step = rng.randrange(values[i].size(options["axis"])), rng.choice((-4, -3, -2, 2, 3, 4))
    return (i,), {**options, "start": start, "step": step}


def _strided(xp: Any, x: Value, axis: str, start: int, step: int) -> Any:
    return x.array[(slice(None),) * x.names.index(axis) + (slice(start, None, step),)], x.names


def _windows(rng: random.Random) -> dict[str, int]:
    """Draw windows that may be larger than a shard, or than the array without its padding."""
    return {"size": rng.randint(1, 9), "stride": rng.randint(1, 3), "padding": rng.randint(0, 4)}


def _draw_pool(rng: random.Random, values: Sequence[Value]) -> Any:
    chosen = one(_small_float, axis=some_axis)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    windows = _windows(rng)
    fits = windows["size"] <= values[i].size(options["axis"]) + 2 * windows["padding"]
    return ((i,), {**options, **windows}) if fits else None


def _pool(xp: Any, x: Value, axis: str, size: int, stride: int, padding: int) -> Any:
    at = x.names.index(axis)
    padded = xp.pad(x.array, [(padding, padding) if i == at else (0, 0) for i in range(x.array.ndim)])
    last = padded.shape[at] - size + 1
    each = [padded[(slice(None),) * at + (slice(p, p + last, stride),)] for p in range(size)]
    return functools.reduce(operator.add, each).astype(x.array.dtype), x.names  # which is not weak


def _draw_convolution(rng: random.Random, values: Sequence[Value]) -> Any:
    def suits(x: Value) -> bool:
        return x.array.dtype == np.float32 and x.array.size > 0 and len(x.names) > 1

    chosen = one(suits, new=_fresh)(rng, values)
    if chosen is None:
        return None
    (i,), options = chosen
    axis, channels = rng.sample(values[i].names, 2)
    windows = {**_windows(rng), "dilation": rng.randint(1, 3)}
    size, reach = values[i].size(axis), windows["dilation"] * (windows["size"] - 1)
    fits = reach < size + 2 * windows["padding"] and 2 * windows["padding"] < (size - 1) * windows["stride"] + reach + 1
    if not fits:
        return None
    return (i,), {**options, "axis": axis, "channels": channels, "inputs": values[i].size(channels), **windows}


_CONVOLUTION = (
    ".init)({axis!r}, axn.Axis({channels!r}, {inputs}), axn.Axis({new!r}, 2), {size}, "
    "stride={stride}, padding={padding}, dilation={dilation}, use_bias=False, key=jax.random.key(0))({0})"
)


def _convolution(kind: str) -> Callable[..., Any]:
    def by_position(xp: Any, x: Value, axis: str, channels: str, new: str, inputs: int, **windows: int) -> Any:
        if xp is np:
            raise TypeError("NumPy has no convolution of this kind")
        size, stride, padding, dilation = (windows[name] for name in ("size", "stride", "padding", "dilation"))
        layer = getattr(axn.nn, kind).init(
            axis, axn.Axis(channels, inputs), axn.Axis(new, 2), size, use_bias=False, key=jax.random.key(0)
        )
        rest = [n for n in x.names if n not in (axis, channels)]
        moved = xp.transpose(x.array, [x.names.index(n) for n in (*rest, channels, axis)])
        flat = moved.reshape(-1, inputs, x.size(axis))
        spread, step = (1, stride) if kind == "Conv" else (stride, 1)
        edge = padding if kind == "Conv" else dilation * (size - 1) - padding
        found = jax.lax.conv_general_dilated(flat, layer.weight.array, (step,), [(edge, edge)], (spread,), (dilation,))
        found = found.reshape(*moved.shape[:-2], *found.shape[1:])
        names = tuple(new if n == channels else n for n in x.names)
        return xp.transpose(found, [(*rest, new, axis).index(n) for n in names]), names

    return by_position


def _draw_convolve(rng: random.Random, values: Sequence[Value]) -> Any:
    def suits(a: Value, b: Value) -> bool:
        shared = [n for n in a.names if n in b.names]
        sizes = {n: v.size(n) for v in (a, b) for n in v.names}
        floats = a.array.dtype == b.array.dtype == np.float32
        same = sum(a.size(n) != b.size(n) for n in shared) <= 1
        empty = 0 in (a.array.size, b.array.size)  # which JAX refuses
        return bool(shared and floats and same and not empty) and math.prod(sizes.values()) <= 2048

    pairs = [(i, j) for i, a in enumerate(values) for j, b in enumerate(values) if suits(a, b)]
    if not pairs:
        return None
    i, j = rng.choice(pairs[-12:])
    a, b = values[i], values[j]
    shared = [n for n in a.names if n in b.names]
    axis = next((n for n in shared if a.size(n) != b.size(n)), rng.choice(shared))
    return (i, j), {"axis": axis, "mode": rng.choice(("full", "same", "valid"))}


def _convolve(xp: Any, a: Value, b: Value, axis: str, mode: str) -> Any:
    names = (*a.names, *(n for n in b.names if n not in a.names))
    at, n, m = names.index(axis), a.size(axis), b.size(axis)
    ours, kernel = aligned(xp, a, names), aligned(xp, b, names)

    def term(j: int) -> Any:
        widths = [(j, m - 1 - j) if i == at else (0, 0) for i in range(len(names))]
        return xp.pad(ours, widths) * kernel[(slice(None),) * at + (slice(j, j + 1),)]

    total = functools.reduce(operator.add, map(term, range(m)))
    start, length = {
        "full": (0, n + m - 1),
        "same": ((min(n, m) - 1) // 2, max(n, m)),
        "valid": (min(n, m) - 1, max(n, m) - min(n, m) + 1),
    }[mode]
    return total[(slice(None),) * at + (slice(start, start + length),)], names


def _numeric(x: Value) -> bool:
    return x.array.dtype != bool


def _ordered(x: Value) -> bool:
    return not is_complex(x) and x.array.dtype != bool


def _small_float(x: Value) -> bool:
    return is_float(x) and x.array.size > 0


_PAIR: Any = {"axes": some_axes}

OPERATIONS: dict[str, Operation] = {
    **{
        name: Operation(f"axn.{name}({{0}})", one(_small_float), _elementwise(name), rounds=True)
        for name in ("tanh", "sin", "exp2", "square", "cbrt", "logaddexp2")
        if name != "logaddexp2"
    },
    **{
        name: Operation(f"axn.{name}({{0}})", one(_numeric), _elementwise(name), rounds=False)
        for name in ("abs", "negative")
    },
    **{
        name: Operation(f"axn.{name}({{0}})", one(_ordered), _elementwise(name), jumps=True, rounds=False)
        for name in ("sign", "floor", "isfinite")
    },
    **{
        name: Operation(f"axn.{name}({{0}}, {{1}})", two(lambda a, b: _numeric(a) and _numeric(b)), _binary(name))
        for name in ("add", "subtract", "multiply")
    },
    **{
        name: Operation(f"axn.{name}({{0}}, {{1}})", two(lambda a, b: _ordered(a) and _ordered(b)), _binary(name))
        for name in ("maximum", "minimum")
    },
    **{
        name: Operation(
            f"axn.{name}({{0}}, {{1}})",
            two(lambda a, b: not is_complex(a) and not is_complex(b)),
            _binary(name),
            jumps=True,
            rounds=False,
        )
        for name in ("less", "equal", "greater_equal")
    },
    "logical_and": Operation(
        "axn.logical_and({0}, {1})",
        two(lambda a, b: a.array.dtype == b.array.dtype == bool),
        _binary("logical_and"),
        rounds=False,
    ),
    "where": Operation("axn.where({0}, {1}, {2})", _draw_where, _where, rounds=False),
    **{
        name: Operation(f"axn.{name}({{0}}, {{axes!r}})", one(**_PAIR), _reduction(name))
        for name in ("sum", "mean", "prod")
    },
    **{
        name: Operation(f"axn.{name}({{0}}, {{axes!r}})", one(_ordered, **_PAIR), _reduction(name), rounds=False)
        for name in ("max", "min")
    },
    **{
        name: Operation(f"axn.{name}({{0}}, {{axes!r}})", one(**_PAIR), _reduction(name), jumps=True, rounds=False)
        for name in ("any", "all")
    },
    "std": Operation("axn.var({0}, {axes!r})", one(is_float, **_PAIR), _reduction("var")),
    **{
        name: Operation(f"axn.{name}({{0}}, {{axis!r}})", one(_ordered, axis=some_axis), _arg(name), jumps=True)
        for name in ("argmax", "argmin")
    },
    "cumsum": Operation("axn.cumsum({0}, {axis!r})", one(axis=some_axis), _along("cumsum")),
    "sort": Operation("axn.sort({0}, {axis!r})", one(_ordered, axis=some_axis), _along("sort"), rounds=False),
    "argsort": Operation(
        "axn.argsort({0}, {axis!r})",
        one(_ordered, axis=some_axis),
        lambda xp, x, axis: (
            xp.argsort(x.array, axis=x.names.index(axis), **({"stable": True} if xp is jnp else {"kind": "stable"})),
            x.names,
        ),
        jumps=True,
    ),
    "flip": Operation("axn.flip({0}, {axis!r})", one(axis=some_axis), _along("flip"), rounds=False),
    "diff": Operation("axn.diff({0}, {axis!r})", one(_ordered, axis=long_axis), _along("diff")),
    "softmax": Operation("axn.nn.softmax({0}, {axis!r})", one(_small_float, axis=some_axis), _softmax),
    "roll": Operation(
        "axn.roll({0}, {shift}, {axis!r})",
        one(axis=some_axis, shift=lambda rng, x: rng.randint(-3, 3)),
        lambda xp, x, axis, shift: (xp.roll(x.array, shift, axis=x.names.index(axis)), x.names),
        rounds=False,
    ),
    "rearrange": Operation(
        "axn.rearrange({0}, {order!r})",
        one(order=_order),
        lambda xp, x, order: (xp.transpose(x.array, [x.names.index(n) for n in order]), order),
        rounds=False,
    ),
    "rename": Operation(
        "axn.rename({0}, {{{axis!r}: {new!r}}})",
        one(axis=some_axis, new=_fresh),
        lambda xp, x, axis, new: (x.array, tuple(new if n == axis else n for n in x.names)),
        rounds=False,
    ),
    "flatten_axes": Operation(
        "axn.flatten_axes({0}, {axes!r}, {new!r})", one(axes=some_axes, new=_fresh), _flatten, rounds=False
    ),
    "take": Operation("{0}[{axis!r}, {i}]", _draw_set, _take, rounds=False),
    "slice": Operation("{0}[{axis!r}, {start}:{stop}]", _draw_slice, _slice, rounds=False),
    "gather": Operation("{0}[{axis!r}, axn.named({positions}, {new!r})]", _draw_gather, _gather, rounds=False),
    "set": Operation("{0}.at[{axis!r}, {i}].set(2)", _draw_set, _updated("set"), rounds=False),
    "add_at": Operation("{0}.at[{axis!r}, {i}].add(2)", _draw_set, _updated("add")),
    "dot": Operation("axn.dot({0}, {1}, axis={axes!r})", _draw_dot, _dot),
    "top_k": Operation(
        "axn.top_k({0}, {axis!r}, 2, {new!r})[0]",
        one(lambda x: _ordered(x) and x.array.dtype != np.int8, axis=long_axis, new=_fresh),
        _top_k,
        rounds=False,
    ),
    "one_hot": Operation(
        "axn.nn.one_hot({0}, axn.Axis({new!r}, 4))",
        one(lambda x: x.array.dtype == np.int32, new=_fresh),
        _one_hot,
        jumps=True,
        rounds=False,
    ),
    "astype": Operation("{0}.astype({dtype!r})", one(lambda x: not is_complex(x), dtype=_dtype_below), _cast),
    "cumprod": Operation("axn.cumprod({0}, {axis!r})", one(_numeric, axis=some_axis), _along("cumprod")),
    "median": Operation("axn.median({0}, {axes!r})", one(_small_float, **_PAIR), _reduction("median")),
    "ptp": Operation("axn.ptp({0}, {axes!r})", one(_small_float, **_PAIR), _reduction("ptp")),
    "logsumexp": Operation("axn.logsumexp({0}, {axes!r})", one(_small_float, **_PAIR), _logsumexp),
    "log_softmax": Operation("axn.nn.log_softmax({0}, {axis!r})", one(_small_float, axis=some_axis), _log_softmax),
    "norm": Operation("axn.sqrt(axn.sum(axn.square({0}), {axes!r}) + 1)", one(_small_float, **_PAIR), _norm),
    "where_sum": Operation("axn.sum({0}, {axes!r}, where={0} > 0)", one(_ordered, **_PAIR), _selected_sum, jumps=True),
    "tril": Operation("axn.tril({0}, *{pair!r})", one(pair=_axes_pair), _triangle, rounds=False),
    "concatenate": Operation("axn.concatenate([{0}, {1}], {axis!r})", _draw_concatenate, _concatenate, rounds=False),
    "stack": Operation(
        "axn.stack([{0}, {0}], {new!r})",
        one(lambda x: x.array.size <= 2048, new=_fresh),
        lambda xp, x, new: (xp.stack([x.array, x.array]), (new, *x.names)),
        rounds=False,
    ),
    "pad": Operation(
        "axn.pad({0}, {{{axis!r}: {width}}}, mode={mode!r})",
        one(
            axis=long_axis,
            width=lambda rng, x: (rng.randint(0, 2), rng.randint(0, 2)),
            mode=lambda rng, x: rng.choice(["constant", "edge", "wrap", "reflect"]),
        ),
        _pad,
        rounds=False,
    ),
    "repeat": Operation(
        "axn.repeat({0}, 2, {axis!r})",
        one(axis=some_axis),
        lambda xp, x, axis: (xp.repeat(x.array, 2, axis=x.names.index(axis)), x.names),
        rounds=False,
    ),
    "tile": Operation(
        "axn.tile({0}, {{{axis!r}: 2}})",
        one(axis=some_axis),
        lambda xp, x, axis: (xp.tile(x.array, [1 + (n == axis) for n in x.names]), x.names),
        rounds=False,
    ),
    "unflatten_axis": Operation(
        "axn.unflatten_axis({0}, {axis!r}, (axn.Axis({new!r}, 2), {axis!r}))",
        one(axis=even_axis, new=_fresh),
        _unflatten,
        rounds=False,
    ),
    "sorted_by_index": Operation(
        "axn.take_along_axis({0}, axn.argsort({0}, {axis!r}), {axis!r})",
        one(_ordered, axis=long_axis),
        _sorted_by_index,
        rounds=False,
    ),
    "scatter_add": Operation(
        "{0}.at[{axis!r}, axn.named({positions}, {new!r})].add(3)", _draw_scatter, _scatter("add")
    ),
    "scatter_max": Operation(
        "{0}.at[{axis!r}, axn.named({positions}, {new!r})].max(3)", _draw_scatter, _scatter("max"), rounds=False
    ),
    "scan": Operation(
        "axn.scan(lambda c, x: (c + x, c + x), {axis!r})(axn.zeros_like({0}[{axis!r}, 0]), {0})[1]",
        one(_numeric, axis=long_axis),
        _running,
    ),
    "fold": Operation(
        "axn.fold(lambda c, x: axn.maximum(c, x), {axis!r})({0}[{axis!r}, 0], {0})",
        one(_ordered, axis=long_axis),
        _largest,
        rounds=False,
    ),
    "associative_scan": Operation(
        "axn.associative_scan(axn.add, {0}, {axis!r})", one(is_float, axis=long_axis), _associative_scan
    ),
    "vmap": Operation(
        "axn.vmap(lambda x: axn.flip(x) - x, {axis!r})({0})",
        one(_numeric, axis=some_axis),
        lambda xp, x, axis: (
            xp.flip(x.array, axis=tuple(i for i, n in enumerate(x.names) if n != axis)) - x.array,
            x.names,
        ),
    ),
    "cond": Operation(
        "axn.cond(axn.any({0} > 0), lambda x: x + x, lambda x: -x, {0})", one(_ordered), _either, jumps=True
    ),
    "fft": Operation(
        "axn.fft.fft({0}, {axis!r})",
        one(lambda x: x.array.dtype in (np.float32, np.complex64), axis=long_axis),
        _fft,
    ),
    "broadcast_axis": Operation(
        "axn.broadcast_axis({0}, axn.Axis({new!r}, 2))",
        one(lambda x: x.array.size <= 2048, new=_fresh),
        lambda xp, x, new: (xp.broadcast_to(x.array, (2, *x.array.shape)), (new, *x.names)),
        rounds=False,
    ),
    "strided_slice": Operation("{0}[{axis!r}, {start}::{step}]", _draw_strided, _strided, rounds=False),
    "pool": Operation(
        "axn.nn.pool.pool({0}, axn.Axis({axis!r}, {size}), 0.0, jax.lax.add, {stride}, {padding})", _draw_pool, _pool
    ),
    "convolve": Operation("axn.convolve({0}, {1}, {axis!r}, {mode!r})", _draw_convolve, _convolve),
    **{
        kind: Operation(
            f"axn.axis_mapping({{{{}}}})(axn.nn.{kind}" + _CONVOLUTION, _draw_convolution, _convolution(kind)
        )
        for kind in ("Conv", "ConvTranspose")
    },
}
