"""Evaluate the text of a program in NumPy, in float64 and with all devices simulated: see `Machine`.

A value has a leading axis for devices, whose size is 1 if all devices have the same value. Floating-point numbers are
float64, so that two orders of the same sum agree to 15 digits; integers keep their widths. Operations outside of the
table of this module raise `UnknownForm`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._hlo import HloProgram, HloShape, Instruction, UnknownForm, branches, groups
from ._hlo_shardings import Tiling, tiling

Array = np.ndarray
Value = Any
"""An array, or a tuple of values."""
Operation = Callable[..., Value]


class IllFormed(Exception):
    """A program has an instruction whose operands do not fit together."""

    def __init__(self, instruction: Instruction, why: str):
        super().__init__(why)
        self.instruction = instruction


class Machine:
    """Evaluates a program on arguments: arrays with a leading axis for devices."""

    def __init__(self, program: HloProgram, watch: Callable[[Instruction, Sequence[Value], Value], None] | None = None):
        """Prepare a program. `watch` is called with each instruction, its operands and its result."""
        self.program, self.devices, self._watch = program, program.devices, watch
        self._operations: dict[int, Operation] = {}
        self._inside = 0
        """The number of calls to combining functions around an instruction; inside them, scalars are arrays."""
        unknown: dict[str, None] = {}
        for self._around in program.computations.values():
            for i in self._around.values():
                target = (i.attribute("custom_call_target") or "").strip('"')
                name = f"custom-call to {target}" if target else i.opcode
                try:
                    if name not in _MAKERS:
                        raise UnknownForm(name)
                    self._operations[id(i)] = _MAKERS[name](i, self)
                except UnknownForm as e:
                    unknown[str(e)] = None
        self.unknown = tuple(unknown)
        """The instructions that this module does not know; if there are any, the program cannot be evaluated."""

    def operand(self, i: Instruction) -> Instruction:
        """Return the producer of the first operand of an instruction that is being prepared."""
        return self._around[i.operands[0].partition("#")[0]]

    def run(self, args: Sequence[Value]) -> Value:
        with np.errstate(all="ignore"):
            return self.call(self.program.entry, *args)

    def call(self, computation: str, *args: Value) -> Value:
        values: dict[str, Value] = {}
        for i in self.program.computations[computation].values():
            if i.opcode == "parameter":
                values[i.name] = args[int(i.value)]
                continue
            operands = [_element_of(values, name) for name in i.operands]
            try:
                values[i.name] = result = self._operations[id(i)](*operands)
            except (ValueError, IndexError, TypeError) as e:
                raise e if isinstance(e, UnknownForm) else UnknownForm(f"{i.opcode}, evaluated here: {e}") from e
            if self._inside == 0:
                if not isinstance(result, tuple) and result.shape[1:] != i.shapes[0].sizes:
                    raise UnknownForm(f"{i.opcode}, evaluated here as {result.shape[1:]} in place of {i.shapes[0]}")
                if self._watch is not None:
                    self._watch(i, operands, result)
        return values[self.program.root(computation).name]

    def combiner(self, i: Instruction, attribute: str = "to_apply") -> tuple[np.ufunc | None, Operation]:
        """Return the function that combines two arrays, also as a NumPy function if it is one of a few."""
        name = i.computation(attribute) or ""
        # Combining functions of per-device code copy what they return.
        work = [i for i in self.program.computations[name].values() if i.opcode not in ("parameter", "copy")]
        ufunc = _COMBINING.get(work[0].opcode) if len(work) == 1 else None
        if ufunc and len({*work[0].operands}) == 2:
            return ufunc, lambda x, y: ufunc(x, y)

        def combine(*args: Value) -> Value:
            self._inside += 1
            try:
                return self.call(name, *args)
            finally:
                self._inside -= 1

        return None, combine


def _element_of(values: dict[str, Value], name: str) -> Value:
    """Return the value of an operand, which may be an element of a tuple: `top_k#1`."""
    name, _, places = name.partition("#")
    return functools.reduce(lambda value, place: value[int(place)], places.split(",") if places else (), values[name])


def listed(value: Value) -> list[Array]:
    """Return the arrays of a value."""
    return [x for part in value for x in listed(part)] if isinstance(value, tuple) else [value]


# --- reading ---


def value_dtype(name: str) -> np.dtype:
    """Return the dtype in which an array is evaluated."""
    stored = _stored_dtype(name)
    if name[0] in "su":
        return np.dtype(name[0].replace("s", "i") + str(stored.itemsize))
    return stored if name == "pred" else np.dtype(np.float64)


def _stored_dtype(name: str) -> np.dtype:
    words = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
    found = re.fullmatch(r"(pred|bf|f|[su](?!\d$)|[su](?=8$))(\d*)(e.*)?", name)  # no integers of fewer than 8 bits
    if found is None:
        raise UnknownForm(f"the type {name}")
    return np.dtype(words[found[1]] + found[2] + (f"_{found[3]}" if found[3] else ""))


def _numbers(i: Instruction, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"-?\d+", i.attribute(name) or ""))


def _axes(i: Instruction, name: str = "dimensions") -> tuple[int, ...]:
    """Return the axes of values that an attribute lists."""
    return tuple(n + 1 for n in _numbers(i, name))


def literal(text: str, shape: HloShape) -> Array:
    """Return the value of a constant."""
    dtype = value_dtype(shape.dtype)
    if "..." in text:
        raise UnknownForm("a constant that is not written out")
    words = re.findall(r"[^\s,{}]+", re.sub(r"/\*[^*]*\*/", "", text))
    read = {"b": lambda word: word in ("true", "1"), "f": float}.get(dtype.kind, int)
    return np.array([read(word) for word in words], dtype).reshape(1, *shape.sizes)


# --- helpers ---


def _same_devices(values: Sequence[Array]) -> tuple[Array, ...]:
    count = max(len(v) for v in values)
    return tuple(np.broadcast_to(v, (count, *v.shape[1:])) for v in values)


def _each(fn: Callable[..., Array]) -> Operation:
    """Apply a function of arrays without the axis for devices."""
    return lambda *values: np.stack([np.asarray(fn(*one)) for one in zip(*_same_devices(values), strict=True)])


def _widened(x: Array, like: Array) -> Array:
    """Give a scalar the rank of another array."""
    return x if x.ndim >= like.ndim else x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def _one_or_more(values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else tuple(values)


def _pad(x: Array, value: Any, amounts: Sequence[tuple[int, int, int]]) -> Array:
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


# --- elementwise ---


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    return np.where(y == 0, np.array(-1).astype(x.dtype), (x - np.fmod(x, safe)) // safe)


def _remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, y) if x.dtype.kind == "f" else np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _shift(how: np.ufunc, kind: str) -> Operation:
    def run(x: Array, y: Array) -> Array:
        bits, unsigned = x.dtype.itemsize * 8, y.astype(f"u{y.dtype.itemsize}")
        found = how(x.astype(f"{kind}{bits // 8}"), np.minimum(unsigned, bits - 1).astype(f"{kind}{bits // 8}"))
        return (found if kind == "i" else np.where(unsigned >= bits, 0, found)).astype(x.dtype)

    return run


def _converted(x: Array, dtype: np.dtype) -> Array:
    if dtype.kind in "iu" and x.dtype.kind == "f":
        low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
        whole = np.clip(np.trunc(np.where(np.isnan(x), 0, x)), low, high)
        return np.where(whole >= high, np.iinfo(dtype).max, np.where(whole >= high, 0, whole).astype(dtype))
    return x != 0 if dtype.kind == "b" else x


def _order(x: Array) -> Array:
    """Return numbers in the total order of floating-point numbers, in which -0 is below 0."""
    bits = x.view(np.int64) if x.dtype.kind == "f" else x
    return np.where(bits < 0, -1 - (bits & np.int64(2**63 - 1)), bits) if x.dtype.kind == "f" else x


def _compare(i: Instruction) -> Operation:
    names = {"EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal", "GT": "greater", "GE": "greater_equal"}
    fn = getattr(np, names[i.attribute("direction") or ""])
    return (lambda x, y: fn(_order(x), _order(y))) if i.attribute("type") == "TOTALORDER" else fn


_ELEMENTWISE: dict[str, Operation] = {
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, _widened(low, x)), _widened(high, x)),
    "cosine": np.cos,
    "divide": _divide,
    "erf": np.vectorize(math.erf, [float]),
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "is-finite": np.isfinite,
    "log-plus-one": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "negate": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "popcnt": np.bitwise_count,
    "remainder": _remainder,
    "round-nearest-afz": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "round-nearest-even": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": lambda p, x, y: np.where(_widened(p, x), x, y),
    "shift-left": _shift(np.left_shift, "u"),
    "shift-right-arithmetic": _shift(np.right_shift, "i"),
    "shift-right-logical": _shift(np.right_shift, "u"),
    "sine": np.sin,
    "xor": np.bitwise_xor,
} | {
    name: getattr(np, name)
    for name in "abs add cbrt ceil floor log maximum minimum multiply power sign sqrt subtract tan tanh".split()
}
_COMBINING: dict[str, np.ufunc] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
} | {name: getattr(np, name) for name in ("add", "maximum", "minimum", "multiply")}


def _elementwise(i: Instruction, machine: Machine) -> Operation:
    fn, dtype = _ELEMENTWISE[i.opcode], value_dtype(i.shapes[0].dtype)
    return lambda *values: fn(*values).astype(dtype, copy=False)


def _convert(i: Instruction, machine: Machine) -> Operation:
    dtype = value_dtype(i.shapes[0].dtype)
    return lambda x: _converted(x, dtype).astype(dtype, copy=False)


def _bitcast_convert(i: Instruction, machine: Machine) -> Operation:
    source, target = (_stored_dtype(shape.dtype) for shape in (machine.operand(i).shapes[0], i.shapes[0]))
    narrower, wider = target.itemsize < source.itemsize, target.itemsize > source.itemsize
    dtype = value_dtype(i.shapes[0].dtype)

    def run(x: Array) -> Array:
        raw = np.array(x, source, order="C")
        found = (raw[..., None] if narrower else raw).view(target)
        return (found[..., 0] if wider else found).astype(dtype)

    return run


# --- shapes ---


def _broadcast(i: Instruction, machine: Machine) -> Operation:
    axes, sizes = _numbers(i, "dimensions"), i.shapes[0].sizes

    def run(x: Array) -> Array:
        if not sizes:
            return x
        kept = dict(zip(axes, x.shape[1:], strict=True))
        return np.broadcast_to(x.reshape(len(x), *(kept.get(d, 1) for d in range(len(sizes)))), (len(x), *sizes))

    return run


def _iota(i: Instruction, machine: Machine) -> Operation:
    found = np.indices(i.shapes[0].sizes)[_numbers(i, "iota_dimension")[0]][None]
    return lambda: found.astype(value_dtype(i.shapes[0].dtype))


def _slice(i: Instruction, machine: Machine) -> Operation:
    cuts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.attribute("slice") or "")
    index = (slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in cuts))
    return lambda x: x[index]


def _padded(i: Instruction, machine: Machine) -> Operation:
    parts = [[*map(int, part.split("_")), 0] for part in (i.attribute("padding") or "").split("x") if part]
    amounts = [(low, high, rest[0]) for low, high, *rest in parts]
    return _each(lambda x, value: _pad(x, value, amounts))


def _window_at(x: Array, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    clamped = [min(max(int(s), 0), n - k) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(s, s + k) for s, k in zip(clamped, sizes, strict=True))


def _updated(x: Array, update: Array, *starts: Array) -> Array:
    x = np.array(x)
    x[_window_at(x, starts, update.shape)] = update
    return x


# --- indices ---


class _IndexedWindows:
    """The windows of an array that `gather` reads and `scatter` writes."""

    def __init__(self, i: Instruction, removed: str, over: str, batching: str, batching_of_indices: str):
        self._over, self._batching = _numbers(i, over), _numbers(i, batching)
        self._of_indices = _numbers(i, batching_of_indices)
        self.removed = {*_numbers(i, removed), *self._batching}
        self._vector = _numbers(i, "index_vector_dim")[0]

    def indices(self, x: Array, found: Array, sizes: Sequence[int], clamp: bool) -> tuple[tuple[Array, ...], Array]:
        """Return where the elements of all windows are along each axis, and which windows are inside of the array."""
        found = np.moveaxis(found[..., None] if self._vector == found.ndim else found, self._vector, -1)
        batch = found.shape[:-1]
        starts, inside = np.zeros((x.ndim, *batch), np.int64), np.ones(batch, bool)
        for k, axis in enumerate(self._over):
            starts[axis] = found[..., k].astype(np.int64)
        for axis, of in zip(self._batching, self._of_indices, strict=True):
            starts[axis] = np.indices(batch)[of - (of > self._vector)]
        kept, index = [d for d in range(x.ndim) if d not in self.removed], []
        for axis, (at, n, size) in enumerate(zip(starts, x.shape, sizes, strict=True)):
            inside = inside & (at >= 0) & (at <= n - size)
            at = (np.clip(at, 0, n - size) if clamp else at).reshape((*batch, *[1] * len(kept)))
            along = [-1 if d == axis else 1 for d in kept]
            index.append(at + np.arange(size).reshape(along) if axis in kept else at)
        return tuple(np.broadcast_arrays(*index)), inside


def _gather(i: Instruction, machine: Machine) -> Operation:
    names = "collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims"
    windows, sizes, offset = _IndexedWindows(i, *names), _numbers(i, "slice_sizes"), _numbers(i, "offset_dims")
    order = np.argsort([*(d for d in range(len(i.shapes[0].sizes)) if d not in offset), *offset])
    return _each(lambda x, found: np.transpose(x[windows.indices(x, found, sizes, True)[0]], order))


def _scatter(i: Instruction, machine: Machine) -> Operation:
    names = "inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims"
    windows, offset = _IndexedWindows(i, *names, "scatter_indices_batching_dims"), _numbers(i, "update_window_dims")
    root, (ufunc, combine) = machine.program.root(i.computation("to_apply") or ""), machine.combiner(i)
    if len(i.shapes) != 1:
        raise UnknownForm("scatter of several arrays")

    def run(x: Array, found: Array, updates: Array) -> Array:
        batch = [d for d in range(updates.ndim) if d not in offset]
        updates = np.transpose(updates, [*batch, *offset])
        inner = iter(updates.shape[len(batch) :])
        sizes = [1 if d in windows.removed else next(inner) for d in range(x.ndim)]
        index, inside = windows.indices(x, found, sizes, False)
        x, index, updates = np.array(x), tuple(a[inside] for a in index), updates[inside]
        if root.opcode == "parameter" and root.value == "1":
            x[index] = updates
        elif ufunc is not None:
            ufunc.at(x, index, updates)
        else:
            for place in np.ndindex(updates.shape):
                at = tuple(a[place] for a in index)
                x[at] = combine(x[at][None], updates[place][None])[0]
        return x

    return _each(run)


# --- reductions ---


def _folded(xs: list[Array], axis: int, combine: Operation) -> list[Array]:
    """Combine the elements of arrays along one axis, which has at least one."""
    while (n := xs[0].shape[axis]) > 1:
        cut = [np.split(x, [n // 2, n // 2 * 2], axis) for x in xs]
        found = listed(combine(*(c[0] for c in cut), *(c[1] for c in cut)))
        xs = [np.concatenate([f, c[2]], axis) for f, c in zip(found, cut, strict=True)]
    return [x.take(0, axis) for x in xs]


def _reduce(i: Instruction, machine: Machine) -> Operation:
    axes, (ufunc, combine) = _axes(i), machine.combiner(i)

    def run(*values: Array) -> Value:
        xs, starts = [*_same_devices(values[: len(values) // 2])], values[len(values) // 2 :]
        if ufunc is not None:
            xs = [ufunc.reduce(values[0], axis=axes, dtype=values[0].dtype)]
        else:
            for axis in sorted(axes, reverse=True):
                xs = _folded(xs, axis, combine)
        return combine(*(_widened(s, x) for s, x in zip(starts, xs, strict=True)), *xs)

    return run


class _Sliding:
    """The windows of a convolution, or of a reduction over windows."""

    def __init__(self, i: Instruction):
        found = dict(part.split("=") for part in (i.attribute("window") or "{}").strip("{}").split())
        self.size = [int(n) for n in found["size"].split("x")] if "size" in found else []

        def each(name: str, default: str) -> list[str]:
            return found[name].split("x") if name in found else [default] * len(self.size)

        self._stride, self._dilation = ([*map(int, each(name, "1"))] for name in ("stride", "rhs_dilate"))
        self.reversed = [d for d, word in enumerate(each("rhs_reversal", "0")) if word == "1"]
        pads, base = (part.split("_") for part in each("pad", "0_0")), each("lhs_dilate", "1")
        self.amounts = [(int(a), int(b), int(n) - 1) for (a, b), n in zip(pads, base, strict=True)]

    def positions(self, padded: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each position in a window, and where it is in the padded array for all windows."""
        axes = [*zip(padded, self.size, self._dilation, self._stride, strict=True)]
        counts = [max((n - (k - 1) * d - 1) // step + 1, 0) for n, k, d, step in axes]
        for at in itertools.product(*map(range, self.size)):
            firsts = [(p * d, step) for p, (_, _, d, step) in zip(at, axes, strict=True)]
            yield (
                at,
                tuple(slice(f, f + c * step - step + 1, step) for (f, step), c in zip(firsts, counts, strict=True)),
            )


def _reduce_window(i: Instruction, machine: Machine) -> Operation:
    windows, (_, combine) = _Sliding(i), machine.combiner(i)

    def run(*values: Array) -> Value:
        xs, starts = values[: len(values) // 2], values[len(values) // 2 :]
        pad = _each(lambda x, start: _pad(x, start, windows.amounts))
        padded, total = [pad(x, s) for x, s in zip(xs, starts, strict=True)], [*starts]
        for _, place in windows.positions(padded[0].shape[1:]):
            parts = [p[(slice(None), *place)] for p in padded]
            total = listed(combine(*(_widened(t, p) for t, p in zip(total, parts, strict=True)), *parts))
        return _one_or_more(total)

    return run


def _select_and_scatter(i: Instruction, machine: Machine) -> Operation:
    windows, (_, select), (ufunc, _) = _Sliding(i), machine.combiner(i, "select"), machine.combiner(i, "scatter")
    if ufunc is None:
        raise UnknownForm("select-and-scatter with another function than a sum or an extreme")

    def run(x: Array, source: Array, start: Array) -> Array:
        places = _pad(np.arange(x.size).reshape(x.shape), -1, windows.amounts)
        values, best, value = _pad(x, 0, windows.amounts), np.full(source.shape, -1), np.zeros(source.shape, x.dtype)
        for _, at in windows.positions(values.shape):
            if values[at].shape != source.shape:
                raise IllFormed(i, f"has {values[at].shape} windows and values for {source.shape}")
            better = (places[at] >= 0) & ((best < 0) | ~select(value, values[at]))
            best, value = np.where(better, places[at], best), np.where(better, values[at], value)
        out = np.full(x.size, start, x.dtype)
        ufunc.at(out, best[best >= 0], source[best >= 0])
        return out.reshape(x.shape)

    return _each(run)


def _sort(i: Instruction, machine: Machine) -> Operation:
    axis, (_, before) = _axes(i)[0], machine.combiner(i)

    def run(*values: Array) -> Value:
        xs = [np.moveaxis(x, axis, -1) for x in _same_devices(values)]
        pairs = [a for x in xs for a in (x[..., :, None], x[..., None, :])]
        less = np.broadcast_to(before(*pairs), (*xs[0].shape, xs[0].shape[-1]))  # of the i-th and the j-th element
        first = less | np.triu(~less & ~np.swapaxes(less, -1, -2), 1)
        order = np.argsort(first.sum(-2), -1, kind="stable")
        return _one_or_more([np.moveaxis(np.take_along_axis(x, order, -1), -1, axis) for x in xs])

    return run


def _top_k(i: Instruction, machine: Machine) -> Operation:
    k, sign = i.shapes[0].sizes[-1], 1 if i.attribute("largest") == "false" else -1

    def run(x: Array) -> Value:
        order = np.argsort(sign * x, -1, kind="stable")[..., :k]
        return np.take_along_axis(x, order, -1), order.astype(np.int32)

    return run


# --- products ---


def _dot(i: Instruction, machine: Machine) -> Operation:
    batch_x, batch_y, over_x, over_y = (
        _axes(i, f"{side}_{what}_dims") for what in ("batch", "contracting") for side in ("lhs", "rhs")
    )
    sizes, dtype = i.shapes[0].sizes, value_dtype(i.shapes[0].dtype)

    def run(x: Array, y: Array) -> Array:
        rows = [d for d in range(1, x.ndim) if d not in (*batch_x, *over_x)]
        cols = [d for d in range(1, y.ndim) if d not in (*batch_y, *over_y)]
        x, y = np.transpose(x, [0, *batch_x, *rows, *over_x]), np.transpose(y, [0, *batch_y, *over_y, *cols])
        batch, inner = len(batch_x) + 1, math.prod(x.shape[x.ndim - len(over_x) :])
        x = x.reshape(*x.shape[:batch], math.prod(x.shape[batch : batch + len(rows)]), inner)
        y = y.reshape(*y.shape[:batch], inner, math.prod(y.shape[batch + len(over_y) :]))
        found = np.matmul(x.astype(dtype, copy=False), y.astype(dtype, copy=False))
        return found.reshape(len(found), *sizes)

    return run


def _convolution(i: Instruction, machine: Machine) -> Operation:
    labels, windows = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes), _Sliding(i)
    if labels is None:
        raise UnknownForm("convolution without the order of its axes")
    spatial = [str(d) for d in range(len(windows.size))]
    orders = [
        [t.index(c) for c in (*first, *spatial)] for t, first in zip(labels.groups(), ("bf", "oi", "bf"), strict=True)
    ]
    of_batch = (_numbers(i, "batch_group_count") or (1,))[0]
    parts = max((_numbers(i, "feature_group_count") or (1,))[0], of_batch)
    dtype = value_dtype(i.shapes[0].dtype)

    def run(x: Array, kernel: Array) -> Array:
        x, kernel = np.transpose(x, orders[0]).astype(dtype), np.transpose(kernel, orders[1]).astype(dtype)
        if of_batch > 1:  # each part of the batch meets the kernels of its own results
            x = np.moveaxis(x.reshape(of_batch, -1, *x.shape[1:]), 0, 1)
            x = x.reshape(x.shape[0], -1, *x.shape[3:])
        x = _pad(x, 0, windows.amounts)
        x = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
        kernel = np.flip(kernel, tuple(d + 2 for d in windows.reversed))
        kernel = kernel.reshape(parts, -1, *kernel.shape[1:])
        products = (
            np.einsum("bpi...,poi->bpo...", x[(..., *place)], kernel[(..., *at)])
            for at, place in windows.positions(x.shape[3:])
        )
        total = functools.reduce(np.add, products)
        return np.transpose(total.reshape(len(total), -1, *total.shape[3:]), np.argsort(orders[2]))

    return _each(run)


# --- control ---


def _while(i: Instruction, machine: Machine) -> Operation:
    condition, body = i.computation("condition") or "", i.computation("body") or ""

    def run(state: Value) -> Value:
        while (goes_on := machine.call(condition, state)).any():
            state = _chosen(goes_on, machine.call(body, state), state)
        return state

    return run


def _conditional(i: Instruction, machine: Machine) -> Operation:
    names = branches(i)

    def run(which: Array, *args: Value) -> Value:
        which = 1 - which.astype(int) if which.dtype == bool else np.where(which < 0, len(names), which)
        which = np.minimum(which, len(names) - 1)
        results = {k: machine.call(names[k], args[k]) for k in map(int, np.unique(which))}
        return functools.reduce(lambda y, k: _chosen(which == k, results[k], y), results, next(iter(results.values())))

    return run


def _chosen(where: Array, x: Value, y: Value) -> Value:
    """Return one value on some devices, and another on the others."""
    if where.all():
        return x
    if isinstance(x, tuple):
        return tuple(_chosen(where, a, b) for a, b in zip(x, y, strict=True))
    return np.where(_widened(where, x), x, y)


def _called(i: Instruction, machine: Machine) -> Operation:
    return functools.partial(machine.call, i.computation("to_apply") or "")


# --- devices ---


def _among(i: Instruction, machine: Machine, fn: Callable[..., Array]) -> Operation:
    """Make a collective from a function of the arrays in a group, and the place of the device that gets the result."""
    found = groups(i, machine.devices)
    if sorted(itertools.chain(*found)) != [*range(machine.devices)]:
        raise UnknownForm(f"{i.opcode} among some of the devices")
    order = [g[1:] for g in sorted((device, group, place) for group in found for place, device in enumerate(group))]

    def run(*xs: Array) -> Value:
        every = [np.broadcast_to(x, (machine.devices, *x.shape[1:])) for x in xs]
        if i.opcode == "all-to-all" and not _axes(i):  # of an array for each device in a group
            return _one_or_more([np.stack([every[p][group[k]] for group, p in order]) for k in range(len(xs))])
        return _one_or_more([np.stack([fn(x[[*group]], place) for group, place in order]) for x in every])

    return run


def _reducing(i: Instruction, machine: Machine) -> Operation:
    ufunc, _ = machine.combiner(i)
    if ufunc is None:
        raise UnknownForm(f"{i.opcode} with another function than a sum or an extreme")
    if i.opcode == "all-reduce":
        return _among(i, machine, lambda xs, place: ufunc.reduce(xs, dtype=xs.dtype))
    axis = _numbers(i, "dimensions")[0]
    return _among(i, machine, lambda xs, place: np.split(ufunc.reduce(xs, dtype=xs.dtype), len(xs), axis)[place])


def _moving(i: Instruction, machine: Machine) -> Operation:
    axis = (*_numbers(i, "dimensions"), 0)[0]
    if i.opcode == "all-gather":
        return _among(i, machine, lambda xs, place: np.concatenate([*xs], axis))
    return _among(i, machine, lambda xs, p: np.concatenate([np.split(x, len(xs), axis)[p] for x in xs], axis))


def _permute(i: Instruction, machine: Machine) -> Operation:
    sources, targets = np.array(groups(i, machine.devices), int).reshape(-1, 2).T

    def run(x: Array) -> Array:
        out = np.zeros((machine.devices, *x.shape[1:]), x.dtype)
        out[targets] = np.broadcast_to(x, out.shape)[sources]
        return out

    return run


def _tiling_of(i: Instruction, machine: Machine) -> Tiling:
    return tiling(i.attribute("sharding") or "", len(i.shapes[0].sizes), machine.devices)


def _to_shards(i: Instruction, machine: Machine) -> Operation:
    """Cut an array into the shards of devices, along the mesh axes that become manual."""
    outer, inner, sizes = _tiling_of(machine.operand(i), machine), _tiling_of(i, machine), i.shapes[0].sizes

    def run(x: Array) -> Array:
        pieces = (outer.piece(p, x.shape[1:], sizes, inner) for p in range(machine.devices))
        return np.stack([x[p % len(x)][piece] for p, piece in enumerate(pieces)])

    return run


def _from_shards(i: Instruction, machine: Machine) -> Operation:
    """Put the shards of devices together."""
    outer, inner, sizes = _tiling_of(i, machine), _tiling_of(machine.operand(i), machine), i.shapes[0].sizes
    kept, place = np.unique(outer.manual, return_inverse=True)

    def run(x: Array) -> Array:
        found = np.empty((len(kept), *sizes), x.dtype)
        for p in reversed(range(machine.devices)):
            found[(place[p], *outer.piece(p, sizes, x.shape[1:], inner))] = x[p % len(x)]
        return found if len(kept) == 1 else found[place]

    return run


def _random_bits(i: Instruction, machine: Machine) -> Operation:
    """Stand in for the generator: the bits depend on the state in the same way, but differ from its bits."""
    shape, dtype = i.shapes[-1].sizes, value_dtype(i.shapes[-1].dtype)

    def drawn(state: Array) -> Array:
        count = math.prod(shape) * dtype.itemsize
        return np.frombuffer(np.random.default_rng([int(n) for n in state]).bytes(count), dtype).reshape(shape)

    draw = _each(drawn)
    return lambda state: (state + np.ones((), state.dtype), draw(state)) if len(i.shapes) == 2 else draw(state)


# --- the table ---


def _constant(i: Instruction, machine: Machine) -> Operation:
    value = literal(i.value, i.shapes[0])
    return lambda: value


def _same(i: Instruction, machine: Machine) -> Operation:
    return lambda *xs: _one_or_more(xs)


_MAKERS: dict[str, Callable[[Instruction, Machine], Operation]] = dict.fromkeys(_ELEMENTWISE, _elementwise) | {
    "add-dependency": lambda i, machine: lambda x, _: x,
    "after-all": lambda i, machine: lambda *_: (),
    "all-gather": _moving,
    "all-reduce": _reducing,
    "all-to-all": _moving,
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "call": _called,
    "collective-permute": _permute,
    "compare": lambda i, machine: _compare(i),
    "concatenate": lambda i, machine: lambda *xs: np.concatenate(_same_devices(xs), _axes(i)[0]),
    "conditional": _conditional,
    "constant": _constant,
    "convert": _convert,
    "convolution": _convolution,
    "copy": _same,
    "custom-call to Sharding": _same,
    "custom-call to SPMDFullToShardShape": _to_shards,
    "custom-call to SPMDShardToFullShape": _from_shards,
    "custom-call to TopK": _top_k,
    "dot": _dot,
    "dynamic-slice": lambda i, machine: _each(lambda x, *starts: x[_window_at(x, starts, i.shapes[0].sizes)]),
    "dynamic-update-slice": lambda i, machine: _each(_updated),
    "gather": _gather,
    "get-tuple-element": lambda i, machine: lambda x: x[_numbers(i, "index")[0]],
    "iota": _iota,
    "map": _called,
    "opt-barrier": _same,
    "pad": _padded,
    "parameter": _same,
    "partition-id": lambda i, machine: lambda: np.arange(machine.devices, dtype=np.uint32),
    "reduce": _reduce,
    "reduce-precision": _same,
    "reduce-scatter": _reducing,
    "reduce-window": _reduce_window,
    "reshape": lambda i, machine: lambda x: x.reshape(len(x), *i.shapes[0].sizes),
    "reverse": lambda i, machine: lambda x: np.flip(x, _axes(i)),
    "rng-bit-generator": _random_bits,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "slice": _slice,
    "sort": _sort,
    "topk": _top_k,
    "transpose": lambda i, machine: lambda x: np.transpose(x, (0, *_axes(i))),
    "tuple": lambda i, machine: lambda *xs: xs,
    "while": _while,
}
