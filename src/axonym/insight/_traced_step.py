"""Follow values through a traced step, with its loops, branches and the functions that it calls opened: `TracedStep`.

An operation of a loop stands for all its turns. What a loop carries, takes slices of and stacks are operations too:
`carry` (of the first value and the one that each turn gives), `slice` and `stack`; and `branch` is the result of one of
several branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from ..core.jax_versions import without_unused
from ..core.operation_rules import OperationRule, inside, rule_of
from ..core.source_lines import Frame, Source, frames_of, of_user, source
from ..distribution.axis_marks import MARK
from ..distribution.mesh_axes import mesh_axes
from . import _flops, _scopes


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """An array of a traced step."""

    shape: tuple[int, ...]
    dtype: Any
    maker: Operation | None = None
    """The operation that it is a result of; None for an argument, and for a constant."""
    argument: int | None = None
    """The number of the argument that it is."""
    constant: Any = None
    """The value of a number, or of a constant array."""
    users: list[Operation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """A loop: its operation, how often its body runs, and what its turns pass on and take slices of."""

    operation: Operation
    times: int | None
    """None if values decide."""
    carried: list[Operation] = dataclasses.field(default_factory=list)
    sliced: list[Operation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, repr=False)
class Operation:
    """An operation of a traced step."""

    name: str
    eqn: Any
    operands: list[Value]
    around: tuple[Operation, ...] = ()
    """The operations that contain it, such as loops and calls of functions, from the outermost."""
    loops: tuple[Loop, ...] = ()
    """The loops around it, from the outermost."""
    copies: int = 1
    """The number of devices that each run it, as code per device does."""
    share: Fraction = Fraction(1)
    """The share of the turns in which it runs: each branch is taken equally often, or as a schedule says."""
    results: list[Value] = dataclasses.field(default_factory=list)

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

    def lines(self, within: Operation | None = None) -> list[Source]:
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


class TracedStep:
    """The operations of a step in the order in which they run, its arguments and its results."""

    def __init__(self, closed: Any):
        """Arguments:
        closed: the program that JAX traced.
        """
        jaxpr = without_unused(closed.jaxpr)
        self.operations: list[Operation] = []
        self.arguments = [Value(v.aval.shape, v.aval.dtype, argument=i) for i, v in enumerate(jaxpr.invars)]
        self.results = self._run(jaxpr, closed.consts, self.arguments, (), (), 1, Fraction(1))

    def _run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        given: Sequence[Value],
        around: tuple[Operation, ...],
        loops: tuple[Loop, ...],
        copies: int,
        share: Fraction,
    ) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, given, strict=True))
        for v, value in zip(jaxpr.constvars, constants, strict=False):
            known[v] = Value(v.aval.shape, v.aval.dtype, constant=value)

        def read(v: Any) -> Value:
            return Value(v.aval.shape, v.aval.dtype, constant=v.val) if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            op = Operation(eqn.primitive.name, eqn, [*map(read, eqn.invars)], around, loops, copies, share)
            results = self._results(op)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, op: Operation) -> list[Value]:
        """Record an operation, or those that it runs."""
        functions = [] if op.name in _CLOSED else inside(op.eqn)
        how = functions[0].how if functions else ""
        given = [[op.operands[i] for i in f.operands] for f in functions]
        if how in ("call", "device"):
            f, copies = functions[0], op.copies
            if how == "device":
                sizes = dict(op.eqn.params["mesh"].shape)
                copies *= math.prod(sizes[a] for a in op.eqn.params["newly_manual_axes"])
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

    def _loop(self, op: Operation, f: Any, given: list[Value]) -> list[Value]:
        loop, last = Loop(op, f.times), len(given) - f.sliced
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
        self, op: Operation, name: str, operands: list[Value], aval: Any, loops: tuple[Loop, ...] | None = None
    ) -> Value:
        """Return what a loop, a conditional or code per device makes of values."""
        own = Operation(name, op.eqn, operands, op.around, op.loops if loops is None else loops, op.copies, op.share)
        self._add(own, [aval])
        return own.results[0]

    def _add(self, op: Operation, avals: Iterable[Any]) -> None:
        op.results = [Value(getattr(a, "shape", ()), getattr(a, "dtype", None), op) for a in avals]
        for x in op.operands:
            x.users.append(op)
        self.operations.append(op)


_CLOSED = {"pallas_call", "custom_partitioning"}
"""Primitives whose programs are not of arrays as the step has them."""

SAME = {"convert_element_type", "transpose", "reshape", "broadcast_in_dim", "slice", "dynamic_slice", "squeeze",
        "copy", "optimization_barrier", "sharding_constraint", "reshard", "mesh_cast", "shard", "unshard", "pvary",
        "all_gather", MARK}  # fmt: skip
"""Primitives whose result is their first operand in another form, or part of it; the `slice` of a loop, too."""


def reached(start: Iterable[Value], follows: Callable[[Operation, Value], Iterable[Value]]) -> Iterator[Value]:
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


def origin(x: Value) -> Value:
    """Return the value that another one is in another dtype or layout, or part of."""
    while x.maker is not None and x.maker.name in SAME:
        x = x.maker.operands[0]
    return x


class Replicating(NamedTuple):
    """A placement that replicates axes of the result of a named operation."""

    axes: frozenset[str]
    over: frozenset[str]
    """The mesh axes that it leaves out."""
    source: Source | None
    beside: frozenset[Source | None]
    """The lines of that operation, of those that use what is placed, and of what lies between."""


def replicating(step: TracedStep) -> Iterator[Replicating]:
    """Yield the placements that replicate axes which a named operation before them has sharded."""
    for op in step.operations:
        if op.name not in ("sharding_constraint", "reshard") or (kept := kept_by(op)) is None:
            continue
        maker, named, beside = op.operands[0].maker, None, set[Source | None]()
        for _ in range(16):
            named = None if maker is None else _scopes.operation(maker.scope)
            if maker is None or (named is not None and named.name != "shard"):
                break
            beside.add(maker.source)
            maker = next((x.maker for x in maker.operands if x.shape == op.operands[0].shape), None)
        if maker is None or named is None or len(named.results) != 1:
            continue
        lost = [a for a in named.results[0] if a.compute and kept.isdisjoint(a.compute)]
        beside |= {maker.source, *(user.source for x in reached(op.results, _same_shape) for user in x.users)}
        if lost:
            over = frozenset(m for a in lost for m in a.compute)
            yield Replicating(frozenset(a.name for a in lost), over, op.source, frozenset(beside))


def _same_shape(user: Operation, x: Value) -> Iterable[Value]:
    named = _scopes.operation(user.scope)
    return [y for y in user.results if y.shape == x.shape] if named is None or named.name == "shard" else []


def kept_by(placement: Operation) -> set[str] | None:
    """Return the mesh axes over which a placement shards an array; None if it leaves some to the compiler."""
    sharding = placement.eqn.params.get("sharding", placement.eqn.params.get("dst_sharding"))
    spec = getattr(sharding, "spec", None)
    if spec is None or any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        return None
    return {a for entry in spec for a in mesh_axes(entry)}
