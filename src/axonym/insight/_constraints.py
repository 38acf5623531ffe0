"""Find the sharding constraints of a lowered function, whose lines a compiled program does not show."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ._hlo import Frame


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A sharding constraint on what another operation computes."""

    scopes: tuple[str, ...]
    """Its own, that of the operation whose result is constrained, and of those before it if it is elementwise: XLA
    shards what these compute alike."""
    sizes: tuple[int, ...]
    """The sizes of the array on all devices together."""
    over: tuple[tuple[str, ...] | None, ...]
    """The mesh axes that the constraint shards each axis over; None if it leaves that to the compiler."""
    frames: tuple[Frame, ...]

    @property
    def kept(self) -> set[str]:
        """Return the mesh axes that the array is sharded over."""
        return {a for axes in self.over for a in axes or ()}

    def local_sizes(self, mesh: Mapping[str, int]) -> dict[int, int]:
        """Return the sizes of the array on each device, by the places of the axes for which it says so."""
        return {
            place: size // math.prod(mesh.get(a, 1) for a in axes)
            for place, (size, axes) in enumerate(zip(self.sizes, self.over, strict=True))
            if axes is not None
        }


class Constraints:
    """The sharding constraints of a lowered function, which are looked for when they are first asked for."""

    def __init__(self, lowered: Any):
        self._lowered = lowered
        self._by_scope: dict[str, list[Constraint]] | None = None

    def that_gathers(
        self, scope: str, sizes: Mapping[int, int], over: Collection[str], mesh: Mapping[str, int]
    ) -> Constraint | None:
        """Find the constraint for which the result of an operation is gathered over some mesh axes, if there is one.

        Arguments:
            scope: that of the operation.
            sizes: the sizes of the array on each device along the axes that become longer, by their places.
        """
        for constraint in self._after(scope):
            if constraint.kept.isdisjoint(over) and sizes.items() <= constraint.local_sizes(mesh).items():
                return constraint
        return None

    def that_moves(self, scope: str, place: int, over: Collection[str]) -> Constraint | None:
        """Find the constraint for which the result of an operation is sharded along another axis, if there is one.

        Arguments:
            scope: that of the operation.
            place: the place of the axis that is sharded over these mesh axes before.
        """
        for constraint in self._after(scope):
            own = constraint.over[place] if place < len(constraint.over) else None
            if own is not None and constraint.kept.issuperset(over) and set(over).isdisjoint(own):
                return constraint
        return None

    def _after(self, scope: str) -> Sequence[Constraint]:
        """Return the constraints on what an operation computes."""
        if self._by_scope is None:
            self._by_scope = {}
            # How a module is read is no public interface. Without it, lines are those that the compiler keeps.
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                for constraint in _constraints(self._lowered.compiler_ir("stablehlo").operation):
                    for known in constraint.scopes:
                        self._by_scope.setdefault(known, []).append(constraint)
        # In a function that a compiled function calls, scopes lack those of the call, and what is done with it.
        called = re.sub(r"(jvp|transpose)\(|\)", "", scope)
        inner = (c for known, c in self._by_scope.items() if known and called.endswith(f"/{known}"))
        return self._by_scope.get(scope) or next(inner, ())


def _constraints(operation: Any) -> Iterator[Constraint]:
    """Go through the constraints in an operation, but for those that JAX writes for the type of a result."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                inner = inner.operation
                if inner.name == "sdy.sharding_constraint":
                    location, before = str(inner.location), tuple(_computing(inner.operands[0]))
                    own = scope_of(location)
                    if before[:1] != ((own, False),):
                        sizes, over = tuple(inner.results[0].type.shape), _over(str(inner.attributes["sharding"]))
                        yield Constraint((own, *(of for of, _ in before)), sizes, over, frames_of(location))
                yield from _constraints(inner)


_SAY_NOTHING_OF_AXES = {"comparison_direction", "compare_type", "result_accuracy"}


def _is_elementwise(operation: Any) -> bool:
    plain = _SAY_NOTHING_OF_AXES.issuperset(operation.attributes) and not len(operation.regions)
    return plain and operation.name.startswith("stablehlo.") and "dynamic" not in operation.name


def _computing(value: Any) -> Iterator[tuple[str, bool]]:
    """Go through the scopes of what computes an array, back through elementwise operations and other constraints.

    With each comes whether it is one of these.
    """
    waiting = [value]
    for inner in itertools.islice(waiting, 32):
        producer = getattr(inner.owner, "operation", inner.owner)
        if hasattr(producer, "location"):  # it is not an argument of the function
            placed = producer.name == "sdy.sharding_constraint"
            yield scope_of(str(producer.location)), placed
            if placed or _is_elementwise(producer):
                waiting += [x for x in producer.operands if x.type == value.type]


def scope_of(location: str) -> str:
    found = re.match(r'loc\("((?:[^"\\]|\\.)*)"', location)
    return found[1] if found else ""


def frames_of(location: str) -> tuple[Frame, ...]:
    """Return the lines in a location, the innermost first."""
    found = re.findall(r'"([^"]*)"\("([^"]+)":(\d+)', location)
    return tuple(Frame(file, int(line), function) for function, file, line in found)


def _over(sharding: str) -> tuple[tuple[str, ...] | None, ...]:
    """Return the mesh axes of each axis in a sharding such as `#sdy.sharding<@mesh, [{"data"}, {}, {?}]>`."""
    listed = re.findall(r"\{([^{}]*)\}", sharding[sharding.index("[") : sharding.rindex("]")])
    return tuple(None if axes == "?" else tuple(re.findall(r'"([^"]+)"', axes)) for axes in listed)
