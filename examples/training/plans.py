"""Make the plan of `--mapping plan`: the mesh, the mappings, what the backward pass computes again, and the number of
microbatches with the shortest step time, as computed from names.

The folder of the run keeps the plan, as a file that `--mapping` also reads, with the table of the candidates. A resumed
run uses this plan, unless the number of devices has changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
from models import llama

from axonym import NamedArray, insight
from axonym.precision import Policy

from . import devices, steps, strategies
from .config import Config
from .problems import Problem
from .strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Plan:
    """A strategy that was chosen, and how."""

    strategy: Strategy
    said: str
    """What to print."""
    table: str | None
    """The best candidates in Markdown; None if the plan is an earlier one."""

    def as_json(self) -> str:
        """The strategy as a file that `--mapping` reads."""
        chosen = self.strategy
        parts = {"mesh": chosen.mesh, "mapping": chosen.compute, "parameter_mapping": chosen.storage}
        more = {"remat": chosen.remat, "accumulate": chosen.accumulate}
        more |= {} if chosen.between is None else {"between": chosen.between}
        return json.dumps({**parts, **more}, indent=2) + "\n"

    def keep(self, path: Path) -> None:
        """Write the strategy to such a file."""
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_text(self.as_json())
        os.replace(unfinished, path)


def choose(config: Config, tokens: NamedArray, kept: Path | None) -> Plan:
    """The plan that is kept in a file, or a new one if there is none for as many devices as there are."""
    said = ""
    if kept is not None and kept.exists():
        found = dataclasses.replace(strategies.read(kept), name="plan")
        planned = math.prod(found.mesh.values())
        if planned == jax.device_count():
            return Plan(found, f"The plan is the one in {kept}.", None)
        said = (
            f"The plan in {kept} is for {planned} devices. There are {jax.device_count()} now, so this is a new one.\n"
        )
    chip = devices.chip(config.chip)
    if chip is None:
        known = ", ".join(insight.CHIPS)
        raise Problem(f"--mapping plan has no figures of {devices.describe()}: let --chip be one of {known}.")

    optimizer = steps.make_optimizer(config.optimizer)

    def build(remat: str = "full", accumulate: int = 1) -> tuple[Any, tuple[Any, NamedArray]]:
        policy = Policy.parse(config.precision)
        start, train, _ = steps.plain_functions(config.model, optimizer, policy, remat=remat, accumulate=accumulate)
        return train, (jax.eval_shape(start, jax.random.key(0)), tokens)

    _, (abstract, _) = build()
    choices = {"remat": list(llama.REMAT), "accumulate": [n for n in (1, 2, 4) if config.batches.batch % n == 0]}
    try:
        found = insight.plan(build, abstract, tokens, chips=jax.device_count(), chip=chip, ask=4, choices=choices)
    except ValueError as e:
        why = str(e).split(". ")[0].rstrip(".")  # what follows is what was not considered
        raise Problem(f"--mapping plan finds no mapping: {why}. Choose another --mapping.") from None
    best = found.best
    storage = best.storage or best.compute
    strategy = Strategy("plan", best.mesh, best.compute, storage, between=best.between, **best.choices)
    return Plan(strategy, f"{said}{found}", str(found))
