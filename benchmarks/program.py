"""Check whether names add anything to the compiled program."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax

from . import models
from .harness import Row

LAYERS = 4
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*?\s([a-z][a-z0-9-]*)\(", re.MULTILINE)


def instructions(compiled: Any) -> collections.Counter[str]:
    """How often each kind of instruction stands in an optimized program, fused ones included."""
    return collections.Counter(_INSTRUCTION.findall(compiled.as_text()))


def rows() -> list[Row]:
    """The optimized value and gradient of a transformer, against the hand-written one."""
    params, batch = models.make_params(LAYERS), models.make_batch()
    ours = (
        jax.jit(jax.value_and_grad(models.named_loss))
        .lower(models.name_params(params), *models.name_batch(batch))
        .compile()
    )
    theirs = jax.jit(jax.value_and_grad(models.raw_loss)).lower(params, *batch).compile()
    return compared("program", ours, theirs)


def compared(section: str, ours: Any, theirs: Any) -> list[Row]:
    """Two compiled programs, by how many instructions they have of each kind, and by what these cost."""
    a, b = instructions(ours), instructions(theirs)
    found = [_row(section, "all instructions", sum(a.values()), sum(b.values()))]
    found += [
        _row(section, kind, a[kind], b[kind])
        for kind in ("dot", "fusion", "transpose", "copy", "reduce", "gather", "scatter")
    ]
    costs = ours.cost_analysis(), theirs.cost_analysis()
    found += [_row(section, what, costs[0][what], costs[1][what]) for what in ("flops", "bytes accessed")]
    return found


def _row(section: str, what: str, ours: float, theirs: float) -> Row:
    ratio = ours / theirs if theirs else 1.0 if ours == 0 else float("inf")
    return Row(section, what, f"{ours:.0f}", f"{theirs:.0f}", ratio, 1.0)
