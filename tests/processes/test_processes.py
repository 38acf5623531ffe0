"""Several processes on this machine: what is promised of them, and what happens when one of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonym.state import save_checkpoint
from tests.processes import checks, faults, loading, names, outcomes

Outcomes = dict[str, str]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.further)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"{request.param}-processes")


@pytest.fixture(scope="module")
def found(folder: Path) -> Outcomes:
    """What went wrong in each check, in one start of the processes."""
    count = int(folder.name[0])
    of_one = folder / "check_checkpoint_of_one_process"
    of_one.mkdir()
    save_checkpoint(of_one / "of-one", checks.state())
    modules = (loading, checks, faults) if count == 2 else (checks, faults)
    return outcomes(*names(*modules), count=count, folder=folder)


@pytest.mark.parametrize("name", names(checks, faults))
def test_check(name: str, found: Outcomes) -> None:
    assert not found[name], found[name]


def test_two_processes_load_one_batch(found: Outcomes) -> None:
    (name,) = names(loading)
    assert not found.get(name), found[name]


def test_checkpoint_of_several_processes_in_one(folder: Path, found: Outcomes) -> None:
    checks.restored(folder / "check_checkpoint_for_other_processes" / "of-several")
