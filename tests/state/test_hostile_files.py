"""Damaged or hostile safetensors files and indices: they are read as by the package, or raise one kind of error."""

from __future__ import annotations

import json
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axonym.state import load_state_dict, save_state_dict

safetensors = pytest.importorskip("safetensors")

ENTRIES = {
    "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "é": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]},
    "flag": {"dtype": "BOOL", "shape": [3], "data_offsets": [24, 27]},
    "none": {"dtype": "F64", "shape": [0, 4], "data_offsets": [27, 27]},
}
VALUES = bytes(range(27))
ODD = [
    -1,
    0,
    1,
    16,
    27,
    28,
    2**31,
    2**53,
    2**63,
    2**64,
    10**30,
    1.0,
    1e300,
    True,
    None,
    "16",
    [],
    [[]],
    {},
    "F32",
    "F4",
]


def as_file(header: Any, values: bytes = VALUES, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + values


def read_by_package(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Return the arrays as read by the package, or None for a file that it refuses."""
    try:
        return {k: (x["dtype"], x["shape"], bytes(x["data"])) for k, x in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


def measured(read: Callable[[], Any]) -> tuple[Any, int]:
    """Return the arrays, or the `ValueError`, and the peak of Python's memory in bytes."""
    tracemalloc.start()
    try:
        found = read()
    except ValueError as e:
        found = e
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found, peak


def check(path: Path, content: bytes) -> bool:
    """Return whether the file was read; check the result and the memory against the package."""
    path.write_bytes(content)
    found, peak = measured(lambda: load_state_dict(path))
    expected, allowed = measured(lambda: read_by_package(content))
    assert peak <= max(allowed, 2 * len(content)) + 2**16, (peak, allowed)  # the header, and a key that fills it
    if isinstance(found, ValueError):
        assert str(path) in str(found) and len(str(found)) < 600 and "\n" not in str(found)
        return False
    assert expected is not None, "the package refuses it"
    assert {k: (list(x.shape), x.tobytes()) for k, x in found.items()} == {k: x[1:] for k, x in expected.items()}
    return True


def flip(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) - len(VALUES))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def replace(rng: random.Random, content: bytes) -> bytes:
    at, some = (
        rng.randrange(8, len(content)),
        [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"-", b"9", b"\xff", b""],
    )
    return content[:at] + rng.choice(some) * rng.choice([1, 1, 9]) + content[at + rng.randrange(3) :]


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))] if rng.random() < 0.7 else content + rng.randbytes(rng.randrange(9))


