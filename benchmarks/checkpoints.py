"""Measure checkpoints: the cost of checksums, and how long an asynchronous save blocks."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import axonym as axn
from axonym.state import checkpoint, checkpoint_saves, restore_checkpoint, save_checkpoint, save_checkpoint_async

from .harness import Row, timed_row

ARRAYS, SIZE = 16, 1024
"""So many float32 matrices, together 64 MiB."""


def rows() -> list[Row]:
    """A model of weights that are random, so that they do not compress, sharded over eight devices."""
    mesh = axn.make_mesh({"data": 8})
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    draw = jax.jit(lambda key: jax.random.normal(key, (SIZE, SIZE)), out_shardings=sharding)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    model = {f"w{i}": axn.named(draw(key), ("rows", "columns")) for i, key in enumerate(keys)}
    folder, number = Path(tempfile.mkdtemp()), itertools.count()

    def save() -> Path:
        path = folder / str(next(number))
        save_checkpoint(path, model)
        return path

    def blocked() -> float:
        """Return for how many seconds a step has to wait for a checkpoint."""
        start = time.perf_counter()
        pending = save_checkpoint_async(folder / str(next(number)), model)
        seconds = time.perf_counter() - start
        pending.wait()
        return seconds

    saved = save()

    def restore() -> None:
        jax.block_until_ready(restore_checkpoint(saved, model, {"rows": "data"}, mesh=mesh))

    def without(fn: Callable[[], Any]) -> Callable[[], Any]:
        unwritten = mock.patch.object(checkpoint_saves, "write_checksums", lambda folder: None)
        of_process = mock.patch.object(checkpoint_saves, "write_checksums_of_process", lambda folder, process: None)
        return of_process(unwritten(mock.patch.object(checkpoint, "damage_of", lambda *_: None)(fn)))

    def until_saved() -> float:
        start = time.perf_counter()
        save()
        return time.perf_counter() - start

    try:
        ours, theirs = (min(fn() for _ in range(6)) for fn in (blocked, until_saved))
        what = "a step waits for 64 MiB: asynchronous save, to a save"
        waits = Row("checkpoints", what, f"{1000 * ours:.0f} ms", f"{1000 * theirs:.0f} ms", ours / theirs, 0.5)
        return [
            waits,
            *(
                timed_row("checkpoints", f"{name} 64 MiB with checksums", fn, without(fn), 1.4, repeats=4, rounds=3)
                for name, fn in (("save", save), ("restore", restore))
            ),
        ]
    finally:
        shutil.rmtree(folder)
