"""Trace a step once, without a mesh or mapping, and record by name what devices would exchange under a mapping.

The walk of `axonym.names` names every axis of the trace: names come with the arguments, and named operations leave
marks. Events are recorded here: what each operation sums, looks up, uses, renames or moves. Their cost is then computed
from the names: see `_counted_exchanges`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..axis import Names
from ..core import errors
from ..core.jax_versions import is_on_host, without_unused
from ..core.operation_rules import Inside, OperationRule, inside
from ..core.tree_spec import PROGRAM_ARRAYS, flatten_arrays
from ..distribution.active_settings import REPORTED, activate
from ..distribution.axis_marks import ACTIVE_HERE, EXCHANGE, MARK, PLACEMENT, marking
from ..distribution.mesh_axes import NO_MESH
from ..names import NamedProgram
from ..names._axes import fresh
from ..names._sources import LeafNames
from ..names._values import Axed, AxisStep
from ..names._walk import AxisWalk, Body, steps_of
from ..names.distributing import DistributedFunction
from ..names.inferring import Traced, follow
from ..sharding.leaves import leaves_of
from . import _flops, _scopes
from ._arguments import step_name
from ._named_events import (
    BY_REPORT,
    Dims,
    Event,
    Exchanged,
    Lies,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Offloaded,
    Open,
    PerDevice,
    Placed,
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

    asks = "explain: by='names' traces a step without a mesh, which it asks for: "

    def handle(warning: str) -> bool:
        if re.match(r"(named_jit|distribute)\(.*no mesh is active", warning):
            return True  # they compute all the same
        if re.search("nothing was placed|no mesh is active", warning):
            raise NotKnown(asks + warning)
        return False

    with activate(None), jax.sharding.use_abstract_mesh(NO_MESH), errors.handling_warnings(handle):
        try:
            with marking():
                closed = jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given))
            named = step.named(args, kwargs) if isinstance(step, DistributedFunction) else (args, dict(kwargs))
        except RuntimeError as e:
            if "mesh" not in str(e):
                raise
            raise NotKnown(f"{asks}{e}") from e
    # Operations that no result needs are not compiled, such as a loss if only its gradients are returned.
    jaxpr = without_unused(closed.jaxpr)
    names: list[tuple[str | None, ...]] = []
    for leaf in leaves_of(named)[0]:
        if isinstance(getattr(leaf.value, "array", leaf.value), PROGRAM_ARRAYS):
            spec = getattr(getattr(leaf.value, "sharding", None), "spec", ())
            if leaf.names is None and any(entry is not None for entry in spec):
                raise NotKnown(f"explain: by='names' cannot follow an array without names that is sharded by {spec}.")
            names.append(tuple(None if n == "_" else n for n in leaf.names or (None,) * len(leaf.shape or ())))
    said = [LeafNames(own, "an argument") for own in names]
    whole, needed = (
        follow(Traced(program, static, static, ()), said) for program in (closed, closed.replace(jaxpr=jaxpr))
    )
    events = _Events(needed.names_of, {n for own in names for n in own if n is not None})
    values = [events.value(v.aval, own) for v, own in zip(jaxpr.invars, names, strict=True)]
    results = events.run(needed.body, values, Occurrence())
    # No result may need the operation that renames an axis, but its gradient.
    if any(isinstance(e, Placed) for e in events.found):
        followed = _Events(whole.names_of, set())
        followed.run(whole.body, values, Occurrence())
        events.renamed(whole, followed.lying)
    else:
        events.renamed(whole, {})
    for i, (own, x) in enumerate(zip(returned, results, strict=True)):
        if own is not None:
            dims = tuple(zip(own, (n for _, n in x.dims), strict=True))
            if own not in names:  # an updated argument has its names
                events.differ(Occurrence(), x.dims, dims, at_end=True)
            events.place_by(Occurrence(), x, BY_REPORT)
            results[i] = dataclasses.replace(x.called(dims), by=BY_REPORT)
    exchanges = [*events.rows.exchanges()]
    return NamedTrace(
        step_name(step), tuple(dict.fromkeys((*events.found, *exchanges))), tuple(values), tuple(results),
        tuple(events.kept), tuple(events.parts), events.slices, events.unnamed, tuple(events.uncounted), events.grouped,
        frozenset(n for e in exchanges for n in e.names), isinstance(step, DistributedFunction), events.rows.joined,
        {e.along: e.details[0] for e in events.found if isinstance(e, Exchanged) and e.what == "matrices"},
    )  # fmt: skip


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
        self.lying: dict[int, Lies] = {}
        """The mapping by which the results of a step of the program lie, by its identity, if not by the report's."""
        self._constants: set[int] = set()
        """The numbers of arrays that depend on no argument."""
        self._together: set[tuple[tuple[str, ...], Lies]] = set()
        """The axes of the results so far: what holds for one of several arrays with these axes holds for all that lie
        by the same mapping."""

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
            place = around.inside(step.eqn)
            place = dataclasses.replace(place, by=self._mapping_of_results(operands, None if step.bodies else place))
            if place.by != BY_REPORT:
                self.lying[id(step)] = place.by
            results = self._results(step, operands, place, avoidable)
            depth = max((x.depth for x in operands), default=0)
            results = [dataclasses.replace(x, depth=depth) for x in results]
            if key is not None:
                origins = self._made.setdefault(key, [x.origin for x in results])
                results = [dataclasses.replace(x, origin=n) for x, n in zip(results, origins, strict=True)]
                self._constants.update(origins if constant else ())
            known.update(zip(step.eqn.outvars, results, strict=True))
        return [read(v) for v in body.jaxpr.outvars]

    def _mapping_of_results(self, xs: Sequence[Value], place: Occurrence | None = None) -> Lies:
        """Return the mapping by which the results of an operation lie, and record the operands that lie by others.

        Those that are replicated, or depend on no argument, follow the others.
        """
        if all(x.by == BY_REPORT for x in xs):
            return BY_REPORT
        new = [x for x in xs if x.origin in self._constants]
        varying = [x for x in xs if x.names and x not in new]
        if not varying:
            return next((x.by for x in new if x.by != BY_REPORT), BY_REPORT)
        sharded = [x for x in varying if x.may_be_sharded]
        # Mappings that the step has inside come before the one of the report, with entries replaced or as it is.
        found = min((x.by for x in sharded), key=lambda by: (REPORTED in dict(by), by == BY_REPORT), default=())
        known, seen = dict(found), {n for x in varying for n in x.names}
        for x in new:  # the mapping that is active here places axes that only they have
            by = dict(x.by)
            own = {n: by.get(n) for n in x.names if n not in seen and (n in by or REPORTED not in by)}
            known |= {n: over for n, over in own.items() if REPORTED in known or over != known.get(n)}
        found = tuple(sorted(known.items(), key=lambda pair: pair[0]))
        for x in sharded:
            self.place_by(place, x, found, asked=False)
        return found

    def place_by(self, place: Occurrence | None, x: Value, by: Lies, asked: bool = True) -> None:
        """Record that an array is placed by a mapping, if it lies by another one."""
        if x.by != by and place is not None and x.origin not in self._constants:
            self.found.append(Placed(dataclasses.replace(place, by=x.by), x, by, asked))

    def _by_mark(self, x: Value, place: Occurrence, kind: str, names: Names, by: Lies) -> Value:
        """Return an array that a mark places by a mapping; the active mapping places only new arrays."""
        if kind == ACTIVE_HERE:
            return dataclasses.replace(x, by=by) if x.origin in self._constants else x
        if x.by != by:  # along an axis over which `vmap` maps, JAX leaves an array where it lies
            self._open(place, "a placement", [d for d in x.dims if d[0] not in names])
        self.place_by(place, x, by)
        return dataclasses.replace(x, by=by)

    def _results(self, step: AxisStep, xs: list[Value], around: Occurrence, avoidable: bool) -> list[Value]:
        functions = inside(step.eqn) if step.bodies else []
        if functions and functions[0].how == "call" and step.name not in _UNCOUNTED:
            again = "remat" in step.name or "checkpoint" in step.name
            body = dataclasses.replace(around, within=next(self._numbers), recomputes=True) if again else around
            # A barrier keeps what is computed again from being moved.
            return self.run(step.bodies[0], _changed_alike(xs) if again else xs, body)
        if step.name == EXCHANGE and step.params["names"][0] in (ACTIVE_HERE, PLACEMENT):
            return [self._by_mark(xs[0], around, *step.params["names"])]
        ys = [self._named(v, x) for v, x in zip(step.eqn.outvars, step.results, strict=True)]
        ys = [dataclasses.replace(y, by=around.by) for y in ys]
        if (dispatch := _scopes.around(around.scope, "dispatch")) is not None:
            self.rows.add(dispatch, around, ys)
        if functions and functions[0].how in ("loop", "test", "branch"):
            self._inside(step, functions, xs, ys, around)
        elif step.name == "custom_linear_solve":
            # The names of its solver are followed apart: it takes rows for columns, and the result has the names that
            # solve the system.
            counts, solver = step.params["const_lengths"], step.params["jaxprs"].solve
            first, walk = counts.matvec + counts.vecmat, AxisWalk()
            given, arguments = [*xs[first : first + counts.solve], *xs[sum(counts) :]], list[Axed]()
            for x in given:
                dims = [fresh(n) if name is None else walk.axes.axis(name, n, "") for name, n in x.dims]
                arguments.append(Axed(tuple(dims)))
            self.run(walk.run(solver.jaxpr, arguments, step, solver.consts), given, around)
        elif _scopes.exchanges(around.scope) and step.name != MARK:  # all other steps of it are local
            if step.name == EXCHANGE:
                what, along, *details = step.params["names"]
                place = dataclasses.replace(around, avoidable=xs[0].origin in self._constants)
                self.found.append(Exchanged(place, ys[0], what, along, tuple(details)))
        elif step.rule is None or step.name in _OTHERS:
            self._without_rule(step, xs, ys, dataclasses.replace(around, avoidable=avoidable))
        elif (step.rule.values == "moved" and not step.rule.parts) and (
            step.name == "reshape" or (len(xs) == len(ys) and not step.rule.needed)
        ):
            return [self._relaid(step, x, y, around) for x, y in zip(xs, ys, strict=True)]
        else:
            self._by_rule(step, step.rule, xs, ys, dataclasses.replace(around, avoidable=avoidable))
        return ys

    def _inside(
        self, step: AxisStep, functions: Sequence[Inside], xs: list[Value], ys: list[Value], around: Occurrence
    ) -> None:
        """Record the events of a loop or of branches."""
        number = next(self._numbers)
        for i, (f, body) in enumerate(zip(functions, step.bodies, strict=True)):
            given, first = [xs[j] for j in f.operands], len(f.operands) - f.sliced
            if f.how == "branch":
                inner = dataclasses.replace(around, branches=(*around.branches, (number, len(functions), i)))
                results = self.run(body, _changed_alike(xs, given), inner)
                ys[:] = [dataclasses.replace(y, by=x.by) for y, x in zip(ys, results, strict=True)] if i == 0 else ys
                self._again(around, ys, results)
                continue
            times = None if around.times is None or f.times is None else around.times * f.times
            inner = dataclasses.replace(around, times=times, turns=(*around.turns, f.times), within=number)
            stacked = given[first:]
            given[first:] = [self._named(v, x) for v, x in zip(body.jaxpr.invars, body.arguments, strict=True)][first:]
            given[first:] = [dataclasses.replace(x, by=y.by) for x, y in zip(given[first:], stacked, strict=True)]
            self._open(
                dataclasses.replace(around, by=self._mapping_of_results(stacked)),
                "a loop",
                [x.dims[0] for x in stacked],
            )
            self.slices |= {own.origin: x.origin for own, x in zip(given[first:], stacked, strict=True)}
            for j in (*range(f.first, f.first + f.carried), *range(first, len(given))):
                given[j] = dataclasses.replace(given[j], depth=len(inner.turns))
            results = self.run(body, given, inner)
            if f.how == "loop":
                ys[:] = [dataclasses.replace(y, by=x.by) for y, x in zip(ys, results, strict=True)]
                self._again(around, given[f.first : f.first + f.carried], results)
            if f.how == "loop" and around.phase == "forward":
                # The slices that it goes through are kept anyway, and each array once.
                seen = {x.origin for x in given[first:]}
                for v, y, own in list(zip(step.eqn.outvars, ys, results, strict=True))[f.carried :]:
                    if not is_on_host(v.aval) and own.origin not in seen:
                        seen.add(own.origin)
                        self.kept.append((y, around))

    def _again(self, around: Occurrence, before: Sequence[Value], after: Sequence[Value]) -> None:
        """Compare the names of the results of a loop or branch with the expected names."""
        for x, y in zip(before, after, strict=False):
            if x.dims != y.dims:
                self.differ(around, y.dims, x.dims)
            self.place_by(around, y, x.by, asked=False)

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

    def renamed(self, program: NamedProgram, lying: Mapping[int, Lies]) -> None:
        """Record the axes that named operations call otherwise, unless they are parts of others.

        Arguments:
        lying: the mappings by which results of the program lie, as `lying` has them.
        """
        for step in steps_of(program.body):
            if step.name != MARK or _scopes.exchanges(_around(step).scope):
                continue
            names = zip(*map(program.names_of, (step.operands[0], step.results[0])), strict=True)
            pairs = [(None if a is None or "." in a else a, b) for a, b in names]
            if any(a != b for a, b in pairs if a is not None):
                place = dataclasses.replace(_around(step), by=lying.get(id(step), BY_REPORT))
                before, after = (tuple(zip(own, step.shape, strict=True)) for own in zip(*pairs, strict=True))
                changed = {a for a, b in pairs if a != b}
                whole = place.operation is not None and not changed.isdisjoint(place.operation.axes)
                self.differ(place, before, after, whole)

    # --- rules for primitives ---

    def _relaid(self, step: AxisStep, x: Value, y: Value, place: Occurrence) -> Value:
        """Return an array in another layout: it is the same one, unless a reshape joins or splits axes."""
        if step.name == MARK:  # a named operation names its axes
            names = [a if a is not None else b for (a, _), b in zip(y.dims, step.params["names"], strict=True)]
            dims = tuple(zip(names, step.shape, strict=True))
            new = {a: b for (a, _), (b, _) in zip(x.dims, dims, strict=True) if a is not None}
            base = dims if x.base == x.dims else tuple((new.get(n, n) if n else n, size) for n, size in x.base)
            return dataclasses.replace(x, dims=dims, base=base)
        if step.name == "reshape" and [n for _, n in x.dims if n != 1] != [n for _, n in y.dims if n != 1]:
            if not self.rows.are_moved(step, [x], place):
                self._open(place, step.name, _torn(x.dims, y.dims, place.operation is not None))
                if any(n is not None and size < dict(x.dims).get(n, size) for n, size in y.dims):
                    self.parts.append(y)
            return y
        return dataclasses.replace(y, origin=x.origin, base=x.base if x.names else y.base)

    def _by_rule(
        self, step: AxisStep, rule: OperationRule, xs: list[Value], ys: list[Value], place: Occurrence
    ) -> None:
        """Record what devices exchange for an operation, given its rule."""
        y = ys[0]
        if "dimension_numbers" in step.params and not rule.product:  # a look-up, or an update
            return self._at_places(step, rule, xs, y, place)
        if step.name == "ragged_dot_general":
            y = ys[0] = self._grouped(step, rule, xs, y, place)
        else:
            known = [*zip(xs, rule.operands, strict=False), *zip(ys, rule.results, strict=False)]
            pairs = [pair for x, term in known for pair in zip(x.dims, term, strict=True)]
            self._open(place, step.name, [d for d, own in pairs if not rule.needed.isdisjoint(own)])
        if rule.product or (rule.values in ("each", "linear") and not rule.uses):
            for own in ys:
                # Axes that are one may have several names.
                known = {f: d for f, d in zip(rule.results[0], own.dims, strict=True) if f}
                for x, term in zip(reversed(xs[: len(rule.operands)]), reversed(rule.operands), strict=True):
                    pairs = [(d, known.setdefault(f, d)) for f, d in zip(term, x.dims, strict=False) if f]
                    if any(a != b for a, b in pairs):
                        self.differ(place, tuple([a for a, _ in pairs]), tuple([b for _, b in pairs]))
                self._noted(place, xs[:2] if rule.product else xs, own, rule.product)
        pairs = [pair for x, term in zip(xs, rule.operands, strict=False) for pair in zip(x.dims, term, strict=True)]
        alone = [[d for d, own in pairs if own == (f,)] for f in rule.summed]
        summed = tuple(next((d for d in dims if d[0] is not None), dims[0]) for dims in alone)
        if not rule.product:
            if not summed:
                return
            # The compiler does not sum an array along an axis that broadcasting added.
            gone = tuple(d for d in summed if d in xs[0].base)
            self.found.append(Sum(place.hoisted(xs), y, self._summed(place, gone), xs[0].dims, 0))
            return
        # The groups of rows are no axis of the product: each row has one.
        groups = [term[-1] for term in rule.operands[2:]]
        kept = tuple(d for d, own in zip(y.dims, rule.results[0], strict=True) if own not in groups)
        if any(n is None and size > 1 for n, size in (*kept, *summed)):
            self.unnamed += 1
        narrow = xs[0].dtype.itemsize == xs[1].dtype.itemsize == 1
        axes, place = (*kept, *summed), place.hoisted(xs)
        self.found.append(Sum(place, y, self._summed(place, summed), axes, _flops_of(step, axes), narrow))

    def _grouped(self, step: AxisStep, rule: OperationRule, xs: list[Value], y: Value, place: Occurrence) -> Value:
        """Record a product of groups of rows, each with the matrix of its group."""
        self.grouped = True
        groups = step.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        dispatch = _scopes.around(place.scope, "dispatch")
        if dispatch is None:  # the compiler or per-device code decides how rows in groups are sharded
            rows = step.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
            dims = [xs[0].dims[i] for i in rows] + ([xs[1].dims[i] for i in groups] or list(y.dims[:1]))
            self._open(place, "a grouped product", dims)
        else:
            self.rows.add_groups(dispatch, tuple([xs[1].dims[i] for i in groups] or y.dims[:1]))
            if not groups:  # the dtype in which gradients of experts are summed
                return dataclasses.replace(y, dtype=np.promote_types(np.float32, y.dtype))
        return y

    def _at_places(self, step: AxisStep, rule: OperationRule, xs: list[Value], y: Value, place: Occurrence) -> None:
        """Record a look-up or an update; of complete rows of a table along one axis, its cost is known."""
        update = step.name != "gather"
        if step.name in ("gather", "scatter", "scatter-add") and self.rows.are_moved(step, xs, place):
            return
        table, indices = (y if update else xs[0]), xs[1]
        numbers = step.params["dimension_numbers"]
        at = [i for i, d in enumerate(rule.operands[0]) if rule.needed.intersection(d)]
        at = at or list(numbers.scatter_dims_to_operand_dims if update else numbers.start_index_map)[:1]  # of size 1
        batch = {f for d in rule.operands[0] for f in d} & {f for d in rule.operands[1] for f in d}
        if len(at) == 1 and not batch and not rule.parts and step.name in ("gather", "scatter-add"):
            self.found.append(Lookup(place, table, indices, xs[2] if update else y, table.dims[at[0]], update))
            return
        # Of windows that have all of an axis of the table, each device has its part.
        of_windows = {f for own in (rule.operands[2] if update else rule.results[0]) for f in own}
        alike = of_windows.intersection(f for own in rule.operands[0] for f in own) - rule.needed
        pairs = [p for x, term in zip(xs, rule.operands, strict=True) for p in zip(x.dims, term, strict=True)]
        pairs = pairs[: len(table.dims)] if batch else pairs
        dims = [d for d, own in pairs if not own or not alike.issuperset(own)]
        self._open(place, step.name, dims)
        if batch and step.name == "scatter-add" and place.operation is not None and place.operation.name == "top_k":
            self.found.append(PerDevice(place, y))

    def _without_rule(self, step: AxisStep, xs: list[Value], ys: list[Value], place: Occurrence) -> None:
        """Record what is not known along any axis."""
        if step.name == "device_put":
            for v, w, y in zip(step.eqn.invars, step.eqn.outvars, ys, strict=True):
                if is_on_host(v.aval) != is_on_host(w.aval):
                    self.found.append(Offloaded(place, y))
            return
        if step.name in _UNCOUNTED:
            self.uncounted.setdefault(step.name)
        # Of a call of a Python function, one device makes it, and sends the results to all others.
        back = step.name in ("pure_callback", "io_callback")
        self._open(place, step.name, [d for x in (*xs, *(ys if back else ())) for d in x.dims])
        self.found += [PerDevice(place, y) for y in ys] if back else []

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
        if len(names) > 1 and (names, place.by) not in self._together:
            self._together.add((names, place.by))
            self.found.append(Together(place, names))

    def _summed(self, place: Occurrence, dims: Dims) -> Dims:
        """Leave out rows from the axes that an operation sums over, if each device sums its own."""
        if place.phase == "backward" or _scopes.around(place.scope, "dispatch") is None:
            return dims
        rows = self.rows.in_names([n for n, _ in dims], place)
        return tuple(d for d in dims if d[0] not in rows)


