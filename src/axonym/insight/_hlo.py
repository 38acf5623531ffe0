"""Read the text of a compiled program: its instructions, how often they run, and the lines of Python they come from.

The text is XLA's own, for the program of one device. This module raises an error for forms that it does not know, so
that a report never misses a collective.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from ..core.source_lines import Frame
from ..distribution.operation_scope import RECORD
from . import _scopes
from ._flops import Branches, UnknownForm

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
_EXCHANGES = re.compile(r"= .*? ((?:all|collective|ragged|reduce)-[a-z-]+|send|recv)\(")
"""Matches everything that looks like a collective, known to this module or not; `_NOT_COLLECTIVE` excludes
`reduce-precision` and the ends of asynchronous collectives."""
_NOT_COLLECTIVE = re.compile(r"reduce-(window|precision)|.*-(done|update)")

_MEGASCALE = "_xla_megascale_transfer_type"
"""The attribute of what one slice of TPUs sends to others, and receives."""

_COMMENT = re.compile(r"/\*index=\d+\*/")

_PASSING_ON = frozenset(
    {"bitcast", "copy", "copy-start", "copy-done", "get-tuple-element", "transpose", "convert", "reshape"}
)
"""Instructions that say less about the origin of an array than the producer of their operand."""

CALLED = {
    "while": ("condition", "body"),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "call": ("to_apply",),
    "call-start": ("to_apply",),
    "custom-call-start": ("called_computations",),
}
"""The attributes of instructions that name computations, which run whenever the instruction does."""


@dataclasses.dataclass(frozen=True)
class HloShape:
    """The type of an array on one device."""

    dtype: str
    sizes: tuple[int, ...]

    @functools.cached_property
    def bits(self) -> int:
        """Return the size of an element: the first number in the name of a dtype, such as `s32`, `bf16`, `f8e4m3fn`."""
        return 8 if self.dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*$", r"\1", self.dtype))

    @property
    def bytes(self) -> int:
        return 0 if self.dtype in ("token", "opaque") else -(-math.prod(self.sizes) * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    """The arrays of its result; several for a tuple."""
    operands: tuple[str, ...]
    attributes: str
    """The text after the operands, without the metadata."""
    metadata: str
    value: str = ""
    """The value of a constant, as written, or the number of a parameter."""

    @functools.cached_property
    def scope(self) -> str:
        """Return the JAX operation that the instruction comes from, with the scopes around it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.metadata)
        return found[1].replace('\\"', '"') if found else ""

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute, up to the comma that ends it."""
        return self._attributes.get(name)

    def window(self) -> dict[str, list[list[int]]]:
        """Return the settings of a window along each axis, such as `pad`, before and after."""
        parts = (part.split("=") for part in (self.attribute("window") or "{}").strip("{}").split())
        return {name: [[*map(int, word.split("_"))] for word in text.split("x")] for name, text in parts}

    @functools.cached_property
    def _attributes(self) -> dict[str, str]:
        parts = (part.strip().partition("=") for part in split(self.attributes))
        return {name: text for name, _, text in parts}

    def computation(self, name: str) -> str | None:
        """Return the computation that an attribute names."""
        text = self.attribute(name)
        return None if text is None else text.strip(" {}").lstrip("%")


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction where it runs; one that is reached in several ways has several visits."""

    instruction: Instruction
    computation: str
    """The computation that it is in."""
    times: int | None
    """How often it runs; None if that depends on values."""
    branches: Branches
    """The branches of conditionals around it."""


