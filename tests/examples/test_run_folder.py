"""The folder of a run: locks, and files in it that should not be there."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from axonym.state.file_checksums import write_checksums
from tests.examples.runs import EXAMPLES, SMALL, Problem, losses, rows, train, train_lm

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
        ({"pid": 2**22 + 1}, 0, True),  # no process has such a number
        ({"started": "another boot 1"}, 0, True),  # the number is another process's now
        ({"started": None}, 0, False),
        ({"host": "elsewhere"}, 0, False),
        ({"host": "elsewhere"}, 1000, True),
        ({"pid": 10**30}, 1000, True),
        ("", 0, False),
        ("\xff", -1000, False),
        ("\0[", 1000, True),
        ("[" * 1000, 1000, True),
    ],
)
def test_stale_locks_are_recognized(content: Any, age: float, stale: bool, tmp_path: Path) -> None:
    path = tmp_path / lock.NAME
    content = holder(**content) if isinstance(content, dict) else content  # here, so that test names are the same
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
        if age < 0:
            with pytest.raises(Problem, match=rf"delete {path}, which was written in the future"):
                lock._remove_if_stale(path)


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


# --- bad input: one line, an exit status that is not 0, and nothing lost ---


def settings(**changes: Any) -> Callable[[Path], object]:
    """Change values in the settings of a run; settings of a group by its name."""

    def change(run: Path) -> None:
        content = json.loads((run / "config.json").read_text())
        for name, value in changes.items():
            content[name] = content[name] | value if isinstance(content.get(name), dict) and value else value
        (run / "config.json").write_text(json.dumps(content))

    return change


def content(name: str, text: bytes | str) -> Callable[[Path], object]:
    """Replace the content of a file in the folder of a run."""
    return lambda run: (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def pipe(name: str) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return replace


def damaged(run: Path) -> None:
    file = run / "checkpoints" / "step-000006" / "about" / "metadata"
    file.write_bytes(file.read_bytes().replace(b"6", b"7"))


def partly_copied(run: Path) -> None:
    (run / "checkpoints" / "step-000006" / "checksums.json").unlink()


def cut(run: Path) -> None:
    """Damage everything that was written of the arrays, and have checksums of that."""
    path = run / "checkpoints" / "step-000006"
    for file in path.rglob("manifest.ocdbt"):
        file.write_bytes(file.read_bytes()[:20])
    write_checksums(path)


def strays(run: Path) -> None:
    """Add foreign files to the folders, such as an empty folder with a lower number, and odd lines of losses."""
    for name in ("step-backup", "step-000001", "step-"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "notes-7").write_text("mine")
    (run / "notes").write_text("mine")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\x00\n[1]\n{'lo")


def interrupted(owner: Any, name: str) -> Callable[[Path], object]:
    """Simulate Ctrl-C at a call."""
    return lambda run: mock.patch.object(owner, name, side_effect=KeyboardInterrupt).start()


STOPPED = "Stopped at once; what was saved before is complete"
LONG = "n" * 300
RESUMED = ("--resume", "--out", "RUN")
NEW = ("--out", "RUN/new")
BAD: dict[str, tuple[tuple[str, ...], Callable[[Path], object] | None, str]] = {
    # The folder of a run.
    "no checkpoints": (RESUMED, lambda run: shutil.rmtree(run / "checkpoints"), "it has no checkpoints/. Start a new"),
    "no settings": (RESUMED, lambda run: (run / "config.json").unlink(), "has no config.json"),
    "settings that are a pipe": (RESUMED, pipe("config.json"), "has no config.json"),
    "a damaged checkpoint": (
        RESUMED,
        damaged,
        r"^train_lm.py: The checkpoint \S+step-000006 is damaged: about/metadata differs from what was written. The "
        r"last .* is \S+step-000004",
    ),
    "a checkpoint without its checksums": (
        RESUMED,
        partly_copied,
        r"step-000006 is damaged: checksums\.json is missing, .* The last .* is \S+step-000004\.",
    ),
    "a checkpoint that is cut": (
        RESUMED,
        cut,
        r"^train_lm.py: The checkpoint \S+step-000006 cannot be read: ValueError: DATA_LOSS: [^\n]*manifest\.ocdbt",
    ),
    "the latest without its table": (
        RESUMED,
        lambda run: shutil.rmtree(run / "checkpoints" / "step-000006" / "about"),
        r"step-000006 is no complete checkpoint: it has no about/; the last complete one is \S+step-000004\. .*--acc",
    ),
    "an empty folder that looks later": (
        RESUMED,
        lambda run: (run / "checkpoints" / "step-000009").mkdir(),
        r"step-000009 is no complete checkpoint: it has no about/; the last complete one is \S+step-000006\. .*--acc",
    ),
    "a checkpoint under another name": (
        RESUMED,
        lambda run: (run / "checkpoints" / "step-000004").rename(run / "checkpoints" / "step-000200"),
        r"step-000200 is not of step 200, but of step 4; to go on from it all the same, add --accept step-000200\.",
    ),
    "a checkpoint of another run": (
        RESUMED,
        settings(run=7),
        r"step-000006 is of the run \d+, and this is the run 7; to go on from it all the same, add --accept step-",
    ),
    "to accept what is no checkpoint": (
        (*RESUMED, "--accept", "latest"),
        None,
        r"--accept needs the name of a checkpoint, such as step-000100, and latest is none\.",
    ),
    "to accept without going on": (
        ("--accept", "step-000004"),
        None,
        r"--accept is for a run that goes on: add --resume",
    ),
    "stray things beside a run": (("--out", "RUN"), strays, "has a run already, up to step-000006: go on with it"),
    "stray things beside a damaged checkpoint": (
        RESUMED,
        lambda run: [strays(run), damaged(run)],
        r"step-000006 is damaged: .* The last .* is \S+step-000004\.",
    ),
    "binary losses beside settings that are": (
        RESUMED,
        lambda run: [content("metrics.jsonl", b"\xff\x00\n" * 9)(run), settings(seed=-1)(run)],
        "--seed must not be negative, got -1",
    ),
    "a file in place of checkpoints": (
        NEW,
        lambda run: [(run / "new").mkdir(), (run / "new" / "checkpoints").touch()],
        "new cannot be made: file exists",
    ),
    "a run already": (("--out", "RUN"), None, "has a run already, up to step-000006: go on with it by --resume"),
    "another model": (
        (*RESUMED, "--embed", "32"),
        None,
        "which cannot change when it is resumed; to train another model",
    ),
    "nothing to resume": (("--resume",), None, "There is no run in runs/ to resume"),
    "no run": (("--resume", "--out", "nowhere"), None, "There is no run in nowhere to resume"),
    "a file in place of the folder": (
        ("--out", "RUN/config.json"),
        None,
        "The folder .*config.json cannot be made: ",
    ),
    # Ctrl-C.
    "Ctrl-C while a mapping is read": (NEW, interrupted(train_lm.strategies, "choose"), STOPPED),
    "Ctrl-C while the text is read": (RESUMED, interrupted(train_lm.data, "read"), STOPPED),
    "Ctrl-C while a checkpoint is read": (
        RESUMED,
        interrupted(train_lm.checkpoints.files, "restore_checkpoint"),
        STOPPED,
    ),
    # Its settings.
    "binary settings": (
        RESUMED,
        content("config.json", b"\xff\x00"),
        "cannot be read from .*config.json: 'utf-8' codec",
    ),
    "cut settings": (
        RESUMED,
        content("config.json", '{"seed": '),
        "cannot be read from .*config.json: Expecting value",
    ),
    "settings with a key twice": (
        RESUMED,
        content("config.json", '{"seed": 1, "seed": 2}'),
        r"cannot be read from .*config.json: it has 'seed' twice\.",
    ),
    "deep settings": (RESUMED, content("config.json", "[" * 10**5), "cannot be read from .*config.json"),
    "settings that are a list": (
        RESUMED,
        content("config.json", "[]"),
        r"the whole must be a table of settings, got \[\]",
    ),
    "settings of wrong types": (
        RESUMED,
        settings(seed="0", precision=3, data=None, model={"layers": 2.0, "tied": "no"}, optimizer={"clip": True}),
        "data must be a text, got None; precision must be a text, got 3; seed must be a whole number, got '0'; "
        "layers must be a whole number, got 2.0; tied must be true or false, got 'no'; clip must be a number, got True",
    ),
    "groups that are none": (
        RESUMED,
        settings(model=[], saving=None),
        r"model must be a table of settings, got \[\]; saving must be a table of settings, got None",
    ),
    "settings out of range": (
        RESUMED,
        settings(seed=-1, batches={"batch": 0}, optimizer={"learning_rate": float("nan")}),
        "--seed must not be negative, got -1; --batch must be more than 0, got 0; --learning-rate must be a finite",
    ),
    "settings with a NUL": (RESUMED, settings(data="a\0b"), r"--data must be text, got 'a\\x00b'"),
    "a huge size": (
        RESUMED,
        settings(model={"embed": 10**40}),
        "--embed must be at most 2,147,483,647, got one of 41 di",
    ),
    # Mappings.
    "a binary mapping": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", b"\xff\x00"),
        "is not valid JSON: 'utf-8'",
    ),
    "a binary table": ((*NEW, "--mapping", "RUN/m.toml"), content("m.toml", b"\xff\x00"), "is not valid TOML: 'utf-8'"),
    "a deep mapping": ((*NEW, "--mapping", "RUN/m.json"), content("m.json", "[" * 10**5), "is not valid JSON"),
    "a deep table": ((*NEW, "--mapping", "RUN/m.toml"), content("m.toml", "a = " + "[" * 10**5), "is not valid TOML"),
    "a mapping that is a pipe": ((*NEW, "--mapping", "RUN/m.json"), pipe("m.json"), "it is not a file"),
    "a mapping that is a folder": (
        (*NEW, "--mapping", "RUN/m.json"),
        lambda run: (run / "m.json").mkdir(),
        "it is not a file",
    ),
    "a huge mesh": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", '{"mesh": {"data": 1' + "0" * 30 + '}, "mapping": {"batch": "data"}}'),
        "does not fit the devices: .* needs 1000000000000000000000000000000 devices; there are 8",
    ),
    "a mesh axis twice in a file": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", '{"mesh": {"data": 4, "data": 2}, "mapping": {"batch": "data"}}'),
        "is not valid JSON: it has 'data' twice",
    ),
    "half a character in a mesh axis": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", r'{"mesh": {"d\ud800": -1}, "mapping": {"batch": "d\ud800"}}'),
        r"does not fit the devices: the name of a mesh axis has no lone surrogates, got 'd\\ud800'",
    ),
    "a mesh axis twice for an axis": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", '{"mesh": {"data": 8}, "mapping": {"vocab": ["data", "data"]}}'),
        r"mapping sends axis 'vocab' to a mesh axis twice, \['data', 'data'\]",
    ),
    "a mesh axis twice": ((*NEW, "--mesh", "data=4,data=2"), None, "--mesh has the mesh axis 'data' twice"),
    "a huge size of the mesh": ((*NEW, "--mesh", f"data={10**30}"), None, "does not fit the devices"),
    "a mapping that is none": (
        (*NEW, "--mapping", "tensors"),
        None,
        "There is no mapping 'tensors'; choose one of data, fsdp, tensor,",
    ),
    "a mesh for a plan": (
        (*NEW, "--mapping", "plan", "--mesh", "data=8"),
        None,
        "--mesh cannot be given with --mapping plan, which chooses one, got 'data=8'",
    ),
    "a plan for too large a model": (
        (*NEW, "--mapping", "plan", "--embed", "65536", "--mlp", "262144"),
        lambda run: mock.patch.dict(train_lm.plans.llama.REMAT, {"full": True}, clear=True).start(),  # fewer candidates
        "--mapping plan finds no mapping: plan: of .* on 8 devices, none fits .*; the least is .*\\)\\. Choose another",
    ),
    "a damaged plan": (
        (*RESUMED, "--mapping", "plan"),
        content("plan.json", '{"mesh": '),
        "The mapping in .*plan.json is not valid JSON",
    ),
    "a chip without figures": (
        (*NEW, "--chip", "v9"),
        None,
        "--chip must be one of v4, v5e, v5p, v6e, a100, h100, h200, got 'v9'",
    ),
    "no such mapping": (
        (*NEW, "--mapping", "nowhere.json"),
        None,
        "cannot be read from nowhere.json: no such file or directory",
    ),
    "a mesh axis that is none": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", '{"mesh": {"data": 8}, "mapping": {"batch": "rows"}}'),
        "shards axis 'batch' over mesh axis 'rows', but the mesh has data",
    ),
    "an axis that is none": (
        (*NEW, "--mapping", "RUN/m.toml"),
        content("m.toml", 'mesh = {data = 8}\nmapping = {batch = "data", embd = "data"}'),
        "axis 'embd' is in the mapping but not in the tree. Did you mean 'emb",
    ),
    "one mesh axis for two": (
        (*NEW, "--mapping", "RUN/m.toml"),
        content("m.toml", 'mesh = {data = 8}\nmapping = {vocab = "data", embed = "data"}'),
        "'vocab' and axis 'embed' are both sharded over mesh axis 'data'",
    ),
    "a part of a mapping": (
        (*NEW, "--mapping", "RUN/m.json"),
        content("m.json", '{"mesh": {"data": 8}}'),
        "has mesh, mapping and maybe parameter_mapping, remat, accumulate or between; .*m.json has mesh",
    ),
    "between an unknown mesh axis": (
        (*NEW, "--mapping", "RUN/m.toml"),
        content("m.toml", 'between = "x"\nmesh = {data = 8}\nmapping = {batch = "data"}'),
        "does not fit the devices: between has x; the mesh axes are data",
    ),
    "between no mesh axes": (
        (*NEW, "--mapping", "RUN/m.toml"),
        content("m.toml", 'between = {data = "all"}\nmesh = {data = 8}\nmapping = {batch = "data"}'),
        r"between must be a mesh axis, a list of them, or how many .* such as \{\"data\": 2\}, got \{'data': 'all'\}",
    ),
    "no TOML": ((*NEW, "--mapping", "RUN/m.toml"), content("m.toml", "mesh = "), "in .*m.toml is not valid TOML"),
    # Sizes.
    "heads": (
        (*NEW, "--mapping", "tensor", "--mesh", "data=2,model=4"),
        None,
        "kv_heads=2 cannot be sharded over model=4, .* change --kv-heads",
    ),
    "batch": ((*NEW, "--batch", "9"), None, "batch=9 cannot be sharded over data=4, .* change --batch, --mesh or --m"),
    "length": (
        (*NEW, "--mapping", "sequence", "--length", "12"),
        None,
        "pos=12 cannot be sharded over data=8, .* change --length",
    ),
    "microbatches": (
        (*NEW, "--mapping", "pipeline", "--microbatches", "3"),
        None,
        "The 2 texts of a device cannot be cut into 3 microbatches of one size; change --batch, --microb",
    ),
    "no experts": (
        (*NEW, "--mapping", "RUN/m.toml"),
        content("m.toml", 'mesh = {data = 8}\nmapping = {experts = "data"}'),
        "shards experts, and the model has none; give it some by --experts",
    ),
    "one expert": ((*NEW, "--experts", "1"), None, "--experts must be 0 for none or at least 2, .* got 1"),
    "a mesh axis": ((*NEW, "--mesh", "rows=8"), None, "shards axis 'batch' over mesh axis 'data', but the mesh has r"),
    "too many devices": ((*NEW, "--mesh", "data=16,model=1"), None, "needs 16 devices; there are 8"),
    "too few devices": ((*NEW, "--mesh", "data=2,model=2"), None, "has 4 of the 8 devices"),
    "a mesh without sizes": (
        (*NEW, "--mesh", "8"),
        None,
        "--mesh gives each mesh axis a size, such as data=4,model=2, got '8'",
    ),
    "too little text": (
        (*NEW, "--data", "RUN/m"),
        content("m", "a" * 51),
        "has 51 bytes, and a batch of 8 texts of 16 needs at least",
    ),
    # Numbers.
    "steps": ((*NEW, "--warmup", "6"), None, "--warmup must be less than --steps, got 6 and 6"),
    "a huge seed": ((*NEW, "--seed", str(10**30)), None, "--seed must be at most 2,147,483,647, got one of 31 digits"),
    "NaN": ((*NEW, "--learning-rate", "nan"), None, "--learning-rate must be a finite number, got nan"),
    "infinity": (
        (*NEW, "--clip", "inf", "--weight-decay=-inf", "--temperature", "nan"),
        None,
        "--weight-decay must be a finite .*; --clip must be a finite .*; --temperature must be a finite",
    ),
    "several": (
        (*NEW, "--batch", "0", "--head-size", "3", "--held-out", "2"),
        None,
        "--batch must be more than 0, got 0; --head-size must be even, .* got 3; --held-out must be between",
    ),
    "elastic on one host": ((*NEW, "--elastic"), None, "--elastic needs --distributed"),
    "an address on one host": ((*NEW, "--coordinator", "localhost:1"), None, "--coordinator needs --distributed"),
    "no time": ((*NEW, "--host-timeout", "0"), None, "--host-timeout must be more than 0, got 0"),
    # Texts.
    "an unknown precision": ((*NEW, "--precision", "float7"), None, "--precision 'float7' is not understood"),
    "a precision that is no word": ((*NEW, "--precision", ","), None, "--precision ',' is not understood"),
    "a NUL in a precision": ((*NEW, "--precision", "a\0"), None, "--precision must be text"),
    "half a character": ((*NEW, "--prompt", "a\ud800"), None, r"--prompt must be text, got 'a\\ud800'"),
    "half a character in a path": ((*NEW, "--data", "a\udcff"), None, r"--data must be text, got 'a\\udcff'"),
    "a NUL in a folder": (("--out", "RUN/a\0"), None, "--out must be text"),
    "a long folder": (("--out", f"RUN/{LONG}"), None, "cannot be made: file name too long"),
    "a long folder to resume": (("--resume", "--out", f"RUN/{LONG}"), None, "There is no run in "),
    "a long name of a text": ((*NEW, "--data", LONG), None, "There is no file or folder n+; --data"),
    "a long name of a mapping": (
        (*NEW, "--mapping", f"{LONG}.json"),
        None,
        "cannot be read from .*: file name too long",
    ),
    "a long name of an export": ((*NEW, "--export", f"RUN/{LONG}"), None, "cannot be used: file name too long"),
    "an export to a device": (
        (*NEW, "--export", "/dev/null"),
        None,
        "of a new folder, or of a file .* /dev/null is none",
    ),
    "an export to a folder": (
        (*NEW, "--export", "RUN"),
        None,
        "--export needs the name of a new folder, .* with other files",
    ),
    "no text": ((*NEW, "--data", "nowhere"), None, "There is no file or folder nowhere; --data says where the text is"),
    "a text that is a pipe": ((*NEW, "--data", "RUN/pipe"), pipe("pipe"), "There is no file or folder .*pipe; --data"),
}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of a folder: the bytes of each file, and None for everything else."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("arguments", "prepare", "expected"), BAD.values(), ids=list(BAD))
def test_bad_input(
    arguments: tuple[str, ...],
    prepare: Callable[[Path], object] | None,
    expected: str,
    finished: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(finished, tmp_path / "run")
    if prepare is not None:
        prepare(run)
    before = snapshot(tmp_path)
    given = [*([] if "--resume" in arguments else [*SMALL, "--data", str(text)]), *arguments]
    try:
        status = train_lm.main([argument.replace("RUN", str(run)) for argument in given])
    finally:
        mock.patch.stopall()
    assert status == (train_lm.INTERRUPTED if expected is STOPPED else 1)
    printed, said = capsys.readouterr()
    assert re.search(expected, said) and said.startswith("train_lm.py: ") and said.count("\n") == 1, said
    assert not printed and len(said) < 900
    assert snapshot(tmp_path) == before


def test_stray_things_in_the_folder_are_left(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    saved, metrics = run / "checkpoints", run / "metrics.jsonl"
    shutil.rmtree(saved / "step-000006")
    for name in ("step-backup", "step-000001", "step-"):
        (saved / name).mkdir()
    (saved / "notes-7").write_text("mine")
    odd = [
        b"\xff\x00\n",
        b"[1]\n",
        b'{"loss": 1}\n',
        b'{"step": "1"}\n',
        b'{"step": 1, "loss": "low"}\n',
        b"[" * 10**5 + b"\n",
    ]
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], *odd, *lines[1:], b'{"step": 2, "loss": NaN}\n', b'{"step": 7, "lo']))
    assert train_lm.main(["--resume", "--out", str(run), "--keep", "1"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"train_lm.py: {metrics} has 6 lines that are no losses") and said.count("\n") == 1
    assert (run / "metrics.jsonl.odd").read_bytes() == b"".join(odd)
    assert losses(run)[-1] == losses(finished)[-1] and len(rows(run)) == len(rows(finished)) + 1
    assert {path.name for path in saved.iterdir()} == {"step-backup", "step-000001", "step-", "notes-7", "step-000006"}


def test_accepted_checkpoints(finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run goes on from what is accepted, whatever its name and run; later ones are set aside, and not in the way."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    folder = run / "checkpoints"
    (folder / "step-000004").rename(folder / "step-000200")
    shutil.rmtree(folder / "step-000006" / "about")
    settings(run=7)(run)
    other = json.loads((finished / "config.json").read_text())["run"]
    assert train_lm.main(["--resume", "--out", str(run), "--accept", "step-000200"]) == 0
    assert "Going on from step 4 to 6" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir())[-3:] == [
        "step-000004",
        "step-000006",
        "step-000006.set-aside",
    ]
    assert json.loads((run / "config.json").read_text())["run"] == other
    assert losses(run) == losses(finished)
    assert train_lm.main(["--resume", "--out", str(run), "--accept", "step-000004"]) == 0
    assert (folder / "step-000006.set-aside-2").exists()


def test_a_folder_that_is_deleted_is_not_advised(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = train_lm.Training.note

    def note(self: Any, *args: Any) -> None:
        noted(self, *args)
        if self.step == 3:
            self.finish_saving()
            shutil.rmtree(self.files.folder)

    monkeypatch.setattr(train_lm.Training, "note", note)
    assert train(text, tmp_path / "run", "--mapping", "fsdp+tensor", "--samples", "0", "--save-every", "1") == 1
    printed, said = capsys.readouterr()
    last = said.splitlines()[-1]  # at the second save that fails
    assert last.endswith("step-000004 could not be written, because the folder was deleted."), said
    assert "--resume" not in printed + said and said.count("Could not write down the losses") < 2
    assert not list((tmp_path / "run").glob("checkpoints"))


def test_ctrl_c_where_an_exception_would_be_lost(tmp_path: Path) -> None:
    """While Python imports, and inside a callback of JAX."""
    scripts = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['train_lm.py']\n"
        "runpy.run_path(sys.path[0] + '/train_lm.py', run_name='__main__')\n",
        "from training import at_once\n"
        "import jax, numpy as np\n"
        "at_once.install()\n"
        "def callback(index):\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException: pass\n"
        "    return np.zeros(1)\n"
        "jax.make_array_from_callback((1,), jax.sharding.SingleDeviceSharding(jax.devices()[0]), callback)\n",
    )
    for script in scripts:
        begin = f"import runpy, signal, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        ended = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, timeout=120, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (train_lm.INTERRUPTED, b""), ended.stderr
        assert ended.stderr == b"train_lm.py: Stopped at once; what was saved before is complete.\n"


def test_a_text_is_mapped_and_not_read(tmp_path: Path) -> None:
    """Files are holes on the disk, and larger than what the process may hold; so is what a folder has of them."""
    Batch, Pos = train_lm.axn.make_axes(batch=8, pos=16)
    (tmp_path / "texts").mkdir()
    for i in range(3):
        with (tmp_path / "texts" / str(i)).open("wb") as file:
            file.truncate(2**37)
    one = train_lm.data.read(str(tmp_path / "texts" / "0"), 0.5, Batch, Pos)
    several = train_lm.data.read(str(tmp_path / "texts"), 0.5, Batch, Pos)
    assert len(one.train) == 2**36 and one.held_out[-1] == 0
    assert len(several.train) + len(several.held_out) == 3 * 2**37 + 2
    np.testing.assert_array_equal(several.train[2**37 - 1 : 2**37 + 2][np.arange(3)], [0, ord("\n"), 0])
    assert several.held_out[-1] == 0


@pytest.mark.parametrize("held_out", [0.3, 0.5, 0.66])
def test_a_folder_of_texts_is_what_its_files_have(held_out: float, tmp_path: Path) -> None:
    Batch, Pos = train_lm.axn.make_axes(batch=8, pos=16)
    for name, part in (("a", b"one"), ("b", b""), ("c", b"three"), (os.fsdecode(b"\xff"), b"")):
        (tmp_path / name).write_bytes(part * 999)
    corpus = train_lm.data.read(str(tmp_path), held_out, Batch, Pos)
    parts = [b"".join(map(bytes, text.parts())) for text in (corpus.train, corpus.held_out)]
    whole = b"".join(parts)
    assert sorted(whole.split(b"\n")) == [b"", b"", b"one" * 999, b"three" * 999]
    for text, part in zip((corpus.train, corpus.held_out), parts, strict=True):
        assert text[np.arange(len(text))].tobytes() == part and len(text) == len(part)
        assert text[5:90][np.array([[0, 1], [84, -1]])].tobytes() == part[5:7] + part[89:90] * 2
    assert corpus.fingerprint == zlib.crc32(whole)
    (tmp_path / "c").write_bytes(b"")
    train_lm.data._mapped.cache_clear()
    with pytest.raises(Problem, match="c has become shorter while it was used"):
        corpus.train[np.arange(len(corpus.train))], corpus.held_out[np.arange(len(corpus.held_out))]
