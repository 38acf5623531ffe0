"""Find gradients of a traced step that nothing needs, that placements gather, or that are computed again too often."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.source_lines import Source
from . import _scopes
from ._traced_step import CONSTRAINTS, SAME, StepProgram, TracedArray, TracedOperation, bytes_of, kept_by, share_of
from .records import MUCH, WIDE, AvoidableWork, some, without_numbers


def frozen(step: StepProgram, arguments: Sequence[Any], results: Sequence[Any], total: int) -> Iterator[AvoidableWork]:
    """Find gradients that are zeroed, or of parameters that the step returns as they were."""
    zero = _zero_values(step)
    fixed = {x.argument for x in (_value_before_zeros(x, zero) for x in step.results) if x.argument is not None}
    paths = [path for i, path in enumerate(arguments) if i in fixed and path]
    # What is kept of their gradients, such as moments, is of no use; nor is the norm of all gradients.
    ends = tuple(f"/{path.partition('/')[2]}" for path in paths if "/" in path)
    if len(results) != len(step.results):  # the trees of some models hide results
        ends = ()
    used = [x for x, path in zip(step.results, results, strict=False) if not (ends and str(path).endswith(ends))]
    used += step.results[len(results) :]
    needed, waiting = set(used), used
    while waiting:
        op = waiting.pop().maker
        if (
            op is None
            or op.results[0] in zero
            or (paths and op.name == "reduce_sum" and not op.results[0].shape and not op.phase)
        ):
            continue
        new = [x for x in op.operands if x not in needed]
        needed.update(new)
        waiting += new
    unused = [
        op
        for op in step.operations
        if op.flops and needed.isdisjoint(op.results) and op.phase in ("backward", "recomputed")
    ]
    if (share := share_of(unused, total)) >= MUCH:
        line = next(iter(unused[0].lines()), None)
        yield AvoidableWork(
            "frozen", None, line, share, of=some(list(dict.fromkeys(map(without_numbers, paths)))) or "they are zeroed"
        )


def joined_parameters(step: StepProgram) -> Iterator[AvoidableWork]:
    """Find parameters or gradients that are joined to one vector, whose axis no mapping shards."""
    given = sum(bytes_of(x) for x in step.arguments)
    for op in step.operations:
        flat = [x for x in op.operands if x.maker is not None and x.maker.name == "reshape" and len(x.shape) == 1]
        arrays = [x for x in flat if x.maker is not None and len(x.maker.operands[0].shape) > 1]
        if op.name != "concatenate" or len(arrays) < _SEVERAL or len(op.results[0].shape) != 1:
            continue
        if (share := (size := bytes_of(op.results[0])) / given) >= WIDE / 2:
            yield AvoidableWork("joined", None, op.source, share, (size, len(flat)))


_SEVERAL = 4
"""The least number of joined arrays that are taken for the parameters of a model."""


def _zero_values(step: StepProgram) -> set[TracedArray]:
    """Return the values that are zero, whatever the arguments are."""
    found = set[TracedArray]()

    def is_zero(x: TracedArray) -> bool:
        return x in found or (x.constant is not None and not np.any(np.asarray(x.constant)))

    for op in step.operations:
        if op.name in SAME or op.name == "neg":
            zero = is_zero(op.operands[0])
        else:
            zero = op.name == "mul" and any(map(is_zero, op.operands))
        found.update(op.results if zero else ())
    return found


def _value_before_zeros(x: TracedArray, zero: set[TracedArray]) -> TracedArray:
    """Return the value that another one is after zeros are added to it."""
    while x.maker is not None:
        op = x.maker
        rest = [y for y in op.operands if y not in zero]
        if (op.name in ("add", "sub") and len(rest) == 1 and rest[0] is op.operands[0]) or (
            op.name == "add" and len(rest) == 1
        ):
            x = rest[0]
        elif op.name in SAME and op.operands[0].dtype == x.dtype and op.operands[0].shape == x.shape:
            x = op.operands[0]
        else:
            break
    return x


def gathered_gradients(
    step: StepProgram, arguments: Sequence[str | None], shards: Mapping[str, int], mesh: Mapping[str, int]
) -> Iterator[AvoidableWork]:
    """Find placements that give devices more of gradients than they have of the parameters."""
    given = sum(bytes_of(x) for x in step.arguments)
    counts: dict[tuple[int, ...], list[int]] = {}
    for x, path in zip(step.arguments, arguments, strict=False):
        counts.setdefault(x.shape, []).append(shards.get(path or "", 1))
    found: dict[Source | None, list[TracedArray]] = {}
    for op in step.operations:
        if op.name in CONSTRAINTS and op.phase in ("", "optimizer") and _is_of_gradient(op):
            x, kept = op.operands[0], kept_by(op)
            if kept is not None and min(counts.get(x.shape, [1])) > math.prod(mesh[a] for a in kept):
                found.setdefault(op.source, []).append(x)
    for line, xs in found.items():
        if (share := (size := sum(map(bytes_of, xs))) / given) >= MUCH:
            yield AvoidableWork("gathered", None, line, share, (size, len(xs)))


def _is_of_gradient(op: TracedOperation) -> bool:
    """Return whether the operand of an operation is a gradient, or made of one element for element."""
    waiting, seen = [op.operands[0]], set[TracedArray]()
    while waiting and len(seen) < 32:
        x = waiting.pop()
        if x.maker is not None and x not in seen and x.shape == op.operands[0].shape:
            if x.maker.phase == "backward":
                return True
            seen.add(x)
            waiting += x.maker.operands
    return False


def computed_twice(step: StepProgram, total: int) -> Iterator[AvoidableWork]:
    """Find products that the backward pass computes again more than once, as checkpointing lies around more of it."""
    passes: dict[Any, dict[str, list[TracedOperation]]] = {}
    for op in step.operations:
        if op.flops and _scopes.around(op.scope, "dispatch") is None:  # which computes again to save memory
            key = _scopes.said_of(_scopes.operation(op.scope)), op.source
            passes.setdefault(key, {}).setdefault(op.phase, []).append(op)
    more, nested = 0, list[TracedOperation]()
    for found in passes.values():
        again = found.get("recomputed", [])
        own, flops = (sum(op.flops for op in ops) for ops in (found.get("forward", []), again))
        if own and flops >= 1.5 * own:
            more += flops - own
            nested += again
    if more >= MUCH * total:
        line = next(
            (line for op in nested if len(around := _checkpoints_around(op)) > 1 for line in op.lines(around[0])), None
        )
        yield AvoidableWork("checkpointed", None, line, more / total)


def _checkpoints_around(op: TracedOperation) -> list[TracedOperation]:
    return [x for x in op.around if "remat" in x.name or "checkpoint" in x.name]
