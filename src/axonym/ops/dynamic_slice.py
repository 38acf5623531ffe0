"""Dynamic slices: a start that may be traced, and a size that is known."""

from __future__ import annotations

import operator
from typing import Any

from ..axis import Axis


class dslice:
    """A slice whose start may be traced, of a size that is known.

    Arguments:
        start: the first index.
        length: how many, or an axis whose size says so.

    >>> x = axn.arange(axn.Axis("x", 8))
    >>> jax.jit(lambda i: x["x", axn.dslice(i, 3)])(2)
    NamedArray(int32[x=3], [2 3 4])
    """

    __slots__ = ("size", "start")

    def __init__(self, start: Any, length: int | Axis):
        self.start = start
        self.size = length.size if isinstance(length, Axis) else operator.index(length)
        if self.size < 0:
            raise ValueError(f"ds: a length is not negative, got {self.size}.")

    def to_slice(self) -> slice:
        """The same as a Python slice.

        >>> axn.ds(2, 3).to_slice()
        slice(2, 5, None)
        """
        return slice(self.start, self.start + self.size)

    @staticmethod
    def block(idx: Any, size: int) -> dslice:
        """The `idx`-th block of `size` elements.

        >>> axn.ds.block(1, 4)
        ds(4, 4)
        """
        return dslice(idx * size, size)

    def __repr__(self) -> str:
        return f"ds({self.start}, {self.size})"


ds = dslice


def dblock(idx: Any, size: int) -> dslice:
    """The slice that holds block `idx` of `size` elements.

    Arguments:
        idx: which block; may be traced.
        size: elements in a block.

    >>> axn.arange(axn.Axis("x", 8))["x", axn.dblock(1, 4)]
    NamedArray(int32[x=4], [4 5 6 7])
    """
    return dslice.block(idx, size)
