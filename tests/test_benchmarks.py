"""The programs that `benchmarks` compares compute the same: other libraries' programs, and steps on accelerators."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

pytest.importorskip("optax")

from benchmarks import __main__, accelerator, harness, peers, published, transfer
from benchmarks.peers.case import Sizes

ROOT = Path(__file__).parent.parent

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


SECTIONS = ["calls", "checkpoints", "eager", "named_jit", "published", "schedules", "transfer"]
"""The sections that pages name, without those that are tried above."""


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_that_pages_name(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs in its smallest form: one call, one layer, two runs of each kind, one topology."""
    once, weights = harness.in_turn, transfer.weights
    monkeypatch.setattr(harness, "in_turn", lambda fns, **_: once(fns, repeats=1, rounds=1, warm=1))
    monkeypatch.setattr(transfer, "weights", lambda layers: weights(1))
    monkeypatch.setattr(published, "PLANNED", published.PLANNED[:1])
    models, runs = published.read()
    few = [run for i, run in enumerate(runs) if [*map(published.stack, runs[:i])].count(published.stack(run)) < 2]
    monkeypatch.setattr(published, "read", lambda: (models, few))
    monkeypatch.setattr(published, "COUNTED", published.COUNTED[:1])
    with jax.numpy_rank_promotion("allow"):
        assert __main__.SECTIONS[section]()


def test_every_section_that_a_page_names_is_tried() -> None:
    pages = [ROOT / "README.md", *ROOT.joinpath("docs").glob("*.md")]
    found = (re.findall(r"python -m benchmarks ([\w ]+)", page.read_text()) for page in pages)
    assert {name for texts in found for text in texts for name in text.split()} == {*SECTIONS, *__main__.ON_REQUEST}
