"""`blame`: the first operation at which an axis stops being sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..core import errors
from ..distribution.mesh_axes import AnyMesh
from .explaining import Mappings, explain, quickest_exact
from .records import Collective
from .report import Report


@dataclasses.dataclass(frozen=True)
class Blame:
    """The operation at which an axis stops being sharded: the result of `blame`.

    >>> print(axn.insight.Blame("batch", None, ()))
    nothing gathers or moves batch
    """

    axis: str
    culprit: Collective | None
    """The first all-gather that completes the axis on each device, or all-to-all that shards another axis instead."""
    not_known: tuple[Collective, ...]
    """All-gathers and all-to-alls before `culprit` (all, if None) whose axes are not known: each may be the first."""
    remark: str = ""
    """Why nothing can gather the axis: no mapping shards it, or no array has it."""

    def __str__(self) -> str:
        if self.culprit is None:
            text = f"nothing gathers or moves {self.axis}" + (f": {self.remark}" if self.remark else "")
        else:
            text = f"{self.axis} stops being sharded at {self.culprit}"
        if self.not_known:
            many = errors.counted(len(self.not_known), "exchange")
            text += f"\nof {many}{' before it' if self.culprit else ''} the axes are not known:"
            text += "".join(f"\n  {c}" for c in self.not_known)
        return text


def blame(
    fn: Callable[..., Any],
    /,
    *args: Any,
    axis: str,
    mapping: Mappings = None,
    mesh: AnyMesh | None = None,
    **kwargs: Any,
) -> Blame:
    """Find the first operation at which an axis stops being sharded, because it is gathered or moved.

    Indices of look-ups do not count: looking up a table that is stored sharded needs all of them.

    Arguments:
        fn, args, mapping, mesh, kwargs: as in `explain`.
        axis: the name of the axis.

    >>> f = lambda x: axn.sort(x, "batch")
    >>> found = axn.insight.blame(f, axn.ones({"batch": 8}), axis="batch")
    >>> print(found)
    nothing gathers or moves batch: no mapping shards it.
    """
    report = explain(fn, *args, mapping=mapping, mesh=mesh, by=quickest_exact(), **kwargs)
    unknown = []
    for c in report.collectives:
        if c.of_indices:
            continue
        if axis in (*c.gathered, *c.moved):
            return Blame(axis, c, tuple(unknown))
        if c.kind in ("all-gather", "all-to-all") and c.reason is None:
            unknown.append(c)
    return Blame(axis, None, tuple(unknown), _remark(report, axis))


def _remark(report: Report, axis: str) -> str:
    """Say that an axis is sharded nowhere, with names of the mapping that may be meant for it."""
    if any(over for x in report.placed for n, over in zip(x.axes, x.over, strict=True) if n == axis):
        return ""
    if report.axes and axis not in report.axes:
        return f"no array of the step has it.{errors.suggestion(axis, report.axes)}"
    mappings = {**report.parameter_mapping, **report.mapping}
    if mappings.get(axis):
        return ""
    others = [n for n, over in mappings.items() if over and n not in report.axes]
    near = f", but {errors.quoted(others)}, which no array has" if others else ""
    return f"no mapping shards it{near}."
