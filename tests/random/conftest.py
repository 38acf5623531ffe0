"""Most of the time of these tests goes into compiling."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(quick_compilation: None) -> None: ...
