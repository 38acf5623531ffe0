"""The names of whole training steps, with all sizes distinct and all equal."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import pytest

import axonym as axn
from axonym.names._sources import LeafNames
from axonym.names.inferring import follow, trace
from tests.names.models import DISTINCT, EQUAL, MODELS, Case, by_path

pytestmark = pytest.mark.usefixtures("promotes_ranks")


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


@functools.cache
def inferred(model: str, equal: bool) -> tuple[Case, axn.names.NamedProgram, list[str]]:
    """Return a model's program, and which names in it are wrong."""
    case = MODELS[model](EQUAL if equal else DISTINCT)
    program = axn.names.infer(case.fn, *case.args, names=case.given)
    results = program.traced.returned.unflatten(program.traced.jaxpr.out_avals)
    wrong = []
    for tree, found, rules in zip(case.args, program.arguments[0], case.truth, strict=True):
        wrong += wrong_names(tree, found, rules)
    for tree, found, rules in zip(results, program.results, case.results, strict=True):
        wrong += wrong_names(tree, found, rules)
    return case, program, wrong


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("equal", [False, True])
def test_names(model: str, equal: bool) -> None:
    case, program, wrong = inferred(model, equal)
    assert not wrong
    assert not program.mix_ups
    assert program.known_share >= 1 - case.unknown, program.unknown


@pytest.mark.parametrize("model", MODELS)
def test_sizes_do_not_matter(model: str) -> None:
    (_, first, _), (_, second, _) = inferred(model, False), inferred(model, True)
    for a, b in ((first.body.arguments, second.body.arguments), (first.body.results, second.body.results)):
        assert [*map(first.names_of, a)] == [*map(second.names_of, b)]


def main() -> None:
    """Print, for each model, the axes known, wrong names and mix-ups, and the time in relation to that of tracing."""
    for model in sys.argv[1:] or MODELS:
        for equal in (False, True):
            case, program, wrong = inferred(model, equal)
            jax.clear_caches()
            start = time.perf_counter()
            traced = trace(case.fn, case.args, {})
            middle = time.perf_counter()
            follow(traced, [LeafNames(program.names_of(x), "names=") for x in program.body.arguments])
            stop = time.perf_counter()
            print(
                f"{model:20} known {program.known_share:.3f}, wrong {len(wrong)}, mix-ups {len(program.mix_ups)}",
                end=", ",
            )
            print(f"{(stop - middle) / (middle - start):.2f} of the {middle - start:.2f} s of tracing")
            for line in [*wrong[:5], *map(str, program.mix_ups[:5])]:
                print("    ", line)
            for line in program.unknown:
                if "constant" not in line.reason:
                    print("    ", line)


if __name__ == "__main__":
    main()
