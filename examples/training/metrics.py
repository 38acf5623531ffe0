"""What is measured at each step, in a file of one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Metrics:
    """The measurements of a run: those of training have `loss`, those of evaluation `held_out_loss`."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def go_on_from(self, step: int) -> None:
        """Take what the file says of steps up to this one, and forget the others: they are done again."""
        if self.path.exists():
            self.rows = [row for row in _rows(self.path.read_text()) if row["step"] <= step]
        unfinished = self.path.with_name(self.path.name + ".new")
        unfinished.write_text("".join(map(_line, self.rows)))
        os.replace(unfinished, self.path)

    def add(self, **values: Any) -> None:
        """Write a row, with the number of its step."""
        row = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(_line(row))

    def column(self, name: str) -> list[tuple[int, float]]:
        """The steps at which something was measured, each with its value."""
        return [(row["step"], row[name]) for row in self.rows if name in row]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _rows(text: str) -> list[dict[str, Any]]:
    """The rows of a file; the last one is not whole if the process was killed while it wrote."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
