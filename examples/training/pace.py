"""Find out which host is slow: each process measures itself, and the supervisors compare.

Every step takes as long as the slowest process, in all processes alike. So the supervisors compare what each does by
itself: its work before a step, and a product of matrices on each of its devices.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterator, Mapping

Pace = Mapping[str, float]
"""The median seconds of what a process has measured."""

_LATEST, _FEWEST = 20, 10
"""Of so many measurements the median is taken, as soon as there are so few."""
_SHARE, _FACTOR = 0.2, 1.5
"""A host is slow if its own work adds this share to a step, or if a device takes so many times the median."""

_STEP, _BEFORE, _DEVICE = "step", "before a step", "device "

_SECONDS: dict[str, collections.deque[float]] = collections.defaultdict(lambda: collections.deque(maxlen=_LATEST))


def took(step: float, before: float) -> None:
    """Note the seconds of a step, and those before it for which this process kept its devices waiting."""
    _SECONDS[_STEP].append(step)
    _SECONDS[_BEFORE].append(before)


def took_on_device(number: int, seconds: float) -> None:
    """Note how long a device took for what all of them do."""
    _SECONDS[f"{_DEVICE}{number}"].append(seconds)


def pace() -> Pace:
    """What this process has measured lately."""
    latest = {what: list(seconds) for what, seconds in list(_SECONDS.items())}
    return {what: statistics.median(seconds) for what, seconds in latest.items() if len(seconds) >= _FEWEST}


def slow(paces: Mapping[int, Pace]) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each slow host, what is slow there, and why that is said."""
    measured = [(i, what, seconds) for i, own in paces.items() for what, seconds in own.items()]
    for i, what, seconds in measured:
        kind = what.rstrip("0123456789")
        others = [x for j, other, x in measured if (j, other) != (i, what) and other.startswith(kind)]
        if not others or kind == _STEP:
            continue
        usual = statistics.median(others)
        if kind == _BEFORE and seconds > usual + _SHARE * paces[i].get(_STEP, math.inf):
            yield i, what, f"it works {seconds:.2g} s before each step, the median of the others {usual:.2g} s"
        if kind == _DEVICE and seconds > _FACTOR * usual:
            yield i, what, f"its {what} takes {seconds:.2g} s for a product, the median of the others {usual:.2g} s"
