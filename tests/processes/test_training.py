"""The training example on two processes has the losses of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import names, outcomes, training

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the losses of one process."""
    folder = tmp_path_factory.mktemp("training")
    training.text(folder)
    (folder / "one").mkdir()
    losses = training.train(folder / "one", "--mapping", "data", "--samples", "0")
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder


FIRST, *REST = names(training)


def test_losses_are_those_of_one_process(folder: Path) -> None:
    found = outcomes(FIRST, count=2, folder=folder, limit=240)
    assert not any(found.values()), found[FIRST]


@pytest.mark.further
def test_under_each_mapping(folder: Path) -> None:
    found = outcomes(*REST, count=2, folder=folder, limit=400)
    assert not any(found.values()), "\n".join(found.values())
