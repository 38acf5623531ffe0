"""Follow values through a traced step, with its loops, branches and the functions that it calls opened: `StepProgram`.

An operation of a loop stands for all its turns. What a loop carries, takes slices of and stacks are operations too:
`carry` (of the first value and the one that each turn gives), `slice` and `stack`; and `branch` is the result of one of
several branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from ..core.jax_versions import axes_made_manual, without_unused
from ..core.operation_rules import OperationRule, inside, rule_of
from ..core.source_lines import Frame, Source, frames_of, of_user, source
from ..distribution.axis_marks import MARK
from ..distribution.mesh_axes import mesh_axes, padded
from . import _flops, _scopes


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class TracedArray:
    """An array of a traced step."""

    shape: tuple[int, ...]
    dtype: Any
    maker: TracedOperation | None = None
    """The operation that it is a result of; None for an argument, and for a constant."""
    argument: int | None = None
    """The number of the argument that it is."""
    constant: Any = None
    """The value of a number, or of a constant array."""
    users: list[TracedOperation] = dataclasses.field(default_factory=list)


def _value_of(var: Any, **more: Any) -> TracedArray:
    return TracedArray(getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None), **more)


@dataclasses.dataclass(eq=False, repr=False)
class TracedLoop:
    """A loop: its operation, how often its body runs, and what its turns pass on and take slices of."""

    operation: TracedOperation
    times: int | None
    """None if values decide."""
    carried: list[TracedOperation] = dataclasses.field(default_factory=list)
    sliced: list[TracedOperation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, repr=False)
class TracedOperation:
    """An operation of a traced step."""

    name: str
    eqn: Any
    operands: list[TracedArray]
    around: tuple[TracedOperation, ...] = ()
    """The operations that contain it, such as loops and calls of functions, from the outermost."""
    loops: tuple[TracedLoop, ...] = ()
    """The loops around it, from the outermost."""
    copies: int = 1
    """The number of devices that each run it, as code per device does."""
    share: Fraction = Fraction(1)
    """The share of the turns in which it runs: each branch is taken equally often, or as a schedule says."""
    results: list[TracedArray] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def scope(self) -> str:
        return "/".join(filter(None, (str(op.eqn.source_info.name_stack) for op in (*self.around, self))))

    @functools.cached_property
    def phase(self) -> str:
        return _scopes.phase(self.scope)

    @functools.cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The lines of Python that it comes from, from the innermost."""
        return tuple(frame for op in (self, *reversed(self.around)) for frame in frames_of(op.eqn))

    @property
    def source(self) -> Source | None:
        return source(self.frames)

    def lines(self, within: TracedOperation | None = None) -> list[Source]:
        """Return the user's lines that it comes from, from the outermost; or those in the body of a loop around it."""
        first = 0 if within is None else self.around.index(within) + 1
        found = list[Frame]()
        for op in (*self.around, self)[first:]:
            own = [*of_user(reversed([*frames_of(op.eqn)]))]
            found += own[len(found) :] if own[: len(found)] == found else own
        return [Source(f.file, f.line, f.function) for f in found]

    @functools.cached_property
    def rule(self) -> OperationRule | None:
        return rule_of(self.eqn) if self.name == self.eqn.primitive.name else None

    @property
    def runs(self) -> int:
        """Return how often it may run; a loop whose length depends on values is taken to run once."""
        return math.prod(loop.times or 1 for loop in self.loops)

    @functools.cached_property
    def flops(self) -> int:
        """The flops of a product or convolution in all its turns, on all devices together."""
        return int(self.flops_each * self.copies * self.runs * self.share)

    @functools.cached_property
    def flops_each(self) -> int:
        """The flops of a product or convolution each time, on one device."""
        if self.rule is None or not self.rule.product:
            return 0
        result = self.results[0].shape
        if self.name == "conv_general_dilated":
            image, kernel = (x.shape for x in self.operands)
            return _flops.of_traced_convolution(self.eqn.params, image, kernel, result)
        left, summed = self.rule.operands[0], self.rule.summed
        return _flops.of_product(result, [self.rule.sizes[f] for dim in left for f in dim if f in summed])


