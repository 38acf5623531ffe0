"""Find what the loops of a traced step could do before them, after them, or once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.source_lines import Source
from ._traced_step import (
    SAME,
    StepProgram,
    TracedArray,
    TracedLoop,
    TracedOperation,
    along,
    axis_name,
    bytes_of,
    has_parameter,
    origin,
    reached,
    share_of,
)
from .records import MUCH, WIDE, AvoidableWork


def same_in_turns(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find products in loops that do not depend on the turn, or only on some conditions that do."""
    for loop, inside in _operations_by_loop(step).items():
        if (times := loop.times) is None or times < 2:
            continue
        conditions = _conditions_of_values(loop, inside)
        found: list[tuple[TracedOperation, int]] = []
        for op in inside:
            own = conditions[op.results[0]] if op.flops else None
            if own is not None and 2 ** len(own) < times:
                found.append((op, 2 ** len(own)))
        share = sum(op.flops * (1 - values / times) for op, values in found) / total
        if share >= 2 * MUCH:  # keys of a text, and other arrays that each turn looks at, are often small
            line = _line_in_body(loop, [op for op, _ in found])
            yield AvoidableWork("turns", None, line, share, (max(n for _, n in found), times))


def _conditions_of_values(
    loop: TracedLoop, inside: Sequence[TracedOperation]
) -> dict[TracedArray, frozenset[TracedArray] | None]:
    """Return the conditions, such as comparisons with the number of the turn, by which alone values of a loop differ.

    None if they differ in each turn.
    """
    found: dict[TracedArray, frozenset[TracedArray] | None] = {}
    changed = True
    while changed:  # loops inside of it give values to earlier operations
        changed = False
        for op in inside:
            given = [found.get(x, frozenset()) for x in op.operands]
            own = None if None in given else frozenset(c for g in given for c in g or ())
            if op in loop.carried or op in loop.sliced or "random" in op.name:
                own = None
            for y in op.results:
                new = frozenset([y]) if own is None and y.dtype == bool and y.shape == () else own
                changed = changed or y not in found or new != found[y]
                found[y] = new
    return found


