"""The folder of a run: who uses it, and what is in it that should not be."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.examples.runs import SMALL, Problem, train, train_lm

pytestmark = pytest.mark.usefixtures("quick_compilation")

lock = train_lm.lock

# --- the lock ---


def holder(**changes: object) -> str:
    return json.dumps(lock._this_process() | changes)


def test_one_process_at_a_time(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    config = train_lm.settings.parse([*SMALL, "--data", str(text)])
    (tmp_path / "config.json").write_text(json.dumps(train_lm.settings.as_json(config)))
    with lock.held(tmp_path):
        for more in ((), ("--resume",)):
            assert train(text, tmp_path, *more) == 1
            printed, said = capsys.readouterr()
            assert said.count("\n") == 1 and not printed
            assert f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}, since 20" in said
        assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json", lock.NAME]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json"]


@pytest.mark.parametrize(
    ("content", "age", "stale"),
    [
        (holder(pid=2**22 + 1), 0, True),  # no process has such a number
        (holder(started="another boot 1"), 0, True),  # the number is another process's now
        (holder(started=None), 0, False),
        (holder(host="elsewhere"), 0, False),
        (holder(host="elsewhere"), 1000, True),
        (holder(pid=10**30), 1000, True),
        ("", 0, False),
        ("\0[", 1000, True),
        ("[" * 10**5, 1000, True),
    ],
)
def test_stale_locks_are_recognised(content: str, age: float, stale: bool, tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    path.write_text(content)
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    if stale:
        with lock.held(tmp_path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not any(tmp_path.iterdir())
    else:
        with pytest.raises(
            Problem, match=r"is in use by (another process|process \d+ on \S+, since .*): stop that one"
        ):
            with lock.held(tmp_path):
                pass
        assert path.read_text() == content


def test_a_lock_that_is_taken_over_in_between_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that find a stale lock, one gets it."""
    path, rename = tmp_path / lock.NAME, Path.rename
    path.write_text(holder(pid=2**22 + 1))

    def slow(self: Path, target: Path) -> None:
        if self == path:
            path.write_text(holder())  # what another process does meanwhile
        rename(self, target)

    monkeypatch.setattr(Path, "rename", slow)
    with pytest.raises(Problem, match="is in use"):
        with lock.held(tmp_path):
            pass
    assert os.listdir(tmp_path) == [lock.NAME]


def test_runs_without_a_name_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = train_lm.settings.parse([])
    assert [str(train_lm.runs.new(config).folder) for _ in range(2)] == ["runs/1", "runs/2"]
