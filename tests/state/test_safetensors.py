"""Safetensors files: as the package that defines the format has them, lazily read and atomically written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import axonym as axn
from axonym.state import load_state_dict, save_state_dict
from axonym.state.safetensors import _CODES


def entries() -> dict[str, np.ndarray]:
    """Return an array of every dtype, not contiguous, and arrays without axes and without elements."""
    found = {dtype.name: np.arange(1, 7).astype(dtype).reshape(2, 3).T for dtype in _CODES}
    return found | {"scalar": np.array(3.5), "empty": np.zeros((0, 3), np.float32)}


def same(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    numbers = {"number": 2, "jax": jnp.ones(2, "bfloat16"), "none": None}
    save_state_dict({**entries(), **numbers}, path)
    expected = entries() | {"number": np.array(2), "jax": np.ones(2, jnp.bfloat16)}
    found = load_state_dict(path)
    assert found.keys() == expected.keys()
    assert all(same(found[k], x) for k, x in expected.items())
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_state_dict(entries(), str(path), metadata={"by": "axonym"})
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt", "by": "axonym"}
        assert set(file.keys()) == entries().keys()
        for key, x in entries().items():
            view = file.get_slice(key)
            assert view.get_dtype() == _CODES[x.dtype] and tuple(view.get_shape()) == x.shape
            if not key.startswith("float8"):  # which the package cannot convert to NumPy
                assert same(file.get_tensor(key), x), key


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    contiguous = {k: np.ascontiguousarray(x) for k, x in entries().items() if k != "scalar"}
    safetensors.numpy.save_file(contiguous, tmp_path / "a.safetensors")
    found = load_state_dict(tmp_path / "a.safetensors")
    assert found.keys() == contiguous.keys() and all(same(found[k], x) for k, x in contiguous.items())


def test_nothing_is_read_before_it_is_used(tmp_path: Path) -> None:
    """The file is far larger than what it takes on disk and what the process may hold: its values are a hole."""
    path, rows = tmp_path / "a.safetensors", 2**30
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, 64], "data_offsets": [0, rows * 128]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(rows * 128 - 2, os.SEEK_CUR)
        file.write(np.ones(1, jnp.bfloat16).tobytes())
    w = load_state_dict(path)["w"]
    assert w.shape == (rows, 64) and w[-1, -1] == 1 and w[rows // 2, 0] == 0


def test_views_of_a_file_that_is_replaced_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_state_dict({"w": np.zeros(3)}, path)
    w = load_state_dict(path)["w"]
    with pytest.raises(ValueError, match="read-only"):
        w[:] = 7
    save_state_dict({"w": np.ones(3)}, path)
    assert same(w, np.zeros(3)) and same(load_state_dict(path)["w"], np.ones(3))


def test_arrays_on_several_devices(tmp_path: Path, auto_mesh: Any) -> None:
    x = axn.shard(axn.arange(axn.Axis("x", 16)), {"x": ("data", "model")}, auto_mesh)
    save_state_dict({"x": x.array}, tmp_path / "a.safetensors")
    assert same(load_state_dict(tmp_path / "a.safetensors")["x"], np.arange(16, dtype=np.int32))


def test_several_files(tmp_path: Path) -> None:
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    save_state_dict({"a": np.ones(2), "c": np.zeros(1)}, tmp_path / "model-1.safetensors")
    save_state_dict({"b": np.ones(3)}, tmp_path / "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    for path in (index, tmp_path, tmp_path / "model.safetensors"):
        found = load_state_dict(path)
        assert list(found) == ["a", "b", "c"] and same(found["b"], np.ones(3))
    index.write_text(json.dumps({"weight_map": {**weights, "d": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists keys that its files do not have: 'd' in model-2\.safetensors"):
        load_state_dict(tmp_path)
    os.remove(tmp_path / "model-2.safetensors")
    with pytest.raises(FileNotFoundError, match=r"lists files that do not exist: model-2\.safetensors"):
        load_state_dict(tmp_path)


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_state_dict({"a": np.ones(2), "b": np.ones(2)}, path)
    monkeypatch.setattr("axonym.state.safetensors._fetched_array", lambda x: x if x[0] == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_state_dict({"a": np.zeros(2), "b": np.full(2, 3.0)}, path)
    assert same(load_state_dict(path)["a"], np.ones(2)) and os.listdir(tmp_path) == ["a.safetensors"]


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    save_state_dict({"w": np.ones(1)}, tmp_path / f"{'n' * 243}.safetensors")
    assert len(os.listdir(tmp_path)) == 1


KILLED = """
import os, signal, sys
import numpy as np
from axonym.state import save_state_dict
from axonym.state import safetensors

def fetched(x):
    if x.ndim == 1:  # the second array
        os.kill(os.getpid(), signal.SIGKILL)
    return x

safetensors._fetched_array = fetched
save_state_dict({"a": np.ones((512, 512)), "b": np.ones(2)}, sys.argv[1])
"""


@pytest.mark.oldest
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """The older file stays whole, and an export after a while removes what was written of the other."""
    path = tmp_path / "a.safetensors"
    save_state_dict({"w": np.ones(1)}, path)
    ended = subprocess.run([sys.executable, "-c", KILLED, path], capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = tmp_path.glob(".*.unfinished")
    assert left.stat().st_size > 2**20 and load_state_dict(path)["w"] == [1]  # one array of two
    for age, names in ((3000, {path.name, left.name}), (4000, {path.name})):
        os.utime(left, (time.time() - age, time.time() - age))
        save_state_dict({"w": np.zeros(1)}, path)
        assert set(os.listdir(tmp_path)) == names
    assert load_state_dict(path)["w"] == [0]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    wrong = {"a": np.zeros(2, np.complex128), "b": "text", "c": jax.random.key(0), "d": np.ones(1)}
    with pytest.raises(TypeError, match=r"cannot store 'a' is complex128\[2\], 'b' is a str, 'c' is key<fry>\[\]\."):
        save_state_dict(wrong, tmp_path / "a.safetensors")
    with pytest.raises(TypeError, match="'a' has no values"):
        save_state_dict({"a": jax.ShapeDtypeStruct((2,), "float32")}, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"nor does a\.safetensors\.index\.json beside it"):
        load_state_dict(path)
    save_state_dict({"w": np.ones(8)}, path)
    whole = path.read_bytes()
    for content in (
        whole[:4],
        whole[:-8],
        whole.replace(b'"shape": [8]', b'"shape": [7]'),
        (8).to_bytes(8, "little") + b"not JSON",
        whole.replace(b'"F64"', b'"F47"'),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path} is not a safetensors file, or is truncated: .*\.$"):
            load_state_dict(path)


def test_named_arrays_are_not_a_state_dict(tmp_path: Path) -> None:
    model = {"w": axn.ones({"embed": 2})}
    message = r"a state dict has raw arrays, and 'w' is float32\[embed=2\]\. `to_state_dict\(tree\)` makes"
    with pytest.raises(TypeError, match=message):
        save_state_dict(model, tmp_path / "x.safetensors")
    with pytest.raises(TypeError, match=r"expected a state dict, got NamedArray\. `to_state_dict\(tree\)` makes"):
        save_state_dict(model["w"], tmp_path / "x.safetensors")  # pyright: ignore[reportArgumentType]
    save_state_dict(axn.state.to_state_dict(model), tmp_path / "x.safetensors")
