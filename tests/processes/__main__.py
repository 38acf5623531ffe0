"""One of several processes: `python -m tests.processes RANK ADDRESS COUNT DEVICES MODULE FOLDER`."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

import jax
import pytest

from axonym.sharding import fail_together
from tests.processes import names


def main() -> None:
    rank, address, count, devices, module, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
    jax.distributed.initialize(address, int(count), int(rank), initialization_timeout=60, shutdown_timeout_seconds=10)
    assert (jax.process_count(), jax.local_device_count()) == (int(count), int(devices))
    checks = importlib.import_module(module)
    failed = False
    with (Path(folder) / f"report-{rank}.jsonl").open("w") as report:
        for name in names(checks):
            own = Path(folder) / name
            own.mkdir(exist_ok=True)
            wrong = ""
            try:
                with fail_together(name):
                    getattr(checks, name)(own)
            except (Exception, pytest.fail.Exception):
                wrong, failed = traceback.format_exc(), True
            print(json.dumps([name, wrong]), file=report, flush=True)
    jax.distributed.shutdown()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
