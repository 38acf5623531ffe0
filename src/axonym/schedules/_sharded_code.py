"""Decide whether a loss written for complete axes computes the same from shards of them.

The code is traced twice, on complete axes and on their shards, which have other sizes. Both programs must have the same
operations, with the same numbers. Operations on a sharded axis must be elementwise, or run along other axes: products
that keep the axis, reductions of others, and so on. Operations that exchange what they need with other devices, such as
attention along a sequence, are in a scope (`axonym.distribution.kept_shards`), and are not compared. Loops, branches
and calls are compared inside.

A loss may add up a sharded axis in the end: then devices have *partial sums*, to which only linear operations may be
applied.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.jax_versions import programs_in
from ..core.operation_rules import rule_of
from ..distribution.kept_shards import read_scope
from ..distribution.on_shards import NeedsCompleteAxes

_CALLS = frozenset("jit pjit checkpoint remat remat2 closed_call".split())
_LOOPS = frozenset("scan while cond".split())
_WITH_RULES = {"relu", "logaddexp", "_softmax", "softmax", "_log_normalizer", "_erfc"}
"""Functions with their own derivatives, which act on each element, or along the axes that they reduce."""
_PACKAGES = f"{Path(jax.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}"
_CHANGES_NO_VALUE = frozenset(("pcast", "pvary", "sharding_constraint"))


def check_computed_from_shards(whole: Any, shards: Any, counts: Mapping[str, int], sums: bool = False) -> bool:
    """Check that a program on shards of some axes computes shards of what the program on the complete axes computes.

    Arguments:
        whole: the jaxpr for the complete axes, with its constants.
        shards: the jaxpr for their shards.
        counts: the number of shards of each of these axes.
        sums: whether results may be partial sums; returned is whether the first one is.
    """
    partial = _ProgramPair(counts, sums).of_closed(whole, shards, ())
    return 0 in partial


class _ProgramPair:
    def __init__(self, counts: Mapping[str, int], sums: bool):
        self._counts, self._sums = counts, sums

    def of_closed(self, whole: Any, shards: Any, partial: Collection[int]) -> set[int]:
        """Compare two programs, and return which results are partial sums, if these operands are."""
        first, second = getattr(whole, "consts", ()), getattr(shards, "consts", ())
        if len(first) != len(second) or not all(x is y or _same(x, y) for x, y in zip(first, second, strict=True)):
            raise NeedsCompleteAxes("it uses constants that depend on the size of the axis.")
        return self._of(getattr(whole, "jaxpr", whole), getattr(shards, "jaxpr", shards), partial)

    def _of(self, whole: Any, shards: Any, partial: Collection[int]) -> set[int]:
        sums = {shards.invars[i] for i in partial}
        programs = _ComparedProgram(whole), _ComparedProgram(shards)
        alike = _Correspondence()
        alike.check(*((*x.constvars, *x.invars) for x in (whole, shards)))
        # Both were traced from one function: their operations come in one order, unless it looks at sizes.
        for first, second in itertools.zip_longest(*(program.compared for program in programs)):
            if first is None or second is None:
                raise NeedsCompleteAxes(f"{_described(first or second)} runs only for some sizes of it.")
            operands = [program.operands(x) for program, x in zip(programs, (first, second), strict=True)]
            where = {i for i, x in enumerate(operands[1]) if not _is_literal(x) and x in sums}
            found = self._operation((first, operands[0]), (second, operands[1]), where)
            alike.check(*operands)
            alike.check(first.outvars, second.outvars)
            sums.update(second.outvars[i] for i in found)
        self._check_exchanges(*programs, sums)
        for one, other in zip(programs[0].gets, programs[1].gets, strict=True):
            if {alike.of_shards(x) for x in one} != {*other}:
                raise NeedsCompleteAxes("an operation that exchanges shards gets other values for other sizes of it.")
        results = [[program.origin(x) for x in p.outvars] for program, p in zip(programs, (whole, shards), strict=True)]
        alike.check(*results)
        return {i for i, x in enumerate(results[1]) if not _is_literal(x) and x in sums}

    def _check_exchanges(self, whole: _ComparedProgram, shards: _ComparedProgram, sums: Collection[Any]) -> None:
        """Check that operations which exchange shards get shards of the complete axes."""
        if any(not _is_literal(x) and x in sums for x in shards.exchanged):
            raise NeedsCompleteAxes("an operation that exchanges shards gets a sum over the axis.")
        if len(whole.scopes) != len(shards.scopes):
            raise NeedsCompleteAxes("an operation that exchanges shards runs only for some sizes of it.")
        for (sizes, fixed, _), (own, own_fixed, _) in zip(whole.scopes, shards.scopes, strict=True):
            if sizes != {n: size * self._counts.get(n, 1) for n, size in own.items()}:
                raise NeedsCompleteAxes(f"an operation gets {own} of the complete axes {sizes}.")
            if fixed != own_fixed:
                raise NeedsCompleteAxes(f"an operation gets{own_fixed}, and{fixed} for the complete axis.")

    def _differs(self, whole: Any, shards: Any) -> set[int]:
        """Return the position of the axis of which one program has a shard; an array has one such axis at most."""
        sizes = whole.aval.shape, shards.aval.shape
        if len(sizes[0]) == len(sizes[1]):
            found = {place for place, (x, y) in enumerate(zip(*sizes, strict=True)) if x != y}
            if all(sizes[0][i] in [n * sizes[1][i] for n in self._counts.values()] for i in found) and len(found) < 2:
                return found
        raise NeedsCompleteAxes(f"arrays of shapes {sizes[0]} and {sizes[1]} take each other's place.")

    def _operation(self, whole: Any, shards: Any, partial: set[int]) -> set[int]:
        """Compare an operation in both programs; return which of its results are partial sums."""
        (first, all_operands), (second, own_operands) = whole, shards
        name, refused = first.primitive.name, NeedsCompleteAxes(f"{_described(first)} needs all of a sharded axis.")
        if "callback" in name:  # Python may close over a size
            raise NeedsCompleteAxes(f"{_described(first)} calls Python, which has no shards.")
        if name != second.primitive.name or len(all_operands) != len(own_operands):
            raise refused
        if not all(map(_same_number, all_operands, own_operands)):
            raise NeedsCompleteAxes(f"{_described(first)} gets a number that depends on the size of the axis.")
        inner = [[*programs_in(operation)] for operation in (first, second)]
        if len(inner[0]) != len(inner[1]) or (partial and name not in _CALLS and not _may_be_linear(first)):
            raise refused
        found = [self.of_closed(x, y, partial if name in _CALLS else ()) for x, y in zip(*inner, strict=True)]
        if name in _CALLS:
            return found[0]
        if any(found):  # summed in a loop
            raise refused
        operands = [*map(self._differs, all_operands, own_operands)]
        results = [*map(self._differs, first.outvars, second.outvars)]
        sharded = any((*operands, *results))
        _refuse_own_derivative(first)
        if partial:
            if sharded or not _is_linear(second, own_operands, partial) or _parameters(first) != _parameters(second):
                raise refused
            return {0}
        if _keeps_shards(first, second, operands, results) if sharded else _parameters(first) == _parameters(second):
            return set()
        if self._sums and _adds_up(first, operands):
            return {0}
        raise refused


def _refuse_own_derivative(operation: Any) -> None:
    if operation.primitive.name.startswith("custom_") and not _is_known_function(operation):
        raise NeedsCompleteAxes(f"{_described(operation)} has a derivative of its own.")


def _may_be_linear(operation: Any) -> bool:
    rule = rule_of(operation)
    return operation.primitive.name in ("mul", "div") or (
        rule is not None and rule.values in ("moved", "linear", "sum")
    )


def _is_linear(operation: Any, operands: Sequence[Any], partial: set[int]) -> bool:
    """Return whether an operation of partial sums, and of numbers that are the same everywhere, gives partial sums."""
    name, rule = operation.primitive.name, rule_of(operation)
    if not jnp.issubdtype(operation.outvars[0].aval.dtype, jnp.inexact):  # a conversion to integers rounds
        return False
    if name in ("mul", "div"):
        return partial == {0} or (name == "mul" and len(partial) == 1)
    if rule is None or rule.values not in ("moved", "linear", "sum") or "sort" in rule.uses.values():
        return False
    return not rule.product and all(i in partial or _is_zero(x) for i, x in enumerate(operands))


_OF_SHAPES = {"shape", "new_sizes", "limit_indices", "slice_sizes"}
"""Parameters that are sizes of results, which are compared anyway."""


def _keeps_shards(first: Any, second: Any, operands: Sequence[set[int]], results: Sequence[set[int]]) -> bool:
    """Return whether an operation gives shards of its results from shards of its operands."""
    name = first.primitive.name
    if name == "ragged_dot_general":  # each device has other groups
        return False
    params = [{k: v for k, v in _parameters(x).items() if k not in _OF_SHAPES} for x in (first, second)]
    if params[0] != params[1]:
        return False
    if (rule := rule_of(first)) is None:
        return name in _LOOPS or (name.startswith("custom_") and _is_known_function(first))
    # A factor is sharded if it is the first of a sharded dimension, since all others would not be contiguous.
    pairs = [*zip(rule.operands, operands, strict=True), *zip(rule.results, results, strict=True)]
    sharded = {term[i][0] for term, own in pairs for i in own if term[i]}
    return sharded.isdisjoint(rule.uses) and all(
        (dimension[:1] in [(f,) for f in sharded]) == (i in own) and sharded.isdisjoint(dimension[1:])
        for term, own in pairs
        for i, dimension in enumerate(term)
    )


def _adds_up(operation: Any, operands: Sequence[set[int]]) -> bool:
    """Return whether an operation adds up the sharded axes, and has no other."""
    rule = rule_of(operation)
    if rule is None or rule.values != "sum":
        return False
    sharded = {f for term, own in zip(rule.operands, operands, strict=True) for i in own for f in term[i]}
    return sharded <= {f for f, how in rule.summed.items() if how == "sum"}


class _ComparedProgram:
    """The operations of a program that are compared, and the scopes of those that exchange shards."""

    def __init__(self, jaxpr: Any):
        self._same: dict[Any, Any] = {}
        self.compared, self.exchanged, self.scopes = list[Any](), list[Any](), list[tuple[dict[str, int], str, int]]()
        self.gets = list[set[Any]]()
        """The values that each exchange gets."""
        made = set[Any]()
        for operation in jaxpr.eqns:
            scope = read_scope(str(operation.source_info.name_stack))
            name = operation.primitive.name
            if name in _CHANGES_NO_VALUE or (
                name == "convert_element_type" and _is_literal(self.operands(operation)[0])
            ):
                # The two programs may differ in these, which change no value: their results stand for their operands.
                # JAX converts a number where it has to make it device-varying.
                self._same.update(zip(operation.outvars, self.operands(operation), strict=True))
            elif scope is None:
                self.compared.append(operation)
            else:
                self.exchanged += self.operands(operation)
                if not self.scopes or self.scopes[-1] != scope:
                    self.scopes.append(scope)
                    self.gets.append(set())
                self.gets[-1] |= {x for x in self.operands(operation) if not _is_literal(x) and x not in made}
                made.update(operation.outvars)

    def origin(self, x: Any) -> Any:
        return x if _is_literal(x) else self._same.get(x, x)

    def operands(self, operation: Any) -> list[Any]:
        return [*map(self.origin, operation.invars)]


class _Correspondence:
    """The values of two programs that correspond. Results of operations that are not compared do by their first use."""

    def __init__(self) -> None:
        self._pairs: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}

    def of_shards(self, x: Any) -> Any:
        """Return the value in the program of shards that corresponds to one in the program of complete axes."""
        return self._pairs[0].get(x, x)

    def check(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        for x, y in zip(first, second, strict=True):
            if _is_literal(x) and _is_literal(y):
                continue
            if (
                _is_literal(x)
                or _is_literal(y)
                or self._pairs[0].setdefault(x, y) is not y
                or (self._pairs[1].setdefault(y, x) is not x)
            ):
                raise NeedsCompleteAxes("it uses other values for other sizes of it.")


# --- operands ---


def _is_literal(x: Any) -> bool:
    return hasattr(x, "val")


def _same_number(x: Any, y: Any) -> bool:
    """Return whether two operands are the same number, or neither is a number."""
    return _same(x.val, y.val) if _is_literal(x) and _is_literal(y) else _is_literal(x) == _is_literal(y)


def _is_zero(x: Any) -> bool:
    return _is_literal(x) and _same(x.val, 0)


def _is_known_function(operation: Any) -> bool:
    """Return whether an operation is one of JAX's or Axonym's functions that have a derivative of their own."""
    inner = operation.params.get("call_jaxpr")
    about = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    name, _, place = str(getattr(about, "func_src_info", "")).partition(" at ")
    return name in _WITH_RULES and place.startswith(_PACKAGES)


def _parameters(operation: Any) -> dict[str, Any]:
    plain = int, float, str, tuple, np.dtype, type(None)
    found = {key: value for key, value in operation.params.items() if isinstance(value, plain)}
    return {key: value for key, value in found.items() if key != "branches"}


def _same(x: Any, y: Any) -> bool:
    return np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))


def _described(operation: Any) -> str:
    """Return the innermost scope of an operation, such as `mean`, and the name of its primitive."""
    scope = str(operation.source_info.name_stack).split("/")[-1].partition("[")[0]
    return f"{scope!r} ({operation.primitive.name})" if scope else repr(operation.primitive.name)
