"""Find where a partitioned program begins to differ from the program that was partitioned, by the values on the way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.source_lines import Source, source
from . import _scopes
from ._hlo import COLLECTIVES, HloProgram, Instruction, along, groups
from ._hlo_shardings import NOTHING, PlacedArray, close, far_from, placed
from ._hlo_values import Machine, listed


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where a partitioned program begins to differ from the program that was partitioned.

    >>> print(axn.insight.FirstDifference("pad", axn.insight.Source("model.py", 12, "loss"), "is wrong"))
    pad at model.py:12 is wrong
    """

    operation: str
    """The named operation, or JAX's name for it."""
    source: Source | None
    """The user's line."""
    what: str
    """How its value differs."""

    def __str__(self) -> str:
        return f"{self.operation}{f' at {self.source}' if self.source else ''} {self.what}"


@dataclasses.dataclass(frozen=True)
class Made:
    """An array, the instruction that computed it, which of its results it is, and the operands."""

    value: np.ndarray
    by: Instruction | None
    """None for an argument."""
    place: int
    operands: tuple[int, ...]


class Trace:
    """The arrays that a program computes, in order, and what each was computed from."""

    def __init__(self, program: HloProgram, args: Sequence[np.ndarray]):
        self.program, self.args = program, args
        self.made = {id(x): Made(x, None, n, ()) for n, x in enumerate(args)}
        self.results = listed(Machine(program, self._watch).run(args))

    def _watch(self, i: Instruction, operands: Sequence[Any], result: Any) -> None:
        inputs = [id(x) for x in listed(tuple(operands))]
        for place, x in enumerate(listed(result)):
            if id(x) not in inputs:
                self.made.setdefault(id(x), Made(x, i, place, tuple(inputs)))

    def causes_of_nan(self) -> set[int]:
        """Return the numbers of the arguments from which values that have no root, say, were computed elementwise."""
        waiting: list[Made] = []
        for made in self.made.values():
            operands = [self.made[o] for o in made.operands if o in self.made]
            if operands and np.isnan(made.value).any() and not any(np.isnan(o.value).any() for o in operands):
                waiting += operands
        causes, seen = set[int](), set[int]()
        while waiting:
            made = waiting.pop()
            if made.by is None:
                causes.add(made.place)
            elif id(made) not in seen and made.by.opcode in ("add", "convert", "copy", "divide", "multiply", "reshape"):
                waiting += [self.made[o] for o in made.operands if o in self.made]
            seen.add(id(made))
        return causes


class Fingerprints:
    """Fingerprints of the arrays that a partitioned program computes, to find those that are equal."""

    def __init__(self, trace: Trace, devices: int):
        self._devices = devices
        self._arrays: dict[Any, list[np.ndarray]] = {}
        for made in trace.made.values():
            self._arrays.setdefault(self._kind(made.value), []).append(made.value)
        self._found = {kind: np.array([*map(self._print, xs)]) for kind, xs in self._arrays.items()}

    def has(self, x: np.ndarray, placed: PlacedArray | None = None) -> bool:
        """Return whether an array was computed, or the shards of one."""
        if placed is not None and any(n % count for n, count in zip(x.shape[1:], placed.tiling.counts, strict=True)):
            shards = self._arrays.get((placed.shard(), x.dtype.kind == "f"), ())
            return any(placed.agree(x, y) for y in shards)  # whatever lies beyond the array
        x = x if placed is None else placed.on_devices(x)
        known = self._found.get(self._kind(x))
        if known is None:
            return False
        value, size = self._print(x)
        return bool((np.abs(known[:, 0] - value) <= 1e-9 * size + NOTHING).any())

    def _kind(self, x: np.ndarray) -> Any:
        return x.shape[1:], x.dtype.kind == "f"

    def _print(self, x: np.ndarray) -> tuple[float, float]:
        shape = (self._devices, *x.shape[1:])
        x = np.clip(np.nan_to_num(np.broadcast_to(x, shape).astype(float)), -1e30, 1e30)
        return float((x * _weights(shape)).sum()), float(np.linalg.norm(x.ravel()))


