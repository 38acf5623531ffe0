"""Find work of a traced step that could be left out, whatever the mapping is: `faults_of`.

Each rule looks at the operations of the step, with their axes, dtypes and lines, and yields what it finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.source_lines import Source
from . import _scopes
from ._traced_step import SAME, Loop, Operation, TracedStep, Value, kept_by, origin, reached
from .records import AvoidableWork, some, without_numbers

_LEAST = 0.05
"""The share of the compute from which work is worth a remark."""


def faults_of(
    step: TracedStep,
    arguments: Sequence[str | None],
    results: Sequence[str],
    shards: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Iterator[AvoidableWork]:
    """Yield the work of a step that could be left out.

    Arguments:
        arguments: the paths of the arguments, None if one is not known.
        results: the paths of the results.
        shards: in how many different shards arguments lie, by their paths.
    """
    total = sum(op.flops for op in step.operations)
    if not total:
        return
    found = itertools.chain(
        _padded(step, total),
        _unused_rows(step, total),
        _equal_rows(step, total),
        _all_experts(step, total),
        _without_cache(step, total),
        _same_in_turns(step, total),
        _apart_from_state(step, total),
        _gathered_gradients(step, arguments, shards, mesh),
        _frozen(step, arguments, results, total),
        _widened(step),
        _computed_twice(step, total),
        _stacked(step),
        _repeated_operands(step),
        _summed_products(step, total),
    )
    by_line: dict[Any, list[AvoidableWork]] = {}
    for work in found:
        by_line.setdefault((work.why, work.source), []).append(work)
    for same in by_line.values():
        yield max(same, key=lambda work: work.share)


def _share(operations: Iterable[Operation], total: int) -> float:
    return sum(op.flops for op in operations) / total


def _axis_of(operations: Iterable[Operation], size: int) -> str:
    """Return the name of the axis of this size in the first named operation that has only one."""
    for op in operations:
        named = _scopes.operation(op.scope)
        terms = () if named is None else (*named.operands, *named.results)
        if len(names := {a.name for term in terms for a in term if a.size == size}) == 1:
            return names.pop()
    return f"an axis of {size:,}"


# --- padding ---


def _padded(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find axes of which much is padding, along which products with parameters run."""
    found: dict[tuple[int, int], dict[Operation, None]] = {}
    first: dict[tuple[int, int], Operation] = {}
    for op in step.operations:
        for at, before, after in _paddings(op):
            if after < 1.25 * before:
                continue
            if op.phase != "backward":
                first.setdefault((before, after), op)
            products = found.setdefault((before, after), {})
            for value in _along(op.results[0], at):
                products |= dict.fromkeys(user for user in value.users if user.flops)
    for (before, after), op in first.items():
        if not any(map(_has_parameter, found[before, after])):  # such as attention to a cache that is not full yet
            continue
        share = _share(found[before, after], total) * (1 - before / after)
        if share >= _LEAST:
            name = _axis_of(found[before, after], after)
            yield AvoidableWork("padding", None, op.source, share, (before, after), name)


def _paddings(op: Operation) -> Iterator[tuple[int, int, int]]:
    """Yield each axis that an operation pads, with its size before and after."""
    if op.name == "pad":
        for i, (low, high, inside) in enumerate(op.eqn.params["padding_config"]):
            if low >= 0 and high >= 0 and low + high and not inside:
                yield i, op.operands[0].shape[i], op.results[0].shape[i]
    elif op.name == "concatenate":
        i, shape = op.eqn.params["dimension"], op.results[0].shape
        filled = [x for x in op.operands if not _is_constant(x)]
        if 0 < len(filled) < len(op.operands):
            yield i, sum(x.shape[i] for x in filled), shape[i]


def _is_constant(x: Value) -> bool:
    return (x := origin(x)).maker is None and x.argument is None


def _along(start: Value, at: int) -> dict[Value, set[int]]:
    """Return the values that have an axis of a value whole, each with the positions of it."""
    found = {start: {at}}
    waiting = [(start, at)]
    while waiting:
        x, at = waiting.pop()
        for user in x.users:
            for y, i in _passed(user, x, at):
                if i not in found.setdefault(y, set()):
                    found[y].add(i)
                    waiting.append((y, i))
    return found


def _passed(op: Operation, x: Value, at: int) -> Iterator[tuple[Value, int]]:
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


