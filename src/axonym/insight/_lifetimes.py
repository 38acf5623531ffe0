"""Find when each array of a scheduled program is created and last used.

The compiler's own report of memory is one block for all temporaries, which does not show its contents. Here each array
counts from its creation to its last use. Gaps between arrays in the block are not known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ._hlo import HloProgram, HloShape, Instruction, UnknownForm, branches

_ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare complex convert copy cosine divide erf exponential exponential-minus-one
    floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real
    reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sqrt subtract tan tanh tuple xor
    """.split()
)
"""Operations whose result may reuse the memory of an operand that is not used again."""

_UPDATING = ("dynamic-update-slice", "scatter")
"""Operations that change a part of their first operand."""


class Buffer:
    """An array that occupies memory for some time."""

    def __init__(self, shape: HloShape, instruction: Instruction, at: int, argument: bool = False):
        self.shape, self.first, self.last, self.argument = shape, at, at, argument
        self.makers = [instruction]
        """The instructions that write the array: several if a loop does."""
        self.uses: list[int] = []
        """The times at which it is used."""
        self.result = False
        self._same_as: Buffer | None = None

    @property
    def itself(self) -> Buffer:
        """Return the array that this one was joined with."""
        return self if self._same_as is None else self._same_as.itself

    def join(self, other: Buffer) -> None:
        """Record that another array uses the same memory, as the state of a loop does in all iterations."""
        mine, other = self.itself, other.itself
        if mine is not other:
            early, late = (mine, other) if mine.first <= other.first else (other, mine)
            early.last, early.argument = max(mine.last, other.last), mine.argument or other.argument
            early.makers += late.makers
            early.uses += late.uses
            late._same_as = early


@dataclasses.dataclass(frozen=True)
class Moment:
    """An instruction where it runs, and the memory in use then."""

    instruction: Instruction
    at: int
    held: int
    """The bytes of all arrays."""


class Lifetimes:
    """The arrays of a program, in the order in which its instructions run; all iterations of a loop count as one."""

    def __init__(self, program: HloProgram):
        self._program = program
        self._now = 0
        self._ran: list[tuple[int, Instruction]] = []
        self._made: list[Buffer] = []
        self._shared: list[tuple[int, Buffer, Sequence[Buffer]]] = []
        self._parameters: dict[int, list[Buffer]] = {}
        for found in self._run(program.entry, None):
            found.itself.result, found.itself.last = True, self._now
        for number, arrays in self._parameters.items():
            for array in arrays:
                array.itself.first = 0
                if number not in program.donated:
                    array.itself.last = self._now + 1  # owned by the caller, so no result takes its place
        taking: set[int] = set()
        for at, operand, results in self._shared:  # results reuse the memory of operands of the same size
            old = operand.itself
            # An operand that is used later keeps its memory, and one that was made by this instruction is a result.
            if old.last != at or old.first == at:
                continue
            for new in (r.itself for r in results):
                if new is not old and new.first == at and new.shape.bytes == old.shape.bytes and id(new) not in taking:
                    taking.add(id(new))
                    old.last = at - 1
                    break
        self.buffers = tuple(b for b in self._made if b.itself is b)

    def moments(self) -> tuple[Moment, ...]:
        """Return the bytes that are held at each instruction."""
        change = [0] * (self._now + 3)
        for buffer in self.buffers:
            change[buffer.first] += buffer.shape.bytes
            change[buffer.last + 1] -= buffer.shape.bytes
        held = list(itertools.accumulate(change))
        return tuple(Moment(instruction, at, held[at]) for at, instruction in self._ran)

    def held_at(self, moment: int) -> list[Buffer]:
        """Return the arrays that are held at one of the moments."""
        at, _ = self._ran[moment]
        return [b for b in self.buffers if b.first <= at <= b.last]

    def _new(self, instruction: Instruction, argument: bool = False) -> list[Buffer]:
        found = [Buffer(shape, instruction, self._now, argument) for shape in instruction.shapes]
        self._made += found
        return found

    def _run(self, computation: str, given: Mapping[int, list[Buffer]] | None) -> list[Buffer]:
        """Run through a computation, and return its results."""
        values: dict[str, list[Buffer]] = {}
        for instruction in self._program.computations[computation].values():
            self._now += 1
            operands = [values[name] for name in instruction.operands]
            if instruction.opcode == "parameter":
                number = int(instruction.value)
                if given is None:
                    self._parameters[number] = self._new(instruction, argument=True)
                found = (self._parameters if given is None else given)[number]
            elif instruction.opcode == "constant":  # a part of the program
                found = [Buffer(shape, instruction, self._now) for shape in instruction.shapes]
            else:
                found = self._results(instruction, operands)
            if len(found) != len(instruction.shapes):
                raise UnknownForm(f"{instruction.opcode} has {len(instruction.shapes)} results, not {len(found)}")
            for array in (*(a for operand in operands for a in operand), *found):
                array.itself.last = max(array.itself.last, self._now)
                array.itself.uses.append(self._now)
            self._ran.append((self._now, instruction))
            values[instruction.name] = found
        return values[self._program.root(computation).name]

    def _results(self, instruction: Instruction, operands: Sequence[list[Buffer]]) -> list[Buffer]:
        opcode = instruction.opcode
        if opcode == "tuple":
            return [array for operand in operands for array in operand]
        if opcode == "get-tuple-element":
            place = int(instruction.attribute("index") or 0)
            return operands[0][place : place + 1]
        if opcode in ("bitcast", "optimization-barrier"):
            return operands[0]
        if opcode == "while":
            self._run(instruction.computation("condition") or "", {0: operands[0]})
            self._join(operands[0], self._run(instruction.computation("body") or "", {0: operands[0]}))
            return operands[0]
        found = self._new(instruction)
        if opcode == "conditional":
            # Only one of the branches runs, so all of them write their results to the same place.
            for i, branch in enumerate(branches(instruction)):
                self._join(found, self._run(branch, {0: operands[1 + i]}))
        elif opcode == "call":
            self._join(found, self._run(instruction.computation("to_apply") or "", dict(enumerate(operands))))
        else:
            self._shared += [
                (self._now, operand[0], found)
                for i, operand in enumerate(operands)
                if len(operand) == 1 and self._may_share(instruction, i)
            ]
        return found

    def _join(self, outside: Sequence[Buffer], inside: Sequence[Buffer]) -> None:
        self._now += 1
        if len(outside) != len(inside):
            raise UnknownForm(f"a computation has {len(inside)} results, and its caller {len(outside)}")
        for a, b in zip(outside, inside, strict=True):
            a.join(b)

    def _may_share(self, instruction: Instruction, place: int) -> bool:
        """Return whether a result may take the place of an operand."""
        if instruction.opcode in _ELEMENTWISE:
            return True
        if instruction.opcode in _UPDATING:
            return place == 0
        if instruction.opcode != "fusion":
            return False
        name = instruction.computation("calls") or ""
        inside, root = self._program.computations[name], self._program.root(name)
        given = [i.name for i in inside.values() if i.opcode == "parameter" and int(i.value) == place]

        def past_bitcasts(found: Instruction) -> Instruction:
            return past_bitcasts(inside[found.operands[0]]) if found.opcode == "bitcast" else found

        for result in [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]:
            updated = past_bitcasts(result)
            if updated.opcode in _UPDATING and past_bitcasts(inside[updated.operands[0]]).name in given:
                return True
        used = set(given)
        for user in inside.values():  # operands come first
            if used.intersection(user.operands):
                if user.opcode not in _ELEMENTWISE:
                    return False
                used.add(user.name)
        return True
