"""Handle Ctrl-C, and the signal with which clusters end a process, between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

from . import hosts

_AT_ONCE = 1.0
"""Seconds in which the same signal may come by two ways."""


class Interrupts:
    """Inside its with-block, a signal is noted; the second one ends the process at once, as always."""

    def __init__(self) -> None:
        self.noted = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def urgent(self) -> bool:
        """Whether a signal was noted where there is nobody to agree with."""
        return self.noted and jax.process_count() == 1

    def agreed(self) -> bool:
        """Whether to stop. Several processes stop at the same step, so all must ask at the same steps."""
        return in_any_process(self.noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            # A cluster may send a signal to the supervisor, which passes it on, and to this process itself.
            if time.monotonic() > self._since + _AT_ONCE:
                self._restore()
                signal.raise_signal(number)
            return
        self.noted, self._since = True, time.monotonic()
        if not hosts.is_supervised():
            self._restore()
        # Not by `print`, which may be at work just now.
        os.write(2, b"\nStopping after this step, and saving. Once more stops at once, without saving.\n")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def in_any_process(flag: bool) -> bool:
    """Whether a flag is set in any process. All must ask at the same steps."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))
