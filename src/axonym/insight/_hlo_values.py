"""Evaluate the text of a program in NumPy, in float64 and with all devices simulated: see `Machine`.

A value has a leading axis for devices, whose size is 1 where all devices have the same. A rule for an opcode is a
function of the instruction, the machine and the operands. What has no rule raises `UnknownForm`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._hlo import HloProgram, Instruction, UnknownForm, branches
from ._hlo_devices import Tiling, groups, tiling
from ._hlo_elements import (
    COMBINING,
    ELEMENTWISE,
    Array,
    axes_of,
    converted,
    in_order,
    indices,
    literal,
    numbers,
    padded,
    same_devices,
    stored_dtype,
    value_dtype,
    widened,
    window_at,
    windows_of,
    wrapped,
)  # fmt: skip

Value = Any
"""An array, or a tuple of values."""
Rule = Callable[..., Value]


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
        self._rules: dict[int, Rule] = {}
        self._inside = 0
        """The number of calls to combining functions around an instruction; inside them, scalars are arrays."""
        self.literal = functools.cache(literal)
        self._bodies = [(body, Machine(body.program)) for body in program.bodies]
        unknown = dict.fromkeys(itertools.chain(*(machine.unknown for _, machine in self._bodies)))
        self._producers = {id(i): c for c in program.computations.values() for i in c.values()}
        for i in itertools.chain(*(c.values() for c in program.computations.values())):
            target = (i.attribute("custom_call_target") or "").strip('"')
            name = f"custom-call to {target}" if target else i.opcode
            if name in _RULES:
                self._rules[id(i)] = _RULES[name]
            else:
                unknown[name] = None
            try:
                [value_dtype(s.dtype) for s in i.shapes]
            except UnknownForm as e:
                unknown[str(e)] = None
        self.unknown = tuple(unknown)
        """The instructions that this module does not know; if there are any, the program cannot be evaluated."""

    def operand(self, i: Instruction) -> Instruction:
        """Return the producer of the first operand of an instruction."""
        return self._producers[id(i)][i.operands[0].partition("#")[0]]

    def body(self, i: Instruction) -> Machine:
        """Return the machine for an operation with its own partitioning."""
        around = self._producers[id(i)]
        operands = [
            str(around[name].shapes[int(place or 0)]) for name, _, place in (o.partition("#") for o in i.operands)
        ]
        found = {
            body.text: machine
            for body, machine in self._bodies
            if i.scope.endswith(body.scope)
            and operands == [str(s) for p in body.program.parameters() for s in p.shapes]
            and i.shapes == body.program.root(body.program.entry).shapes
        }
        if len(found) != 1:
            raise UnknownForm(
                f"custom-call to CustomSPMDPartitioning for {i.scope}, which is one of {len(found)} operations"
            )
        return next(iter(found.values()))

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
                values[i.name] = result = self._rules[id(i)](i, self, *operands)
            except (ValueError, IndexError, TypeError) as e:
                raise e if isinstance(e, UnknownForm) else UnknownForm(f"{i.opcode}, evaluated here: {e}") from e
            # Combining functions declare scalars, and get arrays.
            if self._inside == 0:
                if not isinstance(result, tuple) and result.shape[1:] != i.shapes[0].sizes:
                    raise UnknownForm(f"{i.opcode}, evaluated here as {result.shape[1:]} in place of {i.shapes[0]}")
                if self._watch is not None:
                    self._watch(i, operands, result)
        return values[self.program.root(computation).name]

    def combiner(self, i: Instruction, attribute: str = "to_apply") -> tuple[Any, Callable[..., Value]]:
        """Return the function that combines two arrays, also as a NumPy function if it is one of a few."""
        name = i.computation(attribute) or ""
        # Combining functions of per-device code copy what they return.
        work = [i for i in self.program.computations[name].values() if i.opcode not in ("parameter", "copy")]
        # An operation of one parameter with itself is no `ufunc` of both.
        if len(work) == 1 and work[0].opcode in COMBINING and len({*work[0].operands}) == 2:
            ufunc = ELEMENTWISE[work[0].opcode]
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


# --- helpers ---


def _each(fn: Callable[..., Array], *values: Array) -> Array:
    """Apply a function of arrays without the axis for devices."""
    return np.stack([np.asarray(fn(*one)) for one in zip(*same_devices(values), strict=True)])


def _one_or_more(values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else tuple(values)


# --- elementwise ---


def _elementwise(i: Instruction, m: Machine, *xs: Array) -> Array:
    return wrapped(ELEMENTWISE[i.opcode](*xs), i.shapes[0])


def _compare(i: Instruction, m: Machine, x: Array, y: Array) -> Array:
    names = {"EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal", "GT": "greater", "GE": "greater_equal"}
    fn = getattr(np, names[i.attribute("direction") or ""])
    return fn(in_order(x), in_order(y)) if i.attribute("type") == "TOTALORDER" else fn(x, y)


def _bitcast_convert(i: Instruction, m: Machine, x: Array) -> Array:
    source, target = (stored_dtype(shape.dtype) for shape in (m.operand(i).shapes[0], i.shapes[0]))
    # Values are wider than what XLA stores, and only contiguous ones can be viewed in another dtype.
    raw = np.array(x, source, order="C")
    found = (raw[..., None] if target.itemsize < source.itemsize else raw).view(target)
    return (found[..., 0] if target.itemsize > source.itemsize else found).astype(value_dtype(i.shapes[0].dtype))


# --- shapes ---


def _broadcast(i: Instruction, m: Machine, x: Array) -> Array:
    sizes = i.shapes[0].sizes
    if not sizes:
        return x
    kept = dict(zip(numbers(i, "dimensions"), x.shape[1:], strict=True))
    return np.broadcast_to(x.reshape(len(x), *(kept.get(d, 1) for d in range(len(sizes)))), (len(x), *sizes))


def _iota(i: Instruction, m: Machine) -> Array:
    found = np.indices(i.shapes[0].sizes)[numbers(i, "iota_dimension")[0]][None]
    return found.astype(value_dtype(i.shapes[0].dtype))


def _slice(i: Instruction, m: Machine, x: Array) -> Array:
    cuts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.attribute("slice") or "")
    return x[(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in cuts))]


def _pad(i: Instruction, m: Machine, x: Array, value: Array) -> Array:
    parts = [[*map(int, part.split("_")), 0][:3] for part in (i.attribute("padding") or "").split("x") if part]
    return _each(lambda x, value: padded(x, value, parts), x, value)


def _updated(x: Array, update: Array, *starts: Array) -> Array:
    x = np.array(x)
    x[window_at(x, starts, update.shape)] = update
    return x


# --- indices ---


def _gather(i: Instruction, m: Machine, x: Array, found: Array) -> Array:
    names = "start_index_map", "operand_batching_dims", "start_indices_batching_dims"
    sizes, offset = numbers(i, "slice_sizes"), numbers(i, "offset_dims")
    removed = (*numbers(i, "collapsed_slice_dims"), *numbers(i, names[1]))
    kept = [d for d in range(x.ndim - 1) if d not in removed]
    order = np.argsort([*(d for d in range(len(i.shapes[0].sizes)) if d not in offset), *offset])
    return _each(lambda x, at: np.transpose(x[tuple(indices(i, names, x, at, sizes, kept)[0])], order), x, found)


def _scatter(i: Instruction, m: Machine, *values: Array) -> Value:
    names = "scatter_dims_to_operand_dims", "input_batching_dims", "scatter_indices_batching_dims"
    removed, offset = (*numbers(i, "inserted_window_dims"), *numbers(i, names[1])), numbers(i, "update_window_dims")
    root, (ufunc, combine) = m.program.root(i.computation("to_apply") or ""), m.combiner(i)
    count = len(i.shapes)

    def one(*values: Array) -> list[Array]:
        xs, found, updates = [*map(np.array, values[:count])], values[count], values[count + 1 :]
        batch = [d for d in range(updates[0].ndim) if d not in offset]
        updates = [np.transpose(u, [*batch, *offset]) for u in updates]
        kept, inner = [d for d in range(xs[0].ndim) if d not in removed], iter(updates[0].shape[len(batch) :])
        sizes = [next(inner) if d in kept else 1 for d in range(xs[0].ndim)]
        index, inside = indices(i, names, xs[0], found, sizes, kept)
        at, updates = tuple(a[inside] for a in index), [u[inside] for u in updates]
        if root.opcode == "parameter" and root.value == "1":
            xs[0][at] = updates[0]
        elif ufunc is not None:
            ufunc.at(xs[0], at, updates[0])
        else:
            # One after another: several updates may be of one place, and each is combined with the result of the last.
            for place in np.ndindex(updates[0].shape):
                where = tuple(a[place] for a in at)
                new = listed(combine(*(x[where][None] for x in xs), *(u[place][None] for u in updates)))
                for x, value in zip(xs, new, strict=True):
                    x[where] = value[0]
        return xs

    devices = [one(*v) for v in zip(*same_devices(values), strict=True)]
    return _one_or_more([np.stack(xs) for xs in zip(*devices, strict=True)])


# --- reductions ---


def _reduced(i: Instruction, m: Machine, xs: Sequence[Array], starts: Sequence[Array], axes: Sequence[int]) -> Value:
    """Combine the elements along some axes, and the values to start with."""
    ufunc, combine = m.combiner(i)
    if ufunc is not None:
        # NumPy would add up small integers in a wider dtype, which does not wrap around.
        return combine(
            widened(starts[0], xs[0]), ufunc.reduce(xs[0], axis=tuple(axes), dtype=xs[0].dtype, keepdims=True)
        )
    # Halves are combined, since each call runs a program: as many calls as the size has bits.
    for axis in axes:
        while (n := xs[0].shape[axis]) > 1:
            cut = [np.split(x, [n // 2, n // 2 * 2], axis) for x in xs]
            found = listed(combine(*(c[0] for c in cut), *(c[1] for c in cut)))
            xs = [np.concatenate([f, c[2]], axis) for f, c in zip(found, cut, strict=True)]
    return combine(*(widened(s, x) for s, x in zip(starts, xs, strict=True)), *xs)


def _reduce(i: Instruction, m: Machine, *values: Array) -> Value:
    xs, starts = same_devices(values[: len(values) // 2]), values[len(values) // 2 :]
    found = _reduced(i, m, xs, starts, axes_of(i))
    return _one_or_more([np.squeeze(x, axes_of(i)) for x in listed(found)])


def _reduce_window(i: Instruction, m: Machine, *values: Array) -> Value:
    xs, starts = values[: len(values) // 2], values[len(values) // 2 :]
    windows = [_each(functools.partial(windows_of, i), *pair) for pair in zip(xs, starts, strict=True)]
    return _one_or_more([x[..., 0] for x in listed(_reduced(i, m, same_devices(windows), starts, [-1]))])


def _select_and_scatter(i: Instruction, m: Machine, *values: Array) -> Array:
    (_, select), (ufunc, _) = m.combiner(i, "select"), m.combiner(i, "scatter")
    if ufunc is None:
        raise UnknownForm("select-and-scatter with another function than a sum or an extreme")

    def one(x: Array, source: Array, start: Array) -> Array:
        places, values = windows_of(i, np.arange(x.size).reshape(x.shape), -1), windows_of(i, x, 0)
        if places.shape[:-1] != source.shape:
            raise IllFormed(i, f"has {places.shape[:-1]} windows and values for {source.shape}")
        # Padding has place -1, and is never chosen.
        best, value = places[..., 0], values[..., 0]
        for k in range(1, places.shape[-1]):
            better = (places[..., k] >= 0) & ((best < 0) | ~select(value, values[..., k]))
            best, value = np.where(better, places[..., k], best), np.where(better, values[..., k], value)
        out = np.full(x.size, start, x.dtype)
        ufunc.at(out, best[best >= 0], source[best >= 0])
        return out.reshape(x.shape)

    return _each(one, *values)


def _sort(i: Instruction, m: Machine, *values: Array) -> Value:
    axis, (_, before) = axes_of(i)[0], m.combiner(i)
    xs = [np.moveaxis(x, axis, -1) for x in same_devices(values)]
    pairs = [a for x in xs for a in (x[..., :, None], x[..., None, :])]
    less = np.broadcast_to(before(*pairs), (*xs[0].shape, xs[0].shape[-1]))  # of the i-th and the j-th element
    # The comparison is a program, so NumPy cannot sort by it: compare all pairs, and rank an element by the number that
    # come before it. Equal ones keep their order, which a stable sort must, and others may.
    first = less | np.triu(~less & ~np.swapaxes(less, -1, -2), 1)
    order = np.argsort(first.sum(-2), -1, kind="stable")
    return _one_or_more([np.moveaxis(np.take_along_axis(x, order, -1), -1, axis) for x in xs])


def _top_k(i: Instruction, m: Machine, x: Array) -> Value:
    sign = 1 if i.attribute("largest") == "false" else -1
    order = np.argsort(sign * x, -1, kind="stable")[..., : i.shapes[0].sizes[-1]]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)


# --- products ---


def _dot(i: Instruction, m: Machine, x: Array, y: Array) -> Array:
    batch_x, batch_y, over_x, over_y = (
        axes_of(i, f"{side}_{what}_dims") for what in ("batch", "contracting") for side in ("lhs", "rhs")
    )
    dtype = value_dtype(i.shapes[0].dtype)
    rows = [d for d in range(1, x.ndim) if d not in (*batch_x, *over_x)]
    cols = [d for d in range(1, y.ndim) if d not in (*batch_y, *over_y)]
    x, y = np.transpose(x, [0, *batch_x, *rows, *over_x]), np.transpose(y, [0, *batch_y, *over_y, *cols])
    batch, inner = len(batch_x) + 1, math.prod(x.shape[x.ndim - len(over_x) :])
    x = x.reshape(*x.shape[:batch], math.prod(x.shape[batch : batch + len(rows)]), inner)
    y = y.reshape(*y.shape[:batch], inner, math.prod(y.shape[batch + len(over_y) :]))
    found = np.matmul(x.astype(dtype, copy=False), y.astype(dtype, copy=False))
    return found.reshape(len(found), *i.shapes[0].sizes)


def _convolution(i: Instruction, m: Machine, *values: Array) -> Array:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        raise UnknownForm("convolution without the order of its axes")
    named = zip(labels.groups(), ("bf", "oi", "bf"), strict=True)
    orders = [[text.index(c) for c in (*first, *sorted({*text} - {*first}))] for text, first in named]
    of_batch = (*numbers(i, "batch_group_count"), 1)[0]
    parts = max((*numbers(i, "feature_group_count"), 1)[0], of_batch)
    dtype = value_dtype(i.shapes[0].dtype)

    def one(x: Array, kernel: Array) -> Array:
        x, kernel = np.transpose(x, orders[0]).astype(dtype), np.transpose(kernel, orders[1]).astype(dtype)
        if of_batch > 1:  # each part of the batch meets the kernels of its own results
            x = np.moveaxis(x.reshape(of_batch, -1, *x.shape[1:]), 0, 1)
            x = x.reshape(x.shape[0], -1, *x.shape[3:])
        windows = windows_of(i, x, 0)
        x = windows.reshape(len(x), parts, kernel.shape[1], -1, windows.shape[-1])
        found = np.einsum("bpixw,poiw->bpox", x, kernel.reshape(parts, -1, kernel.shape[1], windows.shape[-1]))
        return np.transpose(found.reshape(len(x), -1, *windows.shape[2:-1]), np.argsort(orders[2]))

    return _each(one, *values)


def _fft(i: Instruction, m: Machine, x: Array) -> Array:
    lengths, how = numbers(i, "fft_length"), (i.attribute("fft_type") or "").lower()
    return getattr(np.fft, f"{how}n")(x, lengths, range(x.ndim - len(lengths), x.ndim))


# --- control ---


def _while(i: Instruction, m: Machine, state: Value) -> Value:
    condition, body = i.computation("condition") or "", i.computation("body") or ""
    # All devices take as many turns as the longest; one that is done keeps its state.
    while (goes_on := m.call(condition, state)).any():
        state = _chosen(goes_on, m.call(body, state), state)
    return state


def _conditional(i: Instruction, m: Machine, which: Array, *args: Value) -> Value:
    names = branches(i)
    # The first branch is for true; an index out of range takes the last branch.
    which = 1 - which.astype(int) if which.dtype == bool else np.where(which < 0, len(names), which)
    which = np.minimum(which, len(names) - 1)
    results = {k: m.call(names[k], args[k]) for k in map(int, np.unique(which))}
    return functools.reduce(lambda y, k: _chosen(which == k, results[k], y), results, next(iter(results.values())))


def _chosen(where: Array, x: Value, y: Value) -> Value:
    """Return one value on some devices, and another on the others."""
    if where.all():
        return x
    if isinstance(x, tuple):
        return tuple(_chosen(where, a, b) for a, b in zip(x, y, strict=True))
    return np.where(widened(where, x), x, y)


# --- devices ---


def _among(i: Instruction, m: Machine, fn: Callable[..., Array], *xs: Array) -> Value:
    """Apply a function of the arrays in a group, and the place of the device that gets the result."""
    found = groups(i, m.devices)
    if sorted(itertools.chain(*found)) != [*range(m.devices)]:
        raise IllFormed(i, f"does not have each of {m.devices} devices in one group")
    order = [g[1:] for g in sorted((device, group, place) for group in found for place, device in enumerate(group))]
    every = [np.broadcast_to(x, (m.devices, *x.shape[1:])) for x in xs]
    try:
        if i.opcode == "all-to-all" and not axes_of(i):  # of an array for each device in a group
            out = [np.stack([every[p][group[k]] for group, p in order]) for k in range(len(xs))]
        else:
            out = [np.stack([fn(x[[*group]], place) for group, place in order]) for x in every]
    except (ValueError, IndexError):  # shards of several sizes, or more devices than arrays
        out = []
    if [x.shape[1:] for x in out] != [s.sizes for s in i.shapes]:
        raise IllFormed(i, f"has groups of {sorted({*map(len, found)})} devices, which do not fit its sizes")
    return _one_or_more(out)


def _reducing(i: Instruction, m: Machine, *xs: Array) -> Value:
    ufunc, axis = m.combiner(i)[0], (*numbers(i, "dimensions"), 0)[0]
    if ufunc is None:
        raise UnknownForm(f"{i.opcode} with another function than a sum or an extreme")

    def fn(xs: Array, place: int) -> Array:
        total = ufunc.reduce(xs, dtype=xs.dtype)
        return total if i.opcode == "all-reduce" else np.split(total, len(xs), axis)[place]

    return _among(i, m, fn, *xs)


def _moving(i: Instruction, m: Machine, *xs: Array) -> Value:
    axis = (*numbers(i, "dimensions"), 0)[0]

    def fn(xs: Array, place: int) -> Array:
        return np.concatenate([x if i.opcode == "all-gather" else np.split(x, len(xs), axis)[place] for x in xs], axis)

    return _among(i, m, fn, *xs)


def _permute(i: Instruction, m: Machine, x: Array) -> Array:
    sources, targets = np.array(groups(i, m.devices), int).reshape(-1, 2).T
    if any(len({*p}) < len(p) or max(p, default=0) >= m.devices for p in (sources.tolist(), targets.tolist())):
        raise IllFormed(i, f"sends or receives twice on one of {m.devices} devices, or on another device")
    # A device to which nothing is sent gets zeros.
    out = np.zeros((m.devices, *x.shape[1:]), x.dtype)
    out[targets] = np.broadcast_to(x, out.shape)[sources]
    return out


def _tiling_of(i: Instruction, m: Machine) -> Tiling:
    return tiling(i.attribute("sharding") or "", len(i.shapes[0].sizes), m.devices)


def _to_shards(i: Instruction, m: Machine, x: Array) -> Array:
    """Cut an array into the shards of devices, along the mesh axes that become manual."""
    outer, inner = _tiling_of(m.operand(i), m), _tiling_of(i, m)
    pieces = (outer.piece(p, x.shape[1:], i.shapes[0].sizes, inner) for p in range(m.devices))
    return np.stack([x[p % len(x)][piece] for p, piece in enumerate(pieces)])


def _from_shards(i: Instruction, m: Machine, x: Array) -> Array:
    """Put the shards of devices together."""
    outer, inner, sizes = _tiling_of(i, m), _tiling_of(m.operand(i), m), i.shapes[0].sizes
    kept, place = np.unique(outer.manual, return_inverse=True)
    found = np.empty((len(kept), *sizes), x.dtype)
    # Several devices may have one piece: the first of them counts, since it writes last.
    for p in reversed(range(m.devices)):
        found[(place[p], *outer.piece(p, sizes, x.shape[1:], inner))] = x[p % len(x)]
    return found if len(kept) == 1 else found[place]


def _random_bits(i: Instruction, m: Machine, state: Array) -> Value:
    """Stand in for the generator: the bits depend on the state in the same way, but differ from its bits."""
    shape, dtype = i.shapes[-1].sizes, value_dtype(i.shapes[-1].dtype)

    def one(state: Array) -> Array:
        drawn = np.random.default_rng([int(n) for n in state]).bytes(math.prod(shape) * dtype.itemsize)
        return np.frombuffer(drawn, dtype).reshape(shape)

    bits = _each(one, state)
    return (state + np.ones((), state.dtype), bits) if len(i.shapes) == 2 else bits


def _own_partitioning(i: Instruction, m: Machine, *xs: Array) -> Value:
    """Evaluate the function that a custom partitioning partitions."""
    return _one_or_more(listed(m.body(i).run(xs)))


# --- the table ---


def _same(i: Instruction, m: Machine, *xs: Array) -> Value:
    return _one_or_more(xs)


_RULES: dict[str, Rule] = dict.fromkeys(ELEMENTWISE, _elementwise) | {
    "all-gather": _moving,
    "all-reduce": _reducing,
    "all-to-all": _moving,
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "call": lambda i, m, *xs: m.call(i.computation("to_apply") or "", *xs),
    "collective-permute": _permute,
    "compare": _compare,
    "concatenate": lambda i, m, *xs: np.concatenate(same_devices(xs), axes_of(i)[0]),
    "conditional": _conditional,
    "constant": lambda i, m: m.literal(i.value, i.shapes[0]),
    "convert": lambda i, m, x: converted(x, i.shapes[0]),
    "convolution": _convolution,
    "copy": _same,
    "custom-call to CustomSPMDPartitioning": _own_partitioning,
    "custom-call to Sharding": _same,
    "custom-call to SPMDFullToShardShape": _to_shards,
    "custom-call to SPMDShardToFullShape": _from_shards,
    "custom-call to TopK": _top_k,
    "dot": _dot,
    "dynamic-slice": lambda i, m, *xs: _each(lambda x, *at: x[window_at(x, at, i.shapes[0].sizes)], *xs),
    "dynamic-update-slice": lambda i, m, *xs: _each(_updated, *xs),
    "fft": _fft,
    "gather": _gather,
    "get-tuple-element": lambda i, m, x: x[numbers(i, "index")[0]],
    "iota": _iota,
    "opt-barrier": _same,
    "pad": _pad,
    "parameter": _same,
    "partition-id": lambda i, m: np.arange(m.devices, dtype=np.uint32),
    "reduce": _reduce,
    "reduce-precision": _same,  # rounding alone: floats are evaluated in float64
    "reduce-scatter": _reducing,
    "reduce-window": _reduce_window,
    "reshape": lambda i, m, x: x.reshape(len(x), *i.shapes[0].sizes),
    "reverse": lambda i, m, x: np.flip(x, axes_of(i)),
    "rng-bit-generator": _random_bits,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "slice": _slice,
    "sort": _sort,
    "topk": _top_k,
    "transpose": lambda i, m, x: np.transpose(x, (0, *axes_of(i))),
    "tuple": lambda i, m, *xs: xs,
    "while": _while,
}
