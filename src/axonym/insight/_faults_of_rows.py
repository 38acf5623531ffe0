"""Find products of a traced step whose rows are padding, equal, unused, or wider or more often than they need to be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ..core.source_lines import Source
from ._traced_step import (
    SAME,
    Replicating,
    StepProgram,
    TracedArray,
    TracedOperation,
    along,
    axis_name,
    bytes_of,
    has_parameter,
    is_constant,
    origin,
    passed,
    reached,
    replicating,
    share_of,
)
from .records import MUCH, WIDE, AvoidableWork


def padded(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find axes of which much is padding, along which products with parameters run."""
    found: dict[tuple[int, int], dict[TracedOperation, None]] = {}
    first: dict[tuple[int, int], TracedOperation] = {}
    for op in step.operations:
        for at, before, after in _padded_axes(op):
            if after < 1.25 * before:
                continue
            if op.phase != "backward":
                first.setdefault((before, after), op)
            products = found.setdefault((before, after), {})
            for value in along(op.results[0], at):
                products |= dict.fromkeys(user for user in value.users if user.flops)
    for (before, after), op in first.items():
        if not any(map(has_parameter, found[before, after])):  # such as attention to a cache that is not full yet
            continue
        share = share_of(found[before, after], total) * (1 - before / after)
        if share >= MUCH:
            name = axis_name(found[before, after], after)
            yield AvoidableWork("padding", None, op.source, share, (before, after), name)


def _padded_axes(op: TracedOperation) -> Iterator[tuple[int, int, int]]:
    """Yield each axis that an operation pads, with its size before and after."""
    if op.name == "pad":
        for i, (low, high, inside) in enumerate(op.eqn.params["padding_config"]):
            if low >= 0 and high >= 0 and low + high and not inside:
                yield i, op.operands[0].shape[i], op.results[0].shape[i]
    elif op.name == "concatenate":
        i, shape = op.eqn.params["dimension"], op.results[0].shape
        filled = [x for x in op.operands if not is_constant(x)]
        if 0 < len(filled) < len(op.operands):
            yield i, sum(x.shape[i] for x in filled), shape[i]
    elif op.name in ("scatter", "dynamic_update_slice") and is_constant(op.operands[0]):
        new, shape = op.operands[2 if op.name == "scatter" else 1].shape, op.results[0].shape
        if len(new) == len(shape):
            yield from ((i, n, m) for i, (n, m) in enumerate(zip(new, shape, strict=True)) if n < m)


