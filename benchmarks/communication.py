"""Read the collectives from a compiled program."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

_KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (?P<shapes>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<shape>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*?^\}", re.MULTILINE | re.DOTALL)
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_NAME = re.compile(r"[\w.-]+")
_BITS = {"pred": 8, "bf16": 16}


@dataclasses.dataclass
class Moved:
    """What one kind of collective delivers to each device: the sizes of its results."""

    count: int = 0
    bytes: int = 0
    largest: int = 0


def bytes_moved(compiled: Any) -> dict[str, Moved]:
    """Collectives of an optimized program by kind. One that carries several arrays at once counts once for each."""
    return _collectives(compiled.as_text())


def bytes_moved_in_loops(compiled: Any) -> tuple[dict[str, Moved], dict[str, Moved]]:
    """The same for one turn of every loop of the program, and for what stands outside of loops."""
    computations = {match["name"]: match[0] for match in _COMPUTATION.finditer(compiled.as_text())}
    inside: set[str] = set()
    reached = [name for text in computations.values() for name in _BODY.findall(text)]
    while reached:
        name = reached.pop()
        if name not in inside:
            inside.add(name)
            reached += [n for n in _NAME.findall(computations[name]) if n in computations]
    loops, rest = (
        "\n".join(text for name, text in computations.items() if (name in inside) is looped) for looped in (True, False)
    )
    return _collectives(loops), _collectives(rest)


def _collectives(text: str) -> dict[str, Moved]:
    found: dict[str, Moved] = collections.defaultdict(Moved)
    for match in _COLLECTIVE.finditer(text):
        sizes = [_bytes(a["dtype"], a["shape"]) for a in _ARRAY.finditer(match["shapes"])]
        if match["start"]:
            sizes = sizes[len(sizes) // 2 :]  # the start of an asynchronous collective lists operands, then results
        moved = found[match["kind"]]
        moved.count += len(sizes)
        moved.bytes += sum(sizes)
        moved.largest = max(moved.largest, *sizes)
    return found


def _bytes(dtype: str, shape: str) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"^\D+", "", dtype) or 8)
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8