class DispatchedRows:
    """The dispatches of rows to experts in a step: the names of their axes, and the operations that only move them.

    In a dispatch, each device sorts, repeats, joins and counts its own rows, and exchanges rows with the others once.
    """

    def __init__(self, given: Collection[str]) -> None:
        """Arguments:
        given: the axis names of the arguments of the step.
        """
        self.joined: dict[str, tuple[str, ...]] = {}
        """For each axis made by joining axes of rows, the names of those axes."""
        self._given = given
        self._places: dict[_scopes.ScopedOperation, tuple[Occurrence, set[str]]] = {}
        """The place of each dispatch, and the names of the groups in its products."""

    def add(self, dispatch: _scopes.ScopedOperation, place: Occurrence, results: list[Value]) -> None:
        """Record the results of an operation of a dispatch."""
        self._places.setdefault(dispatch, (dataclasses.replace(place, dispatch=dispatch), set()))
        for axes in _rows(dispatch):
            names, count = tuple(a.name for a in axes), _count(axes)
            for n, size in (d for y in results for d in y.dims):
                if n is not None and (n == "*".join(names) or (size == count and n not in self._given)):
                    self.joined.setdefault(n, names)

    def add_groups(self, dispatch: _scopes.ScopedOperation, dims: Dims) -> None:
        """Record the axes of the groups in a product of rows."""
        self._places[dispatch][1].update(n for n, _ in dims if n is not None)

    def are_moved(self, step: AxisStep, xs: list[Value], place: Occurrence) -> bool:
        """Return whether an operation sorts, repeats, joins, counts or restores rows, which each device does."""
        dispatch = _scopes.around(place.scope, "dispatch")
        if dispatch is None:
            return False
        if step.name == "scatter-add" and xs[0].dtype.kind in "iu":
            return True
        starts = [start for axes in _rows(dispatch) for start in (tuple(a.size or 1 for a in axes), (_count(axes),))]
        shapes = tuple(n for _, n in xs[0].dims), step.shape
        return all(any(shape[: len(start)] == start for start in starts) for shape in shapes)

    def in_names(self, names: Collection[str | None], place: Occurrence) -> set[str | None]:
        """Return which names are of rows: of joined axes, and in a dispatch of the axes of its rows."""
        dispatch = _scopes.around(place.scope, "dispatch")
        rows = set() if dispatch is None else {a.name for a in dispatch.operands[0]}
        return {n for n in names if n in self.joined or n in rows}

    def exchanges(self) -> Iterator[Open]:
        """Yield the exchange of rows of each dispatch, with the axes over which they are exchanged between experts."""
        for dispatch, (place, groups) in self._places.items():
            of_x = {a.name for term in dispatch.operands[:2] for a in term}
            own = {a.name for term in dispatch.operands[2:] for a in term}
            yield Open(place, "an exchange of rows", frozenset(groups or own - of_x))


