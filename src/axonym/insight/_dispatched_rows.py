"""Follow the rows that a step dispatches to experts: the names of their axes, and the operations that only move them.

In a dispatch, each device sorts, repeats, joins and counts its own rows, and exchanges rows with the others once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

from ..names._values import AxisStep
from . import _scopes
from ._named_events import Dims, Occurrence, Open, Value


class DispatchedRows:
    """The dispatches of rows in a step."""

    def __init__(self, given: Collection[str]) -> None:
        """Arguments:
        given: the axis names of the arguments of the step.
        """
        self.joined: dict[str, tuple[str, ...]] = {}
        """For each axis made by joining axes of rows, the names of those axes."""
        self._given = given
        self._places: dict[_scopes.ScopedOperation, tuple[Occurrence, set[str]]] = {}
        """The place of each dispatch, and the names of the groups in its products."""

    def add(self, dispatch: _scopes.ScopedOperation, place: Occurrence, results: list[Value]) -> None:
        """Record the results of an operation of a dispatch."""
        self._places.setdefault(dispatch, (dataclasses.replace(place, dispatch=dispatch), set()))
        for axes in _rows(dispatch):
            names, count = tuple(a.name for a in axes), _count(axes)
            for n, size in (d for y in results for d in y.dims):
                if n is not None and (n == "*".join(names) or (size == count and n not in self._given)):
                    self.joined.setdefault(n, names)

    def add_groups(self, dispatch: _scopes.ScopedOperation, dims: Dims) -> None:
        """Record the axes of the groups in a product of rows."""
        self._places[dispatch][1].update(n for n, _ in dims if n is not None)

    def are_moved(self, step: AxisStep, xs: list[Value], place: Occurrence) -> bool:
        """Return whether an operation sorts, repeats, joins, counts or restores rows, which each device does."""
        dispatch = _scopes.dispatch(place.scope)
        if dispatch is None:
            return False
        if step.name == "scatter-add" and xs[0].dtype.kind in "iu":
            return True
        starts = [start for axes in _rows(dispatch) for start in (tuple(a.size or 1 for a in axes), (_count(axes),))]
        shapes = tuple(n for _, n in xs[0].dims), step.shape
        return all(any(shape[: len(start)] == start for start in starts) for shape in shapes)

    def in_names(self, names: Collection[str | None], place: Occurrence) -> set[str | None]:
        """Return which names are of rows: of joined axes, and in a dispatch of the axes of its rows."""
        dispatch = _scopes.dispatch(place.scope)
        rows = set() if dispatch is None else {a.name for a in dispatch.operands[0]}
        return {n for n in names if n in self.joined or n in rows}

    def exchanges(self) -> Iterator[Open]:
        """Yield the exchange of rows of each dispatch, with the axes over which they are exchanged between experts."""
        for dispatch, (place, groups) in self._places.items():
            of_x = {a.name for term in dispatch.operands[:2] for a in term}
            own = {a.name for term in dispatch.operands[2:] for a in term}
            yield Open(place, "an exchange of rows", frozenset(groups or own - of_x))


def _rows(dispatch: _scopes.ScopedOperation) -> list[_scopes.Term]:
    """Return the axes of rows, and the axes that rows for several experts have in common."""
    rows = dispatch.operands[0]
    return [axes for axes in (rows, tuple(a for a in rows if a in dispatch.operands[1])) if axes]


def _count(axes: _scopes.Term) -> int:
    return math.prod(a.size or 1 for a in axes)
