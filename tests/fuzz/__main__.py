"""Run random programs for some time, and print those that fail: `python -m tests.fuzz --minutes 60`.

Programs run in a separate process, since XLA may abort it. An abort is a failure like any other, unless the same
program in positional JAX also aborts: then it is counted, but not as a failure of this library.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.checks import check_plain
from tests.fuzz.uneven import all_placements, check_uneven
from tests.fuzz.worker import ABORTED, Worker, compile_quickly


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to try")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", action="store_true", help="try the one seed and stop")
    parser.add_argument("--uneven", action="store_true", help="instead, run operations on uneven shards")
    arguments = parser.parse_args()
    compile_quickly()
    worker = Worker()
    if arguments.uneven:
        return run_uneven(worker)
    end, seed, failed, known = time.monotonic() + 60 * arguments.minutes, arguments.seed, 0, 0
    while seed == arguments.seed or (time.monotonic() < end and not arguments.only):
        found = worker.try_seed(seed)
        if found is not None and found.words == ABORTED and worker.fails(check_plain, found.program, seed) == ABORTED:
            known += 1
            print(f"seed {seed}: XLA aborts, for positional JAX too", flush=True)
        elif found is not None:
            failed += 1
            print(found, flush=True)
        seed += 1
    worker.stop()
    print(f"{seed - arguments.seed} programs, {failed} failed, {known} aborted in positional JAX too")
    return 1 if failed else 0


def run_uneven(worker: Worker) -> int:
    """Check all placements of all operations; print those that fail."""
    failed = 0
    for of in all_placements():
        if (found := worker.attempt(check_uneven, of)) is not None:
            failed += 1
            print(f"{of}: {found}", flush=True)
    worker.stop()
    print(f"{len(all_placements())} placements, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
