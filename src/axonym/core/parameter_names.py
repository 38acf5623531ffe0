"""Find the names of the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def parameter_names(fn: Callable[..., Any], count: int, keywords: Collection[str] = ()) -> list[str]:
    """Return the names of the first positional arguments: their parameters' names, and `rest[0]`, ... for `*rest`.

    `keywords` are the names of keyword arguments, which positional arguments must not get.
    """
    names, rest = _positional_names(fn)
    names = names[:count]
    rest = rest or "args"
    names += [f"{rest}[{i}]" for i in range(count - len(names))]
    return [f"args[{i}]" if name in keywords else name for i, name in enumerate(names)]


def by_parameter(what: str, fn: Callable[..., Any], values: Sequence[T], static: Sequence[int] = ()) -> dict[str, T]:
    """Return the values of the positional parameters, in order, by parameter name.

    Arguments:
        values: one for each parameter that is not static, or one for each parameter.
        static: the positions of static parameters.
    """
    parameters, rest = _positional_names(fn)
    fixed = {i if i >= 0 else i + len(parameters) for i in static}
    names = [name for i, name in enumerate(parameters) if i not in fixed]
    if len(values) == len(parameters) != len(names):
        values = [value for i, value in enumerate(values) if i not in fixed]
    more = len(values) - len(names)
    if more > 0 and rest is None:
        parameters = "parameter" if len(names) == 1 else f"{len(names)} parameters"
        raise ValueError(f"{what}: {len(values)} placements for the {parameters} {', '.join(names)}.")
    return dict(zip([*names, *(f"{rest}[{i}]" for i in range(more))], values, strict=False))


def _positional_names(fn: Callable[..., Any]) -> tuple[list[str], str | None]:
    """Return the names of the positional parameters, and of the `*args` parameter."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return [], "args"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
