"""Damaged checkpoints: restored arrays have the saved bits, or the error names the damage."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.state import file_checksums, restore_checkpoint, save_checkpoint, verify
from axonym.state.__main__ import main

A, B = axn.make_axes(a=64, b=128)


def state() -> dict[str, Any]:
    """Return arrays that TensorStore stores in separate files, and some that it stores with their names."""
    rng = np.random.default_rng(0)
    w, v = (axn.named(jnp.asarray(rng.normal(size=(64, 128)), jnp.float32), (A, B)) for _ in range(2))
    return {"w": w, "v": v, "small": jnp.arange(6), "key": jax.random.key(7), "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, auto_mesh: Mesh) -> Path:
    """Save two checkpoints, step-1 and step-2, and return their folder."""
    folder, patch = tmp_path_factory.mktemp("checkpoints"), pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(file_checksums, "_BLOCK", 512)
        for step in (1, 2):
            save_checkpoint(folder / f"step-{step}", axn.shard(state(), {"a": "data"}, auto_mesh))
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Make a copy to damage."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: int, bit: int) -> bytes:
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :])
    return content


def assert_restored(path: Path, mesh: Mesh, verify: bool = True) -> None:
    found, expected = restore_checkpoint(path, state(), {"b": "model"}, mesh=mesh, verify=verify), state()
    for name in ("w", "v"):
        np.testing.assert_array_equal(np.asarray(found[name].array), np.asarray(expected[name].array))
    assert found["small"].tolist() == list(range(6))
    assert found["key"] == expected["key"] and found["step"] == 3


def test_flipped_bits(copied: Path, auto_mesh: Mesh) -> None:
    path, rng = copied / "step-2", random.Random(0)
    files = files_of(path)
    for file in files:
        name = file.relative_to(path).as_posix()
        for _ in range(10):
            content = flip(file, rng.randrange(file.stat().st_size), rng.randrange(8))
            try:
                with pytest.raises(ValueError, match=rf"^restore_checkpoint: {path} is damaged: {name} differs"):
                    assert_restored(path, auto_mesh)
            finally:
                file.write_bytes(content)
    assert len(files) > 6  # how many there are depends on the version of Orbax
    assert_restored(path, auto_mesh)


def test_files_that_are_cut_or_gone(copied: Path, auto_mesh: Mesh) -> None:
    path = copied / "step-2"
    names = [file.relative_to(path).as_posix() for file in files_of(path) if file.parent != path]
    for name in names:
        content = (path / name).read_bytes()
        for shorter in (None, content[:-1], b"", content + b"0"):
            (path / name).unlink() if shorter is None else (path / name).write_bytes(shorter)
            problem = "is missing" if shorter is None else f"has {len(shorter)} bytes of {len(content)}"
            with pytest.raises(ValueError, match=rf"is damaged: {name} {problem}\."):
                assert_restored(path, auto_mesh)
        (path / name).write_bytes(content)
    os.remove(path / names[0])
    os.mkfifo(path / names[0])  # refused, and not waited for
    with pytest.raises(ValueError, match="is missing"):
        verify(path)
    for name in names:
        (path / name).unlink()
    with pytest.raises(ValueError, match=rf"is missing; and {len(names) - 8} files more\.$"):
        verify(path)


def test_the_last_one_that_is_intact_is_offered(copied: Path, auto_mesh: Mesh) -> None:
    shutil.copytree(copied / "step-1", copied / "step-11")
    (copied / "step-99").mkdir()  # stray things
    (copied / "step-1.orbax-checkpoint-tmp-5" / "about").mkdir(parents=True)
    (copied / "old-100").write_text("")
    for damaged, offered in (("step-11", "step-2"), ("step-2", "step-1"), ("step-1", None)):
        flip(copied / damaged / "about" / "metadata", 5, 5)
        hint = f"that is not damaged is {copied / str(offered)}." if offered else "No other checkpoint beside it is kn"
        with pytest.raises(ValueError, match=hint):
            assert_restored(copied / damaged, auto_mesh)


def test_lost_checksums(copied: Path, auto_mesh: Mesh) -> None:
    """A partial copy is refused, unless asked for: damage could not be seen."""
    path = copied / "step-2"
    os.remove(path / file_checksums.CHECKSUMS)
    with pytest.raises(ValueError, match=r"is damaged: checksums\.json is missing.*not damaged is \S+step-1\."):
        assert_restored(path, auto_mesh)
    with pytest.raises(ValueError, match=r"^verify: \S+ is damaged: checksums\.json is missing"):
        verify(path)
    assert_restored(path, auto_mesh, verify=False)
    (path / "about" / "metadata").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match=r"^restore_checkpoint: \S+ cannot be read: about/metadata is no table of arrays\.$"
    ):
        assert_restored(path, auto_mesh, verify=False)


DAMAGED = """
import sys
import numpy as np
from axonym.state import restore_checkpoint, save_checkpoint
from pathlib import Path

