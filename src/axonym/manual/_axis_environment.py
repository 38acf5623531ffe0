"""Find the mesh axes that a name means inside `shard_map`.

Inside, an array has its names and local sizes. An *axis environment*, active while the body is traced, has the rest:
the sizes that the axes of the arguments have outside, and the mesh axes that they are sharded over. A collective over
a logical axis communicates over the mesh axes that the environment and the active mapping have for it. The environment
is part of jit's cache key, as the mapping is: a program traced under one is not used under another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh

from ..axis import Axis
from ..core import errors
from ..core.jax_versions import varying_axes
from ..distribution.active_settings import activate_here, active_mapping, active_settings
from ..distribution.mesh_axes import Axes, mapped_axes, mesh_axes, shard_count
from ..named_array import NamedArray, describe_array, raw


class MeshAxis(str):
    """The name of a mesh axis, marked as one.

    A collective takes a plain string for a logical axis or a mesh axis, and refuses one that could be either. Then use
    a `MeshAxis` for the mesh axis, or an `Axis` for the logical axis.

    >>> axn.MeshAxis("data")
    MeshAxis('data')
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"MeshAxis({str(self)!r})"


AnyAxis: TypeAlias = str | Axis | Sequence[str | Axis]
"""A logical axis, by its name or as an `Axis`, a mesh axis, by its name or as a `MeshAxis`, or several of them."""


class ArgumentAxis(NamedTuple):
    """An axis of an argument and its sharding."""

    name: str
    size: int
    """The size outside of the `shard_map`."""
    local: int
    axes: Axes
    """The manual mesh axes that it is sharded over; none if it is replicated."""


class AxisSharding(NamedTuple):
    """A possible sharding of an axis of an array, found from its size."""

    size: int
    """The size outside of the `shard_map`."""
    now: Axes
    """The mesh axes that it is sharded over, the major one first; none if it is replicated."""
    at_most: Axes
    """The mesh axes that it was sharded over before any all-gather: `now`, then minor ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisEnvironment:
    """The shardings of the arguments of a `shard_map`."""

    argument_axes: tuple[ArgumentAxis, ...] = ()
    checked: bool = False
    """True if JAX tracks which values are device-varying."""
    any_sharding: bool = False
    """True if the body must work for any sharding of its axes. A collective over a replicated axis then does nothing,
    and a name means a logical axis first, because the body does not know the mesh."""

    def found(self, name: str) -> list[ArgumentAxis]:
        """Return the shardings of the arguments that have an axis."""
        return [p for p in self.argument_axes if p.name == name]

    def sharded_over(self, name: str) -> list[Axes]:
        """Return all mesh axes that an axis of the arguments is sharded over, without repetitions."""
        return list(dict.fromkeys(p.axes for p in self.found(name) if p.axes))


_NOWHERE = AxisEnvironment()


def active_environment() -> AxisEnvironment:
    """Return the environment of the surrounding `shard_map`; an empty one outside of any."""
    settings = active_settings()
    return _NOWHERE if settings is None else settings.environment or _NOWHERE


def activate(environment: AxisEnvironment) -> contextlib.AbstractContextManager[None]:
    """Activate an environment."""
    return activate_here(environment=environment)


@functools.lru_cache(maxsize=1024)
def interned(argument_axes: frozenset[ArgumentAxis], checked: bool, any_sharding: bool = False) -> AxisEnvironment:
    """Return the same object for equal arguments while it is in use: JAX compares the environment on every call."""
    return AxisEnvironment(tuple(sorted(argument_axes)), checked, any_sharding)


# --- the sharding of an axis ---


def possible_shardings(name: str, size: int) -> list[AxisSharding]:
    """Return the possible shardings of an axis of this size: as in the arguments, or gathered over minor mesh axes.

    An axis that is replicated in the arguments may have been sharded since, by the mapping.
    """
    environment = active_environment()
    by_mapping = () if environment.sharded_over(name) else _manual_mapped_axes(name)
    found = []
    for argument in environment.found(name):
        axes = argument.axes or by_mapping
        # Sizes do not show shardings over mesh axes of size one: assume that these are as in the arguments.
        as_there = argument.axes and argument.local == size
        # A prefix of the mesh axes, since an all-gather removes the last ones first.
        starts = [argument.axes] if as_there else [axes[:i] for i in range(len(axes) + 1)]
        now = next((start for start in starts if argument.size == size * count(start)), None)
        if now is not None:
            found.append(AxisSharding(argument.size, now, axes))
    return list(dict.fromkeys(found))


def declared(name: str) -> list[Axes]:
    """Return the possible shardings of an axis of any size: from the arguments, else from the mapping."""
    return active_environment().sharded_over(name) or [axes for axes in [_manual_mapped_axes(name)] if axes]


def _manual_mapped_axes(name: str) -> Axes:
    """Return the manual mesh axes over which the mapping shards an axis."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in mapped_axes(name) if a in manual)


