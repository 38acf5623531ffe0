"""Give functions of the library Haliax's parameters."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any


def with_parameters(fn: Callable[..., Any], /, *first: str, **names: str) -> Callable[..., Any]:
    """Wrap a function so that it takes the same arguments in another order, or under other names.

    Arguments:
        fn: the function.
        *first: its parameters that come first, in order; the others follow unchanged.
        **names: the new names of its parameters.
    """
    signature = inspect.signature(fn)
    order = [*first, *(name for name in signature.parameters if name not in first)]
    signature = signature.replace(
        parameters=[signature.parameters[name].replace(name=names.get(name, name)) for name in order]
    )
    own = {new: name for name, new in names.items()}
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        options = given.pop(rest, {}) if rest else {}
        return fn(**{own.get(name, name): value for name, value in given.items()}, **options)

    functools.update_wrapper(call, fn, assigned=("__name__", "__qualname__"))
    call.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  # which `inspect` asks for
    call.__module__ = sys._getframe(1).f_globals["__name__"]  # where pickle looks it up
    documentation = fn.__doc__ or ""
    call.__doc__ = re.sub(r"(?m)^( +)(\w+): ", lambda m: f"{m[1]}{names.get(m[2], m[2])}: ", documentation)
    return call
