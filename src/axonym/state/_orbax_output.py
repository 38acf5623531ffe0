"""Keep Orbax from printing what it also raises.

When a write fails, Orbax logs a traceback in each of its threads, and closes event loops in which other writes still
run, for each of which TensorStore then prints a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax adds this, and more, to the name of a folder until it is complete."""

_lock = threading.Lock()
_users = 0
_mine = threading.local()
_made: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Orbax quiet in a with-block; several threads may be in one.

    For the whole process, this replaces `asyncio.new_event_loop` and adds a filter to the logger of Abseil, since Orbax
    offers nothing narrower. Both only act on Orbax in a thread that is in such a block, or in a thread of Orbax.
    """
    global _users, _made
    _mine.depth = getattr(_mine, "depth", 0) + 1
    with _lock:
        _users += 1
        if _users == 1:
            _made, asyncio.new_event_loop = asyncio.new_event_loop, _new_event_loop
            logging.getLogger("absl").addFilter(_is_not_of_orbax)
    try:
        yield
    finally:
        _mine.depth -= 1
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
    return "orbax" not in record.pathname or not _is_mine()


def _is_mine() -> bool:
    """Return whether this thread is in a block, or Orbax has started it."""
    here = threading.current_thread()
    return getattr(_mine, "depth", 0) > 0 or type(here).__module__.startswith("orbax.")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    loop = _made()
    if str(sys._getframe(1).f_globals.get("__name__")).startswith("orbax.") and _is_mine():
        close = loop.close

        def wait_and_close() -> None:
            if not loop.is_closed() and (left := asyncio.all_tasks(loop)):
                loop.run_until_complete(asyncio.wait(left, timeout=60))
            close()

        loop.close = wait_and_close
        loop.set_exception_handler(lambda *_: None)
    return loop


def remove_unfinished(path: Any) -> None:
    """Remove the rest of a checkpoint that could not be written; its folder has the name of a temporary one."""
    with contextlib.suppress(OSError):
        for child in list(path.parent.iterdir()):  # a pattern would take the name for one, too
            if child.name.startswith(path.name + UNFINISHED):
                _remove(child)


def _remove(path: Any) -> None:
    with contextlib.suppress(OSError):
        if os.path.islink(path) or not path.is_dir():
            path.unlink()
            return
        for child in list(path.iterdir()):
            _remove(child)
        path.rmdir()
