"""Everything public is documented, and every example runs."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
import axonym.haliax as hax
from axonym import scalax
from tests.helpers import definitions, examples, exports, modules

NAMESPACE = {"axn": axn, "hax": hax, "jax": jax, "jnp": jnp, "np": np, "scalax": scalax}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _members(owner: type) -> dict[str, Any]:
    """Return the public methods and properties that a class defines itself; overriding ones share documentation."""
    found = {}
    for name, member in vars(owner).items():
        if any(hasattr(base, name) and getattr(base, name).__doc__ for base in owner.__mro__[1:]):
            continue
        member = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            found[name] = member
    return found


def _with_members(found: dict[str, Any]) -> dict[str, Any]:
    """Return functions and classes, then methods and properties; each once, preferably under the name of a function."""
    found = {n: v for n, v in found.items() if inspect.isfunction(v) or isinstance(v, type)}
    classes = [(n, v) for n, v in found.items() if isinstance(v, type)]
    found |= {f"{n}.{m}": member for n, v in classes for m, member in _members(v).items()}
    once = {id(v.fget if isinstance(v, property) else v): n for n, v in reversed(found.items())}
    return {n: v for n, v in found.items() if n in once.values()}


def _qualified(found: dict[str, Any]) -> dict[str, Any]:
    own = {n: v for n, v in found.items() if getattr(v, "__module__", "").startswith("axonym")}
    return {f"{v.__module__}.{v.__name__ if isinstance(v, type) else n}": v for n, v in own.items()}


def _by_module(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group names by module, for one test each: thousands of small tests take longer to list than to run."""
    names = [module.__name__ for module in modules()]
    grouped: dict[str, dict[str, Any]] = {}
    for name, thing in found.items():
        module = max((m for m in names if name == m or name.startswith(f"{m}.")), key=len)
        grouped.setdefault(module, {})[name] = thing
    return grouped


PUBLIC = _with_members({n: v for module in modules() for n, v in _qualified(exports(module)).items()})
EVERYTHING = {m.__name__: m for m in modules()} | _with_members(
    {n: v for module in modules() for n, v in _qualified(definitions(module)).items()}
)
PUBLIC_BY_MODULE = _by_module(PUBLIC)
EXAMPLES_BY_MODULE = _by_module({name: thing for name, thing in EVERYTHING.items() if examples(thing)})


def test_the_walk_finds_what_there_is() -> None:
    assert len(PUBLIC) > 200
    for name in ("axonym.ops.reductions.sum", "axonym.named_array.NamedArray.axes", "axonym.axis.Axis.alias"):
        assert name in PUBLIC and name in EVERYTHING
    assert "axonym" in EVERYTHING


@pytest.mark.parametrize("module", PUBLIC_BY_MODULE)
def test_summary(module: str) -> None:
    """One sentence on the first line, then nothing or an empty line, as `help` and the reference pages expect."""
    problems = []
    for name, thing in PUBLIC_BY_MODULE[module].items():
        lines = inspect.cleandoc(thing.__doc__ or "").split("\n")
        if not lines[0]:
            problems.append(f"{name} has no docstring")
        elif not lines[0].rstrip().endswith((".", "?", ":")):
            problems.append(f"{name}: {lines[0]!r} is not a sentence on one line")
        elif len(lines) > 1 and lines[1].strip():
            problems.append(f"{name}: no empty line after the summary")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("module", PUBLIC_BY_MODULE)
def test_has_an_example(module: str) -> None:
    missing = [name for name, thing in PUBLIC_BY_MODULE[module].items() if not examples(thing)]
    assert not missing, f"no example: {', '.join(missing)}"


@pytest.mark.parametrize("module", EXAMPLES_BY_MODULE)
def test_examples_run(module: str) -> None:
    """Each in a namespace of its own, with `axn`, `hax`, `jax`, `jnp`, `np` and `scalax` imported."""
    report: list[str] = []
    for name, thing in EXAMPLES_BY_MODULE[module].items():
        test = doctest.DocTest(examples(thing), dict(NAMESPACE), name, None, None, thing.__doc__)
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("module", PUBLIC_BY_MODULE)
def test_arguments_that_are_described_exist(module: str) -> None:
    """The names under `Arguments:` are those of the signature."""
    problems = []
    for name, thing in PUBLIC_BY_MODULE[module].items():
        lines = inspect.cleandoc(thing.__doc__ or "").split("\n")
        if not inspect.isfunction(thing) or "Arguments:" not in lines:
            continue
        described = []
        for line in lines[lines.index("Arguments:") + 1 :]:
            if line and not line.startswith("    "):
                break
            if line.startswith("    ") and not line[4].isspace():
                described += [part.strip(" *") for part in line.partition(":")[0].split(",")]
        parameters = inspect.signature(thing).parameters
        if not described or not set(described) <= parameters.keys():
            problems.append(f"{name}({', '.join(parameters)}) describes {', '.join(described) or 'none'}")
    assert not problems, "\n".join(problems)
