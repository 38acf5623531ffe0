"""Follow the names of axes through the functions, loops and branches of a traced step.

A loop body is followed until the names of its carry are stable. Where an operation gives an axis another name than the
array had before, that is an event: under a mapping that shards the two names otherwise, devices would exchange it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.source_lines import Frame, frames_of
from . import _scopes
from ._named_dims import by_scope, has_names_of, new_names, renamings, with_names
from ._named_events import Dims, Event, Occurrence, Open, Renamed, Value

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn


@dataclasses.dataclass(frozen=True)
class Around:
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


class NameWalk(abc.ABC):
    """Follows names through the functions, loops and branches of a trace, and records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kept: list[Value] = []
        self.unnamed = 0
        self.joined: dict[str, tuple[str, ...]] = {}
        self.given: set[str] = set()
        """The axis names of the arguments."""
        self._numbers = itertools.count(1)
        self._made: dict[Any, list[int]] = {}
        """The numbers of results, by the operation and the numbers of its operands."""
        self._constants: set[int] = set()
        """The numbers of arrays that depend on no argument."""
        self._avoidable = False

    @abc.abstractmethod
    def _operation(self, eqn: JaxprEqn, operands: list[Value], around: Around) -> list[Value]:
        """Return the results of an equation that calls no function, and record what devices exchange for it."""

    def value(self, aval: Any, dims: Dims | None = None, like: Value | None = None) -> Value:
        """Make a value; `like` is the same value in another layout."""
        if dims is None:
            dims = tuple((None, n) for n in aval.shape)
        number, base = (next(self._numbers), dims) if like is None else (like.origin, like.base)
        return Value(dims, aval.dtype, number, base)

    def run(self, jaxpr: Jaxpr, given: Sequence[Value], around: Around) -> list[Value]:
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
        # An array whose names match no operand is most likely an operand whose names match no array.
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

    def _results(self, eqn: JaxprEqn, operands: list[Value], inner: Around) -> list[Value]:
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

    def place(self, around: Around, operation: _scopes.ScopedOperation | None = None) -> Occurrence:
        a = around
        return Occurrence(
            a.scope, operation, _scopes.phase(a.scope), a.times, a.in_branch, a.within, a.recomputes, a.frames
        )

    # --- loops and branches ---

    def _scan(self, eqn: JaxprEqn, operands: list[Value], around: Around) -> list[Value]:
        params = eqn.params
        jaxpr, length = params["jaxpr"].jaxpr, params["length"]
        # Scanned arrays have one more axis outside; how JAX counts the others differs between versions.
        carried = sum(shape_of(a) == shape_of(b) for a, b in zip(eqn.outvars, jaxpr.outvars, strict=True))
        scanned = sum(shape_of(a) != shape_of(b) for a, b in zip(eqn.invars, jaxpr.invars, strict=True))
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

    def _while(self, params: Any, operands: list[Value], around: Around) -> list[Value]:
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

    def _cond(self, params: Any, operands: list[Value], around: Around) -> list[Value]:
        body = dataclasses.replace(around, in_branch=True)
        found = [self.run(branch.jaxpr, operands[1:], body) for branch in params["branches"]]
        merged = found[0]
        for other in found[1:]:
            for a, b in zip(merged, other, strict=True):
                self.differ(self.place(around), b.dims, a.dims)
            merged = [with_names(a, b.dims) for a, b in zip(merged, other, strict=True)]
        return merged

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


def shape_of(var: Any) -> tuple[int, ...]:
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


def _inside(eqn: JaxprEqn, around: Around) -> Around:
    """Return the surroundings of the operations in an equation, with its own scope and lines."""
    scope = "/".join(part for part in (around.scope, str(eqn.source_info.name_stack)) if part)
    return dataclasses.replace(around, scope=scope, frames=(*frames_of(eqn), *around.frames))