class HloProgram:
    """A compiled program, read from XLA's text."""

    def __init__(self, text: str, devices: int):
        self.text = text
        self.devices = devices
        """The number of devices that it runs on."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, Instruction] = {}
        self.entry = ""
        self._read()

    def visits(self) -> Iterator[Visit]:
        """Yield all instructions that run, in the order in which they run.

        Compilers for TPUs spread an asynchronous collective over several fusions that run beside other work. Each
        contains the collective and the number of their chain; it is visited once.
        """
        chains: set[str] = set()
        for visit in self._visits(self.entry, 1, (), itertools.count()):
            chain = re.search(r'chain_id="(\d+)"', visit.instruction.attributes)
            if chain is None or chain[1] not in chains:
                yield visit
            if chain is not None and visit.instruction.opcode in COLLECTIVES:
                chains.add(chain[1])

    @functools.cached_property
    def donated(self) -> frozenset[int]:
        """Return the numbers of the parameters whose memory results may reuse."""
        return frozenset(int(n) for n in re.findall(r"\}: \((\d+), \{", self.text.partition("\n")[0]))

    @functools.cached_property
    def devices_of_text(self) -> int:
        """Return how many devices the text is for: those of one slice, if the program runs on several."""
        found = re.search(r"num_partitions=(\d+)", self.text.partition("\n")[0])
        return int(found[1]) if found and _MEGASCALE in self.text else self.devices

    def received(self, visit: Visit) -> Visit:
        """Return the instruction that receives what others send with one; itself if there is none beside it."""
        key = re.search(r"_rendezvous=\"[^\"]*\"", visit.instruction.attributes)
        beside = self.computations[visit.computation].values()
        found = [i for i in beside if i.opcode == "recv" and key and key[0] in i.attributes]
        return dataclasses.replace(visit, instruction=found[0]) if found else visit

    def parameters(self) -> list[Instruction]:
        """Return the parameters of the program, in order."""
        found = (i for i in self.computations[self.entry].values() if i.opcode == "parameter")
        return sorted(found, key=lambda i: int(i.value))

    def root(self, computation: str) -> Instruction:
        """Return the instruction that computes the result of a computation."""
        return self._roots[computation]

    def operands(self, visit: Visit) -> list[tuple[Instruction, tuple[HloShape, ...]]]:
        """Return the operands of an instruction: the producer and the shapes of each."""
        around = self.computations[visit.computation]
        return [(self._named(visit.computation, name), around[name].shapes) for name in visit.instruction.operands]

    def _named(self, computation: str, name: str) -> Instruction:
        """Return the instruction that an array comes from, with a scope if what it passes on has one."""
        at: tuple[str, str] | None = (computation, name)
        while not (found := self.computations[computation][name]).scope and (at := self._before(*at)) is not None:
            computation, name = at
        return found

    def _before(self, computation: str, name: str) -> tuple[str, str] | None:
        """Return the computation and the name of what an instruction passes on; None if it says more than that."""
        around = self.computations[computation]
        producer = around[name]
        if producer.opcode == "parameter" and computation in self._given:
            outside, operands = self._given[computation]
            return outside, operands[int(producer.value)]
        if not self._passes_on(producer):
            return None
        inner = around[producer.operands[0]]
        if producer.opcode == "get-tuple-element" and inner.opcode == "tuple":
            return computation, inner.operands[int(producer.attribute("index") or 0)]
        return computation, inner.name

    @functools.cached_property
    def _given(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return what fusions and calls on SparseCores give to their computations: where, and the operands."""
        found = dict[str, tuple[str, tuple[str, ...]]]()
        for name, inside in self.computations.items():
            for i in inside.values():
                if i.opcode == "fusion":
                    found[i.computation("calls") or ""] = name, i.operands
                elif i.opcode.endswith("call-update"):  # it has its operands after the start
                    start = inside[i.operands[0]]
                    called = (start.computation(attribute) or "" for attribute in CALLED[start.opcode])
                    found |= dict.fromkeys(called, (name, i.operands[1:]))
        return found

    def asked_for(self, visit: Visit, count: int) -> tuple[str, Instruction, HloShape] | None:
        """Return what a step asks for in place of an all-reduce: compilers for TPUs make other collectives one.

        Devices add their own parts of what they gather to zeros, or use one of `count` parts of a sum. Returns the
        kind, the producer of the operand, and the shape of a part.
        """
        size = sum(s.bytes for s in visit.instruction.shapes)
        at: tuple[str, str] | None = (visit.computation, visit.instruction.operands[0])
        while at is not None:
            maker = self.computations[at[0]][at[1]]
            inside, update = self._update(maker)
            part = inside[update.operands[1]] if update.opcode == "dynamic-update-slice" else None
            if part is not None and part.shapes[0].bytes * count == size:
                called = at[0] if maker is update else maker.computation("calls") or ""
                return "all-gather", self._named(called, part.name), part.shapes[0]
            at = self._before(*at)
        # Of a collective within a call or several fusions, what ends these has the result.
        computation, name = visit.computation, visit.instruction.name
        if computation in self._given:
            computation, operands = self._given[computation]
            chain = re.search(r'chain_id="\d+"', visit.instruction.attributes)
            for i in self.computations[computation].values():
                called = self.computations.get(i.computation("calls") or "", {}).values()
                in_chain = chain is not None and any(chain[0] in j.attributes for j in called)
                if in_chain or (i.opcode.endswith("call-update") and i.operands[1:] == operands):
                    name = i.name
        used = {*self._used(computation, name)}
        part = used.pop() if len(used) == 1 else None
        if part is None or part.bytes * count != size:
            return None
        return "reduce-scatter", self.operands(visit)[0][0], part

    def _used(self, computation: str, name: str) -> Iterator[HloShape | None]:
        """Yield the shapes of the parts of a result that are used; None for a use of another kind."""
        for user in self._users[computation].get(name, ()):
            if user.opcode in _PASSING_ON or user.opcode.endswith(("-update", "-done")):
                yield from self._used(computation, user.name)
            elif user.opcode == "fusion":
                called = user.computation("calls") or ""
                inside = [i for i in self.computations[called].values() if i.opcode == "parameter"]
                for given in (i for i in inside if user.operands[int(i.value)] == name):
                    yield from self._used(called, given.name)
            else:
                yield user.shapes[0] if user.opcode == "dynamic-slice" else None

    def _passes_on(self, instruction: Instruction) -> bool:
        """Return whether an instruction says less about the origin of an array than the producer of its operand.

        Compilers for CPUs put conversions, such as the ones around sums of bfloat16, into fusions of their own.
        """
        if instruction.opcode != "fusion":
            return instruction.opcode in _PASSING_ON
        inside = self.computations[instruction.computation("calls") or ""].values()
        return len(instruction.operands) == 1 and all(i.opcode in {*_PASSING_ON, "parameter"} for i in inside)

    def origin(self, instruction: Instruction) -> Instruction:
        """Return the instruction that says most of the origin of a result.

        It is the instruction itself if it belongs to a named operation, or else one in its fusion, or the producer of
        what it passes on.
        """
        found = instruction
        for _ in range(64):
            if RECORD.search(found.scope):
                return found
            inside = self.computations[found.computation("calls") or ""] if found.opcode == "fusion" else {}
            named = [i for i in inside.values() if RECORD.search(i.scope)]
            if named:
                return named[-1]
            if not self._passes_on(found) or not found.operands:
                break
            found = self._around[found.name][found.operands[0]]
        return instruction

    @functools.cached_property
    def _around(self) -> dict[str, dict[str, Instruction]]:
        """Return the computation of each instruction."""
        return {name: inside for inside in self.computations.values() for name in inside}

    def updates_with(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that computes the slice written into an array, or None."""
        outside, fusion = self._around[instruction.name], instruction
        inside, update = self._update(instruction)
        if update.opcode != "dynamic-update-slice":
            return None
        found = inside[update.operands[1]]
        while not RECORD.search(found.scope):
            if found.opcode == "parameter" and inside is not outside:  # it stands for an operand of the fusion
                inside, found = outside, outside[fusion.operands[int(found.value)]]
            elif found.opcode in _PASSING_ON:
                found = inside[found.operands[0]]
            else:
                break
        return found

    def _update(self, instruction: Instruction) -> tuple[dict[str, Instruction], Instruction]:
        """Return the instruction that computes a result, in its fusion if it is one, and those around it."""
        if instruction.opcode != "fusion":
            return self._around[instruction.name], instruction
        name = instruction.computation("calls") or ""
        inside, update = self.computations[name], self._roots[name]
        while update.opcode in _PASSING_ON and update.operands:
            update = inside[update.operands[0]]
        return inside, update

    def users(self, visit: Visit) -> Iterator[Instruction]:
        """Yield the direct and indirect users of a result in one computation."""
        waiting, seen = [visit.instruction.name], {visit.instruction.name}
        for name in waiting:
            for user in self._users[visit.computation].get(name, ()):
                if user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user.name)
                    yield user

    @functools.cached_property
    def _users(self) -> dict[str, dict[str, list[Instruction]]]:
        """Return, for each computation, the users of each of its results."""
        found: dict[str, dict[str, list[Instruction]]] = {computation: {} for computation in self.computations}
        for computation, inside in self.computations.items():
            for instruction in inside.values():
                for name in instruction.operands:
                    found[computation].setdefault(name, []).append(instruction)
        return found

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Return the lines that an instruction comes from, the innermost first."""
        files, functions, places, stacks = self._tables
        found = re.search(r"stack_frame_id=(\d+)", instruction.metadata)
        if found is None or not stacks:
            told = re.search(r'source_file="([^"]*)".*?source_line=(\d+)', instruction.metadata)
            return (Frame(told[1], int(told[2]), ""),) if told else ()
        # XLA writes parents one too high. A frame is listed after its parent, so the first one shows whether it does.
        shift = _numbers(stacks.get(1, "")).get("parent_frame_id", 0)
        frames, at = [], int(found[1])
        while at in stacks and len(frames) < len(stacks):
            stack = _numbers(stacks[at])
            place = _numbers(places[stack["file_location_id"]])
            frames.append(Frame(files[place["file_name_id"]], place["line"], functions[place["function_name_id"]]))
            at = stack.get("parent_frame_id", 0) - shift
        return tuple(frames)

    @functools.cached_property
    def _tables(self) -> list[dict[int, str]]:
        """Return the tables of files, functions, places and stacks."""
        head = "\n".join(itertools.takewhile(lambda line: not line.endswith("{"), self.text.splitlines()[1:]))
        tables: list[dict[int, str]] = []
        for title in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            listed = head.partition(f"{title}\n")[2].splitlines()
            lines = (re.fullmatch(r'(\d+) ["{](.*)["}]', line.strip()) for line in listed)
            tables.append({int(found[1]): found[2] for found in itertools.takewhile(bool, lines) if found})
        return tables

    def _visits(self, name: str, times: int | None, around: Branches, numbers: Iterator[int]) -> Iterator[Visit]:
        """Yield the instructions of a computation; `numbers` tell conditionals apart."""
        for instruction in self.computations[name].values():
            yield Visit(instruction, name, times, around)
            called = [(instruction.computation(attribute), times) for attribute in CALLED.get(instruction.opcode, ())]
            if instruction.opcode == "while" and times is not None:
                turns = self.trip_count(name, instruction)
                inside = None if turns is None else times * turns
                tests = None if turns is None else times * (turns + 1)  # the last test ends the loop
                called = [(called[0][0], tests), (called[1][0], inside)]
            for computation, often in called:
                yield from self._visits(computation or "", often, around, numbers)
            if instruction.opcode == "conditional":
                found, number = branches(instruction), next(numbers)
                turns = _scopes.turns(instruction.scope) if times is not None and len(found) == 2 else None
                for i, branch in enumerate(found):
                    if turns is not None and times is not None:
                        holds = i == (instruction.attribute("branch_computations") is not None)
                        often = times * (turns[0] if holds else turns[1] - turns[0]) // turns[1]
                        yield from self._visits(branch, often, around, numbers)
                        continue
                    yield from self._visits(branch, times, (*around, (number, len(found), i)), numbers)

    def trip_count(self, around: str, loop: Instruction) -> int | None:
        """Return how often the body of a loop runs; None if that depends on values.

        Compilers for TPUs do not write it down, so it is computed for loops that count up from one constant to another
        in equal steps, as loops of `jax.lax.scan` do.
        """
        written = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if written:
            return int(written[1])
        outer = self.computations[around]
        conditions, bodies = (loop.computation(which) or "" for which in ("condition", "body"))
        test, results, given = self._roots[conditions], self._roots[bodies], self._producer(outer, loop.operands[0])
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        condition, body = self.computations[conditions], self.computations[bodies]
        place = self._place(condition, test.operands[0])
        if place is None or results.opcode != "tuple" or given.opcode != "tuple":
            return None
        start, end = self._constant(outer, given.operands[place]), self._constant(condition, test.operands[1])
        count = self._producer(body, results.operands[place])
        if count.opcode != "add" or self._place(body, count.operands[0]) != place:
            return None
        step = self._constant(body, count.operands[1])
        return None if start is None or end is None or not step or step < 0 else max(-(-(end - start) // step), 0)

    def _producer(self, around: dict[str, Instruction], name: str) -> Instruction:
        """Return the producer of an operand, skipping copies."""
        found = around[name]
        while found.opcode in ("copy", "bitcast"):
            found = around[found.operands[0]]
        return found

    def _place(self, around: dict[str, Instruction], name: str) -> int | None:
        """Return the index of an operand in a loop's state; None if it is not part of it."""
        found = self._producer(around, name)
        if found.opcode != "get-tuple-element" or around[found.operands[0]].opcode != "parameter":
            return None
        return int(found.attribute("index") or 0)

    def _constant(self, around: dict[str, Instruction], name: str) -> int | None:
        found = self._producer(around, name)
        return int(found.value) if found.opcode == "constant" and found.value.lstrip("-").isdecimal() else None

    def _read(self) -> None:
        name = ""
        current: dict[str, Instruction] | None = None
        for line in _joined(self.text):
            if current is None:
                head = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$", line)
                if head:
                    name, current = head[2], self.computations.setdefault(head[2], {})
                    if head[1]:
                        self.entry = head[2]
            elif _END.match(line):
                current = None
            elif line.strip():
                instruction = _instruction(_COMMENT.sub("", line))
                current[instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    self._roots[name] = instruction
        if not self.entry:
            raise UnknownForm("the text of the program has no entry computation")
        # A reduce-scatter stands for each fusion that is one: an all-reduce of a padded array, and a slice.
        for around in [*self.computations.values()]:
            for i in [*around.values()]:
                called = i.computation("calls") if i.opcode == "fusion" else None
                if called and called.startswith("all-reduce-scatter"):
                    (sums,) = (j for j in self.computations.pop(called).values() if j.opcode == "all-reduce")
                    around[i.name] = dataclasses.replace(i, opcode="reduce-scatter", attributes=sums.attributes)
        # A report must not miss a collective, so the text is also searched for anything that looks like one.
        every = [i for c in self.computations.values() for i in c.values()]
        crossing = {i.opcode for i in every if i.opcode in ("send", "recv") and _MEGASCALE in i.attributes}
        known = COLLECTIVES | crossing
        seen = sum(i.opcode.removesuffix("-start") in known for i in every)
        stripped = re.sub(r"metadata=\{.*", "", self.text)
        looks = [word for word in _EXCHANGES.findall(stripped) if not _NOT_COLLECTIVE.fullmatch(word)]
        if unknown := [w for w in looks if w.removesuffix("-start") not in known]:
            raise UnknownForm(f"the program has {unknown[0]!r}, which is not known here")
        if len(looks) != seen:
            raise UnknownForm(f"the program has {len(looks)} collectives, of which {seen} were read")
        waiting = reached = {self.entry: None}  # the computations that the entry runs
        while waiting:
            inside = [i for name in waiting for i in self.computations.get(name, {}).values()]
            called = [c for i in inside for a in CALLED.get(i.opcode, ()) if (c := i.computation(a)) is not None]
            called += [branch for i in inside if i.opcode == "conditional" for branch in branches(i)]
            waiting = dict.fromkeys(c for c in called if c not in reached)
            reached = {**reached, **waiting}
        for name, inside in self.computations.items():
            missed = [i.opcode for i in inside.values() if i.opcode.removesuffix("-start") in known]
            if missed and name not in reached:
                raise UnknownForm(f"the program has {missed[0]!r} in {name!r}, and what runs that is not known here")


# --- instructions ---


_START = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = ")
_END = re.compile(r"\}(?:$|, execution_thread)")


def _joined(text: str) -> Iterator[str]:
    """Yield the lines of a program, each instruction as one line: attributes of kernels may contain line breaks."""
    inside = ""
    for line in text.splitlines():
        if inside and not (_START.match(line) or _END.match(line)):
            inside += line
            continue
        if inside:
            yield inside
        inside = line if _START.match(line) else ""
        if not inside:
            yield line


def _instruction(line: str) -> Instruction:
    found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        raise UnknownForm(f"not an instruction: {line.strip()[:80]!r}")
    rest = line[found.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = tuple(HloShape(d, ints(s)) for d, s in re.findall(r"([a-z]+[a-z0-9]*)\[([\d,<= ]*)\]", rest[:end]))
    opening = rest.index("(", end)
    opcode = rest[end:opening].strip()
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    words = () if opcode in ("constant", "parameter", "iota") else split(inside)
    operands = tuple(word for part in words if (word := part.strip().split(" ")[-1].lstrip("%")))
    value = inside if opcode in ("constant", "parameter") else ""
    attributes, metadata = rest[closing + 1 :].removeprefix(", "), ""
    at = attributes.find("metadata={")
    if at >= 0:
        last = _closing(attributes, at + len("metadata="))
        metadata = attributes[at : last + 1]
        attributes = attributes[:at] + attributes[last + 1 :].removeprefix(", ")
    return Instruction(found[1], opcode, shapes, operands, attributes.strip().removesuffix(","), metadata, value)


def ints(text: str) -> tuple[int, ...]:
    """Read whole numbers, such as sizes, of which `<=4` is one."""
    return tuple(int(n.strip().removeprefix("<=")) for n in text.split(",") if n)


def _closing(text: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`; skip quoted text."""
    depth, quoted, i = 0, False, opening
    while i < len(text):
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise UnknownForm(f"a bracket is not closed: {text[opening:][:80]!r}")


def split(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth = start = 0
    for i, c in enumerate(text):
        if c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
        elif c == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def branches(instruction: Instruction) -> Sequence[str]:
    """Return the branches of a condition."""
    listed = instruction.attribute("branch_computations")
    if listed is not None:
        return [name.strip().lstrip("%") for name in listed.strip("{}").split(",")]
    both = [instruction.computation(f"{which}_computation") for which in ("true", "false")]
    return [name for name in both if name]


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
