"""Pipelines whose neighbouring stages are in several processes."""

from __future__ import annotations

from pathlib import Path

import jax

from tests.processes.checks import assert_values
from tests.test_schedules import KINDS, ROWS, arguments_of, distributed, plain

CHOSEN = ("gpipe, fsdp inside", "gpipe, tensor", "1f1b, behind", "1f1b, rounds, fsdp", "1f1b, rounds, vocabulary")
"""Rows that send all that a schedule sends: compiling a row takes seconds in each process."""


def check_table(folder: Path) -> None:
    """Schedules, under several mappings: values and gradients. Neighbours in the table use different types of mesh."""
    for i, row in enumerate(ROWS[name] for name in CHOSEN):
        step, mesh = distributed(row, KINDS[i % 2])
        with jax.set_mesh(mesh):
            found = step(*arguments_of(row.step))
        assert_values(found, lambda step=row.step: plain(step), atol=1e-4)
