"""Find work of a traced step that could be left out, whatever the mapping is: `faults_of`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._faults_of_gradients import computed_twice, frozen, gathered_gradients, joined_parameters
from ._faults_of_loops import apart_from_state, same_in_turns, stacked, without_cache
from ._faults_of_rows import (
    all_experts,
    equal_rows,
    padded,
    repeated_operands,
    replicated,
    summed_products,
    unused_rows,
    widened,
)
from ._traced_step import StepProgram
from .records import AvoidableWork


def faults_of(
    step: StepProgram,
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
    total = sum(op.flops for op in step.operations) or 1
    found = itertools.chain(
        padded(step, total),
        unused_rows(step, total),
        equal_rows(step, total),
        all_experts(step, total),
        replicated(step, mesh, total),
        without_cache(step, total),
        same_in_turns(step, total),
        apart_from_state(step, total),
        gathered_gradients(step, arguments, shards, mesh),
        frozen(step, arguments, results, total),
        joined_parameters(step),
        widened(step),
        computed_twice(step, total),
        stacked(step),
        repeated_operands(step),
        summed_products(step, total),
    )
    by_line: dict[Any, list[AvoidableWork]] = {}
    for work in found:
        by_line.setdefault((work.why, work.source), []).append(work)
    for same in by_line.values():
        yield max(same, key=lambda work: work.share)
