"""Processes that differ, or of which one is missing, end soon and say why."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

from tests.processes import agreement, free_port, run

DIFFER = (
    "ValueError: connect_processes: {} must be the same in every process, but differ:\n  process 0: {}\n  process 1: {}"
)
TWICE = r"ValueError: connect_processes: 2 processes have the number {}: process \d+ on \S+. Each of {} needs a .*"
MISSING = r"TimeoutError: connect_processes: process {} of 2(, which the others .*,)? did not start within 2 s\."


def test_processes_that_differ(tmp_path: Path) -> None:
    ports = [str(free_port()) for _ in agreement.TRIES]
    ended = run([["-W", "error", "-m", "tests.processes.agreement", str(i), *ports] for i in range(2)], tmp_path, 300)
    assert ended.statuses == [0, 0], ended.printed
    python = platform.python_version()
    expected = {
        "versions": re.escape(DIFFER.format("versions", f"Python {python}", "Python 3.99.0")),
        "settings": re.escape(DIFFER.format("settings", "--seed 0", "--seed 1")),
        "counts": re.escape(DIFFER.format("numbers of processes", "2", "3")),
        "twice": TWICE.format(1, 3),
        "first twice": TWICE.format(0, 3),
        "missing": MISSING.format(1),
        "first missing": MISSING.format(0),
        "devices": re.escape(DIFFER.format("numbers of devices", "2", "1")),
    }
    for index, printed in enumerate(ended.printed):
        found = {name: rest for name, *rest in (json.loads(x) for x in printed.splitlines() if x.startswith("["))}
        assert list(found) == list(expected), printed
        for name, (messages, told, seconds) in found.items():
            assert len(messages) == len(agreement.numbers(name, index)) and seconds < 20, (name, messages)
            assert all(re.fullmatch(expected[name], message) for message in messages), (name, messages)
            if name in ("missing", "first missing") and messages:
                assert told[0].startswith(f"Waiting for process {1 - index} of 2"), told
