"""Trace a step once, without a mesh or mapping, and record by name what devices would exchange under a mapping.

Every axis of every array in the trace gets the name that it has in the model. Names come with the arguments, and are
followed through the operations; the scopes of named operations (see `distribution/operation_scope`) name new axes.
The cost of sums, look-ups and gathers of parameters is then computed from these names: see `_by_names`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

try:
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError:  # then unused operations are counted, too
    dce_jaxpr = None

from ..core.source_lines import Frame, frames_of
from ..core.tree_spec import PROGRAM_ARRAYS, flatten_arrays
from ..distribution.active_settings import activate
from ..distribution.mesh_axes import NO_MESH
from ..sharding.placement import leaves_of
from . import _scopes
from ._arguments import step_name
from ._named_dims import by_scope, has_names_of, joined_axes, moved, moved_rows, new_names, renamings, with_names
from ._named_events import (
    Dims,
    Event,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Open,
    PerDevice,
    Renamed,
    Sum,
    Together,
    Use,
    Value,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn


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

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    try:
        with activate(None), jax.sharding.use_abstract_mesh(NO_MESH), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(nothing was placed|no mesh is active)")
            # They compute all the same.
            warnings.filterwarnings("ignore", message=r"(named_jit|distribute)\(.*no mesh is active")
            closed = jax.make_jaxpr(flat)(*abstract)
            # Operations that no result needs are not compiled, such as a loss if only its gradients are returned.
            jaxpr = closed.jaxpr
            if dce_jaxpr is not None:
                jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    except (RuntimeError, UserWarning) as e:
        if "mesh" not in str(e):
            raise
        raise NotKnown(f"explain: by='names' traces a step without a mesh, which it asks for: {e}") from e
    walk = _Walk()
    leaves = [leaf for leaf in leaves_of((args, dict(kwargs)))[0] if leaf.shape is not None]
    for leaf in leaves:
        spec = getattr(getattr(leaf.value, "sharding", None), "spec", ())
        if leaf.names is None and any(entry is not None for entry in spec):
            raise NotKnown(f"explain: by='names' cannot follow an array without names that is sharded by {spec}.")
    names = [leaf.names or (None,) * len(leaf.shape or ()) for leaf in leaves]
    arguments = [
        walk.value(var.aval, tuple(zip(own, _shape(var), strict=True)))
        for var, own in zip(jaxpr.invars, names, strict=True)
    ]
    whole = _Walk()
    walk.given = whole.given = {n for x in arguments for n, _ in x.dims if n is not None}
    for own, x in zip(returned, whole.run(closed.jaxpr, arguments, _Around()), strict=True):
        if own is not None:
            whole.differ(whole.place(_Around()), x.dims, tuple(zip(own, (n for _, n in x.dims), strict=True)))
    # No result may need the operation that renames an axis, but its gradient.
    walk.events += [event for event in whole.events if isinstance(event, Renamed)]
    results = walk.run(jaxpr, arguments, _Around())
    exchanged = walk.close_dispatches()
    kept = tuple(walk.kept)
    events = tuple(dict.fromkeys(walk.events))
    return NamedTrace(
        step_name(step), events, tuple(arguments), tuple(results), kept, walk.unnamed, tuple(walk.uncounted),
        walk.grouped, frozenset(exchanged), walk.joined,
    )  # fmt: skip


# --- following names ---


@dataclasses.dataclass(frozen=True)
class _Around:
    """The surroundings of the equations in a function or loop body."""

    scope: str = ""
    times: int | None = 1
    in_branch: bool = False
    within: int = 0
    recomputes: bool = False
    frames: tuple[Frame, ...] = ()


@dataclasses.dataclass
class _Entered:
    """The outside arrays that the equations of one named operation use."""

    place: Occurrence | None = None
    uses: list[list[Value]] = dataclasses.field(default_factory=list)


class _Equation(NamedTuple):
    """An equation whose operands have the names that its named operation uses."""

    eqn: JaxprEqn
    operands: list[Value]
    place: Occurrence

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def operation(self) -> _scopes.ScopedOperation | None:
        return self.place.operation

    @property
    def aval(self) -> Any:
        return self.eqn.outvars[0].aval

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.eqn.outvars[0])


_LAYOUT = {"convert_element_type", "copy", "reduce_precision", "stop_gradient", "optimization_barrier", "name"}
_LAYOUT |= {"transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
"""Primitives whose result is their operand in another layout."""
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
_UNCOUNTED = {"conv_general_dilated", "shard_map", "pallas_call", "custom_partitioning"}
"""Primitives that may multiply, and whose flops are not known."""
_ALONG = {"concatenate": "dimension", "split": "axis", "cumsum": "axis", "cumprod": "axis", "cummax": "axis"}
_ALONG |= {"cummin": "axis", "cumlogsumexp": "axis", "sort": "dimension", "rev": "dimensions"}


_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le
    lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square or polygamma population_count pow
    real regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square sub tan tanh xor zeta""".split()
)


