"""Count steps on several hosts, with the supervisors, the lock and the flags of the training example.

This script starts in a second, so that tests can lose many hosts. Each step adds a number from every device.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
from pathlib import Path

from examples.training import hosts

if __name__ == "__main__":
    hosts.supervise_if_distributed(sys.argv[1:])

import jax
import numpy as np
from jax.experimental import multihost_utils

from axonym.sharding import connect_processes
from examples.training import lock, pace
from examples.training.interrupts import in_any_process
from examples.training.probe import Probe

STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("coordinator", str), ("processes", int), ("process-index", int), ("out", Path)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--start-timeout", type=int, default=300)
    parser.add_argument("--slow", type=int, help="the number of a process that does more before a step")
    options, _ = parser.parse_known_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    where = options.coordinator, options.processes, options.process_index
    connect_processes(*where, initialization_timeout=options.start_timeout)
    token = multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31)))
    hosts.connected(jax.process_index(), jax.process_count(), int(token))
    steps: Path = options.out / "steps.txt"
    first = jax.process_index() == 0
    with lock.held(options.out) if first else contextlib.nullcontext():
        if first and not options.resume:
            steps.write_text("")
            (options.out / "config.json").write_text("{}")
        multihost_utils.sync_global_devices("there is a file")
        done = len(steps.read_text().splitlines())
        probe, is_slow = Probe(), jax.process_index() == options.slow and not options.resume
        for step in range(done + 1, options.steps + 1):
            start = time.perf_counter()
            time.sleep(0.3 if is_slow else 0.1)
            before = time.perf_counter() - start
            total = int(multihost_utils.process_allgather(np.ones(())).sum())
            hosts.stepped()
            pace.took(time.perf_counter() - start, before)
            if options.slow is not None:
                probe.measure_next()
            if first:
                with steps.open("a") as file:
                    print(step, total, file=file)
            if in_any_process(hosts.restart_is_wanted()):
                sys.exit(hosts.RESTART)
            if in_any_process((options.out / "stop").exists()):
                break


if __name__ == "__main__":
    main()
