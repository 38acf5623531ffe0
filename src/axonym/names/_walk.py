"""Walk over a traced program, and follow the axes of its arguments to every value in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from ..core.operation_rules import Inside, inside, rule_of
from ._axes import Axes, Axis, Meeting, find, fresh, last_base, leaves, size_of
from ._masks import facts_of, facts_of_value, is_declared_role, is_readable
from ._rules import COMPARISONS, RULES, results_by_rule, unknown
from ._values import Axed, AxisStep, Facts, dtype_kind

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr


@dataclasses.dataclass(eq=False, slots=True)
class Body:
    """A function of a program: the whole, or the body of a loop or branch, for one of its calls."""

    jaxpr: Jaxpr
    arguments: Sequence[Axed]
    steps: list[AxisStep]
    results: Sequence[Axed] = ()


class AxisWalk:
    """A walk over a program. A primitive that has no rule gives axes of which nothing is known, and is counted."""

    def __init__(self, separate: frozenset[int] = frozenset(), renames: bool = True) -> None:
        self.axes = Axes(separate, renames)
        self.unknown_primitives: Counter[str] = Counter()
        self.given: list[set[str | None]] = []
        """The names of each argument."""

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[Axed], outer: AxisStep | None = None, constants: Sequence[Any] = ()
    ) -> Body:
        """Follow the axes through a function, of which the values of constants may be known."""
        body = Body(jaxpr, arguments, [])
        known: dict[Any, Axed] = dict(zip(jaxpr.invars, arguments, strict=True))
        values = itertools.chain(constants, itertools.repeat(None))
        known |= {v: _constant_array(v, value) for v, value in zip(jaxpr.constvars, values, strict=False)}
        slices: dict[tuple[Any, int], list[tuple[int, int, int]]] = defaultdict(list)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "slice" and type(eqn.invars[0]) is not Literal:
                starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
                strides = eqn.params["strides"] or (1,) * len(starts)
                for i, bounds in enumerate(zip(starts, stops, strides, strict=True)):
                    slices[eqn.invars[0], i].append(bounds)
        for eqn in jaxpr.eqns:
            step = AxisStep(eqn, outer, slices)
            step.operands = xs = [_constant_array(v, v.val) if type(v) is Literal else known[v] for v in eqn.invars]
            step.results = results = self._results(step, xs)
            body.steps.append(step)
            if len(results) == 1:  # as most have
                known[eqn.outvars[0]] = results[0]
            else:
                known.update(zip(eqn.outvars, results, strict=True))
        body.results = [_constant_array(v, v.val) if type(v) is Literal else known[v] for v in jaxpr.outvars]
        return body

    def _results(self, step: AxisStep, xs: Sequence[Axed]) -> Sequence[Axed]:
        name = step.name
        if (rule := rule_of(step.eqn)) is not None:
            step.rule = rule
            step.operands = used = [x.used() if x.constant and x.dims else x for x in xs]
            results = results_by_rule(self.axes, step, rule, used)
            if results and _tells_facts(step, used, results[0]):
                results[0].facts = facts_of(step, used, results[0])
        elif name == "custom_linear_solve":  # the product of its solution with the matrix is the right-hand side
            product, count = step.params["jaxprs"].matvec, step.params["const_lengths"].matvec
            results = unknown(step)
            products = self.run(product.jaxpr, [*xs[:count], *results], step).results
            self._together(step, products, xs[len(xs) - len(results) :])
        elif functions := inside(step.eqn):
            results = self._inside(step, xs, functions)
            if functions[0].how == "call":
                return results
        else:
            results = unknown(step)
            if results:
                self.unknown_primitives[name] += 1
        if all([x.constant for x in xs]):
            for x in results:
                x.constant = True
        return results

    def settle(self) -> list[Meeting]:
        """Decide about the roles that met other names, and return all mix-ups."""
        axes = self.axes
        for met in axes.adopted:
            role, other = (find(met.left), find(met.right))
            if other.base is not None and (role.base is None or other.name is None):
                role, other = other, role
            base = last_base(role)
            if role is other or base.name is None or other.name is None or base.name == other.name:
                continue
            if other.base is not None and last_base(other) is not base:
                axes.differ(base, last_base(other), met.at)
            elif role.base is not None and role.name is not None:  # the user named both
                axes.differ(role, other, met.at)
            elif role.side == "query" or (met.at.name == "dot_general" and role.side != "key"):
                axes.differ(base, other, met.at)
            elif not is_declared_role(other.name, base.name, self.given):
                axes.differ(base, other, met.at)
            elif other.base is None:
                other.base = base
                axes.merge(role, other, met.at)
        crossed = {
            frozenset((find(m.left), find(m.right), m.at)): dataclasses.replace(m, kind="crossed")
            for m in axes.crossed
            if (m.left.side or m.right.side) and m.at.name in RULES and not m.at.backward and _has_both(m)
        }
        return [*axes.meetings.values(), *axes.found, *crossed.values()]

    # --- loops, branches and functions on each device ---

    def _inside(self, step: AxisStep, xs: Sequence[Axed], functions: Sequence[Inside]) -> list[Axed]:
        """Follow the axes through the functions that an equation runs."""
        used = functools.cache(lambda i: xs[i].used())
        found: list[Axed] | None = None
        for f in functions:
            if f.how == "call":
                step.bodies = (self.run(f.jaxpr, xs, step, f.constants),)
                return list(step.bodies[0].results)
            last, carried = len(f.operands) - f.sliced, slice(f.first, f.first + f.carried)
            own = {*range(last)}.difference(range(carried.start, carried.stop)) if f.how != "device" else ()
            given = [xs[i] if j in own else used(i) for j, i in enumerate(f.operands)]
            along: Axis = () if f.times is None else fresh(f.times)
            for x in given[last:]:
                along = self.axes.unify(along, x.dims[0], step)
            given[last:] = [Axed(x.dims[1:], points=x.points) for x in given[last:]]
            if f.how == "device":
                given = [self._resized(x, v) for x, v in zip(given, f.jaxpr.invars, strict=True)]
            body = self.run(f.jaxpr, given, step)
            step.bodies = (*step.bodies, body)
            if f.how == "loop":
                carry = self._together(step, given[carried], body.results[: f.carried])
                found = [*carry, *(Axed((along, *x.used().dims)) for x in body.results[f.carried :])]
            elif f.how == "device":
                pairs = zip(body.results, step.eqn.outvars, strict=True)
                found = [self._resized(x.used(), v) for x, v in pairs]
            elif f.how == "branch":
                results = [x.used() for x in body.results]
                found = results if found is None else self._together(step, found, results)
        branch = functions[0].how == "branch"
        return [Axed(x.dims, points=x.points) for x in found or ()] if branch else found or []

    def _together(self, step: AxisStep, left: Sequence[Axed], right: Sequence[Axed]) -> list[Axed]:
        """Record that values are the same; where one has a role of an axis and the other the axis, return the axis."""

        def either(a: Axis, b: Axis) -> Axis:
            self.axes.unify(a, b, step)
            base = find(a[0]).base if len(a) == len(b) == 1 else None
            return leaves(b) if base is not None and find(b[0]) is find(base) else a

        pairs = zip(left, right, strict=True)
        return [Axed(tuple(map(either, x.dims, y.used().dims)), points=x.points) for x, y in pairs]

    def _resized(self, x: Axed, to: Any) -> Axed:
        """Return a value as it is on one device, or on all."""

        def resized(axis: Axis, size: int) -> Axis:
            if size_of(axis) == size:
                return axis
            if (whole := self.axes.of_size(axis, size, -2)) is not None:
                return whole
            found = self.axes.derived(axis, size)
            if axis and found:
                found[0].part_of += ((axis, -2),)
            return found

        return Axed(tuple(map(resized, x.dims, to.aval.shape)), points=x.points)


def _has_both(m: Meeting) -> bool:
    """Return whether an array in which two roles of an axis meet has a further role of it."""
    base = last_base(m.left)
    found = [f for x in m.at.results for axis in x.dims for f in leaves(axis) if last_base(f) is base]
    return m.at.name != "dot_general" and len(found) > 1


_FACTS_BEGIN = {"iota", "exp", "broadcast_in_dim"}
"""The primitives that tell facts of operands of which nothing is known."""
_OF_MASKS = {"not", "and", "or", "select_n", *COMPARISONS.split()}
"""The primitives that do so if these are booleans, which may be masks, or are compared with numbers."""


def _tells_facts(step: AxisStep, xs: Sequence[Axed], result: Axed) -> bool:
    """Return whether there can be facts about the result; a number alone, by which an array is scaled, tells none."""
    name, told = step.name, [x for x in xs if x.facts is not None]
    if name in _FACTS_BEGIN or (name in _OF_MASKS and (told or dtype_kind(step.eqn.invars[0]) == "b")):
        return True
    return bool(told) and (not result.dims or any([x.dims for x in told]))


def _constant_array(v: Any, value: Any) -> Axed:
    if v.aval.shape:
        dims = tuple(map(fresh, v.aval.shape))
        return Axed(dims, constant=True, facts=facts_of_value(dims, value))
    readable = dtype_kind(v) in ("b", "i", "u", "f") and is_readable(value)
    return _number_array(float(value)) if readable else _SCALAR


@functools.lru_cache(maxsize=256)
def _number_array(value: float) -> Axed:
    return Axed((), constant=True, facts=Facts(value=value, varies=()))


_SCALAR = Axed((), constant=True)


def steps_of(body: Body) -> Iterator[AxisStep]:
    """Yield all steps of a function, and of the functions that it calls."""
    for step in body.steps:
        yield step
        for inner in step.bodies:
            yield from steps_of(inner)
