"""The held-out programs run, and mark their mistakes."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import pytest

from .heldout.clean import PROGRAMS
from .heldout.mix_ups import PAIRS
from .heldout.models import MODELS, sizes

pytestmark = pytest.mark.usefixtures("promotes_ranks")


@pytest.mark.parametrize("square", [False, True])
def test_clean_programs_run(square: bool) -> None:
    for program in PROGRAMS:
        shapes = jax.tree.leaves(jax.eval_shape(program.fn, *program.example(square)))
        names = jax.tree.leaves(program.returns)
        assert [len(n.split()) for n in names] == [x.ndim for x in shapes], program.name


def test_mistakes_run_with_equal_sizes() -> None:
    for pair in PAIRS:
        for program in pair:
            jax.eval_shape(program.fn, *program.example(square=True))
        marks: list[Any] = [inspect.getsource(program.fn).count("# bug") for program in pair]
        assert marks == [0, 1], pair.buggy.name


@pytest.mark.parametrize("program", MODELS, ids=lambda program: program.name)
def test_models_run(program: Any) -> None:
    fn, arguments = program.build(sizes(program, square=False))
    jax.eval_shape(fn, *arguments)
