"""Read and write state dicts as safetensors files.

A safetensors file starts with the size of its header in eight bytes, and the header as JSON: a dtype, a shape and byte
offsets for each key. The `safetensors` package parses it, and refuses a damaged or malicious file before anything is
allocated for its arrays. Values are not read by the package, which copies them, and lacks some dtypes in NumPy: reading
maps the file into memory and returns views, so values are read only when they are used. Writing fetches one array at a
time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import reprlib
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.processes import fail_together
from ..distribution.padded_array import PaddedArray, stored
from ..named_array import NamedArray, describe_array
from ..sharding.moving import copied_to_host
from .naming import StateDict, is_number

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "BF16": np.dtype(jnp.bfloat16),
    "C64": np.dtype(np.complex64),
    **{
        f"{code}{bits}": np.dtype(f"{kind}{bits}")
        for code, kind in (("U", "uint"), ("I", "int"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000
"""The limit of the `safetensors` package."""

_INDEX_SUFFIX = ".index.json"
_USUAL_NAME = "model.safetensors"

_TO_STATE_DICT = " `to_state_dict(tree)` makes a state dict of a tree of named arrays, such as a model."


# --- writing ---


def save_state_dict(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict to a safetensors file.

    Arrays on devices are fetched one at a time. The file appears once it is complete: if writing is interrupted, an
    older file of that name stays. With several processes, all of them must call this function; the first one writes. If
    it cannot, or another one fails, all of them raise the same error.

    Arguments:
        state_dict: arrays and numbers by key. Entries that are None are left out.
        path: the file.
        metadata: additional metadata for the header.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_state_dict({"weight": jnp.ones(2, "bfloat16")}, f"{folder}/model.safetensors")
    ...     axn.state.load_state_dict(f"{folder}/model.safetensors")
    {'weight': array([1, 1], dtype=bfloat16)}
    """
    with fail_together("save_state_dict") as agree:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"save_state_dict: expected a state dict, got {type(state_dict).__name__}.{_TO_STATE_DICT}")
        entries = {key: np.asarray(x) if is_number(x) else x for key, x in state_dict.items() if x is not None}
        keys, head = _keys_and_header(entries, metadata, path)
        # Gathers are paired by their order, so every process must have every array.
        agree({"arrays": "\n".join(f"{key!r} {_described_value(entries[key])}" for key in keys)})
        _write_file(Path(path), head, (_fetched_array(entries[key]) for key in keys))


