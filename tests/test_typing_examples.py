"""The scripts in `typing_examples` run. Linting checks that type checkers see the types in them."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "typing_examples").glob("[a-z]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_runs(script: Path) -> None:
    assert callable(runpy.run_path(str(script))["refused"])
