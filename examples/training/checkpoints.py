"""Checkpoints of a run, and the model as a file.

A checkpoint has everything that a run needs to continue as if nothing had happened: parameters, optimizer state, random
key, step, and the position in the text. It appears when it is complete, so if the process ends at any time, the
checkpoint before it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from models import llama
from models.families import to_huggingface
from models.layouts import layout

from axonym import state as files
from axonym.sharding import MappingShardingRule, fail_together

from . import data
from .interrupts import in_any_process
from .problems import Problem, in_a_line, reason_of

T = TypeVar("T")

_UNFINISHED = "*.orbax-checkpoint-tmp*"


_EXPORTED = {"model.safetensors", "config.json", "tokenizer.json"}
"""The files of a folder with an exported model."""


class FolderDeleted(Problem):
    """Somebody has deleted the folder of a run."""


class Checkpoints:
    """The checkpoints in a folder, of which the latest few are kept."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.run = 0
        """A number that tells this run from others; each of its checkpoints has it."""
        self._pending: tuple[Path, int, files.PendingCheckpoint] | None = None
        """The checkpoint that is being written, its path and its step."""

    def latest(self) -> Path | None:
        """The latest checkpoint. A later folder that is damaged is a problem, and not passed over."""
        try:
            found = files.latest_checkpoint(self.folder)
        except ValueError as e:
            text = in_a_line(e).removeprefix("latest_checkpoint: ")
            raise Problem(f"{text} To go on from another one, name it: --accept step-...") from None
        return None if found is None else Path(found)

    def begin(self, state: Any, step: int, seen: int) -> None:
        """Begin to write a checkpoint, while training goes on; `finish` completes it."""
        path = self.folder / f"step-{step:06d}"
        with self._problems(path), fail_together("save"):  # or those that see the folder would wait for the others
            if not self.folder.is_dir():
                raise FolderDeleted(f"The checkpoint {path} could not be written, because the folder was deleted.")
            if _bytes_of(state) > shutil.disk_usage(self.folder).free:  # and Orbax would print much about it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._problems(path):
            tree = {"state": state, "step": step, "seen": seen, "run": self.run}
            self._pending = path, step, files.save_checkpoint_async(path, tree)

    def save(self, state: Any, step: int, seen: int) -> tuple[Path, int] | None:
        """Write a checkpoint; its path and step."""
        self.begin(state, step, seen)
        return self.finish()

    def is_written(self) -> bool:
        """Whether there is a checkpoint that `finish` need not wait for, in all processes, which all must ask."""
        return self._pending is not None and not in_any_process(not self._pending[2].is_written())

    def finish(self) -> tuple[Path, int] | None:
        """Complete the checkpoint that is being written, then delete those that are too many; its path and step.

        What fails is a problem, and deletes nothing.
        """
        if self._pending is None:
            return None
        path, step, pending = self._pending
        self._pending = None
        with self._problems(path):
            pending.wait()
        if jax.process_index() == 0:
            before = (p for p in self.folder.glob("step-*") if _is_complete(p) and _step_of(p) <= step)
            for old in sorted(before, key=_step_of)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)
        return path, step

    @contextlib.contextmanager
    def _problems(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FolderDeleted:
            raise
        except Exception as e:  # file systems, Orbax and TensorStore each have errors of their own
            if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e):
                raise  # a device or another process is lost, which is no matter of files
            if isinstance(e, FileNotFoundError) and jax.process_index() == 0:
                for folder in (self.folder, self.folder.parent):  # deleted; Orbax may have made them again, empty
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            last = None
            with contextlib.suppress(Problem):
                last = self.latest()
            kept = "there is none before it" if last is None else f"{last} is complete"
            raise Problem(f"The checkpoint {path} could not be written, because {reason_of(e)}; {kept}.") from e

    def restore(self, path: Path, abstract: T, storage: Mapping[str, Any], accepts: bool = False) -> tuple[T, int, int]:
        """A state on the active mesh, the step, and how much of the text was seen.

        A checkpoint that is not of this run, or not of the step in its name, has to be accepted.
        """
        template = {"state": abstract, "step": 0, "seen": 0, "run": 0}
        # The mapping shards named arrays; arrays without names, such as the key, are replicated.
        placement = MappingShardingRule(storage) | jax.P()
        try:
            found = files.restore_checkpoint(path, template, placement)
        except Exception as e:
            text = in_a_line(e)
            says = text.removeprefix(f"restore_checkpoint: {path} ")
            raise Problem(f"The checkpoint {path} {says if says != text else f'cannot be read: {text}'}") from e
        step, run = found["step"], found["run"]
        if not accepts:
            hint = f"to go on from it all the same, add --accept {path.name}"
            if run != self.run:
                raise Problem(f"The checkpoint {path} is of the run {run}, and this is the run {self.run}; {hint}.")
            if step != _step_of(path):
                raise Problem(f"The checkpoint {path} is not of step {_step_of(path)}, but of step {step}; {hint}.")
        self.run = run
        return found["state"], step, found["seen"]

    def set_aside(self, accepted: Path, step: int) -> None:
        """Give what would be taken for later checkpoints names without a number, and the accepted one its own name."""
        with fail_together("accept"):
            if jax.process_index() == 0:
                own = self.folder / f"step-{step:06d}"
                if accepted != own and not own.exists():
                    accepted.rename(own)
                for path in self.folder.glob("step-*"):
                    if re.fullmatch(r"step-[0-9]+", path.name) and _step_of(path) > step:
                        ends = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
                        names = (path.with_name(f"{path.name}.set-aside{end}") for end in ends)
                        path.rename(next(name for name in names if not name.exists()))

    def remove_unfinished(self) -> None:
        """Delete what was left by a save that did not come to its end."""
        if jax.process_index() == 0:
            for path in self.folder.glob(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)

    def check_room(self, abstract: Any) -> None:
        """Raise a problem now, rather than later, if there is no room for a checkpoint."""
        needed, free = _bytes_of(abstract), shutil.disk_usage(self.folder).free
        if free < needed:
            raise Problem(
                f"The disk is full: a checkpoint takes {needed / 1e6:,.1f} MB, and {self.folder} has room for "
                f"{free / 1e6:,.1f} MB; choose another folder with --out."
            )


