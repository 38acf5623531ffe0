"""One of several processes: `python -m tests.processes DEVICES FOLDER CHECK...`, in the environment of a cluster."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import jax
import pytest

from axonym.sharding import connect_processes, fail_together
from tests.processes import DEVICES


def main() -> None:
    devices, folder, *checks = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
    connect_processes(initialization_timeout=60, shutdown_timeout_seconds=10)
    rank, found = jax.process_index(), (jax.process_count(), jax.local_device_count())
    assert found == (DEVICES // int(devices), int(devices)), found
    failed = False
    with (Path(folder) / f"report-{rank}.jsonl").open("w") as report:
        for name in checks:
            module, _, function = name.rpartition(".")
            own = Path(folder) / function
            own.mkdir(exist_ok=True)
            wrong, start = "", (time.monotonic(), time.process_time())
            try:
                with fail_together(name):
                    getattr(importlib.import_module(module), function)(own)
            except (Exception, pytest.fail.Exception):
                wrong, failed = traceback.format_exc(), True
            took, on_cpu = time.monotonic() - start[0], time.process_time() - start[1]
            print(f"{function}: {took:.1f} s, {on_cpu:.1f} s of CPU", flush=True)
            print(json.dumps([name, wrong]), file=report, flush=True)
    jax.distributed.shutdown()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
