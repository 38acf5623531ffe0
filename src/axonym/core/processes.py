"""Keep several processes together when one of them fails.

JAX pairs the collectives of several processes by their order. A process that raises in the middle of them leaves the
others waiting, and its next collective is paired with a wrong one. So when all processes run an operation together,
they finish its collectives, exchange whether they succeeded, and then all raise, or none.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np


class ProcessAgreement(Protocol):
    """Wait for all processes; raise the same error in each if one of them failed or has different data."""

    def __call__(self, same: Mapping[str, str | jax.stages.Lowered] | None = None) -> None: ...


@contextlib.contextmanager
def fail_together(what: str) -> Iterator[ProcessAgreement]:
    """Raise in all processes an error that one of them raises in a with-block; the message names the process.

    All processes must enter the block. A process that fails skips the rest of the block. The block gets a function:
    call it before a collective if anything before that can fail in only some processes. It also takes texts and lowered
    programs by key, which must be the same in every process.

    With one process this does nothing.

    Arguments:
        what: the operation, for messages.

    >>> with axn.sharding.fail_together("save the names") as agree:
    ...     lines = sorted({"embed": 4, "batch": 2})
    ...     agree({"names": str(lines)})
    """
    if jax.process_count() == 1:
        yield lambda same=None: None
        return
    over = False

    def agree(same: Mapping[str, str | jax.stages.Lowered] | None = None) -> None:
        nonlocal over
        try:
            agree_on(what, same or {})
        except BaseException:
            over = True
            raise

    try:
        yield agree
    except BaseException as error:
        if not over:  # the others do not know about it
            _agree_on_success(what, error, {})
        raise
    _agree_on_success(what, None, {})


def agree_on(what: str, same: Mapping[str, str | jax.stages.Lowered]) -> None:
    """Raise an error in all processes if one of them has other texts or programs, or has failed."""
    try:
        # JAX leaves out names of files by itself.
        texts = {key: x if isinstance(x, str) else _ADDRESS.sub("", x.as_text()) for key, x in same.items()}
    except BaseException as error:
        _agree_on_success(what, error, {})
        raise
    _agree_on_success(what, None, texts)


_ADDRESS = re.compile(r'(?<=backend_config = ")[0-9]+(?=")')
"""The address of a custom partitioning's rule in the memory of a process."""


def _agree_on_success(what: str, error: BaseException | None, same: Mapping[str, str]) -> None:
    """Exchange whether each process succeeded; raise an error if one of them failed."""
    summaries = from_all_processes(
        np.array([error is not None, zlib.crc32(json.dumps(dict(same)).encode())], np.uint32)
    )
    if not summaries[:, 0].any():
        if (summaries == summaries[0]).all():
            return
        raise ValueError(difference(what, dict(enumerate(_of_all_processes(dict(same))))))
    told = _of_all_processes(None if error is None else _described_error(error))
    failed = {i: one for i, one in enumerate(told) if one is not None}
    first = next(iter(failed.values()))
    if error is not None and (
        not isinstance(error, Exception) or (len(failed) == len(told) and all(e == first for e in failed.values()))
    ):
        return  # the caller raises it unchanged: all processes have it, or it is an interrupt
    raise _combined_error(what, failed, len(told)) from error


def _of_all_processes(x: Any) -> list[Any]:
    """Return what each process gives to this function."""
    payload = zlib.compress(json.dumps(x).encode())  # programs are long
    lengths = from_all_processes(np.array([len(payload)], np.uint32))[:, 0]
    # Few sizes, since each compiles a gather.
    padded = np.zeros(max(1024, 1 << int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    return [
        json.loads(zlib.decompress(row[:n].tobytes()))
        for row, n in zip(from_all_processes(padded), lengths, strict=True)
    ]


def from_all_processes(x: np.ndarray) -> np.ndarray:
    """Stack the arrays of all processes, which must have the same shape."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x))


def checksum(x: Any) -> int:
    """Return a checksum of the values of an array in host memory."""
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _described_error(error: BaseException) -> dict[str, Any]:
    kinds = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    try:  # an error here would leave the other processes waiting
        text = str(error)
    except Exception:
        text = ""
    errno = getattr(error, "errno", None)
    return {"kinds": kinds, "text": text or kinds[0][1], "errno": errno if isinstance(errno, int) else None}


def _combined_error(what: str, failed: Mapping[int, Mapping[str, Any]], count: int) -> Exception:
    """Build the error that every process raises, with the type of the first failure if possible."""
    interrupts = ("KeyboardInterrupt", "SystemExit")
    lines = [
        f"process {i} of {count}: {'it was interrupted' if one['kinds'][0][1] in interrupts else one['text']}"
        for i, one in failed.items()
    ]
    text = f"{what} failed in {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{what} failed in", *lines])
    first = next(iter(failed.values()))
    if first["errno"] is not None:
        error = OSError(first["errno"], "")  # Python chooses the class, such as FileNotFoundError
        made: Exception = type(error)(text)
        made.errno = first["errno"]  # pyright: ignore[reportAttributeAccessIssue]
        return made
    for module, name in first["kinds"]:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (Exception, KeyError):
            with contextlib.suppress(Exception):  # some need more than a message
                return kind(text)
    return RuntimeError(text)


def difference(what: str, told: Mapping[int, Mapping[str, str]]) -> str:
    """Describe which texts differ between processes, and the lines that only some have; "" if none differs."""
    parts = []
    for key in dict.fromkeys(key for one in told.values() for key in one):
        texts = {i: one.get(key, "") for i, one in told.items()}
        if len(set(texts.values())) == 1:
            continue
        # Lines that all processes have would hide the lines that differ.
        everywhere = set.intersection(*(set(text.splitlines()) for text in texts.values()))
        reordered = all(set(text.splitlines()) == everywhere for text in texts.values())
        groups: dict[str, list[int]] = {}
        for i, text in texts.items():
            own = [*dict.fromkeys(line.strip() for line in text.splitlines() if line not in everywhere)]
            shown = "; ".join(own[:3]) + (" ..." if len(own) > 3 else "")
            if reordered:
                shown = f"the same lines in another order or number ({zlib.crc32(json.dumps(text).encode()):08x})"
            groups.setdefault(shown, []).append(i)
        seen = "".join(f"\n  process {', '.join(map(str, ids))}: {own or 'none'}" for own, ids in groups.items())
        parts.append(f"{key} must be the same in every process, but differ:{seen}")
    return f"{what}: " + "\n".join(parts) if parts else ""
