"""The lock of a run: two processes with one folder would delete each other's checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .problems import Problem

NAME = "lock.json"

_TOUCHED = 10.0
"""Seconds from one sign of life to the next, for processes on other hosts, which cannot ask for this one."""
_STALE = 120.0


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in a with-block; a problem if another process holds it."""
    path, mine = folder / NAME, json.dumps(_this_process())
    while True:
        try:
            with path.open("x") as file:
                file.write(mine)
            break
        except FileExistsError:
            _remove_if_stale(path)
    over = threading.Event()
    threading.Thread(target=_touch, args=(path, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        with contextlib.suppress(OSError):  # the folder may be gone
            if path.read_text() == mine:
                path.unlink()


def _this_process() -> dict[str, Any]:
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "since": now}


def _started(pid: int) -> str | None:
    """When a process of this host was started, which tells it from an earlier one of its number; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None


def _remove_if_stale(path: Path) -> None:
    """Remove a lock whose process is no more; a problem if it is still there."""
    try:
        content, age = path.read_bytes(), _now(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return  # its process has just ended
    try:
        holder = json.loads(content)
        # On Windows, asking for a process would end it.
        here, pid = os.name == "posix" and holder["host"] == socket.gethostname(), int(holder["pid"])
        who = f"process {pid} on {holder['host']}, since {holder['since']}"
        runs = _is_running(pid, holder["started"]) if here else age < _STALE
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # it is just being written, or is no lock
        here, who, runs = False, "another process", age < _STALE
    if runs:
        hint = "" if here else f" If no process uses it, delete {path}, which was written {_ago(age)}."
        raise Problem(f"{path.parent} is in use by {who}: stop that one, or choose another folder with --out.{hint}")
    claimed = path.with_name(f"{NAME}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        path.rename(claimed)
        if claimed.read_bytes() == content:
            claimed.unlink()
        else:  # another process was faster, and this is its lock
            claimed.rename(path)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds >= 0 else "in the future, by the clock of its file system"


def _is_running(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return None in (started, _started(pid)) or _started(pid) == started


def _now(folder: Path) -> float:
    """The time by the clock of the file system, which may be that of another machine."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _touch(path: Path, over: threading.Event) -> None:
    while not over.wait(_TOUCHED):
        with contextlib.suppress(OSError):
            os.utime(path)
