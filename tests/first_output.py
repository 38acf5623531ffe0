"""Run a command until it shows something: a file or `-m MODULE`, and its arguments.

What takes seconds must come later, so it exits with 1 if programs are compiled or large packages imported before. JAX
is imported here, since every command needs it. `tests/test_repository.py` runs this.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import jax

LARGE = "flax", "matplotlib", "orbax.checkpoint", "sklearn", "torch", "transformers"
FEW = 2
"""So many compiled programs, of single operations, take no time that anybody sees."""

compiled: list[str] = []


def note(event: str, duration_secs: float, **about: Any) -> None:
    if event.endswith("backend_compile_duration"):
        compiled.append(event)


class Screen:
    """A terminal that ends the process when something is shown on it."""

    def write(self, text: str) -> int:
        if text.strip():
            large = [name for name in LARGE if name in sys.modules]
            problem = f"{len(compiled)} programs compiled, and imported: {large}; then {text!r}"
            bad = bool(large) or len(compiled) > FEW
            os.write(1, (problem if bad else text).encode())
            os._exit(bad)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


if __name__ == "__main__":
    jax.monitoring.register_event_duration_secs_listener(note)
    sys.stdout = sys.stderr = Screen()  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    os.write(1, b"nothing was shown")
    os._exit(1)
