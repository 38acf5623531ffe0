"""The training text, as bytes, with a part held out for evaluation.

The texts of a step depend only on a seed and the number of texts seen before. So a checkpoint stores only this number,
and every host can compute its part by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import axonym as axn
from axonym import Axis, NamedArray

from .problems import Problem, reason_of

VOCAB = 256
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""The bytes that tokenizers write as the characters with these numbers; the others are written as those from 256 on."""
_HIDDEN = [i for i in range(VOCAB) if i not in _SHOWN]
TOKENIZER = {
    "version": "1.0",
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    "model": {
        "type": "BPE",
        "vocab": {chr(i) if i in _SHOWN else chr(VOCAB + _HIDDEN.index(i)): i for i in range(VOCAB)},
        "merges": [],
    },
}
"""The content of a `tokenizer.json` in which each byte is a token."""
"""Tokens are bytes."""

_NOT_TEXT = {".git", "__pycache__", "node_modules", "site-packages"}
_LEFT_OUT = _NOT_TEXT | {"test", "tests", "idle_test", "lib-dynload"}
"""Folders of the standard library that are not read: its tests are as large as the rest."""


class Joined:
    """The bytes of files with a newline after each but the last, or a stretch of them.

    Files are mapped into memory when something of them is asked for: what is not used is not read, and what was used
    can be dropped.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], start: int = 0, stop: int | None = None):
        self.paths, self.sizes = paths, sizes
        self.starts = np.cumsum([0, *(size + 1 for size in sizes)])
        """Where each file begins, after which there is a newline."""
        self.start, self.stop = start, int(self.starts[-1]) - 1 if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: Any) -> Any:
        """A stretch by a slice, which reads nothing; and bytes by their places."""
        if isinstance(index, slice):
            inside = range(self.start, self.stop)[index]
            return Joined(self.paths, self.sizes, inside.start, inside.stop)
        places = np.asarray(index) % len(self) + self.start
        files = np.searchsorted(self.starts, places, "right") - 1
        found = np.full(places.shape, _NEWLINE, np.uint8)
        for file in np.unique(files):
            offsets = places - self.starts[file]
            here = (files == file) & (offsets < self.sizes[file])
            if here.any():
                found[here] = _mapped(self.paths[file], self.sizes[file])[offsets[here]]
        return found

    def parts(self) -> Iterator[np.ndarray]:
        """All bytes, a file at a time."""
        for path, size, start in zip(self.paths, self.sizes, self.starts.tolist(), strict=False):
            first, last = max(self.start - start, 0), min(self.stop - start, size + 1)
            if first < min(last, size):
                yield _mapped(path, size)[first:last]
            if first <= size < last:
                yield np.array([_NEWLINE], np.uint8)


_NEWLINE = ord("\n")


@functools.lru_cache(maxsize=64)
def _mapped(path: Path, size: int) -> np.ndarray:
    try:
        return np.asarray(np.memmap(path, np.uint8, "r", shape=(size,)))
    except ValueError:
        raise Problem(f"The text in {path} has become shorter while it was used.") from None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on, and text to evaluate on."""

    name: str
    files: int
    train: Joined
    held_out: Joined

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that tells this text from others."""
        crc = 0
        for text in (self.train, self.held_out):
            for part in text.parts():
                crc = zlib.crc32(part.data, crc)
        return crc


def read(source: str, held_out: float, Batch: Axis, Pos: Axis) -> Corpus:
    """The text of a file, of a folder, or of Python's standard library.

    Files come in an order that looks random and is always the same, and the end of the whole is held out: of many files
    these are some, and of a single file it is its end.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths, name = _files(root, ".py", _LEFT_OUT), "the source text of Python's standard library"
    else:
        root = Path(source)
        if not (os.path.isfile(root) or os.path.isdir(root)):
            raise Problem(f"There is no file or folder {source}; --data says where the text is.")
        paths, name = ([root] if root.is_file() else _files(root, "", _NOT_TEXT)), source
    if not paths:
        raise Problem(f"The folder {root} has no files to learn from.")
    ordered = sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest())
    try:
        text = Joined(ordered, [_size(path) for path in ordered])
    except OSError as e:
        raise Problem(f"The text cannot be read from {e.filename or source}: {reason_of(e)}.") from None
    end = len(text) - int(len(text) * held_out)
    corpus = Corpus(name, len(paths), text[:end], text[end:])
    needed = (Batch.size + 1) * Pos.size
    for part, share in ((corpus.train, 1 - held_out), (corpus.held_out, held_out)):
        if len(part) < needed:
            least = int(needed / min(share, 1 - share, held_out)) + 1
            raise Problem(
                f"The text of {name} has {len(text):,} bytes, and a batch of {Batch.size} texts of {Pos.size} needs at "
                f"least {least:,}: give more text, or a smaller --batch or --length."
            )
    return corpus


def _size(path: Path) -> int:
    with path.open("rb") as file:  # so that those that cannot be read are known now
        return os.fstat(file.fileno()).st_size


def _files(root: Path, suffix: str, left_out: set[str]) -> list[Path]:
    def is_wanted(path: Path) -> bool:
        inside = path.relative_to(root).parts
        return path.is_file() and path.name.endswith(suffix) and left_out.isdisjoint(inside)

    return [path for path in root.rglob("*") if is_wanted(path)]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Pieces of a text of equal length: each once in every round, in an order that is different each time."""

    text: Joined | np.ndarray
    length: int
    seed: int

    @property
    def per_round(self) -> int:
        return len(self.text) // self.length - 1

    def start_of(self, number: int) -> int:
        """Where the piece begins that is the `number`-th to be seen."""
        round_, place = divmod(number, self.per_round)
        shift, order = _round(self.seed, round_, self.per_round, self.length)
        return int(order[place]) * self.length + shift

    @functools.cached_property
    def order(self) -> int:
        """A number that tells the order of the pieces in the first rounds from others."""
        rounds = [_round(self.seed, i, self.per_round, self.length) for i in range(2)]
        return zlib.crc32(
            repr([(int(shift), zlib.crc32(np.asarray(order, np.int64))) for shift, order in rounds]).encode()
        )

    def batch(self, first: int, Batch: Axis, Pos: Axis, sharding: jax.sharding.Sharding) -> NamedArray:
        """The pieces from the `first` on. Each device gets its own part, and nothing else is put together."""

        def part(index: Any) -> np.ndarray:
            rows, columns = (range(*s.indices(size)) for s, size in zip(index, (Batch.size, Pos.size), strict=True))
            starts = np.array([self.start_of(first + row) for row in rows])
            return self.text[starts[:, None] + np.array(columns)[None]].astype(np.int32)

        tokens = jax.make_array_from_callback((Batch.size, Pos.size), sharding, part)
        return axn.named(tokens, (Batch, Pos))


@functools.lru_cache(maxsize=4)
def _round(seed: int, round_: int, count: int, length: int) -> tuple[int, np.ndarray]:
    """Where pieces begin in a round, by how much they are shifted, and their order."""
    rng = np.random.default_rng((seed, round_))
    return int(rng.integers(length)), rng.permutation(count)


def encode(text: str) -> np.ndarray:
    """The tokens of a text."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Any) -> str:
    """The text of tokens, without what a terminal would take for a command."""
    text = np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")
    return "".join(
        c if c.isprintable() or c == "\n" else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