def of_size_one() -> set[str]:
    """Return the mesh axes of size one."""
    return {a for a, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1}


def without_trivial(axes: Axes) -> Axes:
    """Return the mesh axes that have several devices."""
    return tuple(a for a in axes if a not in of_size_one())


# --- from names to mesh axes ---


def axes_meant(what: str, over: AnyAxis) -> Axes:
    """Return the mesh axes over which a collective communicates, given as logical or mesh axes."""
    given = over if isinstance(over, Sequence) and not isinstance(over, str) else [over]
    return _manual_axes_of(what, over, tuple(dict.fromkeys(a for word in given for a in _axes_of_word(what, word))))


def axes_of_sharded(what: str, name: str) -> Axes | None:
    """Return the mesh axes that a logical axis is sharded over; None if neither arguments nor mapping shard it.

    If the body must work for any sharding, a replicated axis has none.
    """
    found = _sharded_over(what, name)
    if not found and _may_be_replicated(name):
        return ()
    return _manual_axes_of(what, name, found) if found else None


def sharded_here() -> dict[str, Axes]:
    """Return the logical axes that are sharded, with their mesh axes."""
    environment, mapping = active_environment(), active_mapping()
    found = {p.name: p.axes for p in environment.argument_axes if p.axes}
    return found | {n: mesh_axes(e) for n, e in mapping.items() if e is not None and n not in found}


def _axes_of_word(what: str, word: Any) -> Axes:
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(word, MeshAxis):
        if word not in mesh.shape:
            _require_inside(what, mesh)
            raise ValueError(f"{what}: no mesh axis {str(word)!r}.{_describe_known_axes(mesh)}")
        return (str(word),)
    if not isinstance(word, (str, Axis)):
        raise TypeError(f"{what}: an axis is given by an Axis, a name or a MeshAxis, got {type(word).__name__}.")
    name = word if isinstance(word, str) else word.name
    environment, logical = active_environment(), _sharded_over(what, name)
    if _may_be_replicated(name):
        return logical
    # A string may be either kind of axis; it is ambiguous only if the two readings mean different mesh axes.
    is_mesh_axis = isinstance(word, str) and name in mesh.shape
    is_axis = bool(environment.found(name)) or name in active_mapping()
    if is_mesh_axis and is_axis and logical != (name,):
        means = f"sharded over {_quoted_list(logical)}" if logical else "replicated"
        raise ValueError(
            f"{what}: {name!r} could be the logical axis, which is {means}, or the mesh axis. Say which: "
            f"`axonym.MeshAxis({name!r})` is the mesh axis, and an Axis, as `x.resolve_axis({name!r})` gives, the "
            "logical one."
        )
    if logical:
        return logical
    if is_mesh_axis:
        return (name,)
    if not environment.any_sharding:
        _require_inside(what, mesh)
    raise ValueError(
        f"{what}: {name!r} is neither a mesh axis nor an axis that is sharded here.{_describe_known_axes(mesh)}"
        + errors.suggestion(name, (*sharded_here(), *(p.name for p in environment.argument_axes), *mesh.shape))
    )