def export(model: Any, path: Path, config: llama.Config) -> None:
    """Write a model to a safetensors file, or to a folder that `generate.py` reads, as `transformers` has a Llama."""
    target = path if is_file(path) else path / "model.safetensors"
    try:
        with fail_together("export"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target != path and jax.process_index() == 0:
                texts = {"config.json": to_huggingface(config), "tokenizer.json": data.TOKENIZER}
                for name, content in texts.items():
                    (path / name).write_text(json.dumps(content, indent=2) + "\n")
        files.save_state_dict(files.to_torch_compatible_state_dict(model, layout=layout(model)), target)
    except OSError as e:
        raise Problem(f"The model could not be written to {path}, because {reason_of(e)}.") from e


def is_file(path: Path) -> bool:
    """Whether a model is exported to this file, and not to a folder."""
    return path.suffix == ".safetensors"


def problem_of_export(path: Path, config: llama.Config) -> str | None:
    """Say why a model cannot be exported there; None if it can, as far as is known before training."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()  # which fails now, and not in the end, for a name that no file can have
        if path.is_dir() if is_file(path) else not path.is_dir() or {*os.listdir(path)} - _EXPORTED:
            what = "a folder with other files" if path.is_dir() and not is_file(path) else "none"
            return (
                f"--export needs the name of a new folder, or of a file that ends with .safetensors; {path} is {what}."
            )
    if config.Experts is not None and not is_file(path):
        return "--export to a folder is for models without experts; name a file that ends with .safetensors."
    return None


def _bytes_of(state: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def _is_complete(path: Path) -> bool:
    """Whether a folder is one of our checkpoints: other things in the folder are left alone."""
    return re.fullmatch(r"step-[0-9]+", path.name) is not None and (path / "checksums.json").is_file()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
