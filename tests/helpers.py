"""Helpers for several test modules."""

from __future__ import annotations

import ast
import collections
import contextlib
import doctest
import functools
import importlib
import inspect
import itertools
import pkgutil
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect what JAX traces, lowers or compiles inside a with-block: nothing, if every cache is hit."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def covering(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of three or more parameters, in which each two values of different ones occur together.

    For tests that compile for seconds: a mistake shows with one value, or with two values that meet. All combinations
    would find hardly more, in much more time.
    """
    values = list(map(list, parameters))
    possible = list(itertools.product(*(range(len(of)) for of in values)))
    parts = {case: set(itertools.combinations(enumerate(case), 2)) for case in possible}
    missing, used, chosen = set().union(*parts.values()), collections.Counter[tuple[int, int]](), []
    while missing:
        # Of cases that add as much, the one whose values were used least: so values alternate.
        case = max(
            possible, key=lambda case: (len(parts[case] & missing), -sum(used[part] for part in enumerate(case)))
        )
        missing -= parts[case]
        used.update(enumerate(case))
        chosen.append(tuple(of[i] for of, i in zip(values, case, strict=True)))
    return chosen


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of 256 kB at a new folder; whether this user can."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def public_name(name: str) -> Any:
    """Return the object with a dotted name such as 'linalg.inv' in axonym."""
    found: Any = axn
    for part in name.split("."):
        if not hasattr(found, part) and inspect.ismodule(found):
            with contextlib.suppress(ImportError):  # a module that is not imported yet
                importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


@functools.cache
def modules(native: bool = False) -> list[ModuleType]:
    """Return the package and every module in it; `native`: without the compatibility modules."""
    names = [m.name for m in pkgutil.walk_packages(axn.__path__, "axonym.")]
    return [axn, *(importlib.import_module(n) for n in names if not (native and n.startswith("axonym.haliax")))]


def exports(module: ModuleType) -> dict[str, Any]:
    """Return the public names of a module: its `__all__`, or else the imports of the form `x as x`."""
    names = getattr(module, "__all__", None)
    if names is None:
        imports = [
            n
            for n in ast.parse(Path(str(module.__file__)).read_text()).body
            if isinstance(n, (ast.Import, ast.ImportFrom))
        ]
        names = [a.name for n in imports for a in n.names if a.asname == a.name]
    return {name: getattr(module, name) for name in names}


def definitions(module: ModuleType) -> dict[str, Any]:
    """Return the functions and classes that a module defines itself, without private ones."""
    found = {n: v for n, v in vars(module).items() if not n.startswith("_") and callable(v)}
    return {n: v for n, v in found.items() if getattr(v, "__module__", None) == module.__name__}


def examples(thing: Any) -> list[doctest.Example]:
    """Return the examples in the docstring of a function, class, property or module."""
    return doctest.DocTestParser().get_examples(inspect.cleandoc(thing.__doc__ or ""))


def draw(*axes: axn.Axis) -> axn.NamedArray:
    """Return normal numbers, which are other ones for another number of axes."""
    values = np.random.default_rng(len(axes)).normal(size=[a.size for a in axes])
    return axn.named(jnp.asarray(values, jnp.float32), axes)


def spec(x: Any) -> tuple[Any, ...]:
    """Return the entries of an array's partition spec, one for each axis."""
    array: Any = x.array if isinstance(x, axn.NamedArray) else x
    entries = tuple(array.sharding.spec)
    return entries + (None,) * (array.ndim - len(entries))


def assert_named(found: Any, expected: axn.NamedArray, **tolerance: Any) -> None:
    """Check that two arrays have the same axes in the same order, and the same values."""
    assert isinstance(found, axn.NamedArray), f"expected a named array, got {type(found).__name__}"
    assert found.axes == expected.axes
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(found.array), np.asarray(expected.array), **tolerance)
