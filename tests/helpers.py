"""What several test modules share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

import axonym as axn


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects what JAX traces, lowers or compiles inside a with-block: nothing, if every cache is hit."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def public_name(name: str) -> Any:
    """What a dotted name such as 'linalg.inv' stands for in axonym."""
    found: Any = axn
    for part in name.split("."):
        found = getattr(found, part)
    return found


def public_functions(module: ModuleType) -> dict[str, Any]:
    """The public functions and classes a module defines itself, rather than imports."""
    defined = {n: v for n, v in vars(module).items() if not n.startswith("_") and callable(v)}
    return {n: v for n, v in defined.items() if getattr(v, "__module__", None) == module.__name__}


def assert_named(found: Any, expected: axn.NamedArray, **tolerance: Any) -> None:
    """The same axes in the same order, and the same values."""
    assert isinstance(found, axn.NamedArray), f"expected a named array, got {type(found).__name__}"
    assert found.axes == expected.axes
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(found.array), np.asarray(expected.array), **tolerance)
