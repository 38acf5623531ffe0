"""Plant bugs in the collectives of a partitioned program: see `mutants`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from axonym.insight._hlo import COLLECTIVES, HloProgram, Instruction
from axonym.insight._hlo_devices import groups

GROUPS = re.compile(
    r"replica_groups=(?:mesh\[[^\]]*\](?:, device_ids=\([^)]*(?:\([^)]*\))?\))? \{[^}]*\}|\{\{.*?\}\}|"
    r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
PAIRS = re.compile(r"source_target_pairs=\{\{.*?\}\}")


def mutants(text: str, devices: int, seed: int = 0) -> Iterator[tuple[str, str, HloProgram]]:
    """Yield what was planted, the name of the changed instruction, and the program, in a random order."""
    program = HloProgram(text, devices)
    planted = [
        (f"{how} of {i.name}", i.name, line, changed)
        for computation in program.computations.values()
        for i in computation.values()
        if i.opcode in COLLECTIVES
        for line in [_line(text, i.name)]
        for how, changed in _changes(text, line, i, computation, devices)
    ]
    random.Random(seed).shuffle(planted)
    for what, name, line, changed in planted:
        yield what, name, HloProgram(text.replace(line, changed), devices)


def _line(text: str, name: str) -> str:
    found = re.search(rf"^ *(?:ROOT )?%?{re.escape(name)} = .*$", text, re.MULTILINE)
    assert found, name
    return found[0]


def _changes(
    text: str, line: str, i: Instruction, around: dict[str, Instruction], devices: int
) -> Iterator[tuple[str, str]]:
    operand, call = i.operands[0], f"{i.opcode}("
    before, after = around[operand.partition("#")[0]].shapes, i.shapes
    if len(i.operands) == 1 and before == after:
        head, _, rest = line.partition(call)
        yield "no communication", f"{head}copy({rest.partition(')')[0]})"
    if len(i.operands) == 1 and i.opcode == "all-gather":
        times = max(n // m for n, m in zip(after[0].sizes, before[0].sizes, strict=True))
        head, _, rest = line.partition(call)
        name = rest.partition(")")[0]
        yield (
            "no communication",
            f"{head}concatenate({', '.join([name] * times)}), dimensions={i.attribute('dimensions')}",
        )
    if PAIRS.search(line):
        pairs = groups(i, devices)
        back = ",".join(f"{{{b},{a}}}" for a, b in pairs)
        yield "targets for sources", PAIRS.sub(f"source_target_pairs={{{back}}}", line)
        on = ",".join(f"{{{a},{(b + 1) % devices}}}" for a, b in pairs)
        yield "the wrong targets", PAIRS.sub(f"source_target_pairs={{{on}}}", line)
    elif GROUPS.search(line):
        found, size = groups(i, devices), len(groups(i, devices)[0])
        together = [tuple(range(k, k + size)) for k in range(0, devices, size)]
        apart = [tuple(range(k, devices, devices // size)) for k in range(devices // size)]
        other = next((g for g in (together, apart) if sorted(g) != sorted(found)), None)
        if other is not None:
            listed = ",".join(f"{{{','.join(map(str, group))}}}" for group in other)
            yield "the wrong groups", GROUPS.sub(f"replica_groups={{{listed}}}", line)
    names = [*around]
    for name in reversed(names[: names.index(i.name)]):
        same = around[name].shapes == before and f"%{name} = (" not in text  # not a tuple
        if name != operand and same and around[name].opcode != "constant":
            yield "the wrong operand", line.replace(f"{call}%{operand}", f"{call}%{name}", 1)
            break
