"""Starts several processes on this machine that run the checks of a module together.

A check is a function whose name starts with `check_`, of a folder that all processes share. Starting processes takes
seconds, so those of a module run its checks one after the other. They tell each other how each of them went, and a
check that fails in one process fails alone, unless it leaves the others in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DEVICES = 8
"""How many devices the processes have together."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How processes ended: their exit statuses, what each printed, and the seconds until the last one ended."""

    statuses: list[int]
    printed: list[str]
    seconds: float


def free_address() -> str:
    """Find an address of this machine for the first of several processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def run(commands: Sequence[Sequence[str]], folder: Path, limit: float, alone: float | None = None) -> Ended:
    """Run Python once with each list of arguments, all at a time.

    Arguments:
        commands: the arguments of each process.
        folder: for what they print.
        limit: after so many seconds, those that still run are killed.
        alone: after so many seconds from when one has failed. By default, as many as they may run.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p)
    logs = [folder / f"printed-{i}.txt" for i in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    start = time.monotonic()
    stop = start + limit
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:  # a file, because a pipe that nobody reads may fill up
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-X", "faulthandler", *command], stdout=output, stderr=output, env=environment
                    )
                )
        while None in (states := [p.poll() for p in processes]) and time.monotonic() < stop:
            if alone is not None and any(states):
                stop = min(stop, time.monotonic() + alone)
                alone = None
            time.sleep(0.05)
        seconds = time.monotonic() - start
    finally:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # shows where it is
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()  # does nothing to one that has ended
            process.wait()
    return Ended([p.returncode for p in processes], [log.read_text(errors="replace") for log in logs], seconds)


def names(*modules: ModuleType) -> list[str]:
    """The checks of modules, in order, as `module.check`."""
    return [f"{m.__name__}.{name}" for m in modules for name in vars(m) if name.startswith("check_")]


def outcomes(*checks: str, count: int, folder: Path, devices: int = DEVICES, limit: float = 180) -> dict[str, str]:
    """Run checks in several processes: what went wrong in each, nothing if all was well."""
    address = free_address()
    rest = [address, str(count), str(devices // count), str(folder), *checks]
    ended = run([["-W", "error", "-m", "tests.processes", str(i), *rest] for i in range(count)], folder, limit, alone=5)
    found: dict[str, str] = {}
    for i in range(count):
        report = folder / f"report-{i}.jsonl"
        told = dict(json.loads(line) for line in report.read_text().splitlines()) if report.exists() else {}
        for name in checks:
            wrong = told.get(name, "it did not come to its end")
            found[name] = found.get(name, "") + (f"\nprocess {i}: {wrong}" if wrong else "")
    if first := next((name for name in found if found[name]), None):
        found[first] += "".join(f"\n--- process {i} printed:\n{text}" for i, text in enumerate(ended.printed))
    return found
