"""Find the first operation that a partitioned program computes wrongly, by comparing intermediate values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.differences import Likeness, find_likeness, fingerprint, first_wrong
from ..core.source_lines import Source, source
from . import _scopes
from ._hlo import COLLECTIVES, HloProgram, Instruction
from ._hlo_devices import NOTHING, PlacedArray, along, close, far_from, groups, placed
from ._hlo_values import Machine, listed


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first operation that a partitioned program computes differently from the original program.

    >>> print(axn.insight.FirstDifference("pad", axn.insight.Source("model.py", 12, "loss"), "is wrong"))
    pad at model.py:12 is wrong
    """

    operation: str
    """The named operation, or JAX's name for it."""
    source: Source | None
    """The line of the user's code that the operation comes from."""
    what: str
    """The difference of its value in words, such as `is wrong`, to follow the operation in a sentence."""

    def __str__(self) -> str:
        return f"{self.operation}{f' at {self.source}' if self.source else ''} {self.what}"


class Made(NamedTuple):
    """An array, with the instruction that computed it, its place among the results, and the operands."""

    value: np.ndarray
    by: Instruction | None
    """None for an argument."""
    place: int
    operands: tuple[int, ...]
    """The positions of the arrays that it was computed from."""


class Trace:
    """The arrays that a program computes, in order, and the operands of each."""

    def __init__(self, program: HloProgram, args: Sequence[np.ndarray]):
        self.program, self.args = program, args
        self.made = [Made(x, None, n, ()) for n, x in enumerate(args)]
        self._positions = {id(x): n for n, x in enumerate(args)}
        self.results = listed(Machine(program, self._watch).run(args))

    def positions(self, arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
        return tuple(self._positions[id(x)] for x in arrays if id(x) in self._positions)

    def _watch(self, i: Instruction, operands: Sequence[Any], result: Any) -> None:
        inputs = self.positions(listed(tuple(operands)))
        for place, x in enumerate(listed(result)):
            if id(x) not in self._positions:
                self._positions[id(x)] = len(self.made)
                self.made.append(Made(x, i, place, inputs))

    def causes_of_nan(self) -> set[int]:
        """Return the arguments, by number, from which elementwise operations led to NaN, such as the root of -1."""
        bad = [bool(np.isnan(m.value).any()) for m in self.made]
        first = [m for m, nan in zip(self.made, bad, strict=True) if nan and not any(bad[o] for o in m.operands)]
        waiting, seen = {o for m in first for o in m.operands}, set[int]()
        while waiting:
            seen.add(position := waiting.pop())
            made = self.made[position]
            if made.by is not None and made.by.opcode in _LIKE_THEIR_OPERANDS:
                waiting |= {*made.operands} - seen
        return {self.made[n].place for n in seen if self.made[n].by is None}


_LIKE_THEIR_OPERANDS = "add", "convert", "copy", "divide", "multiply", "reshape"


class Fingerprints:
    """Fingerprints of the arrays that a partitioned program computes, to find equal arrays."""

    def __init__(self, trace: Trace, devices: int):
        self._devices = devices
        self._arrays: dict[Any, list[np.ndarray]] = {}
        for made in trace.made:
            self._arrays.setdefault(self._kind(made.value), []).append(made.value)
        self._found = {kind: np.array([*map(self._print, xs)]) for kind, xs in self._arrays.items()}

    def has(self, x: np.ndarray, placed: PlacedArray | None = None) -> bool:
        """Return whether the program computes an array, or, with its placement, the shards of the array."""
        if placed is not None and any(n % count for n, count in zip(x.shape[1:], placed.tiling.counts, strict=True)):
            shards = self._arrays.get((placed.shard(), x.dtype.kind in "fc"), ())
            return any(placed.agree(x, y) for y in shards)  # elements beyond the array may differ
        x = x if placed is None else placed.on_devices(x)
        known = self._found.get(self._kind(x))
        if known is None:
            return False
        value, size = self._print(x)
        return bool((np.abs(known[:, 0] - value) <= 1e-9 * size + NOTHING).any())

    def _kind(self, x: np.ndarray) -> Any:
        return x.shape[1:], x.dtype.kind in "fc"

    def _print(self, x: np.ndarray) -> tuple[float, float]:
        shape = (self._devices, *x.shape[1:])
        x = np.real(x) + np.pi * np.imag(x)
        x = np.clip(np.nan_to_num(np.broadcast_to(x, shape).astype(float)), -1e30, 1e30)
        return float((x * _weights(shape)).sum()), float(np.linalg.norm(x.ravel()))


@functools.lru_cache(maxsize=256)
def _weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def first_difference(
    before: Trace, after: Trace, results: Sequence[int], mesh: Mapping[str, int]
) -> FirstDifference | None:
    """Find the first instruction whose value the partitioned program lacks, although it computes the operands."""
    devices = before.program.devices
    prints = Fingerprints(after, devices)

    @functools.cache
    def has(position: int) -> bool:
        made = before.made[position]
        if made.by is None or made.by.opcode in ("constant", "iota"):
            return True
        if prints.has(made.value, placed(made.by, devices)[made.place]) or prints.has(made.value):
            return True
        return made.by.opcode in ("broadcast", "reshape") and all(map(has, made.operands))

    ends = before.positions([before.results[n] for n in results])
    position = first_wrong(ends, lambda p: before.made[p].operands, has)
    if position is None or (made := before.made[position]).by is None:
        return None
    return FirstDifference(*described(made.by, before.program), _how(made, made.by, after, mesh))


def described(i: Instruction, program: HloProgram) -> tuple[str, Source | None]:
    """Return the operation that an instruction belongs to, and the line of the user's code."""
    operation = _scopes.operation(i.scope)
    return str(operation) if operation else i.scope.rpartition("/")[2] or i.opcode, source(program.frames(i))


def _how(made: Made, by: Instruction, other: Trace, mesh: Mapping[str, int]) -> str:
    """Say how the value of an instruction differs in the partitioned program."""
    devices = other.program.devices
    right, wrong = placed(by, devices)[made.place].on_devices(made.value), None
    for m in other.made:
        if m.by is not None and m.by.metadata == by.metadata and m.value.shape[1:] == right.shape[1:]:
            wrong = m
    if wrong is None or wrong.by is None:
        return "is wrong: the partitioned program never computes its value"
    kind, value = wrong.by.opcode, np.broadcast_to(wrong.value, right.shape)
    if kind in COLLECTIVES and mesh:
        axes, _ = along(groups(wrong.by, devices), mesh, kind == "collective-permute")
        kind += f" over {' and '.join(axes)}" if axes else ""
    like = find_likeness(value, mesh, mesh, {fingerprint(right, mesh)}) if mesh else None
    if like not in (None, Likeness()):
        return f"is wrong: in the partitioned program, {kind} {like.words(mesh)}"
    off = sum(not close(w, r, far_from(right)) for w, r in zip(value, right, strict=True))
    return f"is wrong: in the partitioned program, {kind} differs from the reference on {off} of {devices} devices"
