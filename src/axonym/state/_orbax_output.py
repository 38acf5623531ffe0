"""Keep Orbax from printing what it also raises.

When a write fails, Orbax logs a traceback in each of its threads, and closes event loops in which other writes still
run, for each of which TensorStore then prints a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.Lock()
_users = 0
_made: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Orbax quiet in a with-block; several threads may be in one. Nothing changes for other code."""
    global _users, _made
    with _lock:
        _users += 1
        if _users == 1:
            _made, asyncio.new_event_loop = asyncio.new_event_loop, _new_event_loop
            logging.getLogger("absl").addFilter(_is_not_of_orbax)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                asyncio.new_event_loop = _made
                logging.getLogger("absl").removeFilter(_is_not_of_orbax)


def wait_for_threads() -> None:
    """Wait for the threads of Orbax that still write after one has failed; each of them logs how it ends."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, 60)  # theirs raises


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _new_event_loop() -> asyncio.AbstractEventLoop:
    loop = _made()
    if str(sys._getframe(1).f_globals.get("__name__")).startswith("orbax."):
        close = loop.close

        def wait_and_close() -> None:
            if not loop.is_closed() and (left := asyncio.all_tasks(loop)):
                loop.run_until_complete(asyncio.wait(left, timeout=60))
            close()

        loop.close = wait_and_close
        loop.set_exception_handler(lambda *_: None)
    return loop


def remove_unfinished(path: Any) -> None:
    """Remove what is left of a checkpoint that could not be written; its folder has the name of a temporary one."""
    with contextlib.suppress(OSError):
        for unfinished in list(path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*")):
            _remove(unfinished)


def _remove(path: Any) -> None:
    with contextlib.suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        for child in list(path.iterdir()):
            _remove(child)
        path.rmdir()
