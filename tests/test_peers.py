"""The programs of `benchmarks/peers`: those of all libraries that are installed compute the same."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

from benchmarks import peers
from benchmarks.peers.case import Sizes

pytestmark = pytest.mark.further


@pytest.mark.usefixtures("quick_compilation")
def test_libraries_agree() -> None:
    """On the forward pass; the steps, which take long to compile, are compared before they are measured."""
    made = peers.prepare("block", Sizes(**peers.SMALL, batch=8, layers=1))
    assert {peers.PLAIN, peers.OURS} <= made.keys()


def test_lines_are_those_above_the_comparison() -> None:
    assert all(40 < peers.lines_of(module) < 120 for module in peers.installed().values())
