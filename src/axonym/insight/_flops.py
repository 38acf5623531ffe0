"""Count the flops of products and convolutions: a multiplication and an addition for each pair of numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from ._hlo import HloShape, Instruction, UnknownForm

Sizes = Sequence[int]


def of_product(result: Sizes, summed: Sizes) -> int:
    """Return the flops of a product with a result of some sizes, which sums over axes of others."""
    return 2 * math.prod(result) * math.prod(summed)


@dataclasses.dataclass(frozen=True)
class Window:
    """The stride, padding and dilations of a convolution along one axis."""

    stride: int = 1
    before: int = 0
    """The padding before the first element."""
    spread: int = 1
    """The distance between elements of the input."""
    apart: int = 1
    """The distance between elements of the kernel."""

    def seen(self, size: int, kernel: int, out: int) -> int:
        """Count the pairs of an output and a kernel element that meet an element of the input."""
        starts = np.arange(out, dtype=np.int64) * self.stride - self.before
        seen = 0
        for place in range(kernel):
            at = starts + place * self.apart
            seen += int(((at >= 0) & (at <= (size - 1) * self.spread) & (at % self.spread == 0)).sum())
        return seen


def of_convolution(labels: str, shapes: Sequence[Sizes], windows: Sequence[Window]) -> int:
    """Return the flops of a convolution, whose axes are labelled as XLA does: `b01f_01io->b01f`.

    Every output feature sees the input features of the kernel, except at padding and at the gaps of dilation.
    """
    found = re.fullmatch(r"([0-9a-z]+)_([0-9a-z]+)->([0-9a-z]+)", labels)
    if found is None:
        raise UnknownForm(f"a convolution with the axes {labels!r}")
    image, kernel, out = (dict(zip(of, sizes, strict=True)) for of, sizes in zip(found.groups(), shapes, strict=True))
    spatial = sorted(label for label in kernel if label.isdecimal())
    places = [w.seen(image[d], kernel[d], out[d]) for d, w in zip(spatial, windows, strict=True)]
    return 2 * out["b"] * out["f"] * kernel["i"] * math.prod(places)


def of_instruction(instruction: Instruction, operands: Sequence[HloShape]) -> int:
    """Return the flops of a product or convolution in a compiled program."""
    result, (left, right) = instruction.shapes[0], operands[:2]
    if instruction.opcode == "dot":
        summed = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims") or "")
        return of_product(result.sizes, [left.sizes[int(i)] for i in summed])
    # Compilers for TPUs write products as convolutions.
    labels = instruction.attribute("dim_labels") or ""
    window, spatial = instruction.window(), sum(label.isdecimal() for label in labels.partition("_")[0])

    def of(name: str, otherwise: int) -> list[int]:
        return [first for first, *_ in window.get(name, [[otherwise]] * spatial)]

    windows = [*map(Window, of("stride", 1), of("pad", 0), of("lhs_dilate", 1), of("rhs_dilate", 1))]
    return of_convolution(labels, [left.sizes, right.sizes, result.sizes], windows)
