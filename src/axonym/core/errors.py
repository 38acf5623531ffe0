"""Texts of errors and warnings about axes.

Each message says the same four things: what was asked, what exists (names and sizes, never array contents), where, and
what to do. The functions return strings for callers to raise, except `warn`, `distinct` and the decorators.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the user's line that called the library, however deep the calls inside it."""
    if (handle := _HANDLER.get()) is not None and handle(message):
        return
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)


_HANDLER: ContextVar[Callable[[str], bool] | None] = ContextVar("handler of warnings", default=None)


@contextlib.contextmanager
def handling_warnings(handle: Callable[[str], bool]) -> Iterator[None]:
    """Let a function handle the warnings of this thread in a with-block: it returns whether one is done with."""
    token = _HANDLER.set(handle)
    try:
        yield
    finally:
        _HANDLER.reset(token)


_NOT_THE_USERS = {__name__.partition(".")[0], "jax", "equinox", "contextlib", "functools"}


def describe_axes(names: Iterable[str], sizes: Iterable[Any] | None = None) -> str:
    """Return `(batch=8, embed=16)`, or `(batch, embed)` if the sizes are not known."""
    if sizes is None:
        return f"({', '.join(names)})"
    return f"({', '.join(f'{n}={s}' for n, s in zip(names, sizes, strict=False))})"


def indivisible(axis: str, size: int, over: Mapping[str, int]) -> str:
    """Say that mesh axes do not divide the size of an axis, or of a dimension."""
    shards, listed = math.prod(over.values()), " x ".join(f"{a}={n}" for a, n in over.items())
    return f"{axis} of size {size} cannot be sharded over {listed}: {size} is not a multiple of {shards}."


def describe_selectors(found: Iterable[Any]) -> str:
    """Return the text of `describe_axes` for selectors, where plain names have no size."""
    return f"({', '.join(s if isinstance(s, str) else f'{s.name}={s.size}' for s in found)})"


def describe_shape(shape: Mapping[str, Any]) -> str:
    """Return the text of `describe_axes` for a mapping from names to sizes."""
    return describe_axes(shape.keys(), shape.values())


def describe_sharded(
    dtype: Any, names: Iterable[str] | None, sizes: Iterable[int], over: Iterable[Sequence[str]]
) -> str:
    """Return `float32[batch=8 over data, embed=4]`: an array and the mesh axes that each axis is sharded over."""
    axes = [str(s) for s in sizes] if names is None else [f"{n}={s}" for n, s in zip(names, sizes, strict=True)]
    shown = (f"{a} over {' and '.join(o)}" if o else a for a, o in zip(axes, over, strict=True))
    return f"{dtype}[{', '.join(shown)}]"


def describe_mesh(mesh: Any) -> str:
    """Return `(data=4, model=2) of Auto axes`."""
    kinds = " and ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))
    return describe_shape(mesh.shape) + (f" of {kinds} axes" if kinds else "")


def suggestion(name: str, known: Iterable[str], nearness: float = 0.6) -> str:
    """Return ` Did you mean 'embed'?`, or an empty string if no other known name is similar enough (`nearness`)."""
    near = difflib.get_close_matches(str(name), [k for k in known if k != name], n=1, cutoff=nearness)
    return f" Did you mean {near[0]!r}?" if near else ""


def suggestions(names: Iterable[str], known: Iterable[str]) -> str:
    """Return the suggestions for several names, one after the other."""
    known = list(known)
    return "".join(suggestion(name, known) for name in names)


def quoted(names: Iterable[Any]) -> str:
    """Return `'batch', 'embed'`."""
    return ", ".join(map(repr, names))


def not_a_selector(found: Any, names: Sequence[str] | None = None) -> str:
    """Return the message for an argument that should be an axis or its name; `names` are the array's."""
    refused = f"An axis is selected by an Axis or its name, got {type(found).__name__}."
    if not names:
        return f"{refused} Write a name such as 'embed', never a position; `x.shape` shows the names of the axes of x."
    if isinstance(found, int) and -len(names) <= found < len(names):
        return f"{refused} Write {names[found]!r} for position {found} of {describe_axes(names)}."
    return f"{refused} The axes are {describe_axes(names)}."


def not_an_axis(found: Any, name: str = "batch") -> str:
    """Return the message for an argument that should be an axis with its size."""
    size = found if type(found) is int else 8
    return (
        f"An axis has a name and a size, got {type(found).__name__}. Write `{{{name!r}: {size}}}` or "
        f"`axonym.Axis({name!r}, {size})`."
    )


def say_how_to_call(f: F) -> F:
    """Decorate a function so that the error for a call with wrong arguments ends with a correct call.

    Use it for what people call in their first hour, out of habit from other libraries: each call costs a frame more.
    """

    @functools.wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError as error:
            # An error about the arguments has no frame of the function: it was raised before the body began.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            from . import foreign_names

            raise TypeError(foreign_names.in_call(f, str(error), args, kwargs)) from None

    return called  # pyright: ignore[reportReturnType]


