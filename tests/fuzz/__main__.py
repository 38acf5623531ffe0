"""`python -m tests.fuzz --minutes 60`: try random programs for as long as there is time, and print those that fail."""

from __future__ import annotations

import argparse
import sys
import time

import jax

import tests.conftest  # noqa: F401  # the simulated devices
from tests.fuzz.checks import try_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to try")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", action="store_true", help="try the one seed and stop")
    arguments = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
    end, seed, failed = time.monotonic() + 60 * arguments.minutes, arguments.seed, 0
    while seed == arguments.seed or (time.monotonic() < end and not arguments.only):
        if (words := try_seed(seed)) is not None:
            failed += 1
            print(words, flush=True)
        seed += 1
    print(f"{seed - arguments.seed} programs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
