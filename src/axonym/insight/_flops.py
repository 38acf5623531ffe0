"""Count flops: of products and convolutions, and of the branches of conditionals, of which one runs.

A product takes a multiplication and an addition for each pair of numbers. Of amounts in branches, the least is a bound,
the mean an estimate.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

Sizes = Sequence[int]


class UnknownForm(ValueError):
    """The text of a program has a form that is not known here."""


def of_product(result: Sizes, summed: Sizes) -> int:
    """Return the flops of a product with a result of some sizes, which sums over axes of others."""
    return 2 * math.prod(result) * math.prod(summed)


def pairs_met(
    size: int, kernel: int, out: int, stride: int = 1, before: int = 0, spread: int = 1, apart: int = 1
) -> int:
    """Count the pairs of an output and a kernel element that meet an element of the input, along one axis.

    Arguments:
        before: the padding before the first element.
        spread: the distance between elements of the input.
        apart: the distance between elements of the kernel.
    """
    starts, met = np.arange(out, dtype=np.int64) * stride - before, 0
    for place in range(kernel):
        at = starts + place * apart
        met += int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())
    return met


def of_convolution(labels: str, shapes: Sequence[Sizes], *windows: Sizes) -> int:
    """Return the flops of a convolution, whose axes are labelled as XLA does: `b01f_01io->b01f`.

    Every output feature sees the input features of the kernel, except at padding and at the gaps of dilation.

    Arguments:
        windows: the strides, the padding before, and the dilations of the input and the kernel; empty if there is none.
    """
    found = re.fullmatch(r"([0-9a-z]+)_([0-9a-z]+)->([0-9a-z]+)", labels)
    if found is None:
        raise UnknownForm(f"a convolution with the axes {labels!r}")
    image, kernel, out = (dict(zip(of, sizes, strict=True)) for of, sizes in zip(found.groups(), shapes, strict=True))
    spatial = sorted(label for label in kernel if label.isdecimal())
    settings = zip(*(own or [n] * len(spatial) for own, n in zip(windows, (1, 0, 1, 1), strict=True)), strict=True)
    places = [pairs_met(image[d], kernel[d], out[d], *own) for d, own in zip(spatial, settings, strict=True)]
    return 2 * out["b"] * out["f"] * kernel["i"] * math.prod(places)


def of_traced_convolution(params: Mapping[str, Any], image: Sizes, kernel: Sizes, out: Sizes) -> int:
    """Return the flops of a convolution that JAX traced, with its parameters and the sizes of its arrays."""
    numbers, before = params["dimension_numbers"], [low for low, _ in params["padding"]]
    settings = (params["window_strides"], before, params["lhs_dilation"], params["rhs_dilation"])
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], *settings, strict=True)
    met = [pairs_met(image[i], kernel[j], out[k], *own) for i, j, k, *own in places]
    batch, feature = (out[i] for i in numbers.out_spec[:2])
    return 2 * batch * feature * kernel[numbers.rhs_spec[1]] * math.prod(met)


# --- branches ---

Branches: TypeAlias = tuple[tuple[int, int, int], ...]
"""The branches around an operation, each by the number of its conditional, of how many it is one, and which."""

Thing = TypeVar("Thing", bound=Hashable)

NOTE = (
    "collectives and flops in a branch run only if it is taken: each branch is taken to run equally often, and bounds "
    "count the one that takes least"
)


def ways(branches: Branches) -> int:
    """Return how many ways conditionals may go, of which one runs an operation: as if each were taken equally often."""
    return math.prod(of for _, of, _ in branches)


def mean(amount: int, branches: Branches) -> int:
    """Return the mean of an amount over the branches that may run."""
    return amount // ways(branches)


def least(amounts: Iterable[tuple[Branches, Thing, Any]]) -> defaultdict[Thing, Any]:
    """Add up amounts of several things; of the branches of a conditional, add the least amount of each thing.

    Each amount comes with the branches around the operation that takes it, and the thing, such as flops. Amounts are
    numbers, or arrays of one for each of several meshes. A thing of which nothing is taken has the amount 0.
    """
    total = defaultdict[Thing, Any](int)
    conditionals: dict[tuple[int, int], dict[int, list[tuple[Branches, Thing, Any]]]] = {}
    for branches, what, amount in amounts:
        if branches:
            (number, of, i), *inside = branches
            conditionals.setdefault((number, of), {}).setdefault(i, []).append((tuple(inside), what, amount))
        else:
            total[what] = total[what] + amount
    for (_, of), found in conditionals.items():
        if len(found) == of:  # otherwise a branch takes nothing
            first, *others = map(least, found.values())
            for what, amount in first.items():
                if all(what in other for other in others):
                    total[what] = total[what] + functools.reduce(_smaller, (other[what] for other in others), amount)
    return total


class Computed:
    """The flops of the products that each device computes."""

    def __init__(self) -> None:
        self.flops: int | None = 0
        """The flops, with the mean of the branches of conditionals; None if they are not known."""
        self.phases: dict[str, int] = {}
        """The flops in each phase."""
        self._needed: list[tuple[Branches, str, int]] = []

    def add(self, phase: str, flops: int, branches: Branches, narrow: bool, needed: int | None = None) -> None:
        """Add a product.

        Arguments:
            narrow: whether its operands have at most 8 bits, of which chips multiply more in a second.
            needed: the flops that a chip has to compute, if these are less.
        """
        done = mean(flops, branches)
        self.flops = None if self.flops is None else self.flops + done
        self.phases[phase] = self.phases.get(phase, 0) + done
        needed = flops if needed is None else needed
        self._needed += [(branches, kind, needed) for kind in (("flops",) if narrow else ("flops", "wide"))]

    @property
    def least(self) -> int | None:
        """Return the needed flops if each conditional takes the branch with the fewest."""
        return None if self.flops is None else least(self._needed)["flops"]

    @property
    def wide(self) -> int | None:
        """Return these flops without narrow products, by which bounds are computed."""
        return None if self.flops is None else least(self._needed)["wide"]


def _smaller(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if np.ndim(a) or np.ndim(b) else min(a, b)
