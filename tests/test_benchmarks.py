"""The programs that `benchmarks` compares compute the same: other libraries' programs, and steps on accelerators."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

from benchmarks import accelerator, peers
from benchmarks.peers.case import Sizes

pytestmark = pytest.mark.oldest


def test_libraries_agree() -> None:
    """On the forward pass; the steps, which take long to compile, are compared before they are measured."""
    made = peers.prepare("block", Sizes(**peers.SMALL, batch=8, layers=1))
    assert {peers.PLAIN, peers.OURS} <= made.keys()


def test_lines_are_those_above_the_comparison() -> None:
    assert all(40 < peers.lines_of(module) < 120 for module in peers.installed().values())


def test_steps_on_accelerators() -> None:
    """Tried with a toy on the CPU; the losses of ours and of plain JAX are compared before they are timed."""
    assert len(accelerator.rows()) == 7
