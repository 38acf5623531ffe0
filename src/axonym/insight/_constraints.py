"""Read the sharding constraints of a traced step, and find the ones on the result of an operation of its program."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..core.source_lines import Frame
from ..distribution.mesh_axes import mesh_axes, padded
from ..distribution.operation_scope import RECORD
from . import _scopes
from ._traced_step import StepProgram, TracedOperation


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


_CONSTRAINTS = "sharding_constraint", "reshard"


class Constraints:
    """The sharding constraints of a step."""

    def __init__(self, step: StepProgram):
        self._by_key: dict[Any, list[Constraint]] = {}
        for op in step.operations:
            sharding = op.eqn.params.get("sharding", op.eqn.params.get("dst_sharding"))
            own = _scopes.operation(op.scope)  # an operation on Explicit axes places its operands itself
            by_user = op.name == "sharding_constraint" or own is None or own.name == "shard"
            if op.name in _CONSTRAINTS and by_user and isinstance(sharding, NamedSharding):
                shape = op.results[0].shape
                entries = padded(sharding.spec, len(shape))
                over = tuple(None if e is PartitionSpec.UNCONSTRAINED else mesh_axes(e) for e in entries)
                constraint = Constraint(shape, over, op.frames)
                for key in dict.fromkeys(_key(f"{x.scope}/{x.eqn.primitive.name}") for x in (op, *_computing(op))):
                    self._by_key.setdefault(key, []).append(constraint)

    def after(self, scope: str) -> Sequence[Constraint]:
        """Return the constraints on the result of a named operation, or at its scope in the program."""
        return self._by_key.get(_key(scope), ())


def _key(scope: str) -> tuple[tuple[str, ...], str, str]:
    """Return what a scope says in a trace and in a program alike: named operations, the phase, and the primitive."""
    return tuple(RECORD.findall(scope)), _scopes.phase(scope), scope.rpartition("/")[2]


def _computing(op: TracedOperation) -> Iterator[TracedOperation]:
    """Yield the operations that compute an array: XLA shards the results of elementwise operations alike.

    It goes back through elementwise operations and other constraints.
    """
    waiting, shape = [op.operands[0]], op.operands[0].shape
    # A bound on the work: every constraint follows its own chain of elementwise operations.
    for x in itertools.islice(waiting, 32):
        if (maker := x.maker) is not None:
            yield maker
            if maker.name in _CONSTRAINTS or (maker.rule is not None and maker.rule.values == "each"):
                waiting += [y for y in maker.operands if y.shape == shape]
