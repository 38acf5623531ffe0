"""`PlannedMapping`: a mesh and two mappings, what they cost, and how to write them as code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._text import as_shown
from .cost_model import Bounds, Estimate
from .linked_chips import Islands
from .report import Report

Over = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PlannedMapping:
    """A mesh and two mappings, and their cost.

    >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.mesh
    {'model': 2}
    """

    mesh: Mapping[str, int]
    compute: Mapping[str, Over]
    storage: Mapping[str, Over]
    """The parameter mapping, for `axonym.fsdp`; empty if parameters are stored as they are used."""
    bounds: Bounds
    memory: int
    """The bytes that each device keeps at least."""
    flops: int | None
    sent: int
    """The bytes that each device sends."""
    uncertain: int
    by: str = "names"
    """Its source: `names`, or `partitioner` where names are not enough."""
    verified: Report | None = None
    """The partitioner's report, if it was asked for one."""
    raw: bool = False
    """True if the step is a function of raw arrays, made by `axonym.names.distribute`."""
    estimate: Estimate = dataclasses.field(default_factory=lambda: Estimate({}))
    """The time of a step, estimated, in terms: by this, mappings are ordered."""
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values chosen for the arguments of the step's builder, or their keys, if these were given."""
    keyed: tuple[str, ...] = ()
    """The arguments of the builder whose values have keys."""
    topology: Islands | None = None
    """The chips that the estimate is for; the last axes of the mesh are within islands."""
    peak: int | None = None
    """The bytes that each device holds at most, as compiled, if the arguments that it updates are donated; None if it
    was not compiled."""

    @property
    def seconds(self) -> float:
        """Return the lower bound on the time of a step, by which plans prune: the longest of its bounds.

        >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.seconds > 0
        True
        """
        return self.bounds.longest

    @property
    def mapping(self) -> Any:
        """Return the argument `mapping` for `explain` and `compare`.

        >>> axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.mapping
        {'batch': 'model'}
        """
        return (dict(self.storage), dict(self.compute)) if self.storage else dict(self.compute)

    @property
    def between(self) -> str | list[str] | None:
        """Return the mesh axes that cross slices or islands, as `make_mesh` takes them.

        >>> print(axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.between)
        None
        """
        axes = [] if self.topology is None else self.topology.between(self.mesh)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def code(self) -> str:
        """Return the mesh and the mappings as Python.

        >>> print(axn.insight.plan(lambda x: x * 2, axn.ones({"batch": 8}), chips=2).best.code())
        mesh = axn.make_mesh({'model': 2})
        compute = {'batch': 'model'}
        step = axn.named_jit(step, compute, in_placement=compute)
        """
        across = "" if self.between is None else f", between={self.between!r}"
        lines = [f"mesh = axn.make_mesh({dict(self.mesh)!r}{across})", f"compute = {dict(self.compute)!r}"]
        if self.choices:
            value = {n: f"choices[{n!r}][{x!r}]" if n in self.keyed else repr(x) for n, x in self.choices.items()}
            lines.append(f"step = build({', '.join(f'{n}={x}' for n, x in value.items())})")
        if self.storage:
            lines.append(f"storage = {dict(self.storage)!r}")
        if self.raw:
            lines.append(f"step = axn.names.distribute(step, compute{', storage' * bool(self.storage)}, names=names)")
        elif self.storage:
            lines.append("step = axn.fsdp(step, storage, compute)")
        else:
            lines.append("step = axn.named_jit(step, compute, in_placement=compute)")
        return "\n".join(lines)

    def _what(self) -> tuple[str, str, str]:
        """Return the mesh, the mapping and the choices in words, by which it is told from other mappings."""
        return str(self.mesh), str(self.mapping), str(self.choices)

    def _order(self) -> tuple[float, float, int]:
        """Return the sort key of plans: if their estimates are shown alike, their bounds decide."""
        complexity = len(self.mesh) + len(self.compute) + len(self.storage)
        return as_shown(self.estimate.seconds), as_shown(self.seconds), complexity