class StepProgram:
    """The operations of a step in the order in which they run, its arguments and its results."""

    def __init__(self, closed: Any):
        """Arguments:
        closed: the program that JAX traced.
        """
        jaxpr = without_unused(closed.jaxpr)
        self.operations: list[TracedOperation] = []
        self.arguments = [_value_of(v, argument=i) for i, v in enumerate(jaxpr.invars)]
        self.results = self._run(jaxpr, closed.consts, self.arguments, (), (), 1, Fraction(1))

    def _run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        given: Sequence[TracedArray],
        around: tuple[TracedOperation, ...],
        loops: tuple[TracedLoop, ...],
        copies: int,
        share: Fraction,
    ) -> list[TracedArray]:
        known: dict[Any, TracedArray] = dict(zip(jaxpr.invars, given, strict=True))
        for v, value in zip(jaxpr.constvars, constants, strict=False):
            known[v] = _value_of(v, constant=value)

        def read(v: Any) -> TracedArray:
            return _value_of(v, constant=v.val) if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            op = TracedOperation(eqn.primitive.name, eqn, [*map(read, eqn.invars)], around, loops, copies, share)
            results = self._results(op)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, op: TracedOperation) -> list[TracedArray]:
        """Record an operation, or those that it runs."""
        functions = [] if op.name in _CLOSED else inside(op.eqn)
        how = functions[0].how if functions else ""
        given = [[op.operands[i] for i in f.operands] for f in functions]
        if how in ("call", "device"):
            f, copies = functions[0], op.copies
            if how == "device":
                sizes = dict(op.eqn.params["mesh"].shape)
                copies *= math.prod(sizes[a] for a in axes_made_manual(op.eqn))
                own = [self._of(op, "shard", [x], v.aval) for x, v in zip(given[0], f.jaxpr.invars, strict=True)]
                found = self._run(f.jaxpr, f.constants, own, (*op.around, op), op.loops, copies, op.share)
                pairs = zip(found, op.eqn.outvars, strict=True)
                return [self._of(op, "unshard", [x], v.aval) for x, v in pairs]
            return self._run(f.jaxpr, f.constants, given[0], (*op.around, op), op.loops, copies, op.share)
        if how == "branch":
            turns = _scopes.turns(f"{op.scope}/{op.name}")
            taken = Fraction(*turns) if turns else Fraction(1, len(functions))
            shares = [1 - taken if turns else taken, *[taken] * (len(functions) - 1)]
            found = [
                self._run(f.jaxpr, f.constants, own, (*op.around, op), op.loops, op.copies, op.share * share)
                for f, own, share in zip(functions, given, shares, strict=True)
            ]
            choices = zip(*found, strict=True)
            return [
                self._of(op, "branch", [op.operands[0], *xs], v.aval)
                for xs, v in zip(choices, op.eqn.outvars, strict=True)
            ]
        if how in ("loop", "test"):
            return self._loop(op, functions[-1], given[-1])
        self._add(op, [v.aval for v in op.eqn.outvars])
        return op.results

    def _loop(self, op: TracedOperation, f: Any, given: list[TracedArray]) -> list[TracedArray]:
        loop, last = TracedLoop(op, f.times), len(given) - f.sliced
        inner = (*op.loops, loop)
        carried = range(f.first, f.first + f.carried)
        # What a loop passes on as it is, such as a model that `while_loop` carries, is what it was before.
        passed = [f.jaxpr.outvars[i - f.first] is f.jaxpr.invars[i] for i in carried]
        for i, same in zip(carried, passed, strict=True):
            if not same:
                given[i] = self._of(op, "carry", [given[i]], f.jaxpr.invars[i].aval, inner)
                loop.carried.append(given[i].maker)  # pyright: ignore[reportArgumentType]
        for i in range(last, len(given)):
            given[i] = self._of(op, "slice", [given[i]], f.jaxpr.invars[i].aval, inner)
            loop.sliced.append(given[i].maker)  # pyright: ignore[reportArgumentType]
        results = self._run(f.jaxpr, f.constants, given, (*op.around, op), inner, op.copies, op.share)
        ends = [x for x, same in zip(results, passed, strict=False) if not same]
        for carry, end in zip(loop.carried, ends, strict=True):
            carry.operands.append(end)
            end.users.append(carry)
        first = [given[i] if same else results[i - f.first] for i, same in zip(carried, passed, strict=True)]
        stacked = zip(results[f.carried :], op.eqn.outvars[f.carried :], strict=True)
        return [*first, *(self._of(op, "stack", [x], v.aval) for x, v in stacked)]

    def _of(
        self,
        op: TracedOperation,
        name: str,
        operands: list[TracedArray],
        aval: Any,
        loops: tuple[TracedLoop, ...] | None = None,
    ) -> TracedArray:
        """Return what a loop, a conditional or code per device makes of values."""
        own = TracedOperation(
            name, op.eqn, operands, op.around, op.loops if loops is None else loops, op.copies, op.share
        )
        self._add(own, [aval])
        return own.results[0]

    def _add(self, op: TracedOperation, avals: Iterable[Any]) -> None:
        op.results = [TracedArray(getattr(a, "shape", ()), getattr(a, "dtype", None), op) for a in avals]
        for x in op.operands:
            x.users.append(op)
        self.operations.append(op)


