"""Processes that differ, or of which one is missing, end soon and say why."""

from __future__ import annotations

import json
import platform
import re
import socket
import time
from pathlib import Path

import pytest

from axonym.core import connecting, processes
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


def test_another_program_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found out soon, also if it says nothing."""
    monkeypatch.setattr(connecting, "_SILENT", 0.1)
    monkeypatch.setattr(connecting, "_SAY_AFTER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ValueError, match="is in use by another program"):
            connecting._meet_first_process(f"127.0.0.1:{silent.getsockname()[1]}", None, 2, 1, {}, 300)


@pytest.mark.parametrize("fails", [False, True])
def test_answers_to_all(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a process whose number was given twice, and that comes late; and if the comparison itself fails."""
    port, stop = free_port(), time.monotonic() + 60
    if fails:
        monkeypatch.setattr(connecting, "difference", lambda *_: 1 / 0)

    def said(process: int, name: str) -> str:
        return json.dumps({"process": process, "id": name, "who": name, "same": {"settings": 3}})

    reception = connecting._Reception("127.0.0.1", port, 2, stop)
    with socket.create_connection(("127.0.0.1", port)) as first:  # which stays, so the others are heard, too
        first.sendall(said(0, "a").encode() + b"\n")
        answers = [
            connecting._ask_first_process("127.0.0.1", port, said(1, name), 2, stop)["problem"] for name in ("b", "c")
        ]
    reception.end()
    expected = (
        ["failed in process 0: ZeroDivisionError"] * 2 if fails else ["", "2 processes have the number 1: b and c"]
    )
    assert all(part in answer and bool(part) == bool(answer) for part, answer in zip(expected, answers, strict=True))


def test_what_cannot_be_told() -> None:
    with pytest.raises(TypeError, match=r"same\['seed'\] must be a text, got int"):
        connecting.connect_processes(same={"seed": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="coordinator_address 'node0' has no port"):
        connecting._meet_first_process("node0", None, 2, 1, {}, 1)
    connecting.jax.devices()
    with pytest.raises(RuntimeError, match="JAX has started already"):
        connecting.connect_processes("localhost:1", 2, 1)


def test_only_lines_that_differ_are_shown() -> None:
    common = "\n".join(f"line {i}" for i in range(100))
    texts = {i: {"program": f"{common}\nmine {i}", "order": ("a\nb", "b\na")[i], "same": "x"} for i in range(2)}
    text = processes.difference("save", texts)
    assert "process 0: mine 0\n  process 1: mine 1\n" in text and "line" not in text.partition("order")[0]
    assert text.count("the same lines in another order") == 2 and "same must" not in text
