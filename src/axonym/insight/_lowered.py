"""Read the sharding constraints of a lowered step, before it is partitioned."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..core.source_lines import Frame


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A sharding constraint on the result of another operation."""

    scopes: tuple[str, ...]
    """Its own scope, the scope of the constrained operation, and, if that is elementwise, of the operations before it:
    XLA shards their results alike."""
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
    """The sharding constraints of a lowered function, found on first use."""

    def __init__(self, lowered: Any):
        self._lowered = lowered
        self._by_scope: dict[str, list[Constraint]] | None = None

    def after(self, scope: str) -> Sequence[Constraint]:
        """Return the constraints on the result of an operation, or at its scope."""
        if self._by_scope is None:
            self._by_scope = {}
            # Modules have no public interface for reading. If this fails, only the compiler's own lines are known.
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                for constraint in _constraints(self._lowered.compiler_ir("stablehlo").operation):
                    for known in constraint.scopes:
                        self._by_scope.setdefault(known, []).append(constraint)
        # In a function that a compiled function calls, scopes lack the scope of the call and its transformations.
        called = re.sub(r"(jvp|transpose)\(|\)", "", scope)
        inner = (c for known, c in self._by_scope.items() if known and called.endswith(f"/{known}"))
        return self._by_scope.get(scope) or next(inner, ())


def _constraints(operation: Any) -> Iterator[Constraint]:
    """Yield the constraints in an operation, except the ones that JAX adds for the type of a result."""
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
    """Yield the scopes that produce an array, back through elementwise operations and other constraints.

    Each comes with whether it is a constraint.
    """
    waiting = [value]
    # A bound on the work: every constraint follows its own chain of elementwise operations.
    for inner in itertools.islice(waiting, 32):
        producer = getattr(inner.owner, "operation", inner.owner)
        if hasattr(producer, "location"):  # it is not an argument of the function
            placed = producer.name == "sdy.sharding_constraint"
            yield scope_of(str(producer.location)), placed
            if placed or _is_elementwise(producer):
                waiting += [x for x in producer.operands if getattr(x.type, "shape", None) == value.type.shape]


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
