"""Load submodules and public names of the package when they are first used."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from . import errors

# If threads import a package and a module in it at the same time, they can deadlock, for which Python raises an error.
# No module below the package imports it, so a thread that holds this lock never waits for one that wants it.
_ONE_AT_A_TIME = threading.RLock()


def loaders(namespace: dict[str, Any], apart: tuple[str, ...]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a package that loads the public names in its `_late_names` on first use.

    Arguments:
        namespace: the globals of the package.
        apart: submodules that are no public names. Users import some of them by their path.
    """
    package = namespace["__name__"]

    def submodules() -> set[str]:
        return {m.name for m in pkgutil.iter_modules(namespace["__path__"]) if m.name[0] != "_"}.difference(apart)

    def names() -> set[str]:
        """Load all public names and return the ones that are not modules. Later look-ups find them directly."""
        with _ONE_AT_A_TIME:
            for name, value in vars(importlib.import_module(f"{package}._late_names")).items():
                if not name.startswith("_"):
                    namespace.setdefault(name, value)
        return {n for n, value in namespace.items() if n[0] != "_" and not isinstance(value, ModuleType)}

    def getattribute(name: str) -> Any:
        if name == "__all__":  # for `from axonym import *`
            return sorted(names())
        if name.startswith("_"):  # Python and notebooks ask every module for such names; that should not load anything
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in submodules():
            with _ONE_AT_A_TIME:
                return importlib.import_module(f"{package}.{name}")
        if name in names():
            return namespace[name]
        raise AttributeError(missing_name(package, name, names() | submodules()))

    return getattribute, lambda: sorted({*namespace, *names(), *submodules()}.difference(apart))


def missing_name(package: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that a package does not have."""
    from . import foreign_names

    hint = foreign_names.in_package(package, name) or errors.suggestion(name, known)
    return f"module {package!r} has no attribute {name!r}.{hint}"
