"""Count the collectives that a compiled program executes: one in a loop counts once for each iteration.

`cost_analysis` counts the body of a loop only once, and so does any count of instructions.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}

HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z-]*)\((.*)$")
CALLED = re.compile(
    r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)


def executed(compiled: Any) -> dict[str, tuple[int, int]]:
    """Return how often each collective is executed on a device, and the total bytes of its results."""
    text = compiled.as_text()
    computations: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            name = head[2]
            entry = name if head[1] else entry
            computations[name] = []
        elif found := INSTRUCTION.match(line):
            computations[name].append((found[1], found[2].removesuffix("-start"), found[3]))
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])

    def run(name: str, times: int) -> None:
        for shape, kind, rest in computations[name]:
            if kind in COLLECTIVES:
                counts[kind][0] += times
                counts[kind][1] += times * _bytes(shape)
            turns = 1
            if kind == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                assert known, "a loop whose number of turns the compiler does not know"
                turns = int(known[1])
            for called in CALLED.findall(rest):
                if kind != "all-reduce":
                    for one in re.findall(r"[\w.-]+", " ".join(called)):
                        run(one, times * turns)

    run(entry, 1)
    return {kind: (count, size) for kind, (count, size) in sorted(counts.items())}


def _bytes(shape: str) -> int:
    found = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    return sum(SIZES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found)
