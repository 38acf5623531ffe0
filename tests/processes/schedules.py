"""Pipelines whose neighbouring stages are in several processes."""

from __future__ import annotations

from pathlib import Path

import jax

from tests.processes.checks import assert_values
from tests.test_schedules import KINDS, ROWS, arguments_of, distributed, plain


def check_table(folder: Path) -> None:
    """Every schedule, under every mapping and on both types of meshes: values and gradients."""
    for row in ROWS.values():
        for kind in KINDS:
            step, mesh = distributed(row, kind)
            with jax.set_mesh(mesh):
                found = step(*arguments_of(row.step))
            assert_values(found, lambda step=row.step: plain(step), atol=1e-4)
