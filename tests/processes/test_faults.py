"""When one of several processes fails, all of them raise the same error, and the next collective is the right one."""

from __future__ import annotations

import pytest

from tests.processes import faults, names, outcomes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(faults, 2, tmp_path_factory.mktemp("two"), limit=40)


@pytest.mark.parametrize("name", names(faults))
def test_two_processes(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]
