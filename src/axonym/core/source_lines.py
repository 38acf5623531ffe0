"""Find the line of the user's code in a stack of Python frames."""

from __future__ import annotations

import dataclasses
import functools
import os
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of Python in the stack of an instruction or equation."""

    file: str
    line: int
    function: str


_LIBRARIES = tuple(
    dict.fromkeys(
        os.path.realpath(path) + os.sep
        for path in (*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    )
)
_HIDDEN = tuple(os.path.realpath(Path(file).parent) + os.sep for file in (Path(__file__).parent, jax.__file__))


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's code.

    >>> print(axn.insight.Source("/home/me/model.py", 12, "loss"))
    model.py:12
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"


def source(frames: Sequence[Frame]) -> Source | None:
    """Return the innermost line outside this library and JAX, preferably also outside other libraries."""
    others = [f for f in frames if not _real_path(f.file).startswith(_HIDDEN)]
    best = next(iter([*of_user(others), *others]), None)
    return None if best is None else Source(best.file, best.line, best.function)


def of_user(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield the lines outside of all libraries."""
    return (f for f in frames if not _real_path(f.file).startswith(_HIDDEN) and not _is_installed(f.file))


@functools.lru_cache(maxsize=1024)
def _is_installed(file: str) -> bool:
    """Return whether a file is of a library, also one that an environment takes from another environment."""
    path = Path(_real_path(file))
    return str(path).startswith(_LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


@functools.lru_cache(maxsize=1024)
def _real_path(file: str) -> str:
    return os.path.realpath(file)


def frames_of(eqn: Any) -> Iterator[Frame]:
    """Yield the lines of Python that made an equation of a jaxpr, from the innermost."""
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", ()):
        yield Frame(frame.file_name, frame.line_num, frame.function_name)
