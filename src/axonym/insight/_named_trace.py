"""Trace a step once, without a mesh or mapping, and record by name what devices would exchange under a mapping.

The walk of `axonym.names` names every axis of the trace: names come with the arguments, and named operations leave
marks. Events are recorded here: what each operation sums, looks up, uses, renames or moves. Their cost is then computed
from the names: see `_counted_exchanges`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

try:
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError:  # then unused operations are counted, too
    dce_jaxpr = None

from ..core.jax_versions import is_on_host, scan_operands
from ..core.tree_spec import PROGRAM_ARRAYS, flatten_arrays
from ..distribution.active_settings import activate
from ..distribution.axis_marks import EXCHANGE, MARK, marking
from ..distribution.mesh_axes import NO_MESH
from ..names import NamedProgram
from ..names._rules import COMPARISONS, ELEMENTWISE
from ..names._sources import LeafNames
from ..names._tracing import Traced
from ..names._values import Axed, AxisStep
from ..names._walk import Body, steps_of
from ..names.distributing import DistributedFunction
from ..names.inferring import follow
from ..sharding.leaves import leaves_of
from . import _flops, _scopes
from ._arguments import step_name
from ._dispatched_rows import DispatchedRows
from ._named_events import (
    Dims,
    Event,
    Exchanged,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Offloaded,
    Open,
    PerDevice,
    Renamed,
    Sum,
    Together,
    Use,
    Value,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def named_trace(step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NamedTrace:
    """Trace a step with abstract arguments."""
    given, static = flatten_arrays((args, dict(kwargs)), PROGRAM_ARRAYS, named=False)
    returned: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = static.unflatten(arrays)
        leaves = leaves_of(step(*args, **kwargs))[0]
        found = [(getattr(x.value, "array", x.value), x.names) for x in leaves]
        found = [(x, names) for x, names in found if isinstance(x, PROGRAM_ARRAYS)]
        returned[:] = [names for _, names in found]
        return [x for x, _ in found]

    with _without_mesh():
        with marking():
            closed = jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given))
        named = step.named(args, kwargs) if isinstance(step, DistributedFunction) else (args, dict(kwargs))
    # Operations that no result needs are not compiled, such as a loss if only its gradients are returned.
    jaxpr = closed.jaxpr
    if dce_jaxpr is not None:
        jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    names = _names_of_arguments(named)
    said = [LeafNames(own, "an argument") for own in names]
    whole, needed = (
        follow(Traced(program, static, static, ()), said) for program in (closed, closed.replace(jaxpr=jaxpr))
    )
    events = _Events(needed.names_of, {n for own in names for n in own if n is not None})
    values = [events.value(v.aval, own) for v, own in zip(jaxpr.invars, names, strict=True)]
    results = events.run(needed.body, values, Occurrence())
    # No result may need the operation that renames an axis, but its gradient.
    events.renamed(whole)
    for i, (own, x) in enumerate(zip(returned, results, strict=True)):
        if own is not None:
            dims = tuple(zip(own, (n for _, n in x.dims), strict=True))
            if own not in names:  # an updated argument has its names
                events.differ(Occurrence(), x.dims, dims, at_end=True)
            results[i] = x.called(dims)
    exchanges = [*events.rows.exchanges()]
    return NamedTrace(
        step_name(step), tuple(dict.fromkeys((*events.found, *exchanges))), tuple(values), tuple(results),
        tuple(events.kept), tuple(events.parts), events.slices, events.unnamed, tuple(events.uncounted), events.grouped,
        frozenset(n for e in exchanges for n in e.names), isinstance(step, DistributedFunction), events.rows.joined,
    )  # fmt: skip


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    """Trace without a mesh or mapping; a step that asks for a mesh is refused."""
    with activate(None), jax.sharding.use_abstract_mesh(NO_MESH), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(nothing was placed|no mesh is active)")
        # They compute all the same.
        warnings.filterwarnings("ignore", message=r"(named_jit|distribute)\(.*no mesh is active")
        try:
            yield
        except (RuntimeError, UserWarning) as e:
            if "mesh" not in str(e):
                raise
            raise NotKnown(f"explain: by='names' traces a step without a mesh, which it asks for: {e}") from e


def _names_of_arguments(named: Any) -> list[tuple[str | None, ...]]:
    """Return the names of each array in the arguments, given a tree of them."""
    found = []
    for leaf in leaves_of(named)[0]:
        if not isinstance(getattr(leaf.value, "array", leaf.value), PROGRAM_ARRAYS):
            continue
        spec = getattr(getattr(leaf.value, "sharding", None), "spec", ())
        if leaf.names is None and any(entry is not None for entry in spec):
            raise NotKnown(f"explain: by='names' cannot follow an array without names that is sharded by {spec}.")
        found.append(tuple(None if n == "_" else n for n in leaf.names or (None,) * len(leaf.shape or ())))
    return found


Rule = Callable[["_Events", AxisStep, list[Value], list[Value], Occurrence], None]

_ALONG = {"concatenate": "dimension", "split": "axis", "cumsum": "axis", "cumprod": "axis", "cummax": "axis"}
_ALONG |= {"cummin": "axis", "cumlogsumexp": "axis", "sort": "dimension", "rev": "dimensions"}
_ALONG |= {"argmax": "axes", "argmin": "axes", "unstack": "axis", "top_k": "axis"}
"""For each primitive that works along axes of its operand, the parameter that says which."""


class _Events:
    """Records what devices exchange for each operation of a program whose axes have names."""

    def __init__(self, names_of: Callable[[Axed], tuple[str | None, ...]], given: set[str]) -> None:
        self.found: list[Event] = []
        self.kept: list[tuple[Value, Occurrence]] = []
        self.parts: list[Value] = []
        self.slices: dict[int, int] = {}
        self.unnamed = 0
        self.uncounted: dict[str, None] = {}
        self.grouped = False
        self.rows = DispatchedRows(given)
        self._names_of = names_of
        self._numbers = itertools.count(1)
        self._made: dict[Any, list[int]] = {}
        """The numbers of results, by the operation and the numbers of its operands."""
        self._made_by: dict[int, _scopes.ScopedOperation] = {}
        """The named operations that made the results of elementwise operations and products."""
        self._constants: set[int] = set()
        """The numbers of arrays that depend on no argument."""
        self._together: set[tuple[str, ...]] = set()
        """The axes of the results so far: what holds for one of several arrays with these axes holds for all."""

    # --- values ---

    def value(self, aval: Any, names: Sequence[str | None], like: Value | None = None) -> Value:
        """Make a value; `like` is the same value in another layout."""
        dims = tuple(zip(names, aval.shape, strict=True))
        number, base = (next(self._numbers), dims) if like is None else (like.origin, like.base)
        return Value(dims, aval.dtype, number, base)

    def _named(self, var: Any, x: Axed) -> Value:
        return self.value(var.aval, self._names_of(x))

    def _used(self, value: Value, x: Axed) -> Value:
        """Return an operand. Each use of an array that depends on no argument has axes of its own."""
        names = self._names_of(x)
        return value.called(
            tuple(d if d[1] == 1 or n is None else (n, d[1]) for n, d in zip(names, value.dims, strict=True))
        )

    # --- functions, loops and branches ---

    def run(self, body: Body, given: Sequence[Value], around: Occurrence) -> list[Value]:
        """Record the events of a function, and return its results."""
        known: dict[Any, Value] = dict(zip(body.jaxpr.invars, given, strict=True))
        known |= {v: self.value(v.aval, (None,) * len(v.aval.shape)) for v in body.jaxpr.constvars}  # pyright: ignore

        def read(var: Any) -> Value:
            if not hasattr(var, "val"):
                return known[var]
            self._constants.add((literal := self.value(var.aval, (None,) * len(var.aval.shape))).origin)
            return literal

        for step in body.steps:
            operands = [self._used(read(v), x) for v, x in zip(step.eqn.invars, step.operands, strict=True)]
            key = _key(step.eqn, operands)
            constant = key is not None and self._constants.issuperset(x.origin for x in operands)
            avoidable = constant or key in self._made
            results = self._results(step, operands, around.inside(step.eqn), avoidable)
            if key is not None:
                origins = self._made.setdefault(key, [x.origin for x in results])
                results = [dataclasses.replace(x, origin=n) for x, n in zip(results, origins, strict=True)]
                self._constants.update(origins if constant else ())
            known.update(zip(step.eqn.outvars, results, strict=True))
        return [read(v) for v in body.jaxpr.outvars]

    def _results(self, step: AxisStep, xs: list[Value], around: Occurrence, avoidable: bool) -> list[Value]:
        inside = _INSIDE.get(step.name)
        if inside is None and len(step.bodies) == 1 and step.name not in _UNCOUNTED:
            again = "remat" in step.name or "checkpoint" in step.name
            body = dataclasses.replace(around, within=next(self._numbers), recomputes=True) if again else around
            return self.run(step.bodies[0], xs, body)
        ys = [self._named(v, x) for v, x in zip(step.eqn.outvars, step.results, strict=True)]
        if (dispatch := _scopes.dispatch(around.scope)) is not None:
            self.rows.add(dispatch, around, ys)
        if inside is not None:
            inside(self, step, xs, ys, around)
        elif _scopes.exchanges(around.scope) and step.name != MARK:  # all other steps of it are local
            if step.name == EXCHANGE:
                what, along, *details = step.params["names"]
                place = dataclasses.replace(around, avoidable=xs[0].origin in self._constants)
                self.found.append(Exchanged(place, ys[0], what, along, tuple(details)))
        elif step.name in _LAYOUT:
            return [self._relaid(step, x, y, around) for x, y in zip(xs, ys, strict=True)]
        elif (rule := _RULES.get(step.name)) is not None:
            rule(self, step, xs, ys, dataclasses.replace(around, avoidable=avoidable))
        elif step.name not in _SILENT:
            self._open(around, step.name, [d for x in xs for d in x.dims])
        return ys

    def _scan(self, step: AxisStep, xs: list[Value], ys: list[Value], around: Occurrence) -> None:
        (body,), times = step.bodies, around.times
        consts, carry, stacked = scan_operands(step.params, xs)
        kept = len(consts) + len(carry)
        inside = [self._named(v, x) for v, x in zip(body.jaxpr.invars, body.arguments, strict=True)]
        inner = dataclasses.replace(
            around, times=None if times is None else times * step.params["length"], within=next(self._numbers)
        )
        self._open(around, "a loop", [x.dims[0] for x in stacked])
        self.slices |= {own.origin: x.origin for own, x in zip(inside[kept:], stacked, strict=True)}
        results = self.run(body, [*consts, *carry, *inside[kept:]], inner)
        self._again(around, carry, results)
        if around.phase == "forward":
            # The slices that it goes through are kept anyway, and each array once.
            seen = {x.origin for x in inside[kept:]}
            for v, y, own in list(zip(step.eqn.outvars, ys, results, strict=True))[len(carry) :]:
                if not is_on_host(v.aval) and own.origin not in seen:
                    seen.add(own.origin)
                    self.kept.append((y, around))

    def _while(self, step: AxisStep, xs: list[Value], ys: list[Value], around: Occurrence) -> None:
        tests, consts = step.params["cond_nconsts"], step.params["body_nconsts"]
        carry = xs[tests + consts :]
        inner = dataclasses.replace(around, times=None, within=next(self._numbers))
        self.run(step.bodies[0], [*xs[:tests], *carry], inner)
        self._again(around, carry, self.run(step.bodies[1], xs[tests:], inner))

    def _cond(self, step: AxisStep, xs: list[Value], ys: list[Value], around: Occurrence) -> None:
        number = next(self._numbers)
        for i, body in enumerate(step.bodies):
            inner = dataclasses.replace(around, branches=(*around.branches, (number, len(step.bodies), i)))
            self._again(around, ys, self.run(body, xs[1:], inner))

    def _again(self, around: Occurrence, before: Sequence[Value], after: Sequence[Value]) -> None:
        """Compare the names of the results of a loop or branch with the expected names."""
        for x, y in zip(before, after, strict=False):
            if x.dims != y.dims:
                self.differ(around, y.dims, x.dims)

    # --- names that change ---

    def differ(self, place: Occurrence, before: Dims, after: Dims, whole: bool = False, at_end: bool = False) -> None:
        """Record that the names of an array differ before and after.

        In code without names they are inferred, and no mapping places such an array by them.
        """
        if place.operation is None and not at_end:
            return
        before, after = self._parted(before), self._parted(after)
        if any(None not in (a, b) and a != b and size > 1 for (a, size), (b, _) in zip(before, after, strict=True)):
            filled = tuple((b if b is not None else a, n) for (a, n), (b, _) in zip(before, after, strict=True))
            self.found.append(Renamed(place, before, filled, whole))

    def _parted(self, dims: Dims) -> Dims:
        """Rename joined axes in the same way if the same axes were joined into them."""
        return tuple(("*".join(self.rows.joined.get(n or "", (n,))) if n else n, size) for n, size in dims)  # pyright: ignore

    def renamed(self, program: NamedProgram) -> None:
        """Record the axes that named operations call otherwise, unless they are parts of others."""
        for step in steps_of(program.body):
            if step.name != MARK:
                continue
            names = zip(*map(program.names_of, (step.operands[0], step.results[0])), strict=True)
            pairs = [(None if a is None or "." in a else a, b) for a, b in names]
            if any(a != b for a, b in pairs if a is not None):
                place = _around(step)
                before, after = (tuple(zip(own, step.shape, strict=True)) for own in zip(*pairs, strict=True))
                changed = {a for a, b in pairs if a != b}
                whole = place.operation is not None and not changed.isdisjoint(place.operation.axes)
                self.differ(place, before, after, whole)

    def _marked(self, step: AxisStep, x: Value, y: Value) -> Value:
        """Return an array with the names that a named operation gives its axes."""
        names = [a if a is not None else b for (a, _), b in zip(y.dims, step.params["names"], strict=True)]
        dims = tuple(zip(names, step.shape, strict=True))
        new = {a: b for (a, _), (b, _) in zip(x.dims, dims, strict=True) if a is not None}
        base = dims if x.base == x.dims else tuple((new.get(n, n) if n else n, size) for n, size in x.base)
        return dataclasses.replace(x, dims=dims, base=base)

    # --- rules for primitives ---

    def _relaid(self, step: AxisStep, x: Value, y: Value, place: Occurrence) -> Value:
        """Return an array in another layout: it is the same one, unless a reshape joins or splits axes."""
        if step.name == MARK:
            return self._marked(step, x, y)
        if step.name == "reshape" and _large(x.dims) != _large(y.dims):
            if not self.rows.are_moved(step, [x], place):
                self._open(place, step.name, _torn(x.dims, y.dims, place.operation is not None))
                if any(n is not None and size < dict(x.dims).get(n, size) for n, size in y.dims):
                    self.parts.append(y)
            return y
        return dataclasses.replace(y, origin=x.origin, base=x.base if x.names else y.base)

    def _product(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        self._multiplied(step.params["dimension_numbers"], xs, ys[0], (), place)

    def _grouped_product(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record a product of groups of rows, each with the matrix of its group."""
        self.grouped = True
        numbers, (left, right) = step.params["ragged_dot_dimension_numbers"], xs[:2]
        groups = tuple(numbers.rhs_group_dimensions)
        of_groups = [right.dims[i] for i in groups] or list(ys[0].dims[:1])
        dispatch = _scopes.dispatch(place.scope)
        if dispatch is None:  # the compiler or per-device code decides how rows in groups are sharded
            self._open(place, "a grouped product", [*(left.dims[i] for i in numbers.lhs_ragged_dimensions), *of_groups])
        else:
            self.rows.add_groups(dispatch, tuple(of_groups))
            if not groups:  # the dtype in which gradients of experts are summed
                ys[0] = dataclasses.replace(ys[0], dtype=np.promote_types(np.float32, ys[0].dtype))
        self._multiplied(numbers.dot_dimension_numbers, [left, right], ys[0], groups, place)

    def _multiplied(self, numbers: Any, xs: list[Value], y: Value, groups: Sequence[int], place: Occurrence) -> None:
        ((left_summed, right_summed), (left_batch, right_batch)), (left, right) = numbers, xs
        free = [d for i, d in enumerate(left.dims) if i not in (*left_summed, *left_batch)]
        free += [d for i, d in enumerate(right.dims) if i not in (*right_summed, *right_batch, *groups)]
        kept = y.dims[len(y.dims) - len(free) - len(left_batch) :]
        pairs = [(left.dims[i], right.dims[j]) for i, j in zip(left_summed, right_summed, strict=True)]
        self.differ(place, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        for x, batch in ((left, left_batch), (right, right_batch)):
            self.differ(place, (*(x.dims[i] for i in batch), *free), kept)
        summed = tuple(a if a[0] is not None else b for a, b in pairs)
        if any(n is None and size > 1 for n, size in (*kept, *summed)):
            self.unnamed += 1
        self._noted(place, xs, y, product=True)
        axes = (*kept, *summed)
        narrow = left.dtype.itemsize == right.dtype.itemsize == 1
        flops = 2 * math.prod(n for _, n in axes)
        self.found.append(Sum(place, y, self._summed(place, summed), axes, flops, narrow))

    def _convolved(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record a convolution: a product along its channels, with windows that names say nothing of."""
        params, numbers, (left, right), y = step.params, step.params["dimension_numbers"], xs, ys[0]
        (_, channel, *spatial), (_, inner, *window) = numbers.lhs_spec, numbers.rhs_spec
        (batch, feature, *places) = numbers.out_spec
        grouped = params["feature_group_count"] * params["batch_group_count"] > 1
        along = [*(left.dims[i] for i in spatial), *(right.dims[i] for i in window), *(y.dims[i] for i in places)]
        self._open(place, step.name, [*along, *(left.dims[channel], y.dims[feature], y.dims[batch])[: 3 * grouped]])
        met = 1  # the pairs of an output and an element of the kernel that meet an element of the input
        before = [low for low, _ in params["padding"]]
        settings = (params["window_strides"], before, params["lhs_dilation"], params["rhs_dilation"])
        for i, j, k, *setting in zip(spatial, window, places, *settings, strict=True):
            met *= _flops.Window(*setting).seen(left.dims[i][1], right.dims[j][1], y.dims[k][1])
        kept, summed = (y.dims[batch], y.dims[feature]), (right.dims[inner] if grouped else left.dims[channel],)
        if not grouped:
            self.differ(place, summed, (right.dims[inner],))
        self._noted(place, xs, y, product=True)
        flops = 2 * met * math.prod(n for _, n in (*kept, *summed))
        self.found.append(Sum(place, y, self._summed(place, summed), (*kept, *summed), flops))

    def _windowed(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        windows = step.params["window_dimensions"]
        self._open(place, step.name, [d for d, n in zip(xs[0].dims, windows, strict=True) if n > 1])

    def _reduced(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        (x,), axes = xs, step.params["axes"]
        # The compiler does not sum an array along an axis that broadcasting added.
        gone = tuple(d for d in (x.dims[i] for i in axes) if d in x.base)
        self.found.append(Sum(place, ys[0], self._summed(place, gone), x.dims, 0))

    def _looked_up(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record a look-up; of complete rows of a table along one axis, its cost is known."""
        numbers, (table, indices) = step.params["dimension_numbers"], xs
        batch = numbers.operand_batching_dims
        if self.rows.are_moved(step, xs, place):
            return
        at = _indexed(table, numbers.start_index_map, dict(enumerate(step.params["slice_sizes"])))
        if at is not None and not batch:
            self.found.append(Lookup(place, table, indices, ys[0], table.dims[at], False))
        else:
            dims = [d for i, d in enumerate(table.dims) if i not in batch] if batch else [d for x in xs for d in x.dims]
            self._open(place, step.name, dims)

    def _updated(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record the gradient of a look-up."""
        numbers, (_, indices, updates) = step.params["dimension_numbers"], xs
        batch = numbers.operand_batching_dims
        if self.rows.are_moved(step, xs, place):
            return
        window = [i for i in range(len(ys[0].dims)) if i not in (*numbers.inserted_window_dims, *batch)]
        sizes = {i: updates.dims[j][1] for i, j in zip(window, numbers.update_window_dims, strict=True)}
        at = _indexed(ys[0], numbers.scatter_dims_to_operand_dims, sizes)
        if at is not None and not batch:
            self.found.append(Lookup(place, ys[0], indices, updates, ys[0].dims[at], True))
            return
        of_table = [d for i, d in enumerate(ys[0].dims) if i not in batch]
        self._open(place, step.name, of_table if batch else [d for x in xs for d in x.dims])
        if batch and place.operation is not None and place.operation.name == "top_k":
            self.found.append(PerDevice(place, ys[0]))

    def _scattered(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        if not self.rows.are_moved(step, xs, place):
            self._open(place, step.name, [d for x in xs for d in x.dims])

    def _along(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        along = step.params.get(_ALONG[step.name], -1)
        self._open(place, step.name, [x.dims[i] for x in xs for i in (along if isinstance(along, tuple) else (along,))])

    def _sliced(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        new = xs[1].dims if step.name == "dynamic_update_slice" else ys[0].dims
        self._open(place, step.name, [d for d, (_, n) in zip(xs[0].dims, new, strict=True) if d[1] != n])

    def _elementwise(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        for y in ys:
            for x in xs:
                if x.dims != y.dims and len(x.dims) == len(y.dims):
                    pairs = zip(x.dims, y.dims, strict=True)
                    self.differ(place, x.dims, tuple((n if m == size else None, m) for (_, m), (n, size) in pairs))
            self._noted(place, xs, y)

    def _moved(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        for v, w, y in zip(step.eqn.invars, step.eqn.outvars, ys, strict=True):
            if is_on_host(v.aval) != is_on_host(w.aval):
                self.found.append(Offloaded(place, y))

    def _transformed(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        self._open(place, step.name, xs[0].dims[-len(step.params["fft_lengths"]) :])

    def _not_counted(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        self.uncounted.setdefault(step.name)
        self._open(place, step.name, [d for x in xs for d in x.dims])

    def _called_back(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record a call of a Python function: one device makes it, and sends the results to all others."""
        self._open(place, step.name, [d for x in (*xs, *ys) for d in x.dims])
        self.found += [PerDevice(place, y) for y in ys]

    def _open(self, place: Occurrence, what: str, dims: Sequence[tuple[str | None, int]]) -> None:
        names = frozenset(n for n, size in dims if n is not None and size > 1)
        if names := names - self.rows.in_names(names, place):
            self.found.append(Open(place, what, names))

    def _noted(self, place: Occurrence, operands: Sequence[Value], result: Value, product: bool = False) -> None:
        """Record the operands that an operation uses, and the axes of its result."""
        for x in operands:
            # In a product, a broadcast operand counts with all its axes.
            dims = [d for other in operands if other is not x for d in (other.dims if product else other.base)]
            others = frozenset(n for n, size in dims if n is not None and size > 1)
            if x.names and not others.issubset(x.names):
                avoidable = place.avoidable or x.origin in self._constants
                intermediate = place.operation is not None and self._made_by.get(x.origin) == place.operation
                self.found.append(Use(dataclasses.replace(place, avoidable=avoidable), x, others, intermediate))
        if place.operation is not None:
            self._made_by.setdefault(result.origin, place.operation)
        names = tuple(dict.fromkeys(n for n, _ in result.dims if n is not None))
        if len(names) > 1 and names not in self._together:
            self._together.add(names)
            self.found.append(Together(place, names))

    def _summed(self, place: Occurrence, dims: Dims) -> Dims:
        """Leave out rows from the axes that an operation sums over, if each device sums its own."""
        if place.phase == "backward" or _scopes.dispatch(place.scope) is None:
            return dims
        rows = self.rows.in_names([n for n, _ in dims], place)
        return tuple(d for d in dims if d[0] not in rows)


def _around(step: AxisStep) -> Occurrence:
    return (Occurrence() if step.outer is None else _around(step.outer)).inside(step.eqn)


def _large(dims: Dims) -> list[int]:
    return [n for _, n in dims if n != 1]


def _indexed(table: Value, at: Sequence[int], slices: Mapping[int, int]) -> int | None:
    """Return the only axis of a table of which one element is looked up, if all others are complete; None otherwise."""
    found = [i for i, (_, size) in enumerate(table.dims) if slices.get(i, 1) != size] or list(at[:1])
    return found[0] if len(found) == 1 and found[0] in at and slices.get(found[0], 1) == 1 else None


def _torn(before: Dims, after: Dims, named: bool) -> list[tuple[str | None, int]]:
    """Return the axes that a reshape joins or splits otherwise than at the first of several, as its devices can.

    A named operation gives the first of several the name of the axis that they are parts of, or another one.
    """
    found: list[tuple[str | None, int]] = []
    left, right = ([d for d in reversed(dims) if d[1] != 1] for dims in (before, after))
    while left and right:
        old, new = [left.pop()], [right.pop()]
        while (a := math.prod(n for _, n in old)) != (b := math.prod(n for _, n in new)):
            more, of = (left, old) if a < b else (right, new)
            if not more:
                break
            of.append(more.pop())
        (whole, *rest), parts = (old, new) if len(old) == 1 else (new, old)
        if rest or whole[0] != (parts[0][0] if named else "*".join(n or "" for n, _ in parts)):
            found += old
        elif len(parts) > 1:
            found += parts[1:]
    return found + left


def _key(eqn: JaxprEqn, operands: Sequence[Value]) -> Any:
    """Return a key that is equal for operations that compute the same; None if they call functions."""
    given = tuple(
        (str(var), x.dtype) if hasattr(var, "val") else (x.origin, x.dims)
        for var, x in zip(eqn.invars, operands, strict=True)
    )
    key = eqn.primitive, tuple(sorted(eqn.params.items())), given
    try:
        hash(key)
    except TypeError:
        return None
    return None if any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in eqn.params.values()) else key


_INSIDE = {"scan": _Events._scan, "while": _Events._while, "cond": _Events._cond}

_LAYOUT = {"convert_element_type", "copy", "reduce_precision", "stop_gradient", "optimization_barrier", "name", MARK}
_LAYOUT |= {"transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
"""Primitives whose results are their operands in another layout."""

_UNCOUNTED = {"shard_map", "pallas_call", "custom_partitioning"}
"""Primitives that may multiply, and whose flops are not known."""

_SILENT = {"iota", "random_bits", "random_wrap", "random_unwrap", "random_seed", "stack"}
"""Primitives that exchange nothing."""

_RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE.split(), *COMPARISONS.split(), "bitcast_convert_type"), _Events._elementwise),
    **dict.fromkeys(_ALONG, _Events._along),
    **dict.fromkeys((f"reduce_{what}" for what in ("sum", "max", "min", "prod", "and", "or")), _Events._reduced),
    **dict.fromkeys(("slice", "pad", "dynamic_slice", "dynamic_update_slice"), _Events._sliced),
    **dict.fromkeys(_UNCOUNTED, _Events._not_counted),
    **dict.fromkeys((f"reduce_window{what}" for what in ("", "_max", "_min", "_sum")), _Events._windowed),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _Events._windowed),
    **dict.fromkeys(("pure_callback", "io_callback"), _Events._called_back),
    "device_put": _Events._moved,
    "dot_general": _Events._product,
    "conv_general_dilated": _Events._convolved,
    "fft": _Events._transformed,
    "ragged_dot_general": _Events._grouped_product,
    "gather": _Events._looked_up,
    "scatter-add": _Events._updated,
    "scatter": _Events._scattered,
}
"""For each primitive, the rule that records what devices exchange for it. Along all axes of others, it is not known."""
