"""Run the fuzzer for a minute, and check that it finds planted bugs; `python -m tests.fuzz --minutes 60` does more."""

from __future__ import annotations

import os
import random

import pytest

import axonym as axn
from tests.fuzz import checks
from tests.fuzz.checks import check_steps, failure, try_seed
from tests.fuzz.programs import Program, draw_program
from tests.fuzz.worker import ABORTED, Worker


@pytest.mark.parametrize("seed", [0, 1])
def test_random_programs(seed: int) -> None:
    found = try_seed(seed)
    assert found is None, str(found)


def test_a_seed_draws_one_program() -> None:
    assert draw_program(random.Random(0)).code() == draw_program(random.Random(0)).code()


def _place(program: Program) -> int:
    return [step.kind for step in program.steps].index("negative")


def test_planted_fault_is_found_and_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sign in one operation; the report shows a program of few steps that ends in it."""
    monkeypatch.setattr(checks, "CHECKS", (check_steps,))
    right = axn.negative
    seeds = range(29, 100)  # drawing programs takes long, and the first of these has the operation now
    program = next(p for p in map(draw_program, map(random.Random, seeds)) if "negative" in [s.kind for s in p.steps])
    program = program.up_to(min(_place(program) + 2, len(program.steps) - 1))  # a short one, as each step is compiled
    assert failure(program, 0) is None
    monkeypatch.setattr(axn, "negative", lambda x: right(x) + 1)
    found = failure(program, 0)
    assert found is not None and found.check is check_steps
    text = str(found)
    assert "check_steps, seed 0" in text and "values" in text
    assert text.endswith(f"{program.up_to(_place(program)).code()}\n")


def _abort(program: Program, seed: int) -> None:
    os.abort()


def test_a_program_that_ends_the_process_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", (_abort,))
    worker = Worker()
    found = checks.try_seed(3, worker.fails)
    assert found is not None and found.words == ABORTED and len(found.program.steps) == 1
    assert worker.call(abs, -1) == 1, "the next process does the rest"
    worker.stop()
