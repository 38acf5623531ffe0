"""Read and write state dicts as safetensors files.

A safetensors file starts with the size of its header in eight bytes, and the header as JSON: a dtype, a shape and byte
offsets for each key. Reading maps the file into memory and returns views, so values are read only when they are used.
Writing fetches one array at a time. The `safetensors` package is not used: it copies whole dictionaries, and does not
read all of the format's dtypes into NumPy.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..sharding.shard import to_host
from .naming import StateDict, is_number

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_INDEX_SUFFIX = ".index.json"
_USUAL_NAME = "model.safetensors"


# --- writing ---


def save_state_dict(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict to a safetensors file.

    Arrays on devices are fetched one at a time. The file appears once it is complete: if writing is interrupted, an
    older file of that name stays. With several processes, all of them must call this function; the first one writes.

    Arguments:
        state_dict: arrays and numbers by key. Entries that are None are left out.
        path: the file.
        metadata: additional metadata for the header.

    >>> import tempfile
    >>> from axonym.state import load_state_dict, save_state_dict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state_dict({"weight": jnp.ones(2, "bfloat16")}, f"{folder}/model.safetensors")
    ...     load_state_dict(f"{folder}/model.safetensors")
    {'weight': array([1, 1], dtype=bfloat16)}
    """
    entries = {key: np.asarray(x) if is_number(x) else x for key, x in state_dict.items() if x is not None}
    wrong = [f"{key!r} is {_described(x)}" for key, x in entries.items() if getattr(x, "dtype", None) not in _CODES]
    if wrong:
        raise TypeError(f"save_state_dict: safetensors has no way to store {', '.join(wrong)}.")
    if abstract := [repr(key) for key, x in entries.items() if isinstance(x, jax.ShapeDtypeStruct)]:
        raise TypeError(f"save_state_dict: {', '.join(abstract)} has no values, only a shape and a dtype.")
    # Wide dtypes come first, so that every array starts at a multiple of its item size.
    keys = sorted(entries, key=lambda key: (-entries[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # other readers require "format"
    end = 0
    for key in keys:
        x = entries[key]
        start, end = end, end + x.size * x.dtype.itemsize
        header[key] = {"dtype": _CODES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    _write(Path(path), [len(encoded).to_bytes(8, "little"), encoded], (to_host(entries[key]) for key in keys))
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"save_state_dict {path}")


def _write(path: Path, head: Iterable[bytes], arrays: Iterable[np.ndarray]) -> None:
    """Write a file under a temporary name, and rename it once it is complete."""
    if jax.process_index() != 0:
        for _ in arrays:  # fetching an array gathers it from all processes, so each must take part
            pass
        return
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(unfinished, "xb") as file:
            file.writelines(head)
            for array in arrays:
                # As bytes, since the dtypes of ml_dtypes do not support Python's buffer protocol.
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# --- reading ---


def load_state_dict(path: str | os.PathLike[str]) -> StateDict:
    """Load a state dict from a safetensors file, or from several with an index.

    The arrays are views of the file, read when they are used. They are read-only NumPy arrays, of dtypes such as
    bfloat16 too; copy those that you want to change.

    Arguments:
        path: a file; the index of several files, `model.safetensors.index.json`; or a folder that contains either.

    >>> import tempfile
    >>> from axonym.state import load_state_dict, save_state_dict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state_dict({"weight": np.arange(6.0)}, f"{folder}/model.safetensors")
    ...     load_state_dict(folder)["weight"][2:4]
    array([2., 3.])
    """
    path = Path(path)
    if path.is_dir():
        path = path / _USUAL_NAME
    if not path.exists() and (index := path.with_name(path.name + _INDEX_SUFFIX)).exists():
        path = index
    if not path.exists():
        raise FileNotFoundError(
            f"load_state_dict: {path} does not exist, nor does {path.name + _INDEX_SUFFIX} beside it."
            if not path.name.endswith(_INDEX_SUFFIX)
            else f"load_state_dict: {path} does not exist."
        )
    return _load_several(path) if path.name.endswith(_INDEX_SUFFIX) else _load_file(path)


def _load_several(index: Path) -> StateDict:
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise FileNotFoundError(f"load_state_dict: {index} lists files that do not exist: {', '.join(missing)}.")
    files = {name: _load_file(index.parent / name) for name in names}
    absent = [f"{key!r} in {name}" for key, name in places.items() if key not in files[name]]
    if absent:
        raise ValueError(f"load_state_dict: {index} lists keys that its files do not have: {', '.join(absent)}.")
    return {key: files[name][key] for key, name in places.items()}


def _load_file(path: Path) -> StateDict:
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(f"load_state_dict: {path} is not a safetensors file, or is truncated.")
        try:
            header = json.loads(file.read(header_size))
        except ValueError:
            raise ValueError(f"load_state_dict: {path} is not a safetensors file: its header is not JSON.") from None
    header.pop("__metadata__", None)
    # Read-only, not copy-on-write: for that, the system would reserve memory for the whole file.
    values = np.asarray(np.memmap(path, np.uint8, "r"))[8 + header_size :]
    return {key: _view(path, key, entry, values) for key, entry in header.items()}


def _view(path: Path, key: str, entry: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if code not in _DTYPES:
        raise TypeError(f"load_state_dict: {key!r} in {path} has dtype {code}, which NumPy does not have.")
    dtype = _DTYPES[code]
    if end > values.size:
        raise ValueError(f"load_state_dict: {path} is truncated: {key!r} ends at byte {end} of {values.size}.")
    if end - start != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"load_state_dict: {key!r} in {path} has {end - start} bytes for {dtype}{list(shape)}.")
    return values[start:end].view(dtype).reshape(shape)


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
