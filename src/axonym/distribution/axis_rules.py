"""Declare the use of named axes by an operation in one rule, from which the distribution of the operation follows.

`axonym.core.operation_rules` has the rules of JAX's primitives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..axis import Names
from .policy import Successors

INFERRED = frozenset(("sum", "max", "min", "and", "or", "index of", "turned"))
"""The uses of an axis for which JAX infers the sharding of the result on Explicit mesh axes. `prod` is none of them:
its gradient reshapes, which needs an output sharding."""


@dataclasses.dataclass(frozen=True, eq=False)
class AxisRule:
    """Describes what an operation does to named axes.

    >>> from axonym.distribution.axis_rules import AxisRule
    >>> AxisRule((("batch", "embed"),), ("batch",), {"embed": "sum"}).native
    True
    >>> AxisRule((("batch",), ("batch",)), ("batch",), {}).gathers
    True
    """

    operands: Sequence[Names]
    results: Any
    """The axes of the result, or a tuple of them for several."""
    uses: Mapping[str, str] | None = None
    """The use of axes that are not treated index by index: `sum`, `max` and so on; `index of`, the place of an element;
    `turned`, the other order; `whole`, each device needs all of the axis. None if no use is declared, as where results
    can be constants, which have no sharding."""
    successors: Successors = dataclasses.field(default_factory=dict)
    """For axes that are split, merged or renamed, the axes of results that can take over their sharding."""
    product: bool = False
    """True if the operation multiplies its operands, and all-gathers parameters among them itself."""

    @property
    def by_index(self) -> bool:
        """Return whether every index of every axis is treated by itself, and each result has all axes."""
        axes = {n for names in self.operands for n in names}
        return self.uses == {} and all({*names} == axes for names in names_of_results(self.results))

    @property
    def native(self) -> bool:
        """Return whether JAX infers the sharding of the result from operands that agree."""
        return self.uses is not None and not self.product and INFERRED.issuperset(self.uses.values())

    @property
    def gathers(self) -> bool:
        """Return whether parameters in their storage sharding are all-gathered per device."""
        return self.product or (self.by_index and sum(map(bool, self.operands)) > 1)

    @property
    def along(self) -> frozenset[str]:
        """Return the axes of which each device needs all."""
        return frozenset(n for n, use in (self.uses or {}).items() if use == "whole")


def names_of_results(out_names: Any) -> Sequence[Names]:
    """Return the axes of each result."""
    return out_names if out_names and not isinstance(out_names[0], str) else (out_names or (),)
