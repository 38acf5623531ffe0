"""The scripts in `typing_examples` run. Linting checks that type checkers see the types in them."""

import runpy
from pathlib import Path

import pytest

import axonym as axn

SCRIPTS = sorted((Path(__file__).parent / "typing_examples").glob("[a-z]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_runs(script: Path) -> None:
    with axn.set_mesh(axn.make_mesh({"data": 1})):
        assert callable(runpy.run_path(str(script))["refused"])
