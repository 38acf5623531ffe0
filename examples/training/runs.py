"""The folder of a run, with all its output: settings, checkpoints, losses, pictures and samples."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from . import config as settings
from .checkpoints import Checkpoints
from .config import Config
from .problems import Problem, reason_of

RUNS = Path("runs")
_SETTINGS, _CHECKPOINTS = "config.json", "checkpoints"


class Run:
    """A folder, and what is where in it."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.checkpoints = Checkpoints(folder / _CHECKPOINTS, keep)
        self.metrics, self.samples = folder / "metrics.jsonl", folder / "samples.txt"
        self.loss_picture, self.placement_picture = folder / "loss.png", folder / "placement.png"
        self.plan, self.plan_table = folder / "plan.json", folder / "plan.md"
        self.explanation, self.explanation_page = folder / "explanation.md", folder / "explanation.html"

    def keep_settings(self, config: Config, fingerprint: int) -> None:
        """Write down what the run was started with, and numbers that tell its text and itself from others."""
        path = self.folder / _SETTINGS
        unfinished = path.with_name(path.name + ".new")
        try:
            unfinished.write_text(
                json.dumps(settings.as_json(config) | {"text": fingerprint, "run": self.checkpoints.run}, indent=2)
                + "\n"
            )
            os.replace(unfinished, path)
        except OSError as e:
            raise Problem(f"The settings of the run could not be written to {path}, because {reason_of(e)}.") from None

    def can_be_resumed(self) -> bool:
        """Whether everything that is needed is still there, which somebody may have deleted."""
        return os.path.isfile(self.folder / _SETTINGS) and os.path.isdir(self.checkpoints.folder)

    def number_of(self, what: str) -> int | None:
        """The number of the text that the run was started with, or of the run."""
        try:
            found = json.loads((self.folder / _SETTINGS).read_text()).get(what)
            return found if type(found) is int else None
        except (OSError, ValueError, AttributeError):
            return None


def new(config: Config) -> Run:
    """A new run in the folder that `--out` says, or in the next free one."""
    try:
        folder = _next_free() if config.out is None else config.out
        run = Run(folder, config.saving.keep)
        if (last := run.checkpoints.latest()) is not None:
            raise Problem(
                f"{folder} has a run already, up to {last.name}: go on with it by --resume, or choose another folder "
                "with --out."
            )
        run.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Problem(f"The folder {config.out or RUNS} cannot be made: {reason_of(e)}.") from None
    return run


def _next_free() -> Path:
    """Make the next free folder, which another process may be about to take."""
    while True:
        folder = RUNS / str(1 + max(_numbers(), default=0))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def to_resume(config: Config) -> Path:
    """The folder of the run to go on with."""
    if config.out is not None:
        folder = config.out
    elif numbers := _numbers():
        folder = RUNS / str(max(numbers))
    else:
        raise Problem(f"There is no run in {RUNS}/ to resume; --out says where it is.")
    if not os.path.isfile(folder / _SETTINGS):
        raise Problem(f"There is no run in {folder} to resume: it has no {_SETTINGS}.")
    if not os.path.isdir(folder / _CHECKPOINTS):
        raise Problem(f"There is nothing in {folder} to go on from: it has no {_CHECKPOINTS}/. Start a new run.")
    return folder


def with_settings_of(folder: Path, config: Config, arguments: Sequence[str] | None) -> Config:
    """The settings of a run, but for those that the command line gives."""
    saved = settings.load(folder / _SETTINGS)
    found = settings.parse(arguments, saved)
    for name in ("model", "precision"):
        if getattr(found, name) != getattr(saved, name):
            raise Problem(
                f"The run in {folder} has {getattr(saved, name)}, which cannot change when it is resumed; to train "
                "another model, start a new run."
            )
    return found


def _numbers() -> list[int]:
    return [int(p.name) for p in RUNS.glob("*") if p.name.isdecimal()] if RUNS.is_dir() else []