def without_cache(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find loops of which each turn changes one position of what they carry, but computes all positions again."""
    for loop, inside in _operations_by_loop(step).items():
        own = {*inside}
        for carry in loop.carried:
            for at in _changed_axes(carry):
                size, users = carry.results[0].shape[at], (p for x in along(carry.results[0], at) for p in x.users)
                products = [*dict.fromkeys(p for p in users if p.flops and p in own and has_parameter(p))]
                if (share := share_of(products, total) * (1 - 1 / size)) >= MUCH:
                    name = axis_name(products, size)
                    yield AvoidableWork("cache", None, _line_in_body(loop, products), share, (1, size), name)
                    return


def _changed_axes(carry: TracedOperation) -> set[int]:
    """Return the axes along which a turn of a loop changes only one position of what it carries."""
    shape, waiting, seen, found = carry.results[0].shape, [carry.operands[-1]], set[TracedArray](), set[int]()
    while waiting:
        x = waiting.pop()
        if x in seen or (op := x.maker) is None or x.shape != shape or op is carry:
            continue
        seen.add(x)
        if op.name in SAME or op.name == "select_n":
            waiting += op.operands[op.name == "select_n" :]
            if op.name == "select_n" and (position := origin(op.operands[0]).maker) and position.name == "eq":
                counts = [y.maker for y in map(origin, position.operands) if y.maker and y.maker.name == "iota"]
                sizes = {count.results[0].shape[count.eqn.params["dimension"]] for count in counts}
                found |= {i for i, n in enumerate(shape) if n > 1 and n in sizes}
        elif op.name in ("dynamic_update_slice", "scatter"):
            waiting.append(op.operands[0])
            new = op.operands[1 if op.name != "scatter" else 2]
            found |= {i for i, n in enumerate(shape) if n > 1 and math.prod(new.shape) * n == math.prod(shape)}
        elif op.name == "concatenate":
            i, parts = op.eqn.params["dimension"], [y for y in op.operands if y.maker and y.maker.name == "slice"]
            found |= {i for y in parts if y.shape[i] == shape[i] - 1 > 0 and origin(y) is carry.results[0]}
    return found


def apart_from_state(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find products in loops of a slice with a parameter, beside others of what the loop carries."""
    for loop, inside in _operations_by_loop(step).items():
        own = [op for op in inside if op.loops[-1] is loop]
        state = {x for c in loop.carried for x in reached(c.results, lambda user, _: user.results)}
        slices = {x for s in loop.sliced for x in reached(s.results, lambda user, _: user.results)}
        products = [op for op in own if op.flops and op.phase in ("forward", "")]
        given = [
            op for op in products if not state & {*op.operands} and slices & {*op.operands} and _has_constant(op, loop)
        ]
        # A loop over microbatches or layers is meant: it carries sums, or what the layers have in common.
        recurs = any(state & {*op.operands} and _has_constant(op, loop) for op in products)
        trained = 3 if any(p.phase == "forward" for p in given) else 1
        if recurs and (loop.times or 0) >= _MANY and (share := trained * share_of(given, total)) >= MUCH:
            yield AvoidableWork("apart", None, _line_in_body(loop, given), share, (1, loop.times or 0))


_MANY = 16
"""The number of turns from which each has so little to multiply that reading parameters takes longer."""


def _has_constant(op: TracedOperation, loop: TracedLoop) -> bool:
    """Return whether an operand of a product is an argument that a loop does not change."""
    for x in op.operands[:2]:
        while x.maker is not None and x.maker.name in SAME and x.maker not in loop.sliced:
            x = x.maker.operands[0]
        if x.argument is not None:
            return True
    return False


def stacked(step: StepProgram) -> Iterator[AvoidableWork]:
    """Find arrays that a loop stacks, a turn beside the other, and of which only sums are used."""
    given = sum(bytes_of(x) for x in step.arguments)
    found: dict[Any, list[TracedArray]] = {}
    for op in step.operations:
        x = op.results[0] if op.results else None
        if op.name != "stack" or x is None or x in step.results or len(x.shape) < 2:
            continue
        sums = [*_sums_of(x, op.phase)]
        # Only sums over turns are used, or one number of each turn. A forward pass keeps arrays for gradients anyway.
        over_turns = op.phase != "forward" and all(s is not None and 0 in s for s in sums)
        if sums and (over_turns or all(s is not None and {*s} == {*range(1, len(x.shape))} for s in sums)):
            found.setdefault(op.eqn, []).append(x)
    for xs in found.values():
        size = sum(map(bytes_of, xs))
        if (share := size / (size + given)) >= WIDE:
            op = max(xs, key=bytes_of).maker
            maker = op and op.operands[0].maker
            line = maker and next(iter(maker.lines(maker.loops[-1].operation)), maker.source)
            yield AvoidableWork("stacked", None, line, share, (size, xs[0].shape[0]))


def _sums_of(x: TracedArray, phase: str) -> Iterator[Sequence[int] | None]:
    """Yield the axes of the sums over a value, or over elementwise results of it; None for another use."""
    for user in x.users:
        if user.phase == "backward" != phase:
            continue
        if user.name in ("reduce_sum", "reduce_max"):
            yield user.eqn.params["axes"]
        elif user.rule is not None and user.rule.values == "each" and user.results[0].shape == x.shape:
            yield from _sums_of(user.results[0], phase)
        else:
            yield None


def _operations_by_loop(step: StepProgram) -> dict[TracedLoop, list[TracedOperation]]:
    """Return the operations of each loop."""
    found: dict[TracedLoop, list[TracedOperation]] = {}
    for op in step.operations:
        for loop in op.loops:
            found.setdefault(loop, []).append(op)
    return found


def _line_in_body(loop: TracedLoop, operations: Sequence[TracedOperation]) -> Source | None:
    """Return the line in the body of a loop that calls the largest of some operations."""
    op = max(operations, key=lambda op: op.flops)
    return next(iter(op.lines(loop.operation)), op.source)
