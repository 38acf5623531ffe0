"""Verify the steps of the examples, and plant bugs in some: `python -m tests.insight.verified`.

Every step must be the same before and after it is partitioned, under each of its mappings, on Auto and on Explicit mesh
axes. Then bugs are planted in the collectives of the partitioned programs of five steps. Each must be found, or the
changed instruction must have the value that it has in the program without the bug.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from axonym.insight import Verification, verify
from axonym.insight._compiling import around_partitioning
from axonym.insight._hlo import HloProgram
from axonym.insight._hlo_devices import placed
from axonym.insight._hlo_values import Machine, listed
from axonym.insight.verifying import SCALES, _Inputs, compare_programs
from tests.insight import cases, mutants

KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
STRATEGIES = "data", "fsdp", "tensor", "sequence", "mixed"
LANGUAGE = "data", "fsdp", "tensor", "fsdp+tensor", "sequence", "context", "pipeline", "pipeline+fsdp", "expert"
BOTH: dict[str, Callable[[AxisType], cases.Case]] = {
    "plain JAX": cases.plain_jax,
    "pipeline": cases.pipeline,
    **{f"mixture {m}": functools.partial(cases.mixture, m) for m in ("tokens", "experts")},
    **{f"classifier {m}": functools.partial(cases.classifier, m) for m in ("data", "height")},
    **{f"explain {m}": functools.partial(cases.explained, m) for m in ("data", "fsdp", "tensor")},
    **{f"tutorial {m}": functools.partial(cases.tutorial, m) for m in ("data", "tensor", "both", "fsdp")},
    **{f"generate {w}": functools.partial(cases.generated, w) for w in ("float32", "int8", "int4 in groups of 4")},
    **{f"pallas_kernel {m}": functools.partial(cases.kernels, m) for m in range(4)},
    **{f"custom_partitioning {m}": functools.partial(cases.own_partitioning, m) for m in range(4)},
    **{f"per_device {m}": functools.partial(cases.per_device, m) for m in range(9)},
    **{f"tour {m}": functools.partial(cases.tour, m) for m in range(3)},
    **{f"train_lm {m}": functools.partial(cases.train_lm, m) for m in LANGUAGE},
    **{f"{n} {m}": functools.partial(cases.language_model, n, m) for n in ("gpt2", "llama") for m in STRATEGIES},
}
STEPS: dict[str, Callable[[], cases.Case]] = {
    **{f"language model {m}, Auto": functools.partial(cases.raw_language_model, m) for m in ("fsdp", "tensor")},
    **{f"{n}, {kind}": functools.partial(make, KINDS[kind]) for n, make in BOTH.items() for kind in KINDS},
}
PLANTED = "plain JAX", "pipeline", "mixture experts", "classifier height", "train_lm fsdp+tensor"
"""On Auto axes."""


def verified(case: cases.Case) -> Verification:
    mesh, step, args = case
    with jax.set_mesh(mesh):
        return verify(step, *args)


def planted(case: cases.Case, count: int) -> list[tuple[str, Verification, bool]]:
    """Plant bugs, and return the verdict on each, and whether the changed instruction has an equal value."""
    mesh, args = case[0], case[2]
    step: Any = case[1]
    with jax.set_mesh(mesh):
        texts = around_partitioning(step.lower(*args))
    before, after = (HloProgram(text, mesh.size) for text in texts)
    sizes, found = dict(mesh.shape), []
    for what, name, changed in itertools.islice(mutants.mutants(texts[1], mesh.size), count):
        verdict = compare_programs("step", before, changed, mesh=sizes)
        found.append((what, verdict, verdict.same is True and _equal(before, after, changed, name)))
    return found


def _equal(before: HloProgram, after: HloProgram, changed: HloProgram, name: str) -> bool:
    """Return whether an instruction has the same values in two programs, at all scales."""
    inputs, places = _Inputs(before, ()), [place for i in before.parameters() for place in placed(i, before.devices)]
    for trace in filter(None, map(inputs.at, SCALES)):
        shards = [place.on_devices(x) for place, x in zip(places, trace.args, strict=True)]
        values = [_values_of(program, name, shards) for program in (after, changed)]
        if not all(np.allclose(x, y, 1e-9, 1e-12) for x, y in zip(*values, strict=True)):
            return False
    return True


def _values_of(program: HloProgram, name: str, shards: list[np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = []

    def watch(i: Any, operands: Any, result: Any) -> None:
        found.extend(listed(result) if i.name == name else ())

    Machine(program, watch).run(shards)
    return found


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(prog="python -m tests.insight.verified", description=__doc__)
    parser.add_argument("steps", nargs="*", help="parts of the names of steps; by default all")
    parser.add_argument("--mutants", type=int, default=12, help="bugs to plant in each of five steps")
    arguments = parser.parse_args()
    failed = 0
    wanted = [s for s in STEPS if not arguments.steps or any(part in s for part in arguments.steps)]
    for step in wanted:
        case, start = STEPS[step](), time.monotonic()
        verdict = verified(case)
        failed += verdict.same is not True
        print(f"{step}, {time.monotonic() - start:.1f} s: {verdict}", flush=True)
    counts = {"found": 0, "equivalent": 0, "missed": 0}
    for step in PLANTED if arguments.mutants else ():
        for what, verdict, equal in planted(STEPS[f"{step}, Auto"](), arguments.mutants):
            how = "found" if verdict.same is False else "equivalent" if equal else "missed"
            counts[how] += 1
            print(f"{step}, {what}: {how}: {verdict.first}", flush=True)
    print(f"{len(wanted)} steps, {failed} not the same; bugs planted: {counts}")
    return 1 if failed or counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
