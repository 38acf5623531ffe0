"""Dynamic slices: slices with a known size whose start may be traced."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Self

from ..axis import Axis


class ds:
    """A slice with a known size whose start may be traced.

    Arguments:
        start: the first index.
        length: the number of elements, or an axis of that size.

    >>> x = axn.arange(axn.Axis("x", 8))
    >>> jax.jit(lambda i: x["x", axn.ds(i, 3)])(2)
    NamedArray(int32[x=3], [2 3 4])
    """

    __slots__ = ("size", "start")

    must_fit: ClassVar[bool] = True
    """Whether a slice that does not fit its axis is an error. If not, zeros are read outside and nothing is written."""

    def __init__(self, start: Any, length: int | Axis):
        self.start = start
        self.size = length.size if isinstance(length, Axis) else operator.index(length)
        if self.size < 0:
            raise ValueError(f"ds: a length cannot be negative, got {self.size}.")

    def to_slice(self) -> slice:
        """Return the same slice as a Python slice.

        >>> axn.ds(2, 3).to_slice()
        slice(2, 5, None)
        """
        return slice(self.start, self.start + self.size)

    @classmethod
    def block(cls, idx: Any, size: int) -> Self:
        """Make the slice of the `idx`-th block of `size` elements.

        Arguments:
            idx: the index of the block; may be traced.
            size: the number of elements in a block.

        >>> axn.arange(axn.Axis("x", 8))["x", axn.ds.block(1, 4)]
        NamedArray(int32[x=4], [4 5 6 7])
        """
        return cls(idx * size, size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.start}, {self.size})"
