"""The measurements of each step, in a file with one JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Metrics:
    """The measurements of a run: those of training have `loss`, those of evaluation `held_out_loss`."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def go_on_from(self, step: int) -> int:
        """Take what the file says of steps up to this one, and forget the others: they are done again.

        Lines that are no rows are kept in a file of their own; the result is how many there are.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        rows = [_row(line) for line in lines]
        # The last line is not whole if the process was killed while it wrote.
        odd = [line for line, row in zip(lines, rows, strict=True) if row is None and line.endswith(b"\n")]
        if odd:
            with self.path.with_name(self.path.name + ".odd").open("ab") as file:
                file.writelines(odd)
        self.rows = [row for row in rows if row is not None and row["step"] <= step]
        unfinished = self.path.with_name(self.path.name + ".new")
        unfinished.write_text("".join(map(_line, self.rows)))
        os.replace(unfinished, self.path)
        return len(odd)

    def add(self, *rows: Mapping[str, float]) -> None:
        """Write rows, each with the number of its step."""
        rounded = [{name: round(x, 6) if isinstance(x, float) else x for name, x in row.items()} for row in rows]
        self.rows += rounded
        with self.path.open("a") as file:
            file.writelines(map(_line, rounded))

    def column(self, name: str) -> list[tuple[int, float]]:
        """The steps at which something was measured, each with its value."""
        return [(row["step"], row[name]) for row in self.rows if math.isfinite(row.get(name, math.nan))]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _row(line: bytes) -> dict[str, Any] | None:
    """The numbers in a line, or None if it has something else."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(row, dict) and all(type(value) in (int, float) for value in row.values())
    return row if numbers and type(row.get("step")) is int else None
