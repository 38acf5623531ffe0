"""Find the user's line among the lines from which an operation comes."""

from __future__ import annotations

import functools
import os
import site
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ._hlo import Frame
from .collectives import Source

_LIBRARIES = tuple(
    dict.fromkeys(
        os.path.realpath(path) + os.sep
        for path in (*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    )
)
_OWN = os.path.realpath(Path(__file__).parent.parent) + os.sep


def source(frames: Sequence[Frame]) -> Source | None:
    """Return the innermost line outside this library, preferably also outside other libraries."""
    others = [f for f in frames if not _real(f.file).startswith(_OWN)]
    users = [f for f in others if not _real(f.file).startswith(_LIBRARIES)]
    best = (users or others or [None])[0]
    return None if best is None else Source(best.file, best.line, best.function)


@functools.lru_cache(maxsize=1)
def _real(file: str) -> str:
    return os.path.realpath(file)
