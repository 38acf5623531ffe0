"""Words for what went wrong.

Every message about axes is built here, so that it always says the same four things: what was asked, what exists
(names and sizes, never array contents), where, and what to do. The helpers return strings; callers raise.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def warn(message: str) -> None:
    """Warn of the line of the user's program from which all this was called, however many calls of ours lie between."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


_NOT_THE_USERS = {__name__.partition(".")[0], "jax", "equinox", "contextlib", "functools"}


def describe_axes(names: Iterable[str], sizes: Iterable[Any] | None = None) -> str:
    """`(batch=8, embed=16)`, or `(batch, embed)` where the sizes are not known."""
    if sizes is None:
        return f"({', '.join(names)})"
    return f"({', '.join(f'{n}={s}' for n, s in zip(names, sizes, strict=False))})"


def describe_shape(shape: Mapping[str, Any]) -> str:
    """The same for a mapping from names to sizes."""
    return describe_axes(shape.keys(), shape.values())


def suggestion(name: str, known: Iterable[str], nearness: float = 0.6) -> str:
    """` Did you mean 'embed'?`, or nothing when no other known name is near; at 1 only the same one would be."""
    near = difflib.get_close_matches(str(name), [k for k in known if k != name], n=1, cutoff=nearness)
    return f" Did you mean {near[0]!r}?" if near else ""


def not_a_selector(found: Any) -> str:
    """Return the message for something that stands where an axis or its name belongs."""
    return (
        f"An axis is selected by an Axis or its name, got {type(found).__name__}. Write a name such as 'embed', never "
        "a position; `x.shape` shows the names of the axes of x."
    )


def missing_axes(what: str, missing: Sequence[str], known: Sequence[str], sizes: Sequence[Any] | None = None) -> str:
    """Axes were named that are not there."""
    listed = ", ".join(repr(m) for m in missing)
    noun = "axis" if len(missing) == 1 else "axes"
    hints = "".join(suggestion(m, known) for m in missing)
    return f"{what}: no {noun} {listed} in {describe_axes(known, sizes)}.{hints}"


def unknown_mesh_axis(what: str, name: str, mesh_axis: str, mesh: Any) -> str:
    """A mapping sends an axis to a mesh axis that is not there."""
    return (
        f"{what}: the mapping sends axis {name!r} to mesh axis {mesh_axis!r}, which mesh "
        f"{describe_shape(mesh.shape)} does not have.{suggestion(mesh_axis, mesh.axis_names)}"
    )


def size_mismatch(what: str, name: str, sizes: Sequence[tuple[str, Any]]) -> str:
    """One axis was seen with several sizes; `sizes` pairs each place with the size found there."""
    seen = ", ".join(f"{size} in {place}" for place, size in sizes)
    return (
        f"{what}: axis {name!r} has conflicting sizes: {seen}. Axes of one name must have one size; rename one of them."
    )


def duplicate_names(what: str, names: Sequence[str]) -> str:
    """A name stands twice among the axes of one array."""
    twice = sorted({n for n in names if list(names).count(n) > 1})
    listed = ", ".join(repr(n) for n in twice)
    return (
        f"{what}: {listed} would name more than one axis in {describe_axes(names)}. "
        "An array has each name once; rename one of them first."
    )


def wrong_rank(names: Sequence[str], shape: Sequence[Any]) -> str:
    """Names and array disagree on the number of axes."""
    return (
        f"This named array has {len(names)} names {describe_axes(names)} for an array of rank {len(shape)}, "
        f"shape {tuple(shape)}. That is what a positional transform such as `jax.vmap` or `jax.lax.scan` leaves "
        "behind, since it cannot say which axis it took. Map over the axis by name, or take the array out with "
        "`.array` and name it again with `axonym.named`."
    )


def caret(text: str, start: int, stop: int, message: str) -> str:
    """`message` under the offending part of `text`."""
    return f"{message}\n    {text}\n    {' ' * start}{'^' * max(stop - start, 1)}"
