"""Several processes on this machine: their results, and the failure of one of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from axonym.state import save_checkpoint
from tests.processes import checks, faults, loading, names, outcomes, schedules, training

OF_FOUR = ("fsdp", "tensor", "bytes_of_the_text", "files_of_the_example")
"""The checks of the training example for four processes: the mappings that compile fastest, reading and writing."""

OF_FOUR_ALONE = ("fsdp", "tensor")
"""Checks that two processes skip: they run both together, as their first check."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of one process."""
    folder = tmp_path_factory.mktemp("trained")
    training.train_in_one_process(folder)
    return folder


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.newest), pytest.param(4, marks=pytest.mark.oldest)]
)
def test_checks(count: int, trained: Path, tmp_path: Path) -> None:
    """All checks in one start: most of the time goes into starting processes, and into what each compiles."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    of_one = tmp_path / "check_checkpoint_of_one_process"
    of_one.mkdir()
    save_checkpoint(of_one / "of-one", checks.state())
    chosen = names(checks, faults, loading)
    first, *rest = *names(training), *names(schedules)
    if count == 4:
        chosen += [name for name in rest if name.rpartition(".check_")[2] in OF_FOUR]
    else:
        chosen += [first, *(name for name in rest if name.rpartition(".check_")[2] not in OF_FOUR_ALONE)]
    found = outcomes(*chosen, count=count, folder=tmp_path, limit=900)
    assert not any(found.values()), "\n".join(f"{name}{wrong}" for name, wrong in found.items() if wrong)
    checks.restored(tmp_path / "check_checkpoint_for_other_processes" / "of-several")


def test_every_mapping_is_checked() -> None:
    checked = {name.rpartition(".check_")[2] for name in names(training)}
    assert {name.replace("+", "_and_") for name in ("plan", *training.train_lm.strategies.BUILT_IN)} <= checked
