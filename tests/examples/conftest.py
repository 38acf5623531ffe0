"""Fixtures for the tests of the training script: its text, and a run that was not interrupted."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.runs import train, train_lm


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> Any:
    """Share compiled programs between runs of the same settings: compiling again would take most of the time."""
    patch, made = pytest.MonkeyPatch(), {}

    def once(fn: Any) -> Any:
        def maker(*args: Any) -> Any:
            key = (fn.__name__, *map(repr, args))
            if key not in made:
                made[key] = fn(*args)
            return made[key]

        return maker

    patch.setattr(train_lm.steps, "make_functions", once(train_lm.steps.make_functions))
    patch.setattr(train_lm.generation, "make_writer", once(train_lm.generation.make_writer))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files to learn from, each with a counter, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        (folder / f"{i}.txt").write_text(" ".join(str(n) for n in range(100 * i, 100 * i + 400)))
    return folder


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("finished") / "run"
    patch = pytest.MonkeyPatch()
    printed = tmp_path_factory.getbasetemp() / "printed"
    with printed.open("w") as file, patch.context() as p:
        p.setattr(sys, "stdout", file)
        assert train(text, out, "--mapping", "fsdp+tensor", "--keep", 9, "--export", out / "llama.safetensors") == 0
    shutil.move(printed, out / "printed.txt")
    return out
