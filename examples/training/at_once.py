"""Ctrl-C where there is nothing to save: while Python imports, and the second one while training stops.

An exception would be shown with a traceback by an import that it ends, and be swallowed by a callback of JAX. So the
process ends without one. Nothing is lost: files appear when they are complete, and the lock is seen to be stale.
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
