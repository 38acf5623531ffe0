"""Show the progress of a run: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import datetime
import io
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_SECONDS = 30.0
"""Without a terminal, a line comes after so long, or after each tenth of the run."""
_WEIGHT = 0.1
"""How much the latest step counts in the mean time of a step."""
_LOSSES = 20
"""Of how many steps the loss is the mean: single batches differ too much to show whether it falls."""


class Reporter:
    """What prints. Of several processes the first one does, and the others are silent."""

    def __init__(self, total: int, done: int, tokens_per_step: int):
        self.total, self.done, self.tokens_per_step = total, done, tokens_per_step
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self.seconds_per_step: float | None = None
        self._speaks = jax.process_index() == 0
        self._last_line = (time.monotonic(), done)
        self._bar: Progress | None = None
        self._task: Any = None
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where a sign cannot be shown, another one is

    def __enter__(self) -> Reporter:
        if self._speaks and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            columns = (BarColumn(bar_width=30), TextColumn("{task.fields[words]}", markup=False))
            self._bar = Progress(*columns, console=Console(highlight=False), transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self.total, completed=self.done, words="compiling ...")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str = "") -> None:
        """Print something that stays, above the bar."""
        if not self._speaks:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except OSError:  # what is printed goes to a file on a full disk, or nobody reads it any more
            self._speaks = False

    def advance(self, done: int, seconds: float | None, losses: Sequence[float]) -> None:
        """Take note of the latest steps: how long one of them took, if that tells something, and their losses."""
        self.done = done
        self._losses.extend(losses)
        if seconds is not None:
            mean = seconds if self.seconds_per_step is None else self.seconds_per_step
            self.seconds_per_step = mean + _WEIGHT * (seconds - mean)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, words=self.words())
        elif self._speaks and self._line_is_due():
            self.say(self.words())

    def words(self) -> str:
        """Where the run is: `step 20/400  loss 2.345  12,345 tokens/s  0:01:23 left`."""
        text = f"step {self.done}/{self.total}  loss {sum(self._losses) / len(self._losses):.3f}"
        if self.seconds_per_step:
            left = round(self.seconds_per_step * (self.total - self.done))
            clock = datetime.timedelta(seconds=left)
            text += f"  {self.tokens_per_second():,.0f} tokens/s  {clock} left"
        return text

    def tokens_per_second(self) -> float:
        """The tokens of a step by the mean time of one."""
        return self.tokens_per_step / self.seconds_per_step if self.seconds_per_step else 0.0

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        then, done = self._last_line
        tenth = max(self.total // 10, 1)
        due = now - then >= _SECONDS or self.done // tenth > done // tenth
        if due:
            self._last_line = (now, self.done)
        return due
