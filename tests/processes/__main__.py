"""One of several processes: `python -m tests.processes RANK ADDRESS COUNT DEVICES FOLDER CHECK...`."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import jax
import pytest

from axonym.sharding import fail_together


def main() -> None:
    rank, address, count, devices, folder, *checks = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
    jax.distributed.initialize(address, int(count), int(rank), initialization_timeout=60, shutdown_timeout_seconds=10)
    assert (jax.process_count(), jax.local_device_count()) == (int(count), int(devices))
    failed = False
    with (Path(folder) / f"report-{rank}.jsonl").open("w") as report:
        for name in checks:
            module, _, function = name.rpartition(".")
            own = Path(folder) / function
            own.mkdir(exist_ok=True)
            wrong, start = "", time.monotonic()
            try:
                with fail_together(name):
                    getattr(importlib.import_module(module), function)(own)
            except (Exception, pytest.fail.Exception):
                wrong, failed = traceback.format_exc(), True
            print(f"{function}: {time.monotonic() - start:.1f} s", flush=True)
            print(json.dumps([name, wrong]), file=report, flush=True)
    jax.distributed.shutdown()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
