"""Handle Ctrl-C when there is nothing to save: during imports, and the second time while training stops.

An import would show the exception with a traceback, and a callback of JAX would swallow it. So the process ends
without an exception. Nothing is lost: files appear when they are complete, and the stale lock is recognized.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STATUS = 130
"""The exit status of a run that was stopped by Ctrl-C."""
WORDS = "Stopped at once; what was saved before is complete."


def install() -> None:
    """Let Ctrl-C end the process."""
    signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # the bar has hidden the cursor
    os.write(2, f"\ntrain_lm.py: {WORDS}\n".encode().lstrip(b"" if os.isatty(2) else b"\n"))
    os._exit(STATUS)
