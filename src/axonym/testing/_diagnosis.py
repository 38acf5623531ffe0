"""Say which operation makes a distributed program differ from its reference, by comparing the values on the way.

Values are recognised by fingerprints that do not depend on layout and sharding. A correct program has a few values that
its reference does not have, so this is for programs that are known to differ.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._widening import Step


class Recording(NamedTuple):
    """The steps of a program and their values, by the position of the step."""

    steps: Sequence[Step]
    values: Mapping[int, np.ndarray]


class _Likeness(NamedTuple):
    """How a value relates to a value of the reference: summed over these mesh axes, it is that value times a factor."""

    summed: tuple[str, ...]
    factor: tuple[str, ...]
    inverse: bool


_SAME = _Likeness((), (), False)


def diagnose(found: Recording, reference: Recording, wrong: Sequence[int], names: Sequence[str]) -> str | None:
    """Return a sentence about the first wrong step on the way to wrong results; None if the values do not tell.

    Arguments:
        found: the program that differs.
        reference: the reference.
        wrong: the positions of the steps that computed the wrong results.
        names: the names of the arguments.
    """
    return _Diagnosis(found, reference, names).sentence(wrong)


class _Diagnosis:
    def __init__(self, found: Recording, reference: Recording, names: Sequence[str]):
        self._steps, self._values, self._names = found.steps, found.values, names
        self._known = {_fingerprint(x) for x in reference.values.values()}
        self._sizes = {a: n for s in found.steps for a, n in s.devices.items()}
        self._likeness = functools.lru_cache(4096)(self._find_likeness)

    def sentence(self, wrong: Sequence[int]) -> str | None:
        waiting, seen, first = list(wrong), set[int](), list[int]()
        while waiting:
            position = waiting.pop()
            if position in seen or (position not in wrong and self._is_fine(position)):
                continue
            seen.add(position)
            before = [p for p in self._steps[position].operands if not self._is_fine(p)]
            waiting += before
            first += [] if before else [position]
        return self._describe(min(first)) if first else None

    def _describe(self, position: int) -> str | None:
        step, like = self._steps[position], self._likeness(position)
        over = f" over {_list(step.over)}" if step.over else ""
        what = f"{step.operation}{over}" + (f" at {step.where}" if step.where else "")
        if like == _SAME:
            return None
        if like is not None and like.summed:
            return f"{what} gives a partial sum over {_list(like.summed)}, which nothing adds up"
        if like is not None:
            size = math.prod(self._sizes[a] for a in like.factor)
            sizes = f"the size{'s' if len(like.factor) > 1 else ''} of {_list(like.factor)}"
            times = f"1/{size} (one over {sizes}) of" if like.inverse else f"{size} times ({sizes})"
            return f"{what} gives {times} a value of the reference"
        if partial := [(p, k.summed) for p in step.operands if (k := self._likeness(p)) is not None and k.summed]:
            operand, summed = partial[0]
            return f"{what} takes a partial sum over {_list(summed)}, from {self._source(operand)}"
        if gathered := [p for p in step.operands if self._steps[p].operation.startswith("all_gather")]:
            return f"{what} takes {self._source(gathered[0])}, where the reference has no such value"
        operands = ", ".join(dict.fromkeys(self._source(p) for p in step.operands))
        return f"{what} is the first to give a value that the reference does not have, from {operands or 'constants'}"

    def _source(self, position: int) -> str:
        """Return a name for a value: the name of an argument, or of the operation that gives the value."""
        step = self._steps[position]
        if step.operation.startswith("argument "):
            return f"`{self._names[int(step.operation.removeprefix('argument '))]}`"
        at = f" at {step.where}" if step.where else ""
        if step.operation.startswith("all_gather") and step.operands:
            return f"{self._source(step.operands[0])}, all-gathered over {_list(step.over)}{at}"
        return f"{step.operation}{at}"

    def _is_fine(self, position: int) -> bool:
        """Return whether the reference has a value, or it is a partial sum, which is right if it is summed later."""
        like = self._likeness(position)
        return like is not None and (like == _SAME or bool(like.summed))

    def _find_likeness(self, position: int) -> _Likeness | None:
        if position not in self._values or np.array_equal(value := self._values[position], np.round(value)):
            return _SAME  # counts and masks tell nothing
        devices = self._steps[position].devices
        value = value.reshape(*devices.values(), -1)
        scale = float(np.max(np.abs(value), initial=0.0))
        varying = {
            a: i
            for i, a in enumerate(devices)
            if not np.allclose(value, value.take([0], i), rtol=0, atol=1e-10 * scale, equal_nan=True)
        }
        one = value[tuple(slice(None) if a in varying else slice(1) for a in devices)]
        for factor in _subsets(self._sizes):
            size = math.prod(self._sizes[a] for a in factor)
            for summed in _subsets(varying):
                total = one.sum(tuple(varying[a] for a in summed))
                for inverse in (False, True):
                    if _fingerprint(total * size if inverse else total / size) in self._known:
                        return _Likeness(summed, factor, inverse)
        return None


def _subsets(names: Any) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


def _list(names: Sequence[str]) -> str:
    return " and ".join(names)


def _fingerprint(x: np.ndarray) -> tuple[int, str, str]:
    """Return numbers that layout and sharding do not change: sums over all elements, of terms that do not cancel."""
    return x.size, f"{np.sum(np.abs(x)):.9g}", f"{np.sum(np.maximum(x, 0)):.9g}"