def resize(rng: random.Random, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little") + rng.choice([-1, 1, 8, 27, 28, 10**8, 2**40, 2**63])
    return size.to_bytes(8, "little") + content[8:]


def edit(rng: random.Random, content: bytes) -> bytes:
    """Change a value somewhere in the header."""
    header: dict[str, Any] = json.loads(json.dumps(ENTRIES))
    key = rng.choice(list(header))
    field = rng.choice([*header[key], "more"])
    if rng.random() < 0.2:
        header[key] = rng.choice(ODD)
    elif rng.random() < 0.4 or not header[key].get(field) or field == "dtype":
        header[key][field] = rng.choice(ODD)
    else:
        header[key][field][rng.randrange(len(header[key][field]))] = rng.choice(ODD)
    return as_file(header)


def swap(rng: random.Random, content: bytes) -> bytes:
    """Reorder the entries, and the fields of one."""
    keys = rng.sample(list(ENTRIES), rng.choice([3, 4, 4]))
    return as_file({key: dict(rng.sample(list(ENTRIES[key].items()), 3)) for key in keys}, rng.randbytes(27))


@pytest.mark.parametrize("mutate", [flip, replace, cut, resize, edit, swap], ids=lambda f: f.__name__)
def test_mutated_files(mutate: Callable[[random.Random, bytes], bytes], tmp_path: Path) -> None:
    rng, whole = random.Random(mutate.__name__), as_file(ENTRIES)
    assert check(tmp_path / "whole.safetensors", whole)
    read = [check(tmp_path / "a.safetensors", mutate(rng, whole)) for _ in range(120)]
    assert not all(read) and (any(read) or mutate in (cut, resize))


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
REFUSED: dict[str, tuple[bytes, str]] = {
    "negative offsets": (as_file({"w": {**F32, "data_offsets": [-4, 0]}}), "integer `-4`, expected usize"),
    "negative shapes": (
        as_file({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
        "integer `-1`, expected usize",
    ),
    "offsets in the wrong order": (as_file({"w": {**F32, "data_offsets": [4, 0]}}), "invalid offset for tensor `w`"),
    "arrays that overlap": (as_file({"w": F32, "v": {**F32, "data_offsets": [2, 6]}}, bytes(6)), "tensor `v`"),
    "two arrays at one place": (as_file({"w": F32, "v": F32}, bytes(4)), "invalid offset for tensor `[vw]`"),
    "a hole": (as_file({"w": F32, "v": {**F32, "data_offsets": [8, 12]}}, bytes(12)), "tensor `v`"),
    "a hole at the start": (as_file({"w": {**F32, "data_offsets": [4, 8]}}, bytes(8)), "tensor `w`"),
    "trailing bytes": (as_file({"w": F32}, bytes(6)), "file not fully covered"),
    "a key twice": (
        as_file(
            b'{"w":%s,"w":%s}' % ((json.dumps(F32).encode(), json.dumps({**F32, "data_offsets": [4, 8]}).encode())),
            bytes(8),
        ),
        "invalid offset for tensor `w`",
    ),
    "a field twice": (as_file(b'{"w":{"dtype":"F32","dtype":"F32"}}'), "duplicate field `dtype`"),
    "a field too few": (as_file({"w": {"dtype": "F32", "shape": [1]}}), "missing field `data_offsets`"),
    "half a character": (as_file(b'{"\\ud800":{}}'), "invalid JSON in header"),
    "no UTF-8": (as_file(b'{"\xff":{}}'), "invalid UTF-8 in header"),
    "a byte-order mark": (as_file(b"\xef\xbb\xbf{}", b""), "invalid JSON in header"),
    "UTF-16": (as_file("{}".encode("utf-16"), b""), "invalid UTF-8 in header"),
    "metadata that is no text": (as_file({"__metadata__": {"a": 1}}, b""), "integer `1`, expected a string"),
    "something after the header": (as_file(b"{} 1", b""), "trailing characters"),
    "a dtype that NumPy lacks": (
        as_file({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)),
        "'w' in PATH has dtype F4, which NumPy does not have",
    ),
    "sizes without limit": (
        as_file({"w": {"dtype": "F32", "shape": [0, 10**18, 10**18], "data_offsets": [0, 0]}}, b""),
        r"'w' in PATH has a shape that NumPy does not have, \[0, 10+, 10+\]",
    ),
    "dimensions without limit": (
        as_file({"w": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, bytes(4)),
        "'w' in PATH has a shape that NumPy does not have",
    ),
    "deep": (as_file(b'{"w":' + b"[" * 10**6, b""), "recursion limit exceeded"),
    "deeper": (as_file(b'{"w":{"shape":' + b"[" * 10**6, b""), "recursion limit exceeded"),
    "a number of many digits": (as_file(b'{"w":{"shape":[' + b"9" * 10**6, b""), "number out of range"),
    "a key of many characters": (as_file({"w" * 10**6: {**F32, "shape": [2]}}, bytes(4)), "invalid shape, data type"),
    "a header longer than the file": (as_file(b"{}", b"", 2**40), "header too large"),
}


@pytest.mark.parametrize(("content", "expected"), REFUSED.values(), ids=list(REFUSED))
def test_what_the_format_forbids(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert not check(path, content)
    with pytest.raises(ValueError, match="^load_state_dict: .*" + expected.replace("PATH", re.escape(str(path)))):
        load_state_dict(path)


def test_what_the_format_allows(tmp_path: Path) -> None:
    """Other writers pad headers otherwise, or align no array, or have more than the format has."""
    for content in (
        as_file(b'{\n"w" : {"shape":[ 1 ],"dtype":"F32",\t"data_offsets":[0 , 4]} } \r\n', bytes(4)),
        as_file(
            {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "w": {**F32, "data_offsets": [3, 7]}},
            VALUES[:7],
        ),
        as_file({"__metadata__": {"a": "é\n"}, '\u20ac"\\': F32}, bytes(4)),
        as_file({}, b""),
        as_file(b'{"w":%s,"w":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(4)),
        as_file({"w": {**F32, "more": 1}}, bytes(4)),
    ):
        assert check(tmp_path / "a.safetensors", content)


def test_nothing_is_allocated_for_what_is_refused(tmp_path: Path) -> None:
    """Both files are holes on the disk: the size of a header says 2 GB, and that of an array 2 TB."""
    path, w = tmp_path / "a.safetensors", {"dtype": "U8", "shape": [2**41], "data_offsets": [0, 2**41]}
    for head, message in (
        (as_file(b"{", b"", 2**31), "header too large"),
        (as_file({"w": w}, b""), "or is truncated"),
    ):
        with path.open("wb") as file:
            file.write(head)
            file.truncate(2**31 + 100)
        found, peak = measured(lambda: load_state_dict(path))
        assert message in str(found) and peak < 2**20


def test_many_entries_take_less_than_with_the_package(tmp_path: Path) -> None:
    """A header can name arrays without values, of which each takes more as an object than as text."""
    path, entry = tmp_path / "a.safetensors", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path.write_bytes(as_file({f"w{i}": entry for i in range(3000)}, b""))
    found, peak = measured(lambda: load_state_dict(path))
    expected, allowed = measured(lambda: safetensors.deserialize(path.read_bytes()))
    assert len(found) == len(expected) == 3000 and peak < allowed


def test_pipes_and_devices_are_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors.index.json")
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "pipe.safetensors"}}))
    for name in ("pipe.safetensors", "pipe.safetensors.index.json", "device.safetensors", index.name):
        with pytest.raises(ValueError, match=r"(pipe|device)\.safetensors\S* is not a regular file"):
            load_state_dict(tmp_path / name)


WRONG_INDEX: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"\xff\xfe{", "is not an index of safetensors files: 'utf-8' codec"),
    "cut": (b'{"weight_map": {"w": "a.saf', "is not an index of safetensors files: Unterminated string"),
    "a list": (b"[]", "it needs a weight_map, with the name of a file for each key"),
    "no map": (b'{"metadata": {}}', "it needs a weight_map"),
    "a map of numbers": (b'{"weight_map": {"w": 1}}', "it needs a weight_map"),
    "a key twice": (b'{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}', "it has 'w' twice"),
    "deep": (b'{"weight_map": ' + b'{"a":' * 10**5, "is not an index of safetensors files: "),
    "lists without end": (b'{"a": [' + b"[]," * 10**5 + b"[]]}", "it has more than 10,000 values that are not text"),
    "numbers without end": (b'{"a": [' + b"7.5," * 10**5 + b"1]}", "it has more than 10,000 values that are not text"),
    "a number of many digits": (b'{"a": ' + b"9" * 10**5 + b"}", "is not an index of safetensors files: "),
    "a byte-order mark": (b'\xef\xbb\xbf{"weight_map": {}}', "is not an index of safetensors files: "),
    "a parent": (
        b'{"weight_map": {"w": "../a.safetensors"}}',
        r"lists files outside its folder: '\.\./a\.safetensors'",
    ),
    "a parent within": (b'{"weight_map": {"w": "b/../../a.safetensors"}}', "lists files outside its folder"),
    "another root": (b'{"weight_map": {"w": "/etc/passwd"}}', "lists files outside its folder: '/etc/passwd'"),
    "another drive": (b'{"weight_map": {"w": "C:\\\\a.safetensors"}}', "lists files outside its folder"),
    "other slashes": (b'{"weight_map": {"w": "..\\\\a.safetensors"}}', "lists files outside its folder"),
    "no name": (b'{"weight_map": {"w": ""}}', "lists files outside its folder: ''"),
    "the folder itself": (b'{"weight_map": {"w": "."}}', r"lists files outside its folder: '\.'"),
    "a NUL": (b'{"weight_map": {"w": "a\\u0000"}}', r"lists files outside its folder: 'a\\x00'"),
    "half a character": (b'{"weight_map": {"w": "a\\ud800"}}', "lists files outside its folder"),
}


