"""What the arguments of a call are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any


def parameter_names(fn: Callable[..., Any], count: int, keywords: Collection[str] = ()) -> list[str]:
    """The names of the first positional arguments: those of their parameters, and `rest[0]`, ... for `*rest`.

    Arguments:
        fn: the function that is called.
        count: how many positional arguments it is called with.
        keywords: the names of its keyword arguments, which the others must not be called too.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    names += [f"{rest}[{i}]" for i in range(count - len(names))]
    return [f"args[{i}]" if name in keywords else name for i, name in enumerate(names)]
