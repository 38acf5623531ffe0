"""The public names of Haliax, and the parameters of its functions: `names.txt` lists them, and code relies on them.

The list has the names that its modules define or list in `__all__`, in Haliax 1.4 and in the newest version, and others
that public code imports. A default is marked by `=`.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import axonym.haliax as hax

NAMES = [line.partition("(") for line in (Path(__file__).parent / "names.txt").read_text().splitlines()]
BY_MODULE: dict[str, list[tuple[str, str | None]]] = {}

# What is missing, or differs, and why.
MISSING = {
    "nn.linear.gmm_sharded": "a kernel for raw arrays: `MoELinear` has it with `use_gmm=True`",
    "debug.ArrayLike": "an alias that Haliax uses itself",
    "quantization.Int8DotGeneralOp.accumulate": "it has no state",
    "core.NamedArray.tree_unflatten": "Axonym registers the class by its fields",
}
OTHER_PARAMETERS = {
    "NamedRef": "made by `new_ref`",
    "ref.NamedRef": "made by `new_ref`",
    "partitioning.ResourceAxis": "a class to derive from, not to call",
    "quantization.Int8DotGeneralOp": "there is no configuration of AQT",
    "quantization.Int8DotGeneralOp.to_state_dict": "a method",
    "core.NamedArray.var": "`dtype` and `ddof` are keywords",
    "wrap.ReductionFunction.__call__": "`where` is a keyword, as in the functions that it is a type of",
}


def _module_of(path: str) -> str:
    """Return the longest beginning of a path that is a module."""
    names, found = path.split(".")[:-1], "axonym.haliax"
    for name in names:
        try:
            importlib.import_module(f"{found}.{name}")
        except ModuleNotFoundError:
            break
        found += f".{name}"
    return found


for _path, _open, _parameters in NAMES:
    BY_MODULE.setdefault(_module_of(_path), []).append((_path, _parameters[:-1] if _open else None))


def _found(module: str, path: str) -> Any:
    """Return what a path leads to; for a method of a named array, that of an array."""
    found: Any = importlib.import_module(module)
    for name in path.split(".")[module.count(".") - 1 :]:
        found = hax.ones({"a": 2, "b": 2}) if found is hax.NamedArray else found
        found = hax.new_ref(hax.ones({"a": 2})) if found is hax.NamedRef else found
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("module", BY_MODULE)
def test_names(module: str) -> None:
    missing = set()
    for path, _ in BY_MODULE[module]:
        try:
            _found(module, path)
        except AttributeError:
            missing.add(path)
    assert missing == MISSING.keys() & {path for path, _ in BY_MODULE[module]}


@pytest.mark.parametrize("module", BY_MODULE)
def test_parameters(module: str) -> None:
    """Every parameter is there, under its name, in its place, and with a default where code relies on one."""
    problems = {
        path: problem
        for path, parameters in BY_MODULE[module]
        if parameters is not None and path not in MISSING and path not in OTHER_PARAMETERS
        if (problem := _difference(_found(module, path), parameters))
    }
    assert not problems


def _difference(found: Any, parameters: str) -> str:
    """Return how the parameters of a function differ from the expected ones in a way that code can see."""
    try:
        has = inspect.signature(found).parameters
    except (TypeError, ValueError):  # an alias, or an annotation
        return ""
    own = {n: p for n, p in has.items() if n not in ("self", "cls")}
    wanted = inspect.signature(eval(f"lambda {re.sub('=(?=,|$)', '=None', parameters)}: None")).parameters
    anything = {p.kind for p in own.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    in_place = [n for n, p in own.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    expected = [n for n, p in wanted.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if inspect.Parameter.VAR_POSITIONAL not in anything and in_place[: len(expected)] != expected:
        return f"positional parameters {in_place} for {expected}"
    for name, parameter in wanted.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # the list does not say what they stand for
        if name not in own and inspect.Parameter.VAR_KEYWORD not in anything:
            return f"no {name}"
        if name in own and parameter.default is not parameter.empty and own[name].default is parameter.empty:
            return f"{name} has no default"
    if all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in wanted.values()):
        new = [n for n, p in own.items() if n not in wanted and p.default is p.empty and p.kind not in anything]
        return f"{new} must be given" if new else ""
    return ""


@pytest.mark.parametrize("module", BY_MODULE)
def test_functions_can_be_pickled(module: str) -> None:
    for path, _ in BY_MODULE[module]:
        if path not in MISSING and path.count(".") == module.count(".") - 1:
            if inspect.isfunction(fn := _found(module, path)):
                assert pickle.loads(pickle.dumps(fn)) is fn, path
