"""Start several processes on this machine that run the checks of a module together.

A check is a function whose name starts with `check_`, and whose argument is a folder that all processes share. Starting
processes takes seconds, so those of a module run its checks one after another. They exchange the outcomes, and a check
that fails in one process fails alone, unless it leaves the others in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = 8
"""The total number of devices of the processes."""


CLUSTER_PORTS = 61_440, 65_535
"""The ports from which JAX selects one by the number of a job."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of processes: their exit statuses, the output of each, and the seconds until the last one ended."""

    statuses: list[int]
    printed: list[str]
    seconds: float


def free_port(first: int = 20_000, last: int = 30_000) -> int:
    """Find a port of this machine for the first of several processes, outside the range that the system assigns."""
    while True:
        port = random.randint(first, last)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def cluster(index: int, count: int, job: int) -> dict[str, str]:
    """Return the environment variables of a process in a cluster: SLURM for two processes, Open MPI for more."""
    if count == 2:
        names = {"JOB_ID": job, "STEP_NODELIST": "127.0.0.1", "NTASKS": count, "PROCID": index, "LOCALID": 0}
        return {f"SLURM_{name}": str(value) for name, value in names.items()}
    sizes = {"SIZE": count, "RANK": index, "LOCAL_RANK": 0}
    uri = f"{4096 * job}.0;tcp://127.0.0.1:1"
    return {"OMPI_MCA_orte_hnp_uri": uri} | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in sizes.items()}


def slices(count: int) -> list[dict[str, str]]:
    """Return the environment variables of Kubernetes for processes on TPU slices of one host each."""
    same = {"WORKER_HOSTNAMES": "127.0.0.1", "WORKER_ID": 0, "SKIP_MDS_QUERY": 1}  # no metadata server
    found = {f"TPU_{name}": str(value) for name, value in same.items()}
    found |= {"MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "MEGASCALE_NUM_SLICES": str(count)}
    found |= {"JAX_COORDINATOR_PORT": str(free_port()), "JAX_FORCE_TPU_INIT": "1"}  # without a TPU
    return [found | {"MEGASCALE_SLICE_ID": str(i)} for i in range(count)]


def of_another_machine(folder: Path) -> list[str]:
    """Return what starts a command so that it sees another boot id, by which JAX tells machines from each other.

    The test is skipped where that is not allowed.
    """
    boot_id = folder / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    script = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(boot_id)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("files cannot be mounted in a namespace here")
    return prefix


def run(
    commands: Sequence[Sequence[str]],
    folder: Path,
    limit: float,
    alone: float | None = None,
    environments: Sequence[Mapping[str, str]] | None = None,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] = lambda processes: None,
    prefixes: Sequence[Sequence[str]] | None = None,
) -> Ended:
    """Run Python once with each list of arguments, all at the same time.

    Arguments:
        commands: the arguments of each process.
        folder: the folder for their output.
        limit: the seconds after which processes that still run are killed.
        alone: the same, counted from the failure of one of them; by default `limit`.
        environments: variables for each process, in addition to those of this one.
        meanwhile: what to do while they run.
        prefixes: what starts each.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p)
    logs = [folder / f"printed-{i}.txt" for i in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    start = time.monotonic()
    stop = start + limit
    try:
        each = zip(commands, logs, environments or [{}] * len(logs), prefixes or [()] * len(logs), strict=True)
        for command, log, more, prefix in each:
            with log.open("wb") as output:  # a file, because an unread pipe may fill up
                processes.append(
                    subprocess.Popen(
                        [*prefix, sys.executable, "-X", "faulthandler", *command],
                        stdout=output,
                        stderr=output,
                        env=environment | dict(more),
                    )
                )
        meanwhile(processes)
        while None in (states := [p.poll() for p in processes]) and time.monotonic() < stop:
            if alone is not None and any(states):
                stop = min(stop, time.monotonic() + alone)
                alone = None
            time.sleep(0.05)
        seconds = time.monotonic() - start
    finally:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # prints its stack
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()  # does nothing if it has ended
            process.wait()
    return Ended([p.returncode for p in processes], [log.read_text(errors="replace") for log in logs], seconds)


def names(*modules: ModuleType) -> list[str]:
    """Return the checks of modules, in order, as `module.check`."""
    return [f"{m.__name__}.{name}" for m in modules for name in vars(m) if name.startswith("check_")]


def outcomes(
    *checks: str,
    count: int,
    folder: Path,
    devices: int = DEVICES,
    limit: float = 180,
    prefixes: Sequence[Sequence[str]] | None = None,
) -> dict[str, str]:
    """Run checks in several processes; return the errors of each, or an empty string."""
    command = ["-W", "error", "-m", "tests.processes", str(devices // count), str(folder), *checks]
    job = free_port(*CLUSTER_PORTS) - CLUSTER_PORTS[0]
    environments = [cluster(i, count, job) for i in range(count)]
    ended = run([command] * count, folder, limit, alone=5, environments=environments, prefixes=prefixes)
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