def _has_parameter(op: Operation) -> bool:
    """Return whether a product multiplies something by a parameter."""
    return [origin(x).argument is None for x in op.operands[:2]].count(True) == 1


# --- rows ---


def _unused_rows(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products of many rows of which the step then picks a few."""
    for op in step.operations:
        for at, size, picked in _picked(op) if op.phase in ("forward", "") else ():
            if picked > size / 2:
                continue
            # Everything that computes row by row what is picked from, and that nothing else uses.
            waiting, own, products = [(op.operands[0], at)], {op}, list[Operation]()
            while waiting:
                x, at = waiting.pop()
                maker = x.maker
                if maker is None or any(u not in own and u.phase in ("forward", "") for u in x.users):
                    continue
                if maker.loops != op.loops or maker.name in _JOINS:
                    continue
                own.add(maker)
                products += [maker] * bool(maker.flops and _has_parameter(maker))
                if maker.flops and not _has_parameter(maker):
                    continue
                waiting += [(y, i) for y in maker.operands for i in range(len(y.shape)) if (x, at) in _passed(maker, y, i)]
            # The backward pass has two products for each.
            own_share = _share(products, total) * (1 - picked / size)
            trained = 3 if any(p.phase == "forward" for p in products) else 1
            if (share := own_share * trained) >= _LEAST:
                name = _axis_of(products, size)
                line = products[-1].source
                yield AvoidableWork("unused", str(op.source), line, share, (picked, size), name)


_JOINS = {"carry", "branch", "slice", "stack", "add"}


def _picked(op: Operation) -> Iterator[tuple[int, int, int]]:
    """Yield the axes of which an operation picks positions, with their sizes and how many it picks."""
    if op.name not in ("slice", "dynamic_slice", "gather") or op.rule is None:
        return
    before, after = op.operands[0].shape, op.results[0].shape
    if op.name == "gather":
        share = math.prod(after) / math.prod(before)
        at = [i for i, (n, m) in enumerate(zip(before, op.eqn.params["slice_sizes"], strict=True)) if m == 1 < n]
        yield from ((i, before[i], round(before[i] * share)) for i in at if before[i] * share >= 1)
    else:
        yield from ((i, n, m) for i, (n, m) in enumerate(zip(before, after, strict=True)) if m < n)


def _equal_rows(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products of rows that are equal, since what they are made of was broadcast before."""
    equal: dict[tuple[Value, int], Operation] = {}
    """The axes along which all of a value is equal, with the operation that broadcasts it."""
    found: dict[Operation, list[Operation]] = {}
    for op in step.operations:
        if op.name in ("shard", "unshard"):
            own = [(i, equal.get((op.operands[0], i))) for i in range(len(op.results[0].shape))]
        elif op.name == "broadcast_in_dim" and not _is_constant(op.operands[0]):
            kept = {j: i for i, j in enumerate(op.eqn.params["broadcast_dimensions"])}
            sizes = op.operands[0].shape
            new = {j for j, n in enumerate(op.results[0].shape) if n > 1 and (j not in kept or sizes[kept[j]] == 1)}
            own = [(j, op if j in new else equal.get((op.operands[0], kept[j]))) for j in (*new, *kept)]
        else:
            own = _equal_after(op, equal)
        for i, by in own:
            if by is not None:
                for y in op.results[:1]:
                    equal[y, i] = by
                if op.flops and op.phase in ("forward", "") and _has_parameter(op):
                    found.setdefault(by, []).append(op)
    for by, products in found.items():
        trained = 3 if any(p.phase == "forward" for p in products) else 1
        if (share := trained * _share(products, total)) >= _LEAST:
            size = max(by.results[0].shape[i] for i in range(len(by.results[0].shape)) if equal.get((by.results[0], i)) is by)
            name = _axis_of((*products, by), size)
            yield AvoidableWork("equal", None, by.source, share * (1 - 1 / size), (1, size), name)


def _equal_after(op: Operation, equal: dict[tuple[Value, int], Operation]) -> Iterator[tuple[int, Operation | None]]:
    """Yield the axes along which a result is equal, since all operands are."""
    if op.rule is None or op.rule.values not in ("each", "moved", "sum") or not op.results:
        return
    for i, dim in enumerate(op.rule.results[0]):
        having = [
            equal.get((x, j))
            for x, term in zip(op.operands, op.rule.operands, strict=False)
            for j, own in enumerate(term)
            if own and own == dim and not _is_constant(x)
        ]
        if having and None not in having:
            yield i, having[0]


def _all_experts(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products of all rows with the parameters of all experts, of which each row takes a few."""
    for op in step.operations:
        if op.name not in ("top_k", "argmax"):
            continue
        shape = op.operands[0].shape
        at = op.eqn.params.get("axis", op.eqn.params["axes"][0] if "axes" in op.eqn.params else -1) % len(shape)
        size, taken = shape[at], op.eqn.params.get("k", 1)
        rows = math.prod(shape) // size
        products = [p for p in step.operations if p.flops and p.loops == op.loops and _of_each(p, size, rows)]
        trained = 3 if op.phase == "forward" else 1
        if taken <= size / 2 and (share := trained * _share(products, total) * (1 - taken / size)) >= _LEAST:
            yield AvoidableWork("experts", None, products[0].source, share, (taken, size), _axis_of(products, size))


def _of_each(product: Operation, size: int, rows: int) -> bool:
    """Return whether a product multiplies so many rows with parameters of each of so many experts."""
    if product.rule is None or product.phase == "backward" or not _has_parameter(product):
        return False
    first = origin(product.operands[0]).argument is not None
    own, others = product.rule.operands[:2] if first else product.rule.operands[1::-1]
    result, sizes = product.rule.results[0], product.rule.sizes
    experts = [dim for dim in own if dim in result and math.prod(sizes[f] for f in dim) == size]
    of_rows = [dim for dim in others if dim in result and dim not in experts]
    # The product that scores experts has no other axis of theirs.
    more = any(dim in result for dim in own if dim and dim not in experts)
    return bool(experts) and more and math.prod(sizes[f] for dim in of_rows for f in dim) >= rows


# --- loops ---


def _same_in_turns(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products in loops that do not depend on the turn, or only on some conditions that do."""
    for loop, inside in _loops(step).items():
        if (times := loop.times) is None or times < 2:
            continue
        conditions = _conditions(loop, inside)
        found: list[tuple[Operation, int]] = []
        for op in inside:
            own = conditions[op.results[0]] if op.flops else None
            if own is not None and 2 ** len(own) < times:
                found.append((op, 2 ** len(own)))
        share = sum(op.flops * (1 - values / times) for op, values in found) / total
        if share >= _LEAST:
            line = _line_in_body(loop, [op for op, _ in found])
            yield AvoidableWork("turns", None, line, share, (max(n for _, n in found), times))


def _conditions(loop: Loop, inside: Sequence[Operation]) -> dict[Value, frozenset[Value] | None]:
    """Return the conditions, such as comparisons with the number of the turn, by which alone values of a loop differ.

    None if they differ in each turn.
    """
    found: dict[Value, frozenset[Value] | None] = {}
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


def _without_cache(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find loops of which each turn changes one position of what they carry, but computes all positions again."""
    for loop, inside in _loops(step).items():
        own = {*inside}
        for carry in loop.carried:
            for at in _changed_axes(carry):
                along = _along(carry.results[0], at)
                products = [*dict.fromkeys(p for x in along for p in x.users if p in own and _has_parameter(p))]
                size = carry.results[0].shape[at]
                share = _share(products, total) * (1 - 1 / size)
                if share >= _LEAST:
                    name = _axis_of(products, size)
                    yield AvoidableWork("cache", None, _line_in_body(loop, products), share, (1, size), name)
                    return


def _changed_axes(carry: Operation) -> set[int]:
    """Return the axes along which a turn of a loop changes only one position of what it carries."""
    shape, waiting, seen, found = carry.results[0].shape, [carry.operands[-1]], set[Value](), set[int]()
    while waiting:
        x = waiting.pop()
        if x in seen or (op := x.maker) is None or x.shape != shape or op is carry:
            continue
        seen.add(x)
        if op.name in SAME or op.name == "select_n":
            waiting += op.operands[op.name == "select_n" :]
            if op.name == "select_n" and (position := origin(op.operands[0]).maker) and position.name == "eq":
                counts = [y for y in map(origin, position.operands) if y.maker and y.maker.name == "iota"]
                found |= {i for y in counts for i, n in enumerate(shape) if y.shape[y.maker.eqn.params["dimension"]] == n > 1}
        elif op.name in ("dynamic_update_slice", "scatter"):
            waiting.append(op.operands[0])
            new = op.operands[1 if op.name != "scatter" else 2]
            found |= {i for i, n in enumerate(shape) if n > 1 and math.prod(new.shape) * n == math.prod(shape)}
        elif op.name == "concatenate":
            i, parts = op.eqn.params["dimension"], [y for y in op.operands if y.maker and y.maker.name == "slice"]
            found |= {i for y in parts if y.shape[i] == shape[i] - 1 > 0 and origin(y) is carry.results[0]}
    return found


def _apart_from_state(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products in loops of a slice with a parameter, beside others of what the loop carries."""
    for loop, inside in _loops(step).items():
        own = [op for op in inside if op.loops[-1] is loop]
        state = {x for c in loop.carried for x in reached(c.results, lambda user, _: user.results)}
        slices = {x for s in loop.sliced for x in reached(s.results, lambda user, _: user.results)}
        products = [op for op in own if op.flops and op.phase in ("forward", "")]
        given = [op for op in products if not state & {*op.operands} and slices & {*op.operands} and _has_constant(op, loop)]
        # A loop over microbatches or layers is meant: it carries sums, or what the layers have in common.
        recurs = any(state & {*op.operands} and _has_constant(op, loop) for op in products)
        trained = 3 if any(p.phase == "forward" for p in given) else 1
        if recurs and (share := trained * _share(given, total)) >= _LEAST:
            yield AvoidableWork("apart", None, _line_in_body(loop, given), share, (1, loop.times or 0))


def _has_constant(op: Operation, loop: Loop) -> bool:
    """Return whether an operand of a product is an argument that a loop does not change."""
    for x in op.operands[:2]:
        while x.maker is not None and x.maker.name in SAME and x.maker not in loop.sliced:
            x = x.maker.operands[0]
        if x.argument is not None:
            return True
    return False


def _loops(step: TracedStep) -> dict[Loop, list[Operation]]:
    """Return the operations of each loop."""
    found: dict[Loop, list[Operation]] = {}
    for op in step.operations:
        for loop in op.loops:
            found.setdefault(loop, []).append(op)
    return found


def _line_in_body(loop: Loop, operations: Sequence[Operation]) -> Source | None:
    """Return the line in the body of a loop that calls the largest of some operations."""
    op = max(operations, key=lambda op: op.flops)
    return next(iter(op.lines(loop.operation)), op.source)


# --- derivatives ---


def _frozen(step: TracedStep, arguments: Sequence[Any], results: Sequence[Any], total: int) -> Iterator[AvoidableWork]:
    """Find gradients of parameters that the step returns as they were."""
    zero = _zeros(step)
    fixed = {x.argument for x in (_unchanged(x, zero) for x in step.results) if x.argument is not None}
    paths = [path for i, path in enumerate(arguments) if i in fixed and path]
    if not paths or not any(op.phase == "backward" for op in step.operations):
        return
    # What is kept of their gradients, such as moments, is of no use; nor is the norm of all gradients.
    ends = tuple(f"/{path.partition('/')[2]}" for path in paths if "/" in path)
    used = [x for x, path in zip(step.results, results, strict=True) if not (ends and str(path).endswith(ends))]
    needed, waiting = set(used), used
    while waiting:
        op = waiting.pop().maker
        if op is None or op.results[0] in zero or (op.name == "reduce_sum" and not op.results[0].shape and not op.phase):
            continue
        new = [x for x in op.operands if x not in needed]
        needed.update(new)
        waiting += new
    unused = [op for op in step.operations if op.flops and needed.isdisjoint(op.results) and op.phase in ("backward", "recomputed")]
    if (share := _share(unused, total)) >= _LEAST:
        line = next(iter(unused[0].lines()), None)
        yield AvoidableWork("frozen", None, line, share, of=some(list(dict.fromkeys(map(without_numbers, paths)))))


def _gathered_gradients(
    step: TracedStep, arguments: Sequence[str | None], shards: Mapping[str, int], mesh: Mapping[str, int]
) -> Iterator[AvoidableWork]:
    """Find placements that give devices more of gradients than they have of the parameters."""
    given = sum(_bytes(x) for x in step.arguments)
    counts: dict[tuple[int, ...], list[int]] = {}
    for x, path in zip(step.arguments, arguments, strict=True):
        counts.setdefault(x.shape, []).append(shards.get(path or "", 1))
    found: dict[Source | None, list[Value]] = {}
    for op in step.operations:
        if op.name in ("sharding_constraint", "reshard") and op.phase in ("", "optimizer") and _is_of_gradient(op):
            x, kept = op.operands[0], kept_by(op)
            if kept is not None and min(counts.get(x.shape, [1])) > math.prod(mesh[a] for a in kept):
                found.setdefault(op.source, []).append(x)
    for line, xs in found.items():
        if (share := (size := sum(map(_bytes, xs))) / given) >= _LEAST:
            yield AvoidableWork("gathered", None, line, share, (size, len(xs)))


def _is_of_gradient(op: Operation) -> bool:
    """Return whether the operand of an operation is a gradient, or made of one element for element."""
    waiting, seen = [op.operands[0]], set[Value]()
    while waiting and len(seen) < 32:
        x = waiting.pop()
        if x.maker is not None and x not in seen and x.shape == op.operands[0].shape:
            if x.maker.phase == "backward":
                return True
            seen.add(x)
            waiting += x.maker.operands
    return False


def _zeros(step: TracedStep) -> set[Value]:
    """Return the values that are zero, whatever the arguments are."""
    found = set[Value]()

    def is_zero(x: Value) -> bool:
        return x in found or (x.constant is not None and not np.any(np.asarray(x.constant)))

    for op in step.operations:
        if op.name in SAME or op.name == "neg":
            zero = is_zero(op.operands[0])
        else:
            zero = op.name == "mul" and any(map(is_zero, op.operands))
        found.update(op.results if zero else ())
    return found


def _unchanged(x: Value, zero: set[Value]) -> Value:
    """Return the value that another one is after zeros are added to it."""
    while x.maker is not None:
        op = x.maker
        rest = [y for y in op.operands if y not in zero]
        if op.name in ("add", "sub") and len(rest) == 1 and rest[0] is op.operands[0] or (op.name == "add" and len(rest) == 1):
            x = rest[0]
        elif op.name in SAME and op.operands[0].dtype == x.dtype and op.operands[0].shape == x.shape:
            x = op.operands[0]
        else:
            break
    return x


def _computed_twice(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find products that the backward pass computes again more than once, as checkpointing lies around more of it."""
    passes: dict[Any, dict[str, list[Operation]]] = {}
    for op in step.operations:
        if op.flops and _scopes.around(op.scope, "dispatch") is None:  # which computes again to save memory
            key = _scopes.said_of(_scopes.operation(op.scope)), op.source
            passes.setdefault(key, {}).setdefault(op.phase, []).append(op)
    more, nested = 0, list[Operation]()
    for found in passes.values():
        again = found.get("recomputed", [])
        own, flops = (sum(op.flops for op in ops) for ops in (found.get("forward", []), again))
        if own and flops >= 1.5 * own:
            more += flops - own
            nested += again
    if more >= _LEAST * total:
        line = next((line for op in nested if len(around := _checkpoints(op)) > 1 for line in op.lines(around[0])), None)
        yield AvoidableWork("checkpointed", None, line, more / total)


def _checkpoints(op: Operation) -> list[Operation]:
    return [x for x in op.around if "remat" in x.name or "checkpoint" in x.name]


# --- dtypes ---

_WIDE = 0.2
"""The share of the forward pass from which products in a larger dtype are worth a remark."""


def _widened(step: TracedStep) -> Iterator[AvoidableWork]:
    """Find the first conversion to a larger dtype after which products have that dtype."""
    forward = [op for op in step.operations if op.flops and op.phase in ("forward", "")]
    total = sum(op.flops for op in forward)
    for op in step.operations:
        if op.name != "convert_element_type" or op.phase not in ("forward", "") or not _is_wider(op):
            continue
        wide = op.results[0].dtype

        def follows(user: Operation, x: Value) -> Iterable[Value]:
            return [y for y in user.results if y.dtype == wide]  # noqa: B023

        products = {p: None for x in reached(op.results, follows) for p in x.users if p.flops}
        wider = [p for p in forward if p in products and not all(map(_is_converted, p.operands[:2]))]
        if total and (share := _share(wider, total)) >= _WIDE:
            yield AvoidableWork("wide", None, op.source, share, of=f"{op.operands[0].dtype} becomes {wide}")
            return


def _is_wider(op: Operation) -> bool:
    (x,), (y,) = op.operands, op.results
    floats = [np.issubdtype(z.dtype, np.floating) or "float" in str(z.dtype) for z in (x, y)]
    return all(floats) and 1 < x.dtype.itemsize < y.dtype.itemsize


def _is_converted(x: Value) -> bool:
    """Return whether a value is another one in a larger dtype, which somebody asked for."""
    while x.maker is not None and x.maker.name in SAME:
        if x.maker.name == "convert_element_type" and _is_wider(x.maker):
            return True
        x = x.maker.operands[0]
    return False


# --- memory ---


def _stacked(step: TracedStep) -> Iterator[AvoidableWork]:
    """Find arrays that a loop stacks, a turn beside the other, and of which only sums are used."""
    given = sum(_bytes(x) for x in step.arguments)
    found: dict[Any, list[Value]] = {}
    for op in step.operations:
        x = op.results[0] if op.results else None
        if op.name != "stack" or x is None or x in step.results or len(x.shape) < 2:
            continue
        sums = [*_sums_of(x, op.phase)]
        # Sums over turns, apart from what a forward pass keeps anyway, or numbers of each turn.
        over_turns = op.phase != "forward" and all(s is not None and 0 in s for s in sums)
        if sums and (over_turns or all(s is not None and {*s} == {*range(1, len(x.shape))} for s in sums)):
            found.setdefault(op.eqn, []).append(x)
    for eqn, xs in found.items():
        size = sum(map(_bytes, xs))
        if (share := size / (size + given)) >= _WIDE:
            op = max(xs, key=_bytes).maker
            maker = op and op.operands[0].maker
            line = maker and next(iter(maker.lines(maker.loops[-1].operation)), maker.source)
            yield AvoidableWork("stacked", None, line, share, (size, xs[0].shape[0]))


def _bytes(x: Value) -> int:
    return math.prod(x.shape) * getattr(x.dtype, "itemsize", 4)


def _sums_of(x: Value, phase: str) -> Iterator[Sequence[int] | None]:
    """Yield the axes of sums over what is made element for element of a value; None for another use."""
    for user in x.users:
        if user.phase == "backward" != phase:
            continue
        if user.name in ("reduce_sum", "reduce_max"):
            yield user.eqn.params["axes"]
        elif user.rule is not None and user.rule.values == "each" and user.results[0].shape == x.shape:
            yield from _sums_of(user.results[0], phase)
        else:
            yield None


def _repeated_operands(step: TracedStep) -> Iterator[AvoidableWork]:
    """Find arrays, such as the keys of a cache, that are repeated before a product that mostly reads them."""
    if any(op.phase == "backward" for op in step.operations):
        return
    given = sum(_bytes(x) for x in step.arguments)
    for op in step.operations:
        for x in op.operands[:2] if op.flops and not _has_parameter(op) else ():
            if math.prod(x.shape) < _FEW * math.prod(op.results[0].shape):
                continue
            y, by = x, x.maker
            while by is not None and by.name in SAME and (count := math.prod(y.shape) // math.prod(by.operands[0].shape)) < 2:
                y = by.operands[0]
                by = y.maker
            if by is not None and by.name == "broadcast_in_dim" and not _is_constant(y):
                size = op.runs * (_bytes(y) - _bytes(by.operands[0]))
                if (share := size / (size + given)) >= _WIDE:
                    yield AvoidableWork("repeated", None, by.source, share, (size, count))


_FEW = 4
"""How many times the numbers of its result a product reads to be bound by that."""


# --- products that are none ---


_SLOWER = 16
"""About how much more numbers units for products multiply at a time than others do."""


def _summed_products(step: TracedStep, total: int) -> Iterator[AvoidableWork]:
    """Find sums over an axis of elementwise products that are larger than what they are made of."""
    for op in step.operations:
        if op.name != "reduce_sum" or op.phase not in ("forward", "") or not (maker := _before(op.operands[0])):
            continue
        if maker.name != "mul" or len(maker.results[0].users) > 2:
            continue
        size = math.prod(maker.results[0].shape)
        given = [math.prod(origin(x).shape) for x in maker.operands]
        count = _SLOWER * 2 * size * maker.runs * maker.copies
        if max(given) * 4 <= size and (share := count / (count + total)) >= _LEAST:
            yield AvoidableWork("sum of products", None, op.source, share, (max(given), size))


def _before(x: Value) -> Operation | None:
    """Return the operation that makes a value, apart from conversions."""
    while x.maker is not None and x.maker.name in ("convert_element_type", "sharding_constraint", "copy"):
        x = x.maker.operands[0]
    return x.maker