class _Walk:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kept: list[Value] = []
        self.unnamed = 0
        self.uncounted: dict[str, None] = {}
        self.grouped = False
        self.joined: dict[str, tuple[str, ...]] = {}
        self.given: set[str] = set()
        """The axis names of the arguments."""
        self._dispatches: dict[_scopes.ScopedOperation, tuple[Occurrence, set[str]]] = {}
        """Each dispatch of rows to experts, with the names of the groups in its products."""
        self._numbers = itertools.count(1)
        self._made: dict[Any, list[int]] = {}
        """The numbers of results, by the operation and the numbers of its operands."""
        self._constants: set[int] = set()
        """The numbers of arrays that depend on no argument."""
        self._avoidable = False

    def value(self, aval: Any, dims: Dims | None = None, like: Value | None = None) -> Value:
        """Make a value; `like` is the same value in another layout."""
        if dims is None:
            dims = tuple((None, n) for n in aval.shape)
        number, base = (next(self._numbers), dims) if like is None else (like.origin, like.base)
        return Value(dims, aval.dtype, number, base)

    def run(self, jaxpr: Jaxpr, given: Sequence[Value], around: _Around) -> list[Value]:
        """Follow names through a jaxpr, and return its results."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, given, strict=True))
        known |= {var: self.value(var.aval) for var in jaxpr.constvars}

        def read(var: Any) -> Value:
            if not hasattr(var, "val"):
                return known[var]
            self._constants.add((literal := self.value(var.aval)).origin)
            return literal

        made: dict[Any, str] = dict.fromkeys(jaxpr.invars, _named_part(around.scope))
        current, entered = _Entered(), ""
        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            inner = _inside(eqn, around)
            if (part := _named_part(inner.scope)) != entered:
                self._enter(current)
                current, entered = _Entered(), part
            if part and _scopes.phase(inner.scope) != "backward":
                current.place = self.place(inner, _scopes.operation(inner.scope))
                current.uses.append(
                    [x for var, x in zip(eqn.invars, operands, strict=True)
                     if not hasattr(var, "val") and made.get(var) != part]
                )  # fmt: skip
            key = _key(eqn, operands)
            constant = key is not None and self._constants.issuperset(x.origin for x in operands)
            self._avoidable = constant or key in self._made
            results = self._results(eqn, operands, inner)
            if key is not None:
                origins = self._made.setdefault(key, [x.origin for x in results])
                results = [dataclasses.replace(x, origin=n) for x, n in zip(results, origins, strict=True)]
                self._constants.update(origins if constant else ())
            for var, found in zip(eqn.outvars, results, strict=True):
                known[var] = found
                made[var] = part
        self._enter(current)
        return [read(var) for var in jaxpr.outvars]

    def _enter(self, entered: _Entered) -> None:
        """Compare the names of the arrays that a named operation takes with its own names for them."""
        if entered.place is None or entered.place.operation is None:
            return
        operation, place = entered.place.operation, entered.place
        terms = [term for term in operation.operands if any(a.size != 1 for a in term)]
        everything = [x for x in itertools.chain.from_iterable(entered.uses) if x.dims]
        arrays = [x for x in everything if x.has_names]
        lacking = [term for term in terms if not any(has_names_of(x.dims, term) for x in everything)]
        strange = [x for x in arrays if not any(has_names_of(x.dims, term) for term in terms)]
        # An array that no operand has the names of is most likely an operand that no array has the names of.
        for term in lacking:
            self._pair(place, [(x, term) for x in strange], [(x, term) for x in arrays])
        for x in strange:
            self._pair(place, [(x, term) for term in lacking], [(x, term) for term in terms])
        for use in entered.uses:
            if len(use) == len(terms) == len(operation.operands) < 5 and not _fit_in_some_order(use, terms):
                for x, term in zip(use, terms, strict=True):
                    self._pair(place, [(x, term)])

    def _pair(self, place: Occurrence, *choices: Sequence[tuple[Value, _scopes.Term]]) -> None:
        """Record the names that an operation gives to an array, for the pairs of the first choice whose names fit best.

        Names decide before sizes do: only where several pairs fit equally well, all of them are recorded.
        """
        assert place.operation is not None
        for pairs in choices:
            fits = [(x, *renamings(x.dims, term)) for x, term in pairs]
            fits = [(x, agreed, extra, found) for x, agreed, extra, found in fits if found]
            if not fits:
                continue
            best = max((agreed, -extra) for _, agreed, extra, _ in fits)
            chosen = [(x.dims, dims) for x, agreed, extra, found in fits if (agreed, -extra) == best for dims in found]
            for before, after in (chosen := list(dict.fromkeys(chosen))):
                renamed = {n for (n, _), (new, _) in zip(before, after, strict=True) if n != new}
                whole = not renamed.isdisjoint(place.operation.axes)
                self.differ(place, before, after, whole=whole, by_size=len(chosen) > 1)
            return

    def differ(self, place: Occurrence, before: Dims, after: Dims, whole: bool = False, by_size: bool = False) -> None:
        """Record that the names of an array differ before and after."""
        for (a, _), (b, _) in zip(before, after, strict=True):
            if a in self.joined and b is not None and b not in self.joined and b not in self.given:
                self.joined[b] = self.joined[a]  # the experts' name for the rows
        before, after = self._parted(before), self._parted(after)
        if any(None not in (a, b) and a != b and size > 1 for (a, size), (b, _) in zip(before, after, strict=True)):
            filled = tuple((b if b is not None else a, n) for (a, n), (b, _) in zip(before, after, strict=True))
            self.events.append(Renamed(place, before, filled, whole, by_size or "vmap(" in place.scope))

    def _parted(self, dims: Dims) -> Dims:
        """Rename joined axes in the same way if the same axes were joined into them."""
        return tuple(("*".join(self.joined.get(n or "", (n,))) if n else n, size) for n, size in dims)  # pyright: ignore

    def _results(self, eqn: JaxprEqn, operands: list[Value], inner: _Around) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, operands, inner)
        if name == "while":
            return self._while(params, operands, inner)
        if name == "cond":
            return self._cond(params, operands, inner)
        called = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        if called is not None and name != "shard_map":
            jaxpr = getattr(called, "jaxpr", called)
            if len(jaxpr.invars) == len(operands):
                # The names that a named operation gives to its operands also hold in the functions that it calls.
                operation = _scopes.operation(inner.scope)
                operands = self._renamed(operands, operation, self.place(inner, operation))
                again = "remat" in name or "checkpoint" in name
                body = dataclasses.replace(inner, within=next(self._numbers), recomputes=True) if again else inner
                return self.run(jaxpr, operands, body)
        return self._operation(eqn, operands, inner)

    def place(self, around: _Around, operation: _scopes.ScopedOperation | None = None) -> Occurrence:
        a = around
        return Occurrence(
            a.scope, operation, _scopes.phase(a.scope), a.times, a.in_branch, a.within, a.recomputes, a.frames
        )

    # --- loops and branches ---

    def _scan(self, eqn: JaxprEqn, operands: list[Value], around: _Around) -> list[Value]:
        params = eqn.params
        jaxpr, length = params["jaxpr"].jaxpr, params["length"]
        # Scanned arrays have one more axis outside; how JAX counts the others differs between versions.
        carried = sum(_shape(a) == _shape(b) for a, b in zip(eqn.outvars, jaxpr.outvars, strict=True))
        scanned = sum(_shape(a) != _shape(b) for a, b in zip(eqn.invars, jaxpr.invars, strict=True))
        consts = len(eqn.invars) - carried - scanned
        stacked = operands[consts + carried :]
        along = next((x.dims[0][0] for x in stacked if x.dims[0][0] is not None), None)
        slices = [Value(x.dims[1:], x.dtype, next(self._numbers), x.dims[1:]) for x in stacked]
        times = None if around.times is None else around.times * length
        body = dataclasses.replace(around, times=times, within=next(self._numbers))
        if along is not None:
            self.events.append(Open(self.place(around), "a loop", frozenset({along})))
        state, results = self._repeated(
            self.place(around),
            lambda state: self.run(jaxpr, [*operands[:consts], *state, *slices], body),
            operands[consts : consts + carried],
        )
        ends = [Value(((along, length), *x.dims), x.dtype, next(self._numbers), ((along, length), *x.dims))
                for x in results[carried:]]  # fmt: skip
        if _scopes.phase(around.scope) == "forward":
            self.kept += ends
        return [*state, *ends]

    def _while(self, params: Any, operands: list[Value], around: _Around) -> list[Value]:
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        of_body, start = operands[tests : tests + consts], operands[tests + consts :]
        body = dataclasses.replace(around, times=None, within=next(self._numbers))
        state, _ = self._repeated(
            self.place(around), lambda state: self.run(params["body_jaxpr"].jaxpr, [*of_body, *state], body), start
        )
        return state

    def _repeated(
        self, place: Occurrence, turn: Callable[[list[Value]], list[Value]], start: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Trace a loop body until the names of its carry are stable; record only the last pass."""
        state = list(start)
        while True:
            kept, made = (len(self.events), len(self.kept), self.unnamed), dict(self._made)
            results = turn(state)
            for a, b in zip(state, results, strict=False):
                self.differ(place, b.dims, a.dims)
            merged = [with_names(a, b.dims) for a, b in zip(state, results, strict=False)]
            if [x.dims for x in merged] == [x.dims for x in state]:
                return merged, results
            state, self.unnamed, self._made = merged, kept[2], made
            del self.events[kept[0] :], self.kept[kept[1] :]

    def _cond(self, params: Any, operands: list[Value], around: _Around) -> list[Value]:
        body = dataclasses.replace(around, in_branch=True)
        found = [self.run(branch.jaxpr, operands[1:], body) for branch in params["branches"]]
        merged = found[0]
        for other in found[1:]:
            for a, b in zip(merged, other, strict=True):
                self.differ(self.place(around), b.dims, a.dims)
            merged = [with_names(a, b.dims) for a, b in zip(merged, other, strict=True)]
        return merged

    # --- operations ---

    def _operation(self, eqn: JaxprEqn, operands: list[Value], around: _Around) -> list[Value]:
        dispatch = _scopes.dispatch(around.scope)
        if dispatch is None:
            return self._usual(eqn, operands, around)
        self._dispatches.setdefault(dispatch, (self.place(around, dispatch), set()))
        found = self._among_rows(dispatch, eqn, operands) or self._usual(eqn, operands, around)
        return [self._joined_rows(dispatch, x) for x in found]

    def _usual(self, eqn: JaxprEqn, operands: list[Value], around: _Around) -> list[Value]:
        operation = _scopes.operation(around.scope)
        place = dataclasses.replace(self.place(around, operation), avoidable=self._avoidable)
        step = _Equation(eqn, self._renamed(operands, operation, place), place)
        rule = _RULES.get(step.name)
        found = None if rule is None else rule(self, step)
        if found is None:
            self._open(place, step.name, [d for x in step.operands for d in x.dims])
            return self._all_alike(step, step.operands)
        return found

    # --- rules for primitives: each returns the results, or None if it does not know the names ---

    def _dot_general(self, step: _Equation) -> list[Value]:
        return [self._product(step.place, step.params["dimension_numbers"], step.operands, step.aval)]

    def _ragged_dot_general(self, step: _Equation) -> list[Value]:
        return [
            self._grouped_product(step.place, step.params["ragged_dot_dimension_numbers"], step.operands, step.aval)
        ]

    def _reduction(self, step: _Equation) -> list[Value]:
        (x,), axes = step.operands, step.params["axes"]
        # The compiler does not sum an array along an axis that broadcasting added.
        gone = tuple(d for d in (x.dims[i] for i in axes) if d in x.base)
        result = self.value(step.aval, tuple(d for i, d in enumerate(x.dims) if i not in axes))
        self.events.append(Sum(step.place, result, self._summed(step.place, gone), x.dims, False))
        return [result]

    def _extreme_position(self, step: _Equation) -> list[Value]:
        (at,), (x,) = step.params["axes"], step.operands
        self._open(step.place, step.name, x.dims[at : at + 1])
        return [self.value(step.aval, (*x.dims[:at], *x.dims[at + 1 :]))]

    def _top_k(self, step: _Equation) -> list[Value]:
        at, dims = step.params.get("axis", len(step.shape) - 1), [*step.operands[0].dims]
        self._open(step.place, step.name, dims[at : at + 1])
        dims[at] = None, step.shape[at]
        return [self.value(v.aval, by_scope(tuple(dims), step.operation)) for v in step.eqn.outvars]

    def _gather(self, step: _Equation) -> list[Value] | None:
        looked = self._look_up(step.place, step.params, step.operands, step.aval)
        return self._batched(step, step.operands[0]) if looked is None else [looked]

    def _scatter_add(self, step: _Equation) -> list[Value] | None:
        updated = self._update(step.place, step.params, step.operands)
        if updated is not None:
            return [updated]
        found = self._batched(step)
        if found is not None and step.operation is not None and step.operation.name == "top_k":
            self.events.append(PerDevice(step.place, found[0]))
        return found

    def _batched(self, step: _Equation, along: Value | None = None) -> list[Value] | None:
        """Trace a gather or scatter with batch axes, which needs the other axes of the array, or else of the result."""
        batch = step.params["dimension_numbers"].operand_batching_dims
        if not batch:
            return None
        result = self._alike(step.aval, [], step.operation)
        self._open(step.place, step.name, [d for i, d in enumerate((along or result).dims) if i not in batch])
        return [result]

    def _relaid(self, step: _Equation) -> list[Value] | None:
        if len(step.eqn.outvars) != 1:
            return None
        x = step.operands[0]
        dims = moved(step.name, step.params, x.dims, step.shape)
        if dims is None:
            self._open(step.place, step.name, x.dims)
            return self._all_alike(step, step.operands)
        dims = by_scope(dims, step.operation)
        found = self.value(step.aval, dims, x)
        return [found if found.names else self.value(step.aval, dims)]  # if not, the operand has none either

    def _new(self, step: _Equation) -> list[Value]:
        return [self.value(v.aval, by_scope(self.value(v.aval).dims, step.operation)) for v in step.eqn.outvars]

    def _along(self, step: _Equation) -> list[Value]:
        along = step.params[_ALONG[step.name]]
        for i in along if isinstance(along, tuple) else (along,):
            self._open(step.place, step.name, step.operands[0].dims[i : i + 1])
        return self._all_alike(step, step.operands)

    def _unstack(self, step: _Equation) -> list[Value]:
        (x,), at = step.operands, step.params["axis"]
        self._open(step.place, step.name, x.dims[at : at + 1])
        left = (*x.dims[:at], *x.dims[at + 1 :])
        return [self.value(v.aval, by_scope(left, step.operation)) for v in step.eqn.outvars]

    def _stack(self, step: _Equation) -> list[Value]:
        at, named = step.params["axis"], self._alike(step.eqn.invars[0].aval, step.operands, step.operation).dims
        dims = (*named[:at], (None, len(step.operands)), *named[at:])
        return [self.value(step.aval, by_scope(dims, step.operation))]

    def _sliced(self, step: _Equation) -> list[Value]:
        x = step.operands[0]
        new = [n for _, n in step.operands[1].dims] if step.name == "dynamic_update_slice" else step.shape
        self._open(step.place, step.name, [d for d, n in zip(x.dims, new, strict=True) if d[1] != n])
        return self._all_alike(step, [x])

    def _elementwise(self, step: _Equation) -> list[Value]:
        results = self._all_alike(step, step.operands)
        for x, r in itertools.product(step.operands, results):
            if len(x.dims) == len(r.dims):
                pairs = zip(x.dims, r.dims, strict=True)
                self.differ(step.place, x.dims, tuple((n if m == size else None, m) for (_, m), (n, size) in pairs))
        return [self._noted(step.place, step.operands, r) for r in results]

    def _not_counted(self, step: _Equation) -> None:
        self.uncounted.setdefault(step.name)

    def _open(self, place: Occurrence, what: str, dims: Sequence[tuple[str | None, int]]) -> None:
        names = frozenset(n for n, size in dims if n is not None and size > 1 and n not in self.joined)
        if (dispatch := _scopes.dispatch(place.scope)) is not None:
            names -= {a.name for a in dispatch.operands[0]}
        if names:
            self.events.append(Open(place, what, names))

    def _noted(self, place: Occurrence, operands: Sequence[Value], result: Value, product: bool = False) -> Value:
        """Record what an operation uses, and return its result."""
        for x in operands:
            # In a product, a broadcast operand counts with all its axes.
            dims = [d for other in operands if other is not x for d in (other.dims if product else other.base)]
            others = frozenset(n for n, _ in dims if n is not None)
            if x.names and not others.issubset(x.names):
                constant = x.origin in self._constants
                self.events.append(Use(dataclasses.replace(place, avoidable=place.avoidable or constant), x, others))
        names = tuple(dict.fromkeys(n for n, _ in result.dims if n is not None))
        if len(names) > 1:
            self.events.append(Together(place, names))
        return result

    def _product(self, place: Occurrence, numbers: Any, operands: Sequence[Value], aval: Any) -> Value:
        (left_summed, right_summed), (left_batch, right_batch) = numbers
        left, right = operands
        free = [d for i, d in enumerate(left.dims) if i not in (*left_summed, *left_batch)]
        free += [d for i, d in enumerate(right.dims) if i not in (*right_summed, *right_batch)]

        def either(a: Sequence[int], b: Sequence[int]) -> Dims:
            pairs = [(left.dims[i], right.dims[j]) for i, j in zip(a, b, strict=True)]
            self.differ(place, tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
            return tuple(x if x[0] is not None else y for x, y in pairs)

        batch, summed = either(left_batch, right_batch), either(left_summed, right_summed)
        if any(n is None and size > 1 for n, size in (*batch, *summed, *free)):
            self.unnamed += 1
        result = self._noted(place, operands, self.value(aval, (*batch, *free)), product=True)
        self.events.append(Sum(place, result, self._summed(place, summed), (*batch, *free, *summed), True))
        return result

    # --- experts ---

    def _grouped_product(self, place: Occurrence, numbers: Any, operands: list[Value], aval: Any) -> Value:
        """Trace a product of groups of rows, each with the matrix of its group."""
        self.grouped = True
        ((left_summed, right_summed), (left_batch, right_batch)) = numbers.dot_dimension_numbers
        left, right = operands[:2]
        ragged, groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
        batch, summed = (
            tuple(
                x if x[0] is not None else y
                for x, y in ((left.dims[i], right.dims[j]) for i, j in zip(*pair, strict=True))
            )
            for pair in ((left_batch, right_batch), (left_summed, right_summed))
        )
        free = [d for i, d in enumerate(left.dims) if i not in (*left_summed, *left_batch)]
        free += [d for i, d in enumerate(right.dims) if i not in (*right_summed, *right_batch, *groups)]
        made = [] if groups else [(None, aval.shape[0])]
        dims = by_scope((*made, *batch, *free), place.operation)
        of_groups = [right.dims[i] for i in groups] or list(dims[: len(made)])
        dispatch = _scopes.dispatch(place.scope)
        if dispatch is None:  # the compiler or per-device code decides how rows in groups are sharded
            self._open(place, "a grouped product", [*(left.dims[i] for i in ragged), *of_groups])
        else:
            self._dispatches[dispatch][1].update(n for n, _ in of_groups if n is not None)
        result = self._noted(place, [left, right], self.value(aval, dims), product=True)
        if dispatch is not None and made:
            # The dtype in which gradients of experts are summed.
            result = dataclasses.replace(result, dtype=np.promote_types(np.float32, result.dtype))
        self.events.append(Sum(place, result, self._summed(place, summed), (*batch, *free, *summed), True))
        return result

    def _among_rows(
        self, dispatch: _scopes.ScopedOperation, eqn: JaxprEqn, operands: list[Value]
    ) -> list[Value] | None:
        """Trace an operation that moves rows to or from experts; return None for others."""
        name = eqn.primitive.name
        counts = name == "scatter-add" and operands[0].dtype.kind in "iu"
        found = None
        if name in ("reshape", "gather", "scatter", "scatter-add"):
            found = moved_rows(dispatch, operands[0].dims, _shape(eqn.outvars[0]))
        if found is None:
            return [self.value(eqn.outvars[0].aval)] if counts else None
        dims, joined = found
        self.joined |= joined
        return [self.value(eqn.outvars[0].aval, dims)]

    def _joined_rows(self, dispatch: _scopes.ScopedOperation, x: Value) -> Value:
        """Name the first axis of an array if it contains all rows."""
        name, rows = joined_axes(dispatch.operands[0])
        if not x.dims or x.dims[0] != (None, rows):
            return x
        self.joined[name] = tuple(a.name for a in dispatch.operands[0])
        return with_names(x, ((name, rows), *x.dims[1:]))

    def _summed(self, place: Occurrence, dims: Dims) -> Dims:
        """Leave out rows from the axes that an operation sums over, if each device sums its own."""
        if place.phase == "backward" or (dispatch := _scopes.dispatch(place.scope)) is None:
            return dims
        rows = {a.name for a in dispatch.operands[0]}
        return tuple(d for d in dims if d[0] not in self.joined and d[0] not in rows)

    def close_dispatches(self) -> set[str]:
        """Record the axes over which rows are exchanged between experts, and return them."""
        found: set[str] = set()
        for dispatch, (place, groups) in self._dispatches.items():
            of_x = {a.name for term in dispatch.operands[:2] for a in term}
            own = {a.name for term in dispatch.operands[2:] for a in term}
            along = frozenset(groups or own - of_x)
            found |= along
            self.events.append(Open(place, "an exchange of rows", along))
        return found

    def _look_up(self, place: Occurrence, params: Any, operands: Sequence[Value], aval: Any) -> Value | None:
        """Trace a look-up of complete rows of a table, along one axis."""
        numbers, (table, indices) = params["dimension_numbers"], operands
        if len(numbers.start_index_map) != 1 or numbers.collapsed_slice_dims != numbers.start_index_map:
            return None
        (at,) = numbers.start_index_map
        wholes = [n == size for i, (n, (_, size)) in enumerate(zip(params["slice_sizes"], table.dims, strict=True))
                  if i != at]  # fmt: skip
        if numbers.operand_batching_dims or not all(wholes) or indices.dims[-1][1] != 1:
            return None
        columns = iter(d for i, d in enumerate(table.dims) if i != at)
        rows = iter(indices.dims[:-1])
        dims = tuple(next(columns) if i in numbers.offset_dims else next(rows) for i in range(len(aval.shape)))
        result = self.value(aval, dims)
        self.events.append(Lookup(place, table, indices, result, table.dims[at], False))
        return result

    def _update(self, place: Occurrence, params: Any, operands: Sequence[Value]) -> Value | None:
        """Trace the gradient of a look-up."""
        numbers, (table, indices, updates) = params["dimension_numbers"], operands
        if len(numbers.scatter_dims_to_operand_dims) != 1 or numbers.operand_batching_dims:
            return None
        (at,) = numbers.scatter_dims_to_operand_dims
        if numbers.inserted_window_dims != (at,) or indices.dims[-1][1] != 1:
            return None
        columns = iter(updates.dims[i] for i in numbers.update_window_dims)
        dims = tuple(d if i == at else next(columns) for i, d in enumerate(table.dims))
        dims = by_scope(dims, place.operation)
        result = Value(dims, table.dtype, next(self._numbers), dims)
        self.events.append(Lookup(place, result, indices, updates, dims[at], True))
        return result

    def _all_alike(self, step: _Equation, operands: Sequence[Value]) -> list[Value]:
        return [self._alike(v.aval, operands, step.operation) for v in step.eqn.outvars]

    def _alike(self, aval: Any, operands: Sequence[Value], operation: _scopes.ScopedOperation | None) -> Value:
        """Return a result that has the axes of the operands."""
        names: list[str | None] = [None] * len(aval.shape)
        for x in operands:
            if len(x.dims) == len(names):
                names = [a if a is not None or size != n else b
                         for a, (b, size), n in zip(names, x.dims, aval.shape, strict=True)]  # fmt: skip
        return self.value(aval, by_scope(tuple(zip(names, aval.shape, strict=True)), operation))

    def _renamed(
        self, operands: list[Value], operation: _scopes.ScopedOperation | None, place: Occurrence
    ) -> list[Value]:
        """Rename the axes of operands to the names that the operation uses."""
        if operation is None:
            return operands
        found = []
        for x in operands:
            if x.base == x.dims and (dims := by_scope(x.dims, operation, alone=True)) != x.dims:
                x = dataclasses.replace(x, dims=dims, base=dims)  # an array that the step closes over
            if new := new_names(x.dims, operation, mapped="vmap(" in place.scope):
                dims = tuple((new.get(n or "", n), s) for n, s in x.dims)
                self.events.append(Renamed(place, x.dims, dims, False, by_size="vmap(" in place.scope))
                x = dataclasses.replace(x, dims=dims, base=tuple((new.get(n or "", n), s) for n, s in x.base))
            found.append(x)
        return found


_RULES: dict[str, Callable[[_Walk, _Equation], list[Value] | None]] = {
    "dot_general": _Walk._dot_general,
    "ragged_dot_general": _Walk._ragged_dot_general,
    **dict.fromkeys(_REDUCTIONS, _Walk._reduction),
    **dict.fromkeys(("argmax", "argmin"), _Walk._extreme_position),
    "top_k": _Walk._top_k,
    "gather": _Walk._gather,
    "scatter-add": _Walk._scatter_add,
    **dict.fromkeys(_LAYOUT, _Walk._relaid),
    **dict.fromkeys(("iota", "random_bits", "random_wrap", "random_unwrap", "random_seed"), _Walk._new),
    **dict.fromkeys(_ALONG, _Walk._along),
    "unstack": _Walk._unstack,
    "stack": _Walk._stack,
    **dict.fromkeys(("slice", "pad", "dynamic_slice", "dynamic_update_slice"), _Walk._sliced),
    **dict.fromkeys(_ELEMENTWISE, _Walk._elementwise),
    **dict.fromkeys(_UNCOUNTED, _Walk._not_counted),
}
"""For each primitive, how the names of its operands become those of its results, and what devices exchange for it."""


def _key(eqn: JaxprEqn, operands: Sequence[Value]) -> Any:
    """Return a key that is equal for operations that compute the same; None for those that call functions."""
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


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _fit_in_some_order(arrays: Sequence[Value], terms: Sequence[_scopes.Term]) -> bool:
    return any(
        all(has_names_of(x.dims, term) for x, term in zip(arrays, order, strict=True))
        for order in itertools.permutations(terms)
    )


@functools.lru_cache(maxsize=4096)
def _named_part(scope: str) -> str:
    """Return a scope up to its innermost named operation; an empty string if there is none."""
    return scope[: scope.rindex("]") + 1] if _scopes.operation(scope) else ""


def _inside(eqn: JaxprEqn, around: _Around) -> _Around:
    """Return the surroundings of the operations in an equation, with its own scope and lines."""
    scope = "/".join(part for part in (around.scope, str(eqn.source_info.name_stack)) if part)
    return dataclasses.replace(around, scope=scope, frames=(*frames_of(eqn), *around.frames))
