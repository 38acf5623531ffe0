"""A minute of the fuzzer, and that it finds what is planted. `python -m tests.fuzz --minutes 60` runs it for longer."""

from __future__ import annotations

import random

import pytest

import axonym as axn
from tests.fuzz.checks import check_steps, failure, report, try_seed
from tests.fuzz.programs import draw_program

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    words = try_seed(seed)
    assert words is None, words


def test_a_seed_draws_one_program() -> None:
    assert draw_program(random.Random(7)).code() == draw_program(random.Random(7)).code()


def test_planted_fault_is_found_and_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sign in one operation; the report shows a program of few steps that ends in it."""
    right = axn.negative
    program = next(
        p for p in map(draw_program, map(random.Random, range(100))) if "negative" in [s.kind for s in p.steps]
    )
    assert failure(program, 0) is None
    monkeypatch.setattr(axn, "negative", lambda x: right(right(x)) if x.dtype != "int32" else right(x) + 1)
    found = failure(program, 0)
    assert found is not None and found[0] is check_steps
    text = report(program, 0, *found)
    assert "check_steps, seed 0" in text and "values" in text
    first = next(i for i, step in enumerate(program.steps) if step.kind == "negative")
    assert text.endswith(f"{program.up_to(first).code()}\n")
