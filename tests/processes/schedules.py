"""Pipelines whose neighbouring stages are in several processes."""

from __future__ import annotations

from pathlib import Path

import jax

from tests.processes.checks import assert_values
from tests.test_schedules import KINDS, ROWS, arguments_of, distributed, plain


def check_table(folder: Path) -> None:
    """Every schedule, under every mapping: values and gradients.

    Each row uses one type of mesh. Neighbours, and the similar rows 6 apart, use different ones.
    """
    for i, row in enumerate(ROWS.values()):
        step, mesh = distributed(row, KINDS[(i + i // 6) % 2])
        with jax.set_mesh(mesh):
            found = step(*arguments_of(row.step))
        assert_values(found, lambda step=row.step: plain(step), atol=1e-4)