def _may_be_replicated(name: str) -> bool:
    """Return whether an argument has the axis, and it may be replicated because the body must work for any sharding."""
    environment = active_environment()
    return environment.any_sharding and bool(environment.found(name))


def _sharded_over(what: str, name: str) -> Axes:
    """Return the mesh axes of a logical axis: from the arguments, or from the mapping if it is replicated there."""
    found = active_environment().sharded_over(name)
    if len(found) > 1:
        ways = " and ".join(map(_quoted_list, found))
        raise ValueError(
            f"{what}: the arguments shard axis {name!r} in several ways, over {ways}. Say which one is meant by its "
            "mesh axis."
        )
    return found[0] if found else mapped_axes(name)


def _manual_axes_of(what: str, over: AnyAxis, axes: Axes) -> Axes:
    """Keep the manual mesh axes; raise an error if none is manual."""
    if not axes and active_environment().any_sharding:
        return axes
    mesh = jax.sharding.get_abstract_mesh()
    _require_inside(what, mesh)
    unknown = [a for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"{what}: no mesh axis {_quoted_list(unknown)}.{_describe_known_axes(mesh)}")
    found = tuple(a for a in axes if a in mesh.manual_axes)
    if axes and not found:
        raise ValueError(
            f"{what}: {over!r} means mesh axis {_quoted_list(axes)}, which is left to the partitioner here: "
            f"`axis_names` of the shard_map is {_quoted_list(mesh.manual_axes)}."
        )
    return found


def _require_inside(what: str, mesh: AbstractMesh) -> None:
    if not mesh.manual_axes:
        raise ValueError(
            f"{what}: collectives work inside `axonym.shard_map`, where mesh axes are manual; here none is."
        )


def _describe_known_axes(mesh: AbstractMesh) -> str:
    sharded = ", ".join(f"{n} over {' and '.join(axes)}" for n, axes in sharded_here().items())
    text = f" The mesh is {errors.describe_shape(mesh.shape)}; sharded are {sharded or 'no axes'}."
    if sharded or not mesh.manual_axes:
        return text
    return (
        f"{text} No mapping is active. If this is the backward pass of a `jax.custom_vjp`, which runs when the "
        "function around it is done, use mesh axes, or activate the mapping around the gradient."
    )


def _quoted_list(names: Iterable[str]) -> str:
    return ", ".join(repr(str(n)) for n in names)


def quoted_with_and(axes: Iterable[str]) -> str:
    """Return `'data' and 'model'`."""
    return " and ".join(map(repr, axes))


# --- device-varying arrays ---


def count(axes: Axes) -> int:
    """Return the number of devices along some mesh axes."""
    return shard_count(jax.sharding.get_abstract_mesh(), axes)


def require_varying(what: str, x: Any, axes: Axes, consequence: str) -> None:
    """Refuse a collective of a value that is invariant over its mesh axes; the message ends with `consequence`."""
    if not active_environment().checked:
        return
    constant = [a for a in axes if a not in varying_axes(raw(x))]
    if constant:
        kind = jax.typeof(raw(x))
        described = f"the array {kind.dtype}{list(kind.shape)}" if kind.shape else "the value"
        described = f"the array {describe_array(x)}" if isinstance(x, NamedArray) else described
        raise ValueError(
            f"{what}: {described} is the same on all {count(tuple(constant))} devices of {describe_axes(constant)}: "
            f"{consequence} If each device is to have a value of its own from here on, use `axonym.pvary` first."
        )


def describe_axes(axes: Iterable[str]) -> str:
    """Describe mesh axes in a message, with the logical axes that are sharded over them."""
    sharded = sharded_here()
    described = []
    for axis in axes:
        logical = [repr(n) for n, found in sharded.items() if axis in found]
        described.append(f"mesh axis {axis!r}" + (f" (which shards {', '.join(logical)})" if logical else ""))
    return " and ".join(described)
