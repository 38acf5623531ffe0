"""Infer the names of all held-out programs, and print what is wrong, what is unknown, and which mistakes are found.

`python -m tests.names.heldout.score`
"""

from __future__ import annotations

import dataclasses
import linecache
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

import axonym as axn
from axonym.names._sources import Root, given_to_tree

from .cases import Program
from .clean import PROGRAMS
from .mix_ups import PAIRS
from .models import MODELS, sizes


@dataclasses.dataclass
class Score:
    """The counts of some programs, and a line for each fault."""

    axes: Counter[str] = dataclasses.field(default_factory=Counter)
    alarms: int = 0
    programs: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        known = sum(self.axes.values()) or 1
        unknown = f"{self.axes['unknown']} of {known} unknown ({100 * self.axes['unknown'] / known:.1f}%)"
        return f"{self.axes['wrong']} wrong names, {unknown}, false alarms {self.alarms}/{self.programs}"


def kind(expected: str, name: str | None, size: int) -> str:
    """Say whether a name is right, wrong or unknown; nothing depends on axes of size 1 that have no name.

    A part of an axis, such as `height.0`, has no name of its own.
    """
    base = None if name is None or not name.rstrip("'").isidentifier() else name.rstrip("'")
    if expected == "_" or (base is None and size == 1):
        return ""
    if expected == "?" or (expected.endswith("?") and base is None):
        return "right" if base is None else "wrong"
    if base is None:
        return "unknown"
    return "right" if base == expected.rstrip("'?") else "wrong"


def faults_of_names(returns: Any, results: Any, shapes: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind of each axis of the results, and a description."""
    right = dict(expected_names(returns, shapes))
    found = jax.tree.structure(shapes).flatten_up_to(results)
    for (keys, x), names in zip(jax.tree_util.tree_flatten_with_path(shapes)[0], found, strict=True):
        expected = right[keys]
        assert len(expected) == len(x.shape) == len(names), (keys, expected, x.shape, names)
        for e, name, size in zip(expected, names, x.shape, strict=True):
            where = jax.tree_util.keystr(keys, simple=True, separator="/") or "the result"
            yield kind(e, name, size), f"{where}: {names} for {' '.join(expected)!r}"


def expected_names(returns: Any, tree: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the expected names of each array, by the rules of `names=`, where `?` is no name."""
    words = jax.tree.map(lambda text: text.replace("?", "_QUESTION"), returns)
    for keys, found in given_to_tree(words, Root("", (), tree)):
        yield keys, [("_" if n is None else n.rstrip("'")).replace("_QUESTION", "?") for n in found.names or ()]


def run(name: str, fn: Callable[..., Any], args: Any, names: Any, returns: Any, score: Score) -> Any:
    """Add a correct program to a score."""
    score.programs += 1
    try:
        program = axn.names.infer(fn, *args, names=names)
    except Exception as e:
        score.faults.append(f"{name}: failed: {type(e).__name__}: {str(e)[:300]}")
        score.axes["failed"] += 1
        return
    score.alarms += bool(program.mix_ups)
    score.faults += [f"{name}: false alarm: {m}" for m in program.mix_ups]
    if returns is not None:
        found = list(faults_of_names(returns, program.results, jax.eval_shape(fn, *args)))
        score.axes.update(k for k, _ in found if k)
        score.faults += dict.fromkeys(f"{name}: {k}: {text}" for k, text in found if k in ("wrong", "unknown"))


def report(title: str, score: Score) -> None:
    print(f"\n{title}: {score}")
    for line in score.faults:
        print("   ", line)


def on_its_line(mix_up: Any) -> bool:
    source = mix_up.source
    return source is not None and linecache.getline(source.file, source.line).rstrip().endswith("# bug")


def main() -> None:
    for square in (False, True):
        kind_of_sizes = "equal" if square else "different"
        score = Score()
        for model in MODELS:
            if (chosen := sizes(model, square)) is not None:
                fn, args = model.build(chosen)
                run(model.name, fn, args, model.names, model.returns, score)
        report(f"models, {kind_of_sizes} sizes", score)
        score = Score()
        for program in PROGRAMS:
            example(program, square, score)
        report(f"clean programs, {kind_of_sizes} sizes", score)
    score, found, exact = Score(), 0, 0
    for clean, buggy in PAIRS:
        example(clean, True, score)
        try:
            mix_ups = axn.names.infer(buggy.fn, *buggy.example(True), names=buggy.names).mix_ups
        except Exception as e:
            score.faults.append(f"{buggy.name}: failed: {type(e).__name__}: {str(e)[:300]}")
            continue
        found += bool(mix_ups)
        exact += any(map(on_its_line, mix_ups))
        if not any(map(on_its_line, mix_ups)):
            score.faults.append(f"{buggy.name}: {'on another line: ' + str(mix_ups[0]) if mix_ups else 'missed'}")
    report(f"mix-ups found {found}/{len(PAIRS)}, on their line {exact}; their correct twins", score)


def example(program: Program, square: bool, score: Score) -> None:
    run(program.name, program.fn, program.example(square), program.names, program.returns, score)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with jax.numpy_rank_promotion("allow"):
        main()
