"""Find out whether a checkpoint still has the bytes that were written to it.

Orbax stores the values of arrays without a checksum, so that a flipped bit would load as another weight. A checkpoint
therefore has a file with the checksum of each block of each file. It does not depend on the mesh, and is compared
before Orbax reads anything.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Files = dict[str, tuple[int, int, list[int]]]
"""The size of each file, the size of its blocks, and the checksum of each block."""

CHECKSUMS = "checksums.json"
_PART = "checksums.process_{}.json"

_BLOCK = 2**22
_THREADS = min(32, 4 * (os.cpu_count() or 1))  # a thread reads while another computes


def write_checksums(folder: Any) -> None:
    """Write the checksums of all files in the folder of a checkpoint, before it gets its final name."""
    files: Files = {}
    for part in list(folder.glob(_PART.format("*"))):
        files |= json.loads(part.read_bytes())
        part.unlink()
    known = {*files, CHECKSUMS}
    files |= _checksums_of_files(
        folder, (path for path in _files_below(folder) if path.relative_to(folder).as_posix() not in known)
    )
    (folder / CHECKSUMS).write_text(json.dumps({"files": files, "sum": _sum_of(files)}))


def write_checksums_of_process(folder: Any, process: int) -> None:
    """Write the checksums of the files of one of several processes, for `write_checksums` in the first process."""
    written = folder / "arrays" / f"ocdbt.process_{process}"
    if written.is_dir():
        (folder / _PART.format(process)).write_text(json.dumps(_checksums_of_files(folder, _files_below(written))))


def _checksums_of_files(folder: Any, paths: Iterable[Any]) -> Files:
    paths = list(paths)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(lambda path: _sums_of_blocks(path, _BLOCK), paths)
        return {path.relative_to(folder).as_posix(): found for path, found in zip(paths, sums, strict=True)}


def damage_of(folder: Any, process: int = 0, processes: int = 1) -> list[str]:
    """Describe each damaged file of a checkpoint.

    Each of several processes compares some of the files.
    """
    try:
        content = json.loads((folder / CHECKSUMS).read_bytes())
        files: Files = content["files"]
        if content["sum"] != _sum_of(files) or not all(map(_is_of_a_file, files, files.values())):
            raise ValueError
    except FileNotFoundError:
        return [f"{CHECKSUMS} is missing, as after a partial copy; restore_checkpoint has verify=False for this"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return [f"{CHECKSUMS} differs from what was written"]
    # By size, so that the processes read about the same number of bytes.
    mine = sorted(files, key=lambda name: -files[name][0])[process::processes]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(lambda name: _sums_of_blocks(folder / name, files[name][1]), mine))
    problems = []
    for name, (size, _, sums) in zip(mine, found, strict=True):
        expected_size, _, expected = files[name]
        if size != expected_size:
            problems.append(f"{name} has {size} bytes of {expected_size}" if size >= 0 else f"{name} is missing")
        elif sums != expected:
            problems.append(f"{name} differs from what was written")
    return problems


def _is_of_a_file(name: str, found: Any) -> bool:
    """Return whether this can be the size, the block size and the checksums of a file in the folder."""
    size, block, sums = found
    return (
        not {"", ".."} & {*name.split("/")}
        and all(type(x) is int for x in (size, block, *sums))
        and block > 0
        and len(sums) == -(-size // block)
    )


def verify(path: str | os.PathLike[str]) -> None:
    """Check that a checkpoint has the bytes that were written to it, without loading it.

    Raises a ValueError that lists the damaged files. `python -m axonym.state verify PATH` does the same, and
    `restore_checkpoint` does it automatically.

    Arguments:
        path: the folder of the checkpoint.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axn.state.save_checkpoint(f"{folder}/1", {"step": 100})
    ...     axn.state.verify(f"{folder}/1")
    ...     number = pathlib.Path(f"{folder}/1/about/metadata")
    ...     _ = number.write_text(number.read_text().replace("100", "900"))
    ...     try:
    ...         axn.state.verify(f"{folder}/1")
    ...     except ValueError as e:
    ...         print(str(e).replace(folder, ""))
    verify: /1 is damaged: about/metadata differs from what was written.
    """
    folder = as_folder(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"verify: {folder} is not a complete checkpoint.")
    if problems := damage_of(folder):
        raise ValueError(f"verify: {folder} is damaged: {listed_damage(problems)}.")


def listed_damage(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - 8} files more" if len(problems) > 8 else ""
    return "; ".join(problems[:8]) + more


def as_folder(path: str | os.PathLike[str]) -> Any:
    """Return a path in a file system, or in cloud storage."""
    if "://" not in os.fspath(path):
        return Path(path).absolute()
    from etils import epath  # installed with Orbax

    return epath.Path(path)


def _files_below(folder: Any) -> Iterator[Any]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


def _sums_of_blocks(path: Any, block: int) -> tuple[int, int, list[int]]:
    """Return the size of a file, -1 if it is missing, and the checksums of its blocks."""
    if not path.is_file():
        return -1, block, []
    size, sums = 0, []
    with path.open("rb") as file:
        for content in iter(functools.partial(file.read, block), b""):
            size += len(content)
            sums.append(zlib.crc32(content))
    return size, block, sums


def _sum_of(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())
