"""Check programs in a process that may die."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax

import tests.conftest  # noqa: F401  # the simulated devices
from tests.fuzz.checks import Check, Failure, fails, try_seed
from tests.fuzz.programs import Program

ABORTED = "the process aborted"
MAX_PROGRAMS = 50
"""The number of programs before a new process takes over, since a process keeps everything that it has compiled."""


class Worker:
    """A process that calls functions, replaced if it dies."""

    def __init__(self) -> None:
        self._calls = 0
        self._pool: ProcessPoolExecutor | None = None

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self._pool is None or self._calls == MAX_PROGRAMS:
            self.stop()
            spawn = multiprocessing.get_context("spawn")
            self._calls, self._pool = 0, ProcessPoolExecutor(1, spawn, initializer=compile_quickly)
            if (found := self._pool.submit(jax.device_count).exception()) is not None:
                raise RuntimeError("the process does not start") from found
        self._calls += 1
        try:
            return self._pool.submit(fn, *args).result()
        except BrokenProcessPool:
            self.stop()
            raise

    def fails(self, check: Check, program: Program, seed: int) -> str | None:
        """Describe how a program fails a check, which includes ending the process."""
        return self.attempt(fails, check, program, seed)

    def attempt(self, fn: Callable[..., str | None], *args: Any) -> str | None:
        """Call a function that describes a failure, which includes ending the process."""
        try:
            return self.call(fn, *args)
        except BrokenProcessPool:
            return ABORTED

    def try_seed(self, seed: int) -> Failure | None:
        try:
            return self.call(try_seed, seed)
        except BrokenProcessPool:
            print(f"seed {seed}: {ABORTED}", flush=True)
            return try_seed(seed, self.fails)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def compile_quickly() -> None:
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
