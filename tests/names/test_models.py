"""The names of whole training steps, with all sizes distinct and all equal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

import axonym as axn
from tests.names.models import DISTINCT, EQUAL, MODELS, Case, by_path


@pytest.fixture(autouse=True)
def promote_ranks() -> Iterator[None]:
    """Let these programs promote ranks, as most programs do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def wrong_names(tree: Any, found: Any, rules: Mapping[str, str | None]) -> list[str]:
    """Return where names differ from those that a rule gives; an axis without a name is not wrong."""
    arrays, structure = jax.tree_util.tree_flatten_with_path(tree)
    truth = structure.flatten_up_to(by_path(tree, rules))
    wrong = []
    for (keys, x), right, names in zip(arrays, truth, structure.flatten_up_to(found), strict=True):
        all_of = None if right is None else right.split()
        if all_of is not None and len(all_of) != len(
            x.shape
        ):  # a scalar, or what an optimizer keeps in place of an array
            all_of = None
        for size, expected, name in zip(x.shape, all_of or (None,) * len(x.shape), names, strict=True):
            if expected is not None and name is not None and size != 1 and name != expected:
                wrong.append(f"{jax.tree_util.keystr(keys)}: {names} for {right}")
    return wrong


def check(case: Case) -> tuple[Any, list[str]]:
    program = axn.names.infer(case.fn, *case.args, names=case.given)
    wrong = []
    for tree, found, rules in zip(case.args, program.arguments[0], case.truth, strict=True):
        wrong += wrong_names(tree, found, rules)
    results = jax.eval_shape(case.fn, *case.args)
    for tree, found, rules in zip(results, program.results, case.results, strict=True):
        wrong += wrong_names(tree, found, rules)
    return program, wrong


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [DISTINCT, EQUAL], ids=["distinct", "equal"])
def test_names(model: str, sizes: Mapping[str, int]) -> None:
    case = MODELS[model](sizes)
    program, wrong = check(case)
    assert not wrong
    assert not program.mix_ups
    assert program.known_share >= 1 - case.unknown, program.unknown


@pytest.mark.parametrize("model", MODELS)
def test_sizes_do_not_matter(model: str) -> None:
    programs = [MODELS[model](sizes) for sizes in (DISTINCT, EQUAL)]
    first, second = (axn.names.infer(case.fn, *case.args, names=case.given) for case in programs)
    assert first.results == second.results
    assert first.arguments == second.arguments


def main() -> None:
    """Print, for each model: axes known, wrong names, mix-ups, and the time beside that of tracing."""
    for name in sys.argv[1:] or MODELS:
        for sizes in (DISTINCT, EQUAL):
            case = MODELS[name](sizes)
            jax.make_jaxpr(case.fn)(*case.args)
            jax.clear_caches()
            start = time.perf_counter()
            jax.make_jaxpr(case.fn)(*case.args)
            traced = time.perf_counter()
            jax.clear_caches()
            middle = time.perf_counter()
            program, wrong = check(case)
            print(f"{name:20} {program.known_share:.3f} wrong {len(wrong)} mix-ups {len(program.mix_ups)}", end=" ")
            print(f"trace {traced - start:.2f} s, infer and a trace more {time.perf_counter() - middle:.2f} s")
            for line in [
                *wrong[:5],
                *map(str, program.mix_ups[:5]),
                *(str(u) for u in program.unknown if "constant" not in u.reason),
            ]:
                print("    ", line)
            for line in dict(program._walk.unknown_primitives):
                print("    no rule:", line)


if __name__ == "__main__":
    main()
