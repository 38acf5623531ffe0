"""Count the collectives of a compiled program independently, straight from its text."""

from __future__ import annotations

import collections
import math
import re
from typing import Any

import jax
import numpy as np

WIDTH = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u8": 1, "s8": 1, "u64": 8}
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def counted(text: str, mesh: jax.sharding.Mesh) -> dict[Any, int]:
    """Return bytes of results by kind of collective and mesh axes, and the number of `runs`, taking all branches."""
    bodies: dict[str, str] = {}
    for block in re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", text):
        head = re.match(r"(?:ENTRY )?%([\w.-]+) \(", block)
        if head:
            bodies["entry" if block.startswith("ENTRY") else head[1]] = block

    def total(name: str) -> collections.Counter[Any]:
        found: collections.Counter[Any] = collections.Counter()
        for line in bodies[name].splitlines()[1:]:
            if collective := re.search(rf" = (.*?) ({KINDS})\(", line):
                found["runs"] += 1
                key = collective[2], _axes(line, mesh)
                for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", collective[1]):
                    found[key] += WIDTH[dtype] * math.prod(_numbers(dims))
            branches = re.findall(r"branch_computations=\{(.*?)\}", line)
            for called in re.findall(
                r"(?: calls| to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)", line
            ) + [name for listed in branches for name in re.findall(r"%([\w.-]+)", listed)]:
                times = re.search(r'known_trip_count":\{"n":"(\d+)"', line) if "body=" in line else None
                tests = int(times is not None and f"condition=%{called}" in line)  # the last one ends the loop
                for key, value in total(called).items():
                    found[key] += value * (int(times[1]) + tests if times else 1)
        return found

    return {k: v for k, v in total("entry").items() if v}


def _axes(line: str, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ."""
    position = {device.id: where for where, device in np.ndenumerate(mesh.devices)}
    pairs = [(position[group[0]], position[device]) for group in _groups(line, mesh.size) for device in group]
    return tuple(name for i, name in enumerate(mesh.axis_names) if any(a[i] != b[i] for a, b in pairs))


def _groups(line: str, devices: int) -> list[tuple[int, ...]]:
    """Return the devices of each group, from any of XLA's notations."""
    if "source_target_pairs=" in line:
        return [_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", line.split("source_target_pairs=")[1])]
    said = line.split("replica_groups=")[1]
    if said.startswith("mesh["):  # mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a','b':(1)2}
        match = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?\))\))?,? \{(.*?)\}", said)
        assert match, said
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        over = {name: (int(a or 1), int(b or 0)) for name, a, b in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", match[3])}
        shape, inside = list[int](), list[bool]()
        for name, size in sizes.items():
            before, part = over.get(name, (size, 1))
            part = part or size
            shape += [before, part, size // before // part]
            inside += [False, True, False]
        ids = (_iota(match[2]) if match[2] else np.arange(devices)).reshape(shape)
        ids = np.moveaxis(ids, [i for i, x in enumerate(inside) if x], range(-sum(inside), 0))
        return list(map(tuple, ids.reshape(-1, math.prod(n for n, x in zip(shape, inside, strict=True) if x))))
    if said.startswith("["):  # [groups,devices]<=[2,4]T(1,0)
        match = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", said)
        assert match, said
        return list(map(tuple, _iota(match[2]).reshape(_numbers(match[1]))))
    listed = re.findall(r"\{([\d,]+)\}", said.split("}}")[0] + "}")
    return list(map(_numbers, listed)) or [tuple(range(devices))]


def _iota(said: str) -> np.ndarray:
    """Return the devices in the order of `[2,4]T(1,0)`."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", said)
    assert match, said
    sizes = _numbers(match[1])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(match[2])) if match[2] else ids


def _numbers(said: str) -> tuple[int, ...]:
    return tuple(int(n) for n in said.split(",") if n)