_CLOSED = {"pallas_call", "custom_partitioning"}
"""Primitives whose programs are not of arrays as the step has them."""

SAME = {"convert_element_type", "transpose", "reshape", "broadcast_in_dim", "slice", "dynamic_slice", "squeeze",
        "copy", "optimization_barrier", "sharding_constraint", "reshard", "mesh_cast", "shard", "unshard", "pvary",
        "all_gather", MARK}  # fmt: skip
"""Primitives whose result is their first operand in another form, or part of it; the `slice` of a loop, too."""


CONSTRAINTS = "sharding_constraint", "reshard"
"""The primitives of placements by a user, or by an operation on Explicit mesh axes."""


def reached(
    start: Iterable[TracedArray], follows: Callable[[TracedOperation, TracedArray], Iterable[TracedArray]]
) -> Iterator[TracedArray]:
    """Yield values, and those that users make of them, as far as a function of a user and a value follows them."""
    waiting = [*start]
    seen = set(waiting)
    while waiting:
        x = waiting.pop()
        yield x
        for user in x.users:
            for y in follows(user, x):
                if y not in seen:
                    seen.add(y)
                    waiting.append(y)


def origin(x: TracedArray) -> TracedArray:
    """Return the value that another one is in another dtype or layout, or part of."""
    while x.maker is not None and x.maker.name in SAME:
        x = x.maker.operands[0]
    return x


class Replicating(NamedTuple):
    """A placement that replicates axes which a mapping shards."""

    placement: TracedOperation
    axes: Mapping[str, Sequence[str]]
    """These axes, each with the mesh axes that the mapping shards it over."""
    places: tuple[int, ...]
    """The positions of these axes in the array."""
    beside: frozenset[Source | None]
    """The lines of what makes the array, up to the next named operation, and of what uses it."""


def replicating(step: StepProgram) -> Iterator[Replicating]:
    """Yield the placements that replicate axes which a mapping shards."""
    for op in step.operations:
        if op.name not in CONSTRAINTS or (kept := kept_by(op)) is None:
            continue
        before, own = [*_operations_before(op)], _scopes.operation(op.scope)
        if own is not None and own.name != "shard":  # an operation places its operands itself
            continue
        named = own or next((n for x in before if (n := _scopes.operation(x.scope))), None)
        term = named.results[0] if named is not None and named.results else ()
        if lost := {a.name: a.compute for a in term if a.compute and kept.isdisjoint(a.compute)}:
            users = (user for x in reached(op.results, _same_shape) for user in x.users)
            shape, own = op.results[0].shape, list[int]()
            for a in term:  # as the array has them, which may be in another order than the term
                own += [
                    i for i in (*range(len(own), len(shape)), *range(len(own))) if shape[i] == a.size and i not in own
                ][:1]
            places = tuple(i for i, a in zip(own, term, strict=False) if a.name in lost)
            yield Replicating(op, lost, places, frozenset(x.source for x in (*before, *users)))