@functools.lru_cache(maxsize=256)
def _weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def first_difference(
    before: Trace, after: Trace, results: Sequence[int], mesh: Mapping[str, int]
) -> FirstDifference | None:
    """Find the first instruction whose value the partitioned program does not compute, though it has its operands."""
    devices = before.program.devices
    prints, found = Fingerprints(after, devices), dict[int, bool]()

    def has(key: int) -> bool:
        if key not in found:
            made = before.made[key]
            known = made.by is None or made.by.opcode in ("constant", "iota")
            if not known and made.by is not None:
                known = prints.has(made.value, placed(made.by, devices)[made.place]) or prints.has(made.value)
                if not known and made.by.opcode in ("broadcast", "reshape"):
                    known = all(has(o) for o in made.operands if o in before.made)
            found[key] = known
        return found[key]

    waiting = [id(before.results[n]) for n in results if id(before.results[n]) in before.made]
    ends, seen = set[int](), set[int]()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            missing = [o for o in before.made[key].operands if o in before.made and not has(o)]
            waiting += missing
            ends |= set() if missing else {key}
    made = next((m for key, m in before.made.items() if key in ends and m.by is not None), None)
    if made is None or made.by is None:
        return None
    return FirstDifference(*described(made.by, before.program), _how(made, made.by, after, mesh))


def described(i: Instruction, program: HloProgram) -> tuple[str, Source | None]:
    """Return the operation that an instruction belongs to, and the user's line."""
    operation = _scopes.operation(i.scope)
    return str(operation) if operation else i.scope.rpartition("/")[2] or i.opcode, source(program.frames(i))


def _how(made: Made, by: Instruction, other: Trace, mesh: Mapping[str, int]) -> str:
    """Say how the value of an instruction differs in the partitioned program."""
    devices = other.program.devices
    right, wrong = placed(by, devices)[made.place].on_devices(made.value), None
    for m in other.made.values():
        if m.by is not None and m.by.metadata == by.metadata and m.value.shape[1:] == right.shape[1:]:
            wrong = m
    if wrong is None or wrong.by is None:
        return "is wrong: the partitioned program never computes its value"
    kind = wrong.by.opcode
    if kind in COLLECTIVES and mesh:
        axes, _ = along(groups(wrong.by, devices), mesh, kind == "collective-permute")
        kind += f" over {' and '.join(axes)}" if axes else ""
    return f"is wrong: in the partitioned program, {kind} {_relation(wrong.value, right, mesh)}"


def _relation(wrong: np.ndarray, right: np.ndarray, mesh: Mapping[str, int]) -> str:
    wrong, far = np.broadcast_to(wrong, right.shape), far_from(right)
    choices = [axes for n in range(1, len(mesh) + 1) for axes in itertools.combinations(mesh, n)]
    if far and np.abs(right).max(initial=0):
        at = np.unravel_index(np.abs(right).argmax(), right.shape)
        ratio = float(wrong[at]) / float(right[at])
        if math.isfinite(ratio) and close(wrong, ratio * right, far):
            for axes in choices:
                size = math.prod(mesh[a] for a in axes)
                for number, text in (size, f"{size} times"), (1 / size, f"1/{size} of"):
                    if size > 1 and abs(ratio - number) < 1e-6:
                        return f"gives {text} the reference ({size} is the size of {' and '.join(axes)})"
            return f"gives {ratio:.6g} times the reference" if ratio else "gives 0"
        for axes in choices:
            if close(_sums(wrong, axes, mesh), right, far):
                return f"gives a partial sum: the sum over {' and '.join(axes)} is missing"
            if close(wrong, _sums(right, axes, mesh), far):
                return f"adds up what the devices along {' and '.join(axes)} have, each its own shard"
    off = sum(not close(w, r, far) for w, r in zip(wrong, right, strict=True))
    return f"differs from the reference on {off} of {len(wrong)} devices"


def _sums(x: np.ndarray, axes: Sequence[str], mesh: Mapping[str, int]) -> np.ndarray:
    """Sum what devices along some mesh axes have."""
    grid = x.reshape(*mesh.values(), *x.shape[1:])
    over = tuple([*mesh].index(a) for a in axes)
    return np.broadcast_to(grid.sum(over, keepdims=True), grid.shape).reshape(x.shape)
