"""Find work that devices repeat: products of which several devices compute the same part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..core.source_lines import Frame, Source, source
from . import _scopes
from ._arguments import only_axes
from ._branches import Branches, mean
from ._lowered import Product

_LEAST = 1.5
"""The least number of computations of a product that counts as repeated: convolutions repeat a little at edges."""


@dataclasses.dataclass(frozen=True)
class RepeatedWork:
    """Products of which several devices compute the same part.

    >>> step = lambda w, x: axn.dot(x, w, axis="embed")
    >>> w, x = axn.ones({"embed": 8, "mlp": 8}), axn.ones({"batch": 8, "embed": 8})
    >>> mesh = axn.make_mesh({"data": 2})
    >>> report = axn.insight.explain(step, w, x, mapping={}, mesh=mesh, by="partitioner")
    >>> [(work.copies, work.axes, work.operation) for work in report.repeated]
    [(2, ('data',), 'dot[batch, embed; embed, mlp -> batch, mlp]')]
    """

    operation: str | None
    """The named operation, with the axes of its operands and results; None if there is none."""
    phase: str
    """`forward`, `backward` or `recomputed`; empty if it is not differentiated."""
    source: Source | None
    flops: int
    """The flops of each device in them, with the mean of the branches of conditionals."""
    copies: int
    """The number of devices that compute the same part."""
    axes: tuple[str, ...]
    """The mesh axes along which they do; empty if it is not known which."""

    @property
    def needless(self) -> int:
        """Return the flops that each device could leave to others.

        >>> axn.insight.RepeatedWork(None, "", None, flops=80, copies=8, axes=("data",)).needless
        70
        """
        return self.flops - self.flops // self.copies


Key = tuple[str | None, str, Source | None]


def _key(scope: str, frames: Sequence[Frame]) -> Key:
    return _scopes.said_of(_scopes.operation(scope)), _scopes.phase(scope), source(frames)


def repeated(
    step: Sequence[Product], computed: Iterable[tuple[str, Sequence[Frame], int, Branches]], mesh: Mapping[str, int]
) -> Iterator[RepeatedWork]:
    """Compare the products of a step with the ones that each device computes, in the order of the step.

    Arguments:
        computed: the scope, the lines, the flops and the branches of products of each device.
    """
    own, taken = dict[Key, int](), dict[Key, int]()
    for scope, frames, flops, branches in computed:
        key = _key(scope, frames)
        own[key] = own.get(key, 0) + flops
        taken[key] = taken.get(key, 0) + mean(flops, branches)
    needed: dict[Key, int | None] = {}
    scopes: dict[Key, str] = {}
    for product in step:
        key = _key(product.scope, product.frames)
        before = needed.get(key, 0)
        needed[key] = None if before is None or product.flops is None else before + product.flops
        scopes.setdefault(key, product.scope)
    devices = math.prod(mesh.values())
    for key, flops in needed.items():
        if flops and own.get(key, 0) * devices >= _LEAST * flops:
            copies = round(own[key] * devices / flops)
            yield RepeatedWork(*key, taken[key], copies, _axes(_scopes.operation(scopes[key]), copies, mesh))


def _axes(operation: _scopes.ScopedOperation | None, copies: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that shard no axis of an operation, or else the only ones that repeat it so often."""
    idle = () if operation is None else tuple(a for a, n in mesh.items() if n > 1 and a not in operation.over)
    if operation is not None and math.prod(mesh[a] for a in idle) == copies:
        return idle
    return only_axes(mesh, copies)