def unused_rows(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find products of many rows of which the step then picks a few."""
    for op in step.operations:
        for at, size, picked in _picked_axes(op) if op.phase in ("forward", "") else ():
            if picked > size / 2:
                continue
            # All operations that compute the array row by row, and whose results nothing else uses.
            waiting, own, products = [(op.operands[0], at)], {op}, list[TracedOperation]()
            while waiting:
                x, at = waiting.pop()
                maker = x.maker
                if maker is None or any(u not in own and u.phase in ("forward", "") for u in x.users):
                    continue
                if maker.loops != op.loops or maker.name in _JOINS:
                    continue
                own.add(maker)
                products += [maker] * bool(maker.flops and has_parameter(maker))
                if maker.flops and not has_parameter(maker):
                    continue
                waiting += [
                    (y, i) for y in maker.operands for i in range(len(y.shape)) if (x, at) in passed(maker, y, i)
                ]
            # The backward pass has two products for each.
            own_share = share_of(products, total) * (1 - picked / size)
            trained = 3 if any(p.phase == "forward" for p in products) else 1
            if (share := own_share * trained) >= MUCH:
                name = axis_name(products, size)
                line = products[-1].source
                yield AvoidableWork("unused", str(op.source), line, share, (picked, size), name)


_JOINS = {"carry", "branch", "slice", "stack", "add"}


def _picked_axes(op: TracedOperation) -> Iterator[tuple[int, int, int]]:
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


def equal_rows(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find products of rows that are equal, since what they are made of was broadcast before."""
    equal: dict[tuple[TracedArray, int], TracedOperation] = {}
    """The axes along which all of a value is equal, with the operation that broadcasts it."""
    found: dict[TracedOperation, list[TracedOperation]] = {}
    for op in step.operations:
        if op.name in ("shard", "unshard"):
            own = [(i, equal.get((op.operands[0], i))) for i in range(len(op.results[0].shape))]
        elif op.name == "broadcast_in_dim" and not is_constant(op.operands[0]):
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
                if op.flops and op.phase in ("forward", "") and has_parameter(op):
                    found.setdefault(by, []).append(op)
    for by, products in found.items():
        trained = 3 if any(p.phase == "forward" for p in products) else 1
        if (share := trained * share_of(products, total)) >= MUCH:
            size = max(
                by.results[0].shape[i] for i in range(len(by.results[0].shape)) if equal.get((by.results[0], i)) is by
            )
            name = axis_name((by, *products), size)
            yield AvoidableWork("equal", None, by.source, share * (1 - 1 / size), (1, size), name)


def _equal_after(
    op: TracedOperation, equal: dict[tuple[TracedArray, int], TracedOperation]
) -> Iterator[tuple[int, TracedOperation | None]]:
    """Yield the axes along which a result is equal, since all operands are."""
    if op.rule is None or op.rule.values not in ("each", "moved", "sum") or not op.results:
        return
    for i, dim in enumerate(op.rule.results[0]):
        having = [
            equal.get((x, j))
            for x, term in zip(op.operands, op.rule.operands, strict=False)
            for j, own in enumerate(term)
            if own and own == dim and not is_constant(x)
        ]
        if having and None not in having:
            yield i, having[0]


def all_experts(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
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
        if taken <= size / 2 and (share := trained * share_of(products, total) * (1 - taken / size)) >= MUCH:
            yield AvoidableWork("experts", None, products[0].source, share, (taken, size), axis_name(products, size))


def _of_each(product: TracedOperation, size: int, rows: int) -> bool:
    """Return whether a product multiplies so many rows with parameters of each of so many experts."""
    if product.rule is None or product.phase == "backward":
        return False
    sides = [*zip(product.operands[:2], product.rule.operands[:2], strict=True)]
    result, sizes = product.rule.results[0], product.rule.sizes
    for (given, own), (_, others) in (sides, sides[::-1]):
        experts = [dim for dim in own if dim in result and math.prod(sizes[f] for f in dim) == size]
        of_rows = [dim for dim in others if dim in result and dim not in experts]
        # The product that scores experts has no other axis of theirs.
        more = any(dim in result for dim in own if dim and dim not in experts)
        if experts and more and origin(given).argument is not None:
            return math.prod(sizes[f] for dim in of_rows for f in dim) >= rows
    return False


def replicated(step: StepProgram, mesh: Mapping[str, int], total: int) -> Iterator[AvoidableWork]:
    """Find placements that replicate an axis along which products run, so that all devices compute the same."""
    given = sum(bytes_of(x) for x in step.arguments)
    lines: dict[Source | None, list[Replicating]] = {}
    for r in replicating(step):
        if r.placement.phase in ("forward", ""):
            lines.setdefault(r.placement.source, []).append(r)
    for line, placements in lines.items():
        whole, names = set[TracedArray](), dict[str, None]()
        for r in placements:
            x = r.placement.results[0]
            for i in r.places:
                whole |= along(x, i).keys()
            names |= dict.fromkeys(r.axes)
        products = [
            p
            for p in step.operations
            if p.flops
            and p.phase in ("forward", "")
            and not whole.isdisjoint(p.operands[:2])
            and all(x in whole or _is_given(x) for x in p.operands[:2])
        ]
        copies = math.prod(mesh.get(a, 1) for a in {a for r in placements for over in r.axes.values() for a in over})
        flops = (3 if any(p.phase == "forward" for p in products) else 1) * sum(p.flops for p in products)
        share = (copies - 1) * flops / (total + (copies - 1) * flops)
        held = max((bytes_of(p.results[0]) for p in products), default=0)
        if share >= MUCH or held / (held + given) >= WIDE:
            yield AvoidableWork(
                "replicated", None, line, max(share, held / (held + given)), (held, copies), " and ".join(names)
            )


def _is_given(x: TracedArray) -> bool:
    return is_constant(x) or origin(x).argument is not None


def widened(step: StepProgram) -> Iterator[AvoidableWork]:
    """Find the first conversion to a larger dtype after which products have that dtype."""
    forward = [op for op in step.operations if op.flops and op.phase in ("forward", "")]
    total = sum(op.flops for op in forward)
    for op in step.operations:
        if op.name != "convert_element_type" or op.phase not in ("forward", "") or not _is_wider(op):
            continue
        wide = op.results[0].dtype

        def follows(user: TracedOperation, x: TracedArray) -> Iterable[TracedArray]:
            return [y for y in user.results if y.dtype == wide]  # noqa: B023

        products = {p: None for x in reached(op.results, follows) for p in x.users if p.flops}
        wider = [p for p in forward if p in products and not all(map(_is_converted, p.operands[:2]))]
        if total and (share := share_of(wider, total)) >= WIDE:
            yield AvoidableWork("wide", None, op.source, share, of=f"{op.operands[0].dtype} becomes {wide}")
            return


def _is_wider(op: TracedOperation) -> bool:
    (x,), (y,) = op.operands, op.results
    floats = [np.issubdtype(z.dtype, np.floating) or "float" in str(z.dtype) for z in (x, y)]
    return all(floats) and 1 < x.dtype.itemsize < y.dtype.itemsize


def _is_converted(x: TracedArray) -> bool:
    """Return whether a value is another one in a larger dtype, which somebody asked for."""
    while x.maker is not None and x.maker.name in SAME:
        if x.maker.name == "convert_element_type" and _is_wider(x.maker):
            return True
        x = x.maker.operands[0]
    return False


_SLOWER = 16
"""About how much more numbers units for products multiply at a time than others do."""


def summed_products(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find sums over an axis of products, or squared differences, that are larger than what they are made of."""
    held = sum(bytes_of(x) for x in step.arguments)
    for op in step.operations:
        maker = _operation_before(op.operands[0]) if op.name == "reduce_sum" else None
        if maker is None or _most_users(op.operands[0], maker) > (1 if maker.flops else 2):
            continue
        if (
            maker.name in ("square", "integer_pow")
            and (before := _operation_before(maker.operands[0]))
            and before.name == "sub"
        ):
            maker = before
        elif maker.name not in ("mul", "dot_general"):
            continue
        size = math.prod(maker.results[0].shape)
        given = max(math.prod(origin(x).shape) for x in maker.operands)
        count = _SLOWER * 2 * size * maker.runs * maker.copies * float(maker.share)
        share = count / (count + total)
        if maker.flops:  # such as gradients of each example, which only take memory
            share = bytes_of(maker.results[0]) / (bytes_of(maker.results[0]) + held)
        if given * 4 <= size and share >= (WIDE if maker.flops else MUCH):
            yield AvoidableWork("sum of products", None, op.source, share, (given, size))


def _most_users(x: TracedArray, maker: TracedOperation) -> int:
    """Return how many operations use what an operation makes, or the same values before they are summed."""
    most = len(x.users)
    while x.maker is not None and x.maker is not maker:
        x = x.maker.operands[0]
        most = max(most, len(x.users))
    return most


def _operation_before(x: TracedArray) -> TracedOperation | None:
    """Return the operation that makes a value, apart from conversions."""
    while x.maker is not None and x.maker.name in ("convert_element_type", "sharding_constraint", "copy", "transpose"):
        x = x.maker.operands[0]
    return x.maker


def repeated_operands(step: StepProgram) -> Iterator[AvoidableWork]:
    """Find arrays, such as the keys of a cache, that are repeated before a product that mostly reads them."""
    if any(op.phase == "backward" for op in step.operations):
        return
    given = sum(bytes_of(x) for x in step.arguments)
    for op in step.operations:
        for x in op.operands[:2] if op.flops else ():
            if math.prod(x.shape) < _FEW * math.prod(op.results[0].shape):
                continue
            by, count = x.maker, 1
            while by is not None and by.name in SAME:
                count = math.prod(by.results[0].shape) // max(1, math.prod(by.operands[0].shape))
                if count > 1:
                    break
                by = by.operands[0].maker
            if by is not None and by.name == "broadcast_in_dim" and count > 1 and not is_constant(by.operands[0]):
                size = op.runs * (bytes_of(by.results[0]) - bytes_of(by.operands[0]))
                if (share := size / (size + given)) >= WIDE:
                    yield AvoidableWork("repeated", None, by.source, share, (size, count))


_FEW = 4
"""The factor by which operands are larger than the result where reading them takes a product longest."""
