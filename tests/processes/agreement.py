"""One of two processes that try to connect, several times: `python -m tests.processes.agreement INDEX PORT...`.

Each try differs from the other process in one thing, so it fails before JAX connects them; in the last try, JAX does,
and the numbers of devices differ. Each prints a line.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
import time
from unittest import mock

import jax

from axonym.core import connecting
from axonym.sharding import connect_processes

TRIES = ("versions", "settings", "counts", "twice", "first twice", "missing", "first missing", "devices")


def main() -> None:
    index, ports = int(sys.argv[1]), [f"127.0.0.1:{port}" for port in sys.argv[2:]]
    jax.config.update("jax_num_cpu_devices", 2 - index)
    for name, address in zip(TRIES, ports, strict=True):
        found: list[str] = []
        started = time.monotonic()
        told = []
        with (
            mock.patch.object(connecting, "_log_warning", told.append),
            mock.patch.multiple(connecting, _SAY_AFTER=0.3),
        ):
            threads = [threading.Thread(target=attempt, args=(name, address, i, found)) for i in numbers(name, index)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(json.dumps([name, found, told, time.monotonic() - started]), flush=True)


def numbers(name: str, index: int) -> list[int]:
    """Return the numbers with which this process starts: its threads stand for other processes."""
    several = {("twice", 1): [1, 1], ("first twice", 0): [0, 0], ("missing", 1): [], ("first missing", 0): []}
    return several.get((name, index), [index])


def attempt(name: str, address: str, index: int, found: list[str]) -> None:
    same = {"settings": f"--seed {index if name == 'settings' else 0}\n--steps 3"}
    version = "3.99.0" if name == "versions" and index else platform.python_version()
    try:
        with mock.patch.object(platform, "python_version", lambda: version):
            connect_processes(
                address,
                2
                + (index if name == "counts" else 0)
                + ("twice" in name),  # so one is missing, as where a number is given twice by mistake
                index,
                same=same,
                initialization_timeout=2 if "missing" in name else 60,
            )
    except (ValueError, OSError) as e:
        found.append(f"{type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
