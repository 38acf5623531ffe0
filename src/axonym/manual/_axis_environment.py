"""What is known inside `shard_map`: how axes were split on the way in, and which mesh axes a word means.

The names and local sizes of arrays are their own. What they do not tell is kept in a *view*, put in force while the
body is traced: which sizes the axes of the arguments had outside, and over which mesh axes they were split. With the
mapping in force it says what a collective over a logical axis communicates over. A view is part of jit's cache key, as
the mapping is, so what is traced under one view is not used under another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh

from .. import _errors
from .._jax_versions import varying_axes
from .._mesh_axes import Axes, active_mapping, mapped_axes, mesh_axes, shard_count
from ..array import NamedArray
from ..axis import Axis
from ..sharding.mapping import ResourceAxis


class MeshAxis(str):
    """The name of a mesh axis, said to be one.

    A collective takes a plain string for whichever it is, a logical axis or a mesh axis, and refuses it where it could
    be either. There, this says that the mesh axis is meant; an `Axis` says that the logical one is.

    Arguments:
        name: the name of the mesh axis.

    >>> axn.MeshAxis("data")
    MeshAxis('data')
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"MeshAxis({str(self)!r})"


Word: TypeAlias = str | Axis
"""A logical axis, by its name or as an `Axis`, or a mesh axis, by its name or as a `MeshAxis`."""
Words: TypeAlias = Word | Sequence[Word]


class Part(NamedTuple):
    """How an axis of an argument came in."""

    name: str
    size: int
    """Outside, where it is whole."""
    local: int
    axes: Axes
    """The mesh axes that split it; none where it is whole inside, too."""


class Layout(NamedTuple):
    """How an axis of an array may be split, judged by its size."""

    size: int
    """Outside, where it is whole."""
    now: Axes
    """The mesh axes that split it, the major one first; none where it is whole."""
    at_most: Axes
    """Those that split it where nothing of it is gathered: `now` and minor ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What the arguments of a `shard_map` told."""

    parts: tuple[Part, ...] = ()
    checked: bool = False
    """Whether JAX keeps track of the mesh axes that values vary over."""
    however: bool = False
    """Whether the body has to work however its axes are split. A collective over one that is whole then does nothing,
    and a word is a logical axis first, since the mesh is not the body's to know."""

    def of(self, name: str) -> list[Part]:
        """The ways in which an axis came in."""
        return [p for p in self.parts if p.name == name]

    def splits(self, name: str) -> list[Axes]:
        """The ways in which an axis was split."""
        return list(dict.fromkeys(p.axes for p in self.of(name) if p.axes))


# Made once, on import: JAX asks that contexts are not made while it is in use.
_IN_FORCE = jax.make_user_context(None)
_NOWHERE = View()


def view_in_force() -> View:
    """The view of the `shard_map` around; an empty one outside of any."""
    return _IN_FORCE.value or _NOWHERE


def in_force(view: View) -> contextlib.AbstractContextManager[None]:
    """Put a view in force."""
    return _IN_FORCE(view)


@functools.lru_cache(maxsize=1024)
def interned(parts: frozenset[Part], checked: bool, however: bool = False) -> View:
    """The one object for these parts, as long as it is in use: JAX compares what is in force on every call."""
    return View(tuple(sorted(parts)), checked, however)


# --- how an axis is split ---


def layouts(name: str, size: int) -> list[Layout]:
    """The ways in which an axis that has this size may be split: as it came in, or gathered over minor mesh axes.

    An axis that the arguments have and do not split may have been split since, as the mapping says.
    """
    view = view_in_force()
    by_mapping = () if view.splits(name) else _mapped(name)
    found = []
    for part in view.of(name):
        axes = part.axes or by_mapping
        # Sizes do not tell what a mesh axis of size one splits: what came in like this still is like this.
        starts = [part.axes] if part.axes and part.local == size else [axes[:i] for i in range(len(axes) + 1)]
        now = next((start for start in starts if part.size == size * count(start)), None)
        if now is not None:
            found.append(Layout(part.size, now, axes))
    return list(dict.fromkeys(found))


def declared(name: str) -> list[Axes]:
    """What splits an axis, whatever its size: the arguments, or the mapping where they do not split it."""
    splits = view_in_force().splits(name)
    return splits or [axes for axes in [_mapped(name)] if axes]


