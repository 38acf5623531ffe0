"""Checkpoints of a run, and the model as a file.

A checkpoint has everything that a run needs to continue as if nothing had happened: parameters, optimizer state, random
key, step, and the position in the text. It appears when it is complete, so if the process ends at any time, the
checkpoint before it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from axonym import state as files
from axonym.sharding import MappingShardingRule, fail_together

from .problems import Problem, in_a_line, reason_of

T = TypeVar("T")

_UNFINISHED = "*.orbax-checkpoint-tmp*"


class Checkpoints:
    """The checkpoints in a folder, of which the latest few are kept."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def latest(self) -> Path | None:
        """The latest checkpoint that is complete."""
        found = files.latest_checkpoint(self.folder)
        return None if found is None else Path(found)

    def save(self, state: Any, step: int, seen: int) -> Path:
        """Write a checkpoint, then delete those that are too many. What fails is a problem, and deletes nothing."""
        path = self.folder / f"step-{step:06d}"
        with fail_together("save"):  # or those that see the folder would wait for the others
            if not self.folder.is_dir():
                raise Problem(f"The checkpoint {path} could not be written, because the folder was deleted.")
        try:
            with _quiet():
                files.save_checkpoint(path, {"state": state, "step": step, "seen": seen})
        except Exception as e:  # file systems, Orbax and TensorStore each have errors of their own
            if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e):
                raise  # a device or another process is lost, which is no matter of files
            self.remove_unfinished()
            last = self.latest()
            kept = "there is none before it" if last is None else f"{last} is complete"
            raise Problem(f"The checkpoint {path} could not be written, because {reason_of(e)}; {kept}.") from e
        if jax.process_index() == 0:
            before = (p for p in self.folder.glob("step-*") if _is_complete(p) and _step_of(p) <= step)
            for old in sorted(before, key=_step_of)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def restore(self, path: Path, abstract: T, storage: Mapping[str, Any]) -> tuple[T, int, int]:
        """A state on the active mesh, the step, and how much of the text was seen."""
        template = {"state": abstract, "step": 0, "seen": 0}
        # The mapping shards named arrays; arrays without names, such as the key, are replicated.
        placement = MappingShardingRule(storage) | jax.P()
        try:
            with _quiet():
                found = files.restore_checkpoint(path, template, placement)
        except Exception as e:
            text = in_a_line(e)
            says = text.removeprefix(f"restore_checkpoint: {path} ")
            raise Problem(f"The checkpoint {path} {says if says != text else f'cannot be read: {text}'}") from e
        return found["state"], found["step"], found["seen"]

    def remove_unfinished(self) -> None:
        """Delete what was left by a save that did not come to its end."""
        if jax.process_index() == 0:
            for path in self.folder.glob(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)

    def check_room(self, abstract: Any) -> None:
        """Raise a problem now, rather than later, if there is no room for a checkpoint."""
        needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise Problem(
                f"The disk is full: a checkpoint takes {needed / 1e6:,.1f} MB, and {self.folder} has room for "
                f"{free / 1e6:,.1f} MB; choose another folder with --out."
            )


def export(model: Any, path: Path) -> None:
    """Write a model to a safetensors file, with the names that `transformers` has for a Llama."""
    try:
        with fail_together("export"):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.save_state_dict(files.to_torch_compatible_state_dict(model), path)
    except OSError as e:
        raise Problem(f"The model could not be written to {path}, because {reason_of(e)}.") from e


def _is_complete(path: Path) -> bool:
    """Whether a folder is one of our checkpoints: other things in the folder are left alone."""
    return re.fullmatch(r"step-[0-9]+", path.name) is not None and (path / "_CHECKPOINT_METADATA").is_file()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Orbax tells of its workings out of the output; what goes wrong comes as an exception."""
    logger = logging.getLogger("absl")
    level, made = logger.level, asyncio.new_event_loop
    logger.setLevel(logging.CRITICAL)
    asyncio.new_event_loop = lambda: _waiting(made())
    try:
        yield
    finally:
        logger.setLevel(level)
        asyncio.new_event_loop = made


def _waiting(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Let a loop wait for what still runs in it before it closes.

    When one of many writes fails, Orbax closes the loop, and TensorStore prints a traceback for each that ends later.
    """
    close = loop.close

    def wait_and_close() -> None:
        if not loop.is_closed() and (left := asyncio.all_tasks(loop)):
            loop.run_until_complete(asyncio.wait(left, timeout=60))
        close()

    loop.close = wait_and_close
    return loop