def say_how_to_make(layer: T) -> T:
    """Decorate a layer class so that errors for calls with wrong arguments say how to make a layer."""
    layer.__init__ = say_how_to_call(layer.__init__)
    made = vars(layer).get("init")
    if isinstance(made, (staticmethod, classmethod)):
        layer.init = type(made)(say_how_to_call(made.__func__))
    return layer


class NoInit:
    """Stands in for `init` on layers without parameters: raises an error for users who know it from other layers."""

    def __init__(self, call: str):
        self.call = call

    def __get__(self, _: Any, layer: type) -> Any:
        raise AttributeError(f"{layer.__name__} has no `init`, since it has no parameters. Write `{self.call}`.")


def called(fn: Any) -> str:
    """Return the name of a function, or the type of a module or another object that is called, which may be large."""
    fn = getattr(fn, "func", fn)  # of functools.partial
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 name` or `2 names`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def describe_bytes(count: float) -> str:
    """Return `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + " TiB"


def missing_axes(what: str, missing: Sequence[str], known: Sequence[str], sizes: Sequence[Any] | None = None) -> str:
    """Return the message for axes that the array lacks."""
    noun = "axis" if len(missing) == 1 else "axes"
    return f"{what}: no {noun} {quoted(missing)} in {describe_axes(known, sizes)}.{suggestions(missing, known)}"


def unknown_mesh_axis(what: str, name: str, mesh_axis: str, mesh: Any) -> str:
    """Return the message for a mapping from an axis to a mesh axis that the mesh lacks."""
    return (
        f"{what}: the mapping maps axis {name!r} to mesh axis {mesh_axis!r}, which mesh "
        f"{describe_shape(mesh.shape)} does not have.{wrong_way_round({name: mesh_axis}, mesh.axis_names)}"
        f"{suggestion(mesh_axis, mesh.axis_names)}"
    )


def wrong_way_round(mapping: Mapping[str, Any], mesh_axes: Iterable[str]) -> str:
    """Return a sentence about the entries of a mapping that go from a mesh axis to an axis, or an empty string."""
    known = set(mesh_axes)
    entries = [(k, (v,) if isinstance(v, str) else tuple(v or ())) for k, v in mapping.items() if k in known]
    turned = {names[0]: k for k, names in entries if names and known.isdisjoint(names)}
    return f" A mapping goes from axes to mesh axes: write `{turned}`." if turned else ""


def size_mismatch(what: str, name: str, sizes: Sequence[tuple[str, Any]]) -> str:
    """Return the message for an axis with several sizes; `sizes` pairs each place with the size there."""
    seen = ", ".join(f"{size} in {place}" for place, size in sizes)
    return (
        f"{what}: axis {name!r} has conflicting sizes: {seen}. Axes of one name must have one size; rename one of them."
    )


def duplicate_names(what: str, names: Sequence[str]) -> str:
    """Return the message for a name that occurs twice among the axes of one array."""
    twice = sorted({n for n in names if list(names).count(n) > 1})
    return (
        f"{what}: {quoted(twice)} would name more than one axis in {describe_axes(names)}. "
        "An array has each name once; rename one of them first."
    )


def distinct(what: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names; raise an error unless all are different."""
    if len(set(names)) != len(names):
        raise ValueError(duplicate_names(what, names))
    return names


def wrong_rank(names: Sequence[str], shape: Sequence[Any]) -> str:
    """Return the message for an array whose rank is not the number of its names."""
    return (
        f"This named array has {counted(len(names), 'name')} {describe_axes(names)} for an array of rank {len(shape)}, "
        f"shape {tuple(shape)}. A positional function changed its rank: a transform such as `jax.vmap`, "
        "`jax.lax.scan` or `jax.jacobian`, or `jax.tree.map` with a function that reduces an array. Use `axonym.vmap`, "
        "`axonym.scan`, `axonym.jacobian` or `axonym.tree.map` instead, or name the raw `.array` again with "
        "`axonym.named`." + (_STACKED if len(shape) == len(names) + 1 else "")
    )


_STACKED = (
    " If a data loader that stacks examples has added the axis, let it call "
    "`batch_fn=lambda xs: axonym.tree.map(lambda *x: axonym.stack(x, 'batch'), *xs)`."
)


HOW_TO_NAME = (
    " Name its axes with axonym.named(array, axes). `jax.tree.map` passes the raw arrays in named ones; "
    "`axonym.tree.map` passes the named arrays."
)
"""The way out of an error about a raw array where a named array is expected."""


def caret(text: str, start: int, stop: int, message: str) -> str:
    """Return `message`, followed by `text` with a caret under its wrong part."""
    return f"{message}\n    {text}\n    {' ' * start}{'^' * max(stop - start, 1)}"