def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

folder = Path(sys.argv[1])
tree = {f"w{i}": np.random.default_rng(i).normal(size=(64, 64)) for i in range(12)}
for files in ("manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"):
    path = folder / files.replace("/", "-").replace("*", "")
    save_checkpoint(path, tree)
    for file in (path / "arrays").glob(files):
        cut(file)
    try:
        restore_checkpoint(path, tree, verify=False)
    except ValueError as e:
        print(e)
"""


@pytest.mark.oldest
def test_reads_that_are_left_say_nothing(tmp_path: Path) -> None:
    """Of many arrays that cannot be read, an error names one, and the others do not complain of a closed loop."""
    ended = subprocess.run([sys.executable, "-c", DAMAGED, tmp_path], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert len(lines) == 3 and all(re.search(r"cannot be read: ValueError: [A-Z_]+: Error .*\.$", x) for x in lines)


def test_several_processes_share_the_work(copied: Path) -> None:
    path = copied / "step-2"
    for file in files_of(path):
        if file.parent != path:
            flip(file, 0, 0)
    parts = [file_checksums.damage_of(path, i, 3) or [] for i in range(3)]
    assert all(parts) and sorted(problem for part in parts for problem in part) == sorted(
        file_checksums.damage_of(path) or []
    )


def test_command(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = str(copied / "step-1"), str(copied / "step-2")
    assert main(["verify", good]) == 0
    assert capsys.readouterr().out == f"{good} is as it was written.\n"
    flip(copied / "step-2" / "about" / "metadata", 5, 5)
    assert main(["verify", bad, good, str(copied / "step-3")]) == 1
    printed, said = capsys.readouterr()
    assert printed == f"{good} is as it was written.\n"
    assert said.splitlines() == [
        f"Reading {bad}.",
        f"{bad} is damaged: about/metadata differs from what was written.",
        f"Reading {good}.",
        f"Reading {copied / 'step-3'}.",
        f"{copied / 'step-3'} is not a complete checkpoint.",
    ]


def mutated(content: Any, rng: random.Random) -> Any:
    """Change something in a JSON value: a type, a key, a length, a number."""
    if rng.random() < 0.2 or not isinstance(content, (dict, list)) or not content:
        return rng.choice([None, True, -1, 0, 2**70, 1.5, "", "x", [], {}, [0], [None], {"a": 1}, "../x"])
    found: Any = content.copy()
    key = rng.choice([*content]) if isinstance(content, dict) else rng.randrange(len(content))
    kind = rng.random()
    if kind < 0.2:
        del found[key]
    elif kind < 0.3 and isinstance(found, list):
        found.append(found[key])
    elif kind < 0.3:
        found["x"] = found[key]
    else:
        found[key] = mutated(found[key], rng)
    return found


ONE_LINE = re.compile(r"^restore_checkpoint: \S+ (is damaged|cannot be read): [^\n]*$")


@pytest.mark.parametrize("name", ["checksums.json", "about/metadata", "arrays/_METADATA"])
def test_files_that_were_altered_with_a_right_checksum(name: str, copied: Path) -> None:
    """A file that the library cannot have written is named in one line, whatever is in it."""
    path, rng = copied / "step-2", random.Random(name)
    before, template = (path / name).read_bytes(), jax.eval_shape(state) | {"step": 0}
    refused = 0
    for _ in range(150):
        changed = mutated(json.loads(before), rng)
        if name == "checksums.json":
            if isinstance(changed, dict) and "files" in changed:
                changed["sum"] = file_checksums._sum_of(changed["files"])
            (path / name).write_text(json.dumps(changed))
        else:
            (path / name).write_text(json.dumps(changed))
            file_checksums.write_checksums(path)
        try:
            restore_checkpoint(path, template)
        except ValueError as e:
            refused += 1
            fits = str(e).startswith(
                "restore_checkpoint: the checkpoint does not fit the tree"
            )  # a right entry, changed
            assert fits or ONE_LINE.match(str(e)), e
    assert refused > 50
    for content in ("", "[" * 10**5, "\xff", "NaN"):
        (path / name).write_text(content, "latin-1")
        if name != "checksums.json":
            file_checksums.write_checksums(path)
        with pytest.raises(ValueError, match=ONE_LINE.pattern):
            restore_checkpoint(path, template)
