"""Read the sharding constraints of a traced step, and find the ones on the result of an operation of its program."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..core.source_lines import Frame
from ..distribution.operation_scope import RECORD
from . import _scopes
from ._traced_step import CONSTRAINTS, StepProgram, TracedOperation, constrained_axes


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A sharding constraint on the result of another operation."""

    sizes: tuple[int, ...]
    """The sizes of the array on all devices together."""
    over: tuple[tuple[str, ...] | None, ...]
    """The mesh axes that the constraint shards each axis over; None if it leaves the axis to the compiler."""
    frames: tuple[Frame, ...]

    @property
    def kept(self) -> set[str]:
        """Return the mesh axes that the array is sharded over."""
        return {a for axes in self.over for a in axes or ()}

    def gathers(self, sizes: Mapping[int, int], over: Collection[str], mesh: Mapping[str, int]) -> bool:
        """Return whether it makes XLA all-gather the array, so that some axes have these sizes on each device."""
        known = {
            place: size // math.prod(mesh.get(a, 1) for a in axes)
            for place, (size, axes) in enumerate(zip(self.sizes, self.over, strict=True))
            if axes is not None
        }
        return self.kept.isdisjoint(over) and sizes.items() <= known.items()

    def moves(self, place: int, over: Collection[str]) -> bool:
        """Return whether it reshards the array from an axis, which was sharded over these mesh axes, to another one."""
        own = self.over[place] if place < len(self.over) else None
        return own is not None and self.kept.issuperset(over) and set(over).isdisjoint(own)


class Constraints:
    """The sharding constraints of a step."""

    def __init__(self, step: StepProgram):
        self._by_key: dict[Any, list[Constraint]] = {}
        for op in step.operations:
            own = _scopes.operation(op.scope)  # an operation on Explicit axes places its operands itself
            by_user = op.name == "sharding_constraint" or own is None or own.name == "shard"
            over = constrained_axes(op) if op.name in CONSTRAINTS and by_user else None
            if over is not None:
                constraint = Constraint(op.results[0].shape, over, op.frames)
                scopes = (f"{x.scope}/{x.eqn.primitive.name}" for x in (op, *_operations_computing(op)))
                for key in dict.fromkeys(map(_key_of_scope, scopes)):
                    self._by_key.setdefault(key, []).append(constraint)

    def after(self, scope: str) -> Sequence[Constraint]:
        """Return the constraints on the result of a named operation, or at its scope in the program."""
        return self._by_key.get(_key_of_scope(scope), ())


def _key_of_scope(scope: str) -> tuple[tuple[str, ...], str, str]:
    """Return the named operations, the phase and the primitive of a scope, which a trace and a program have alike."""
    return tuple(RECORD.findall(scope)), _scopes.phase(scope), scope.rpartition("/")[2]


def _operations_computing(op: TracedOperation) -> Iterator[TracedOperation]:
    """Yield the operations that compute an array: XLA shards the results of elementwise operations alike.

    It goes back through elementwise operations and other constraints.
    """
    waiting, shape = [op.operands[0]], op.operands[0].shape
    # A bound on the work: every constraint follows its own chain of elementwise operations.
    for x in itertools.islice(waiting, 32):
        if (maker := x.maker) is not None:
            yield maker
            if maker.name in CONSTRAINTS or (maker.rule is not None and maker.rule.values in ("each", "linear")):
                waiting += [y for y in maker.operands if y.shape == shape]
