"""Say which operation makes a distributed program differ from its reference, by comparing the values on the way."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..core.differences import Likeness, find_likeness, fingerprint, first_wrong
from ._widening import Step


class Recording(NamedTuple):
    """The steps of a program and their values, by the position of the step."""

    steps: Sequence[Step]
    values: Mapping[int, np.ndarray]


def diagnose(
    found: Recording, reference: Recording, wrong: Sequence[int], names: Sequence[str], mesh: Mapping[str, int]
) -> str | None:
    """Return a sentence about the first wrong step on the way to wrong results; None if the values do not tell.

    Arguments:
        found: the program that differs.
        reference: the reference.
        wrong: the positions of the steps that computed the wrong results.
        names: the names of the arguments.
        mesh: the mesh axes and their sizes.
    """
    steps, known = found.steps, {fingerprint(x) for x in reference.values.values()}
    sizes = {**mesh, **{a: n for s in steps for a, n in s.devices.items()}}

    @functools.cache
    def likeness(position: int) -> Likeness | None:
        value = found.values.get(position)
        if value is None or np.array_equal(value, np.round(value)):
            return Likeness()  # counts and masks tell nothing
        return find_likeness(value, steps[position].devices, sizes, known)

    def fine(position: int) -> bool:  # a partial sum is right if it is summed later
        like = likeness(position)
        return like is not None and (like == Likeness() or bool(like.summed))

    def source(position: int) -> str:
        """Return a name for a value: the name of an argument, or of the operation that gives the value."""
        step = steps[position]
        if step.operation.startswith("argument "):
            return f"`{names[int(step.operation.removeprefix('argument '))]}`"
        at = f" at {step.where}" if step.where else ""
        if step.operation.startswith("all_gather") and step.operands:
            return f"{source(step.operands[0])}, all-gathered over {' and '.join(step.over)}{at}"
        return f"{step.operation}{at}"

    position = first_wrong(wrong, lambda p: steps[p].operands, fine)
    if position is None or (like := likeness(position)) == Likeness():
        return None
    step = steps[position]
    over = f" over {' and '.join(step.over)}" if step.over else ""
    what = f"{step.operation}{over}" + (f" at {step.where}" if step.where else "")
    if like is not None:
        return f"{what} {like.words(sizes)}"
    for operand in step.operands:
        if (partial := likeness(operand)) is not None and partial.summed:
            return f"{what} takes a partial sum over {' and '.join(partial.summed)}, from {source(operand)}"
    if gathered := [p for p in step.operands if steps[p].operation.startswith("all_gather")]:
        return f"{what} takes {source(gathered[0])}, where the reference has no such value"
    operands = ", ".join(dict.fromkeys(map(source, step.operands)))
    return f"{what} is the first to give a value that the reference does not have, from {operands or 'constants'}"
