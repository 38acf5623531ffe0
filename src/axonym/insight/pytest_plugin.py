"""A pytest plugin: a fixture that holds a step to a snapshot of its distribution.

A project enables it in its `conftest.py`: `pytest_plugins = ["axonym.insight.pytest_plugin"]`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..distribution.mesh_axes import AnyMesh
from .contracts import BrokenContract, contract, snapshot
from .explaining import Mappings

_UPDATE = "--update-snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes snapshots."""
    parser.getgroup("axonym").addoption(
        _UPDATE, action="store_true", help="write the files of `mapping_snapshot` instead of comparing with them"
    )


class MappingSnapshot:
    """The fixture `mapping_snapshot` in one test."""

    def __init__(self, folder: Path, stem: str, update: bool):
        self._folder, self._stem, self._update, self._numbers = folder, stem, update, itertools.count(1)

    def check(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        mapping: Mappings = None,
        mesh: AnyMesh | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare the snapshot of a step with the file; with `--update-snapshots`, write the file.

        The file is `snapshots/MODULE.TEST.txt` beside the test; later checks in one test count: `MODULE.TEST.2.txt`.

        Arguments:
            fn, *args, mapping, mesh, **kwargs: as in `axonym.insight.explain`.
        """
        __tracebackhide__ = True
        number = next(self._numbers)
        path = self._folder / f"{self._stem}{'' if number == 1 else f'.{number}'}.txt"
        where: dict[str, Any] = {"mapping": mapping, "mesh": mesh}
        if self._update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(snapshot(fn, *args, **where, **kwargs) + "\n", encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"there is no {path}: run pytest with {_UPDATE}, and read the new file.", pytrace=False)
        try:
            contract(snapshot=path.read_text(encoding="utf-8"), **where).check(fn, *args, **kwargs)
        except BrokenContract as error:
            advice = f"It is kept in {path}. If this change is intended, run pytest with {_UPDATE}."
            pytest.fail(f"{error}\n{advice}", pytrace=False)


@pytest.fixture
def mapping_snapshot(request: pytest.FixtureRequest) -> MappingSnapshot:
    """Keep snapshots of steps in files beside the test: `mapping_snapshot.check(step, *abstract_args)`."""
    name = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
    folder = request.path.parent / "snapshots"
    return MappingSnapshot(folder, f"{request.path.stem}.{name}", bool(request.config.getoption(_UPDATE)))