def _mapped(name: str) -> Axes:
    """The mesh axes handled by hand that an axis is mapped to."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in mapped_axes(name) if a in manual)


def of_size_one() -> set[str]:
    """The mesh axes along which there is one device."""
    return {a for a, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1}


def without_trivial(axes: Axes) -> Axes:
    """The mesh axes along which there are several devices."""
    return tuple(a for a in axes if a not in of_size_one())


# --- which mesh axes a word means ---


def axes_meant(what: str, words: Words) -> Axes:
    """The mesh axes to communicate over.

    Arguments:
        what: the operation, for messages.
        words: logical axes or mesh axes.
    """
    given = words if isinstance(words, Sequence) and not isinstance(words, str) else [words]
    return _manual(what, words, tuple(dict.fromkeys(a for word in given for a in _meaning(what, word))))


def axes_that_split(what: str, name: str) -> Axes | None:
    """The mesh axes that split a logical axis; None where neither the arguments nor the mapping split it.

    Where an axis that is whole is one part, there are none.
    """
    found = _split_over(what, name)
    if not found and _one_part(name):
        return ()
    return _manual(what, name, found) if found else None


def split_here() -> dict[str, Axes]:
    """The logical axes that are split, with the mesh axes that split them."""
    view, mapping = view_in_force(), active_mapping()
    found = {p.name: p.axes for p in view.parts if p.axes}
    return found | {n: mesh_axes(e) for n, e in mapping.items() if e is not None and n not in found}


def _meaning(what: str, word: Any) -> Axes:
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(word, (MeshAxis, ResourceAxis)):
        if word not in mesh.shape:
            _require_inside(what, mesh)
            raise ValueError(f"{what}: no mesh axis {str(word)!r}.{_known(mesh)}")
        return (str(word),)
    if not isinstance(word, (str, Axis)):
        raise TypeError(f"{what}: an axis is given by an Axis, a name or a MeshAxis, got {type(word).__name__}.")
    name = word if isinstance(word, str) else word.name
    view, logical = view_in_force(), _split_over(what, name)
    if _one_part(name):
        return logical
    is_mesh_axis = isinstance(word, str) and name in mesh.shape
    if is_mesh_axis and name in _logical_names() and logical != (name,):
        means = f"split over {_listed(logical)}" if logical else "not split"
        raise ValueError(
            f"{what}: {name!r} could be the logical axis, which is {means}, or the mesh axis. Say which: "
            f"`axonym.MeshAxis({name!r})` is the mesh axis, and an Axis, as `x.resolve_axis({name!r})` gives, the "
            "logical one."
        )
    if logical:
        return logical
    if is_mesh_axis:
        return (name,)
    if not view.however:
        _require_inside(what, mesh)
    raise ValueError(
        f"{what}: {name!r} is neither a mesh axis nor an axis that is split here.{_known(mesh)}"
        + _errors.suggestion(name, (*split_here(), *(p.name for p in view.parts), *mesh.shape))
    )


def _one_part(name: str) -> bool:
    """Whether an axis is known and may be whole, so that it has one part at least."""
    view = view_in_force()
    return view.however and bool(view.of(name))


def _logical_names() -> set[str]:
    return {p.name for p in view_in_force().parts} | set(active_mapping())


def _split_over(what: str, name: str) -> Axes:
    """What splits a logical axis: how the arguments were split has the say, and where they were not, the mapping."""
    splits = view_in_force().splits(name)
    if len(splits) > 1:
        ways = " and ".join(_listed(s) for s in splits)
        raise ValueError(
            f"{what}: the arguments split axis {name!r} in several ways, over {ways}. Say which one is meant by its "
            "mesh axis."
        )
    return splits[0] if splits else mapped_axes(name)


def _manual(what: str, words: Words, axes: Axes) -> Axes:
    """The mesh axes among some that are handled by hand here; none of them is an error."""
    if not axes and view_in_force().however:
        return axes
    mesh = jax.sharding.get_abstract_mesh()
    _require_inside(what, mesh)
    unknown = [a for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"{what}: no mesh axis {_listed(unknown)}.{_known(mesh)}")
    found = tuple(a for a in axes if a in mesh.manual_axes)
    if axes and not found:
        raise ValueError(
            f"{what}: {words!r} means mesh axis {_listed(axes)}, which is left to the partitioner here: "
            f"`axis_names` of the shard_map is {_listed(mesh.manual_axes)}."
        )
    return found


def _require_inside(what: str, mesh: AbstractMesh) -> None:
    if not mesh.manual_axes:
        raise ValueError(
            f"{what}: collectives work inside `axonym.shard_map`, where mesh axes are handled by hand; here none is."
        )


def _known(mesh: AbstractMesh) -> str:
    split = ", ".join(f"{n} over {' and '.join(axes)}" for n, axes in split_here().items())
    text = f" The mesh is {_errors.describe_shape(mesh.shape)}; split are {split or 'no axes'}."
    if split or not mesh.manual_axes:
        return text
    return (
        f"{text} No mapping is in force. If this is the backward pass of a `jax.custom_vjp`, which runs when the "
        "function around it is done, use mesh axes, or put the mapping in force around the gradient."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(str(n)) for n in names)


# --- what an array varies over ---


def count(axes: Axes) -> int:
    """Over how many devices some mesh axes go."""
    return shard_count(jax.sharding.get_abstract_mesh(), axes)


def require_varying(what: str, x: Any, axes: Axes, consequence: str) -> None:
    """A collective of something that is the same on all devices is a mistake.

    Arguments:
        what: the operation, for messages.
        x: a named or raw array, or a number.
        axes: the mesh axes that the collective goes over.
        consequence: what would come of it.
    """
    if not view_in_force().checked:
        return
    constant = [a for a in axes if a not in varying_axes(x.array if isinstance(x, NamedArray) else x)]
    if constant:
        raise ValueError(
            f"{what}: {describe(x)} is the same on all {count(tuple(constant))} devices of {describe_axes(constant)}: "
            f"{consequence} If each device is to have a value of its own from here on, use `axonym.pvary` first."
        )


def describe(x: Any) -> str:
    """An operand in a message: its axes and local sizes."""
    if isinstance(x, NamedArray):
        return f"the array {x}"
    aval = jax.typeof(x)
    return f"the array {aval.dtype}{list(aval.shape)}" if aval.shape else "the value"


def describe_axes(axes: Iterable[str]) -> str:
    """Mesh axes in a message, with the logical axes that they split."""
    splits = split_here()
    described = []
    for axis in axes:
        logical = [repr(n) for n, found in splits.items() if axis in found]
        described.append(f"mesh axis {axis!r}" + (f" (which splits {', '.join(logical)})" if logical else ""))
    return " and ".join(described)
