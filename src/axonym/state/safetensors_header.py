"""Parse the header of a safetensors file, and check everything that the format demands.

The header is JSON of one form: an object with a dtype, a shape and byte offsets for each key. It is not trusted, so it
is parsed by a grammar of just this form: nothing nests, no number is large, and no key occurs twice. Nothing is
allocated for an array before its entry is checked.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {
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

METADATA = "__metadata__"
MAX_HEADER = 100_000_000
"""The limit of the `safetensors` package."""
_MAX_RANK = 64
"""The limit of NumPy."""


class TensorEntry(NamedTuple):
    """An array in a file. The offsets count from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class InvalidFile(Exception):
    """A fault of a file, and the key of the entry, if it is in one."""

    def __init__(self, problem: str, key: str | None = None):
        super().__init__(problem)
        self.key = key


def parse_header(header: bytes, size: int) -> dict[str, TensorEntry]:
    """Return the entry of each key; the arrays must cover the `size` bytes after the header, each byte once.

    Raises `InvalidFile`.
    """
    entries: dict[str, TensorEntry] = {}
    text = _Text(header)
    for key in text.members():
        if key == METADATA:
            for _ in text.members():
                text.string()
            continue
        fields: dict[str, Any] = {}
        for field in text.members(key):
            if field not in _FIELDS:
                raise InvalidFile(f"has a field {short(field)}, which the format does not have", key)
            fields[field] = text.string(key) if field == "dtype" else text.numbers(key)
        if missing := [field for field in _FIELDS if field not in fields]:
            raise InvalidFile(f"has no {missing[0]}", key)
        entries[key] = _checked(key, fields, size)
    text.end()
    _check_cover(entries, size)
    return entries


_FIELDS = ("dtype", "shape", "data_offsets")


def _checked(key: str, fields: dict[str, Any], size: int) -> TensorEntry:
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if code not in DTYPES:
        raise InvalidFile(f"has dtype {short(code).strip(chr(39))}, which NumPy does not have", key)
    dtype = DTYPES[code]
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidFile(f"has data_offsets {short(offsets)}, but they are a start and an end", key)
    start, end = offsets
    if end > size:
        raise InvalidFile(f"is truncated: {short(key)} ends at byte {end} of {size}")
    # Python's integers do not overflow, as the product of sizes in a hostile header would elsewhere.
    if end - start != dtype.itemsize * math.prod(shape):
        raise InvalidFile(f"has {end - start} bytes for {dtype}{short(shape)}", key)
    return TensorEntry(dtype, tuple(shape), start, end)


def _check_cover(entries: dict[str, TensorEntry], size: int) -> None:
    covered, before = 0, None
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < covered:
            raise InvalidFile(f"overlaps {short(before)}: it starts at byte {entry.start}, before {covered}", key)
        if entry.start > covered:
            raise InvalidFile(f"starts at byte {entry.start}, but no array has the bytes from {covered} on", key)
        covered, before = entry.end, key
    if covered != size:
        raise InvalidFile(f"has {size - covered} bytes after its last array")


def short(x: Any) -> str:
    """Describe a key or a value, however long, in a few words."""
    return _SHORT.repr(x)


_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 100, 8


# --- the grammar ---

# The quantifiers are possessive (`*+`): a pattern that does not match fails at once, without trying shorter matches.
_SPACE = rb"[ \t\n\r]*+"
_NUMBER = rb"(?:0|[1-9][0-9]{0,18}+)(?![0-9.eE])"


def _token(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(b"(" + pattern + b")" + _SPACE)


_OPEN, _CLOSE, _COLON, _NEXT = _token(rb"\{"), _token(rb"\}"), _token(b":"), _token(rb"[,}]")
_STRING = _token(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"')
_NUMBERS = _token(
    rb"\[%(space)s(?:%(number)s(?:%(space)s,%(space)s%(number)s){0,%(more)d})?%(space)s\]"
    % {b"space": _SPACE, b"number": _NUMBER, b"more": _MAX_RANK - 1}
)


class _Text:
    """A header and the position of the reader."""

    def __init__(self, text: bytes):
        self.text, self.at = text, 0

    def members(self, key: str | None = None) -> Iterator[str]:
        """Yield the names in an object; the caller reads the value of each."""
        seen: set[str] = set()
        self._take(_OPEN, "'{'", key)
        more = self._match(_CLOSE) is None
        while more:
            name = self.string(key)
            if name in seen:
                raise InvalidFile(f"has {short(name)} twice", key)
            seen.add(name)
            self._take(_COLON, "':'", name if key is None else key)
            yield name
            more = self._take(_NEXT, "',' or '}'", name if key is None else key)[1] == b","

    def string(self, key: str | None = None) -> str:
        start = self.at
        try:
            found = self._take(_STRING, "a string", key)
            first, last = found.span(1)
            if self.text.find(b"\\", first, last) < 0:  # without a copy, since a key may be as long as the file
                return str(memoryview(self.text)[first + 1 : last - 1], "utf-8")
            value = json.loads(found[1].decode())
            value.encode()  # an escape can be half a character, which is not valid Unicode
        except ValueError:
            raise InvalidFile(f"has a string that is not Unicode at byte {start} of the header", key) from None
        return value

    def numbers(self, key: str) -> list[int]:
        found = self._take(_NUMBERS, f"a list of at most {_MAX_RANK} whole numbers from 0", key)
        return [int(n) for n in re.findall(rb"[0-9]+", found[1])]

    def end(self) -> None:
        if self.at != len(self.text):
            raise self._unexpected("nothing more", None)

    def _take(self, pattern: re.Pattern[bytes], expected: str, key: str | None) -> re.Match[bytes]:
        found = self._match(pattern)
        if found is None:
            raise self._unexpected(expected, key)
        return found

    def _match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _unexpected(self, expected: str, key: str | None) -> InvalidFile:
        found = self.text[self.at : self.at + 20].decode(errors="backslashreplace") or "its end"
        where = f"expected {expected} at byte {self.at} of the header, found {short(found)}"
        not_json = "is not a safetensors file: its header is not JSON of that format"
        return InvalidFile(f"{'does not have the format' if key is not None else not_json}: {where}", key)
