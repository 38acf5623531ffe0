"""Errors that the user can do something about."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


class Problem(Exception):
    """One sentence for the user: what is wrong, and what to do about it. It is shown without a traceback."""


def reason_of(error: BaseException) -> str:
    """Why something failed, in a few words: the errors of file systems and checkpoints are long."""
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return "there is not enough memory for a copy"
    full = re.search(r"no space left|disk quota|RESOURCE_EXHAUSTED", text, flags=re.IGNORECASE)
    if full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        where = re.search(r"\w+ failed in process \d+ of \d+: ", text)
        return f"{where[0] if where else ''}the disk is full"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def listed(problems: Sequence[str]) -> str:
    """Several problems in a line."""
    return "; ".join(problems)


def difference_in_a_line(error: Exception) -> str:
    """What differs between processes, in one line."""
    first, *more = str(error).removeprefix("connect_processes: ").splitlines()
    return " ".join([first, "; ".join(line.strip() for line in more)]).strip()


def agree_on(agree: Callable[[Mapping[str, Any]], None], **same: Any) -> None:
    """Compare texts and programs between processes; a problem if they differ."""
    try:
        agree({name.replace("_", " "): x for name, x in same.items()})
    except ValueError as e:
        raise Problem(difference_in_a_line(e)) from None


def in_a_line(text: object) -> str:
    """What was said in several lines, in one."""
    return " ".join(str(text).split())
