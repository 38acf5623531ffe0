"""Methods that a package gives a class, in code that imports the package and nowhere else.

Named arrays ask for them before they raise an error, about an attribute that does not exist, an operand or an argument,
and about `take` and the order of axes. Other code in the process sees none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

EXTENSIONS: dict[str, dict[tuple[type, str], Callable[..., Any]]] = {}
"""The methods of each package, by class and name."""

_ASKING = ("axonym.core", "axonym.named_array", "axonym._methods", "axonym.ops.indexing", "axonym.ops._index_plan")
_ASKING += ("axonym.ops.updating", "axonym.ref", "equinox", "functools", "jax")
"""Modules that ask, and packages that call functions of others. The rest of the library is code like any other."""


def extend(package: str, cls: type, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Give a class more methods, in modules that import a package, or a class or function defined there.

    Arguments:
        package: the name of the package.
        cls: `NamedArray`, `NamedRef`, or the class of `x.at[...]`.
        methods: the methods by name. Some are asked for what named arrays refuse: `__refused__(operation, a, b)`
            computes an operator for operands that it does not take, `__bool__(x)` the truth value of an array with
            axes, and `__unchecked__(array)` says whether `NamedArray(array, axes)` takes what does not fit; `rename`,
            `rearrange`, `slice`, `var` and `argsort` compute the method for arguments that it does not take. They raise
            an error to refuse it, too. Three are asked for layouts: `take` replaces the method of that name,
            `__arranged__(x, index, result)` arranges the result of an index with arrays or slices of traced starts, and
            `__named__(x, indexed, axis, array)` names the axis of a raw array that indexes `axis`, one of the names in
            `indexed`.

    >>> from axonym.named_array import extend
    >>> extend("math", axn.NamedArray, {"doubled": lambda x: 2 * x})
    >>> import math
    >>> axn.ones({"x": 2}).doubled()
    NamedArray(float32[x=2], [2. 2.])
    """
    EXTENSIONS.setdefault(package, {}).update({(cls, name): method for name, method in methods.items()})


def extension(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the method of that name that a package gives a class in the code that asks for it."""
    found = {package: own[cls, name] for package, own in EXTENSIONS.items() if (cls, name) in own}
    frame = _user_frame() if found else None
    return None if frame is None else next((m for package, m in found.items() if _imports(frame, package)), None)


def _user_frame() -> FrameType | None:
    asking = tuple([f"{package}." for package in (*_ASKING, *EXTENSIONS)])
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(asking):
        frame = frame.f_back
    return frame


def _imports(frame: FrameType, package: str) -> bool:
    """Return whether a frame sees a module of a package, or a class or function that is defined there."""
    for value in (*frame.f_globals.values(), *frame.f_locals.values()):
        if isinstance(value, (ModuleType, type, FunctionType)):
            name = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if f"{name}.".startswith(f"{package}."):
                return True
    return False
