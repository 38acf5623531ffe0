"""Read from the schedule of a program for TPUs what is computed beside each exchange.

The text of such a program is its schedule: instructions run in its order, and say how many cycles the compiler
estimates that they take. What stands between the start and the end of an exchange runs beside it. Which exchanges are
synchronous is certain; cycles are the compiler's estimates, and rates of links are the chip's published ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ._hlo import CALLED, COLLECTIVES, HloProgram, Instruction, branches
from .chips import Chip

SILENT = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
)
"""Calls in programs for TPUs that compute nothing."""


class Schedule:
    """The cycles of computing in a program for TPUs, and beside each of its exchanges."""

    def __init__(self, program: HloProgram):
        self.beside: dict[str, int | None] = {}
        """By the name of an exchange: the cycles between its start and its end, 0 if it is synchronous; None if the end
        is elsewhere, such as in the next turn of a loop."""
        self.unknown = Counter[str]()
        """The operations whose cycles are not known, and how many there are of each."""
        self._program = program
        self.cycles = self._run(program.entry)
        """The cycles of computing in a call."""

    def _run(self, name: str) -> int:
        """Return the cycles of one run of a computation; note what runs beside its exchanges."""
        around, done = self._program.computations[name], 0
        begun: dict[str, tuple[list[str], int]] = {}
        for i in around.values():
            inside = [*self._exchanges(i)]
            chain = next((found for j in inside if (found := _found(r'chain_id="\d+"', j))), None)
            if i.opcode in ("while", "conditional", "call"):
                done += self._nested(name, i)
            elif chain:  # several fusions that compute carry one collective on
                done += _cycles(i)
                names, since = begun.setdefault(chain, ([j.name for j in inside], done))
                self.beside |= dict.fromkeys(names, done - since)
            elif i.opcode == "send":
                begun[_found(_RENDEZVOUS, i)] = [i.name], done
            elif inside and i.opcode.endswith("-start"):
                begun[i.name] = [j.name for j in inside], done
            elif i.opcode.endswith("-update") and i.operands[0] in begun:  # on a SparseCore, it has its operands now
                begun[i.name] = begun.pop(i.operands[0])[0], done
            elif i.opcode.endswith("-done") and i.opcode != "send-done":
                start = around[i.operands[0]]
                names, since = begun.pop(_found(_RENDEZVOUS, start) or start.name, ((), 0))
                self.beside |= dict.fromkeys(names, done - since)
            else:
                self.beside |= dict.fromkeys((j.name for j in inside), 0)
                cycles = 0 if inside else _cycles(i)
                if i.opcode == "custom-call" and not cycles and called_target(i) not in SILENT:
                    self.unknown["custom call"] += 1
                done += cycles
        for exchange in (exchange for names, _ in begun.values() for exchange in names):
            self.beside.setdefault(exchange, None)  # those of chains are known
        return done

    def _nested(self, around: str, i: Instruction) -> int:
        """Return the cycles of a loop, or the mean of the branches of a condition."""
        if i.opcode == "conditional":
            cycles = [self._run(branch) for branch in branches(i)]
            return sum(cycles) // len(cycles)
        if i.opcode == "call":
            return self._run(i.computation("to_apply") or "")
        turns = self._program.trip_count(around, i)
        if turns is None:
            self.unknown["loop"] += 1
        return self._run(i.computation("body") or "") * (1 if turns is None else turns)

    def _exchanges(self, i: Instruction) -> Iterator[Instruction]:
        """Yield the collectives that an instruction is, or that computations have which it runs without a loop."""
        if i.opcode.removesuffix("-start") in COLLECTIVES:
            yield i
        for attribute in () if i.opcode == "while" else CALLED.get(i.opcode, ()):
            for j in self._program.computations[i.computation(attribute) or ""].values():
                yield from self._exchanges(j)


_RENDEZVOUS = r'_rendezvous="[^"]*"'


def _found(pattern: str, i: Instruction) -> str:
    found = re.search(pattern, i.attributes)
    return found[0] if found else ""


def called_target(i: Instruction) -> str:
    """Return the name of what a custom call calls."""
    return (i.attribute("custom_call_target") or "").strip('"')


def _cycles(i: Instruction) -> int:
    return int(_found(r'(?<="estimated_cycles":")\d+', i) or 0)


def links_used(i: Instruction) -> int:
    """Return how many links a chip uses for a collective: both directions of one axis of the torus, or of several."""
    if i.opcode.startswith("collective-permute"):
        return 1
    rings = i.attributes.count("phase_rings")  # on SparseCores
    return rings or 2 * int(_found(r"(?<=num_dims:)\d", i) or 1)


def seconds_waited(sent: int, beside: int, links: int, chip: Chip) -> float:
    """Return about how many seconds a device waits for an exchange that has its links for itself."""
    return max(0.0, sent / (links * chip.link * chip.reached.links) - beside / chip.clock)