def _rows(dispatch: _scopes.ScopedOperation) -> list[_scopes.Term]:
    """Return the axes of rows, and the axes that rows for several experts have in common."""
    rows = dispatch.operands[0]
    return [axes for axes in (rows, tuple(a for a in rows if a in dispatch.operands[1])) if axes]


def _count(axes: _scopes.Term) -> int:
    return math.prod(a.size or 1 for a in axes)


def _changed_alike(xs: Sequence[Value], some: Sequence[Value] | None = None) -> list[Value]:
    """Return values, or some of them, as if the loops around changed all if they change one."""
    depth = max((x.depth for x in xs), default=0)
    return [dataclasses.replace(x, depth=depth) for x in (xs if some is None else some)]


def _around(step: AxisStep) -> Occurrence:
    return (Occurrence() if step.outer is None else _around(step.outer)).inside(step.eqn)


def _flops_of(step: AxisStep, axes: Dims) -> int:
    """Return the flops of a product: a multiplication and an addition for each pair that meets."""
    if step.name != "conv_general_dilated":
        return 2 * math.prod(n for _, n in axes)
    return _flops.of_traced_convolution(step.params, step.shape_of(0), step.shape_of(1), step.shape)


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
        (str(var), x.dtype) if hasattr(var, "val") else (x.origin, x.dims, x.by)
        for var, x in zip(eqn.invars, operands, strict=True)
    )
    key = eqn.primitive, tuple(sorted(eqn.params.items())), given
    try:
        hash(key)
    except TypeError:
        return None
    return None if any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in eqn.params.values()) else key


_UNCOUNTED = {"shard_map", "pallas_call", "custom_partitioning"}
"""Primitives that may multiply, and whose flops are not known."""

_OTHERS = {*_UNCOUNTED, "device_put", "sharding_constraint", "mesh_cast", "reshard", "layout_constraint"}
"""Primitives about which a rule does not say enough: they say where arrays lie."""