def _operations_before(op: TracedOperation) -> Iterator[TracedOperation]:
    """Yield what makes the operand of a placement, up to the first named operation."""
    shape = op.operands[0].shape
    for _ in range(16):
        maker = next((x.maker for x in op.operands if x.shape == shape), None)
        if maker is None:
            return
        yield (op := maker)
        if (named := _scopes.operation(op.scope)) is not None and named.name != "shard":
            return


def _same_shape(user: TracedOperation, x: TracedArray) -> Iterable[TracedArray]:
    named = _scopes.operation(user.scope)
    return [y for y in user.results if y.shape == x.shape] if named is None or named.name == "shard" else []


def constrained_axes(placement: TracedOperation) -> tuple[tuple[str, ...] | None, ...] | None:
    """Return the mesh axes that a placement shards each axis over; None where it leaves that to the compiler."""
    sharding = placement.eqn.params.get("sharding", placement.eqn.params.get("dst_sharding"))
    if not isinstance(sharding, NamedSharding):
        return None
    entries = padded(sharding.spec, len(placement.results[0].shape))
    return tuple(None if e is PartitionSpec.UNCONSTRAINED else mesh_axes(e) for e in entries)


def kept_by(placement: TracedOperation) -> set[str] | None:
    """Return the mesh axes over which a placement shards an array; None if it leaves some to the compiler."""
    over = constrained_axes(placement)
    return None if over is None or None in over else {a for axes in over for a in axes or ()}


# --- what rules about a step ask ---


def share_of(operations: Iterable[TracedOperation], total: int) -> float:
    return sum(op.flops for op in operations) / total


def axis_name(operations: Iterable[TracedOperation], size: int) -> str:
    """Return the name of the axis of this size in the first named operation that has only one."""
    for op in operations:
        named = _scopes.operation(op.scope)
        terms = () if named is None else (*named.operands, *named.results)
        if len(names := {a.name for term in terms for a in term if a.size == size}) == 1:
            return names.pop()
    return "an axis"


def bytes_of(x: TracedArray) -> int:
    return math.prod(x.shape) * getattr(x.dtype, "itemsize", 4)


def is_constant(x: TracedArray) -> bool:
    return (x := origin(x)).maker is None and x.argument is None


def has_parameter(op: TracedOperation) -> bool:
    """Return whether a product multiplies something by an argument, such as a parameter."""
    return any(origin(x).argument is not None for x in op.operands[:2])


def along(start: TracedArray, at: int) -> dict[TracedArray, set[int]]:
    """Return the values that have an axis of a value whole, each with the positions of it."""
    found = {start: {at}}
    waiting = [(start, at)]
    while waiting:
        x, at = waiting.pop()
        for user in x.users:
            for y, i in passed(user, x, at):
                if i not in found.setdefault(y, set()):
                    found[y].add(i)
                    waiting.append((y, i))
    return found


def passed(op: TracedOperation, x: TracedArray, at: int) -> Iterator[tuple[TracedArray, int]]:
    """Yield the results of an operation that have an axis of an operand, and its position in them."""
    (y, *_) = op.results
    if op.name in ("carry", "branch", "shard", "unshard"):
        yield y, at
    elif op.name in ("slice", "stack") and op.rule is None:  # of a loop
        moved = at + (1 if op.name == "stack" else -1)
        if moved >= 0:
            yield y, moved
    elif op.rule is not None:
        needed = op.rule.needed if not op.rule.product else ()
        for given, term in zip(op.operands, op.rule.operands, strict=False):
            factors = {*term[at]}.difference(needed) if given is x and at < len(term) else ()
            for result, own in zip(op.results, op.rule.results, strict=False):
                yield from ((result, i) for i, dim in enumerate(own) if not factors.isdisjoint(dim)) if factors else ()