def _keys_and_header(
    entries: Mapping[str, Any], metadata: Mapping[str, str] | None, path: str | os.PathLike[str]
) -> tuple[list[str], list[bytes]]:
    """Return the keys in the order in which their arrays are written, and the header of the file."""
    if named := [f"{key!r} is {describe_array(x)}" for key, x in entries.items() if isinstance(x, NamedArray)]:
        raise TypeError(f"save_state_dict: a state dict has raw arrays, and {', '.join(named)}.{_TO_STATE_DICT}")
    wrong = [
        f"{key!r} is {_described_value(x)}" for key, x in entries.items() if getattr(x, "dtype", None) not in _CODES
    ]
    if wrong:
        raise TypeError(f"save_state_dict: safetensors cannot store {', '.join(wrong)}.")
    if abstract := [repr(key) for key, x in entries.items() if isinstance(x, jax.ShapeDtypeStruct)]:
        raise TypeError(f"save_state_dict: {', '.join(abstract)} has no values, only a shape and a dtype.")
    if deleted := [
        repr(key) for key, x in entries.items() if isinstance(stored(x), jax.Array) and stored(x).is_deleted()
    ]:
        raise RuntimeError(f"save_state_dict: {', '.join(deleted)} was deleted, as by a donation.")
    metadata = {"format": "pt", **(metadata or {})}  # other readers require "format"
    if unfit := [_shortened(text) for text in (*entries, *metadata, *metadata.values()) if not _is_text(text)]:
        raise TypeError(f"save_state_dict: keys and metadata are text in safetensors, and {', '.join(unfit)} is not.")
    if _METADATA in entries:
        raise ValueError(f"save_state_dict: no array can have the key {_METADATA!r}, which the header itself uses.")
    # Wide dtypes come first, so that every array starts at a multiple of its item size.
    keys = sorted(entries, key=lambda key: (-entries[key].dtype.itemsize, key))
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for key in keys:
        x = entries[key]
        start, end = end, end + math.prod(x.shape) * x.dtype.itemsize
        header[key] = {"dtype": _CODES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MAX_HEADER:
        raise ValueError(
            f"save_state_dict: the keys and metadata of {path} take {len(encoded):,} bytes, more than the "
            f"{_MAX_HEADER:,} that the format allows; save the arrays in several files."
        )
    return keys, [len(encoded).to_bytes(8, "little"), encoded]


def _is_text(x: Any) -> bool:
    """Return whether a value is text that a file can contain: Python strings can contain half characters."""
    try:
        return isinstance(x, str) and x.encode() is not None
    except UnicodeEncodeError:
        return False


def _fetched_array(x: Any) -> np.ndarray:
    if isinstance(x, PaddedArray):
        return x.sliced(_fetched_array(x.array))
    return copied_to_host(x) if isinstance(x, jax.Array) else x


def _write_file(path: Path, head: Iterable[bytes], arrays: Iterator[np.ndarray]) -> None:
    """Write a file under a temporary name, and rename it once it is complete."""
    number = zlib.crc32(path.name.encode(errors="surrogatepass"))  # so that the name has a fixed length
    unfinished = path.with_name(f".{number:08x}-{uuid.uuid4().hex}.unfinished")
    try:
        if jax.process_index() == 0:
            with open(unfinished, "xb") as file:
                _remove_unfinished(unfinished)
                file.writelines(head)
                for array in arrays:
                    # As bytes, since the dtypes of ml_dtypes do not support Python's buffer protocol.
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        if jax.process_count() > 1:  # all processes take part in the gathers, even if the file could not be written
            deque(arrays, maxlen=0)
        unfinished.unlink(missing_ok=True)


_ABANDONED = 3600.0
"""The number of seconds without a write after which a file counts as abandoned."""


def _remove_unfinished(mine: Path) -> None:
    """Remove unfinished copies of a file left by processes that were killed."""
    for path in mine.parent.glob(f"{mine.name.partition('-')[0]}-*.unfinished"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            # By the clock of the file system, which may be on another machine.
            if mine.stat().st_mtime - path.stat().st_mtime > _ABANDONED:
                path.unlink()


# --- reading ---


def load_state_dict(path: str | os.PathLike[str]) -> StateDict:
    """Load a state dict from a safetensors file, or from several with an index.

    The arrays are views of the file, read when they are used. They are read-only NumPy arrays, of dtypes such as
    bfloat16 too; copy those that you want to change.

    Arguments:
        path: a file; the index of several files, `model.safetensors.index.json`; or a folder that contains either.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_state_dict({"weight": np.arange(6.0)}, f"{folder}/model.safetensors")
    ...     axn.state.load_state_dict(folder)["weight"][2:4]
    array([2., 3.])
    """
    path = Path(path)
    if path.is_dir():
        path = path / _USUAL_NAME
    if not path.exists() and (index := path.with_name(path.name + _INDEX_SUFFIX)).exists():
        path = index
    if not path.exists():
        nor = "" if path.name.endswith(_INDEX_SUFFIX) else f", nor does {path.name + _INDEX_SUFFIX} beside it"
        raise FileNotFoundError(f"load_state_dict: {path} does not exist{nor}.")
    if not path.name.endswith(_INDEX_SUFFIX):
        return _load_file(path)
    places = _read_index(path)
    files = {name: _load_file(path.parent / name) for name in sorted(set(places.values()))}
    absent = [
        f"{_shortened(key)} in {_shortened(name)[1:-1]}" for key, name in places.items() if key not in files[name]
    ]
    if absent:
        raise ValueError(f"load_state_dict: {path} lists keys that its files do not have: {_some_of(absent)}.")
    return {key: files[name][key] for key, name in places.items()}


_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([^\s{}:,\[\]"]++|[\[{])', re.DOTALL)
_MOST_OTHERS = 10_000
"""The most values that are not text in an index: lists and numbers take a hundred times their text in memory."""


def _some_of(names: Sequence[str]) -> str:
    """List the first of many names."""
    more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each key; check that all exist in the folder of the index."""
    _check_regular(index)
    try:
        if index.stat().st_size > _MAX_HEADER:
            raise ValueError(f"it is larger than {_MAX_HEADER:,} bytes")
        text = index.read_bytes()
        others = (token for token in _TOKEN.finditer(text) if token[1])
        if next(itertools.islice(others, _MOST_OTHERS, None), None):
            raise ValueError(f"it has more than {_MOST_OTHERS:,} values that are not text")
        content = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("it needs a weight_map, with the name of a file for each key")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"load_state_dict: {index} is not an index of safetensors files: {e}.") from None
    names = sorted(set(places.values()))
    if outside := [_shortened(name) for name in names if not _is_inside(name)]:
        raise ValueError(f"load_state_dict: {index} lists files outside its folder: {_some_of(outside)}.")
    if missing := [_shortened(name)[1:-1] for name in names if not os.path.lexists(index.parent / name)]:
        raise FileNotFoundError(f"load_state_dict: {index} lists files that do not exist: {_some_of(missing)}.")
    return places


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {_shortened(next(key for key in found if keys.count(key) > 1))} twice")
    return found


def _is_inside(name: str) -> bool:
    """Return whether a name stays in its folder, on any system."""
    path = PureWindowsPath(name)  # which accepts both kinds of slashes
    return bool(path.parts) and not path.anchor and ".." not in path.parts and name.isprintable()


def _check_regular(path: Path) -> None:
    """Refuse pipes and devices: opening one may block forever."""
    if not path.is_file():
        raise ValueError(f"load_state_dict: {path} is not a regular file.")


def _load_file(path: Path) -> StateDict:
    _check_regular(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise ImportError("load_state_dict needs safetensors, which is optional: install axonym[safetensors].") from e
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        try:
            parsed = safe_open(path, "np")
        except SafetensorError as e:
            problem = " ".join(str(e).split())[:200]
            raise ValueError(
                f"load_state_dict: {path} is not a safetensors file, or is truncated: {problem}."
            ) from None
        # Read-only, not copy-on-write, for which the system would reserve memory for the whole file.
        values = np.asarray(np.memmap(file, np.uint8, "r"))
    found: StateDict = {}
    for key in parsed.offset_keys():  # each begins where the one before ends, as the package has checked
        entry = parsed.get_slice(key)
        code, shape = entry.get_dtype(), entry.get_shape()
        if code not in _DTYPES:
            raise ValueError(
                f"load_state_dict: {_shortened(key)} in {path} has dtype {code}, which NumPy does not have."
            )
        end = start + math.prod(shape) * _DTYPES[code].itemsize
        try:
            found[key] = values[start:end].view(_DTYPES[code]).reshape(shape)
        except (ValueError, OverflowError):  # an array without values can have any sizes
            what = f"{_shortened(key)} in {path} has a shape that NumPy does not have, {_shortened(shape)}"
            raise ValueError(f"load_state_dict: {what}.") from None
        start = end
    return found


def _shortened(x: Any) -> str:
    """Describe a key or a value, however long, in a few words."""
    return _SHORT.repr(x)


_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 100, 8


def _described_value(x: Any) -> str:
    return describe_array(x) if hasattr(x, "dtype") else f"a {type(x).__name__}"
