"""Count the flops of products and convolutions: a multiplication and an addition for each pair of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from ._hlo import HloShape, Instruction, UnknownForm

Sizes = Sequence[int]


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


def of_instruction(instruction: Instruction, operands: Sequence[HloShape]) -> int:
    """Return the flops of a product or convolution in a compiled program."""
    result, (left, right) = instruction.shapes[0], operands[:2]
    if instruction.opcode == "dot":
        summed = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims") or "")
        return of_product(result.sizes, [left.sizes[int(i)] for i in summed])
    # Compilers for TPUs write products as convolutions.
    labels, window = instruction.attribute("dim_labels") or "", instruction.window()
    windows = ([n for n, *_ in window.get(name, ())] for name in ("stride", "pad", "lhs_dilate", "rhs_dilate"))
    return of_convolution(labels, [left.sizes, right.sizes, result.sizes], *windows)
