"""Compare two evaluations of a program: inputs that do not hide a difference, and where and how the values differ.

Values are recognised by fingerprints that do not depend on layout and sharding. A correct program has a few values that
its reference has not, so the search is for programs that are known to differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SCALES = 1.0, 1 / 16, 16.0
"""The scales of the arguments, several of them because one scale may never take some branch."""


def asymmetric(x: np.ndarray) -> np.ndarray:
    """Return an array with other elements of the same signs, if some are equal, so that no shards are equal by luck.

    An array of zeros becomes one of small positive numbers. Zeros beside other elements may be a mask, and stay.
    """
    if np.unique(x[x != 0]).size == np.count_nonzero(x) > 0:
        return x
    factors = 1 + np.random.default_rng(x.size).random(x.shape) / 64
    return x * factors if x.any() else factors / 16


def moved_by_rounding(
    args: Sequence[np.ndarray], results: Sequence[np.ndarray], run: Callable[[list[np.ndarray]], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Return how far elements of a function's results may be, since its arguments are known but for a rounding."""
    moved = [np.zeros(x.shape) for x in results]
    for seed in range(3):  # one change may by luck leave an element where it was
        choice = np.random.default_rng(seed).choice
        near = [x * (1 + choice((-_ROUNDING, _ROUNDING), x.shape)) if x.dtype.kind in "fc" else x for x in args]
        for total, a, b in zip(moved, results, run(near), strict=True):
            if a.dtype.kind not in "fc":
                far = np.where(a == b, 0.0, np.inf)
            else:
                with np.errstate(invalid="ignore"):
                    far = np.where(a == b, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
            np.maximum(total, far, out=total)
    # A program rounds at each of its steps, and so moves further than by a rounding of its arguments.
    return [2.0**8 * x for x in moved]


# A relative change of arguments that is lost in no function on the way, such as exp of small numbers.
_ROUNDING = 2.0**-46


def usual_sizes(x: np.ndarray) -> np.ndarray:
    """Return the magnitudes of elements, without zeros and without huge ones that stand for infinity, as in masks."""
    sizes = np.abs(x[np.isfinite(x) & (x != 0)]) if x.dtype.kind in "fc" else np.zeros(0)
    return sizes[sizes < 1e8 * max(1.0, np.quantile(sizes, 0.1))] if sizes.size else sizes


def first_wrong(
    ends: Iterable[int], operands: Callable[[int], Iterable[int]], fine: Callable[[int], bool]
) -> int | None:
    """Return the first value on the way to wrong ones that is not fine, though all that it was computed from is."""
    waiting, seen, first = list(ends), set[int](), list[int]()
    while waiting:
        if (position := waiting.pop()) not in seen:
            seen.add(position)
            before = [p for p in operands(position) if not fine(p)]
            waiting += before
            first += [] if before else [position]
    return min(first, default=None)


class Likeness(NamedTuple):
    """The relation of a value on devices to the reference: a partial sum over mesh axes, a multiple, or both."""

    summed: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()
    inverse: bool = False

    def words(self, sizes: Mapping[str, int]) -> str:
        if self.summed:
            return f"gives a partial sum over {' and '.join(self.summed)}, which nothing adds up"
        size = math.prod(sizes[a] for a in self.factor)
        of = f"the size{'s' if len(self.factor) > 1 else ''} of {' and '.join(self.factor)}"
        times = f"1/{size} (one over {of}) of" if self.inverse else f"{size} times ({of})"
        return f"gives {times} a value of the reference"


def find_likeness(
    value: np.ndarray, devices: Mapping[str, int], sizes: Mapping[str, int], known: set[Any]
) -> Likeness | None:
    """Return how a value is like one of those with known fingerprints; None if it is not.

    Its first axis or axes are for devices, along the mesh axes in `devices`; `sizes` has all mesh axes.
    """
    one, varying = _distinct_values(value, devices)
    for factor, inverse in itertools.product(_subsets_of_names(sizes), (False, True)):
        size = math.prod(sizes[a] for a in factor)
        for summed in _subsets_of_names(varying):
            total = one.sum(tuple(varying[a] for a in summed))
            if fingerprint(total * size if inverse else total / size) in known:
                return Likeness(summed, factor, inverse)
    return None


def fingerprint(x: np.ndarray) -> tuple[int, str, str]:
    """Return numbers that layout and sharding do not change: sums over all elements, of terms that do not cancel."""
    x = np.real(x) + np.imag(x)
    return x.size, f"{np.sum(np.abs(x)):.9g}", f"{np.sum(np.maximum(x, 0)):.9g}"


def _distinct_values(value: np.ndarray, devices: Mapping[str, int]) -> tuple[np.ndarray, dict[str, int]]:
    """Return a value without copies of it, and the mesh axes along which it varies."""
    value = value.reshape(*devices.values(), -1)
    far = 1e-10 * float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))
    varying = {
        a: i
        for i, a in enumerate(devices)
        if not np.allclose(value, value.take([0], i), rtol=0, atol=far, equal_nan=True)
    }
    return value[tuple(slice(None) if a in varying else slice(1) for a in devices)], varying


def _subsets_of_names(names: Iterable[str]) -> list[tuple[str, ...]]:
    names = tuple(names)
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]