@pytest.mark.parametrize(("content", "expected"), WRONG_INDEX.values(), ids=list(WRONG_INDEX))
def test_indices_that_are_wrong(content: bytes, expected: str, tmp_path: Path) -> None:
    save_state_dict({"w": np.ones(1)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    found, peak = measured(lambda: load_state_dict(tmp_path))
    assert isinstance(found, ValueError) and re.search(expected, str(found)), found
    assert str(index) in str(found) and "\n" not in str(found)
    assert peak < 4 * len(content) + 2**17


def test_an_index_with_many_faults_has_a_short_error(tmp_path: Path) -> None:
    save_state_dict({"w": np.ones(1)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for name, many in (("a.safetensors", "keys"), ("../{}", "files outside"), ("{}" * 500, "files that do not exist")):
        index.write_text(json.dumps({"weight_map": {"w" * 500 + str(i): name.format(*[i] * 500) for i in range(99)}}))
        with pytest.raises((ValueError, FileNotFoundError), match=rf"lists {many}.* and 91 more\.$") as e:
            load_state_dict(index)
        assert len(str(e.value)) < 2500


def test_mutated_indices(tmp_path: Path) -> None:
    save_state_dict({"w": np.ones(1)}, tmp_path / "a.safetensors")
    index, rng = tmp_path / "model.safetensors.index.json", random.Random(0)
    whole = b'{"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}'
    for _ in range(200):
        index.write_bytes(rng.choice([flip, replace, cut])(rng, whole))
        try:
            assert set(load_state_dict(index)) <= {"w"}
        except (ValueError, FileNotFoundError) as e:
            assert str(index) in str(e)


def test_what_a_file_could_not_give_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(1)
    with pytest.raises(ValueError, match="no array can have the key '__metadata__'"):
        save_state_dict({"__metadata__": x}, tmp_path / "a.safetensors")
    wrong: dict[Any, Any] = {"a\ud800": x, 3: x}
    with pytest.raises(TypeError, match=r"are text in safetensors, and 'a\\ud800', 3, 7 is not"):
        save_state_dict(wrong, tmp_path / "a.safetensors", metadata={"a": 7})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("axonym.state.safetensors._MAX_HEADER", 1000)
    with pytest.raises(ValueError, match="more than the 1,000 that the format allows"):
        save_state_dict({"w": x}, tmp_path / "a.safetensors", metadata={"a": "a" * 1000})
    assert not any(tmp_path.iterdir())
