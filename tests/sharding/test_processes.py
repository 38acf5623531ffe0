"""Data that several processes load becomes one batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TIME_LIMIT = 120


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_load_one_batch(tmp_path: Path) -> None:
    address = f"127.0.0.1:{_free_port()}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    logs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-W", "error", str(Path(__file__).with_name("process.py")), address, str(rank)]
            with log.open("wb") as output:  # a file, because a pipe that nobody reads may fill up
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        stop = time.monotonic() + TIME_LIMIT
        # When one fails the other would wait for it, so it is not waited for.
        while (states := {p.poll() for p in processes}) <= {None, 0} and None in states and time.monotonic() < stop:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    printed = "\n".join(log.read_text() for log in logs)
    assert [p.returncode for p in processes] == [0, 0], printed
    assert all(f"process {rank}: as it should be" in printed for rank in range(2)), printed
