"""Say where the arrays of a traced step lie under a compute and a parameter mapping: `Layout`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..core.errors import describe_axes, indivisible
from ..distribution.active_settings import Entry
from ..distribution.decisions import Mappings
from ..distribution.mesh_axes import Axes, mapped_axes
from ._named_events import Dims, NamedTrace, Value


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, along the mesh axis `stage`."""

    layers: str
    """The axis of the layers."""
    size: int
    """The number of layers."""
    count: int
    microbatches: int


class Layout(Mappings):
    """The mesh axes that each name is sharded over; mesh axes of size one do not count."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        compute: Mapping[str, Entry],
        storage: Mapping[str, Entry],
        joined: Mapping[str, Axes] = MappingProxyType({}),
        stages: Stages | None = None,
    ):
        super().__init__(mesh, compute, storage)
        self.joined, self.stages = joined, stages
        # A step uses the same few names again and again.
        cached = functools.lru_cache(maxsize=4096)
        self.used, self.stored = cached(self._used), cached(self._stored)
        lies = super().is_stored
        self._is_stored = cached(lambda names: lies(n for name in names for n in self._parts(name)))
        self._over = cached(lambda names: [*map(self.stored if self.is_stored(names) else self.used, names)])

    def over_stages(self) -> Layout:
        """Return where arguments and results lie, whose layers are divided over the stages, if there are any."""
        if self.stages is None:
            return self
        own = {self.stages.layers: "stage"}
        return Layout(self.mesh, {**self.compute, **own}, self.storage and {**self.storage, **own}, self.joined)

    def _used(self, name: str | None) -> Axes:
        return self._large(a for n in self._parts(name) for a in super(Layout, self).used(n))

    def _stored(self, name: str | None) -> Axes:
        return self._large(a for n in self._parts(name) for a in super(Layout, self).stored(n))

    def _parts(self, name: str | None) -> Axes:
        """Return the names of the joined axes that it is sharded by, such as the first of `batch*pos`, or its own."""
        if name is None:
            return ()
        if name in self.compute or name in self.storage:
            return (name,)
        return self.joined.get(name, (name.partition("*")[0],))

    def _large(self, axes: Iterable[str]) -> Axes:
        return tuple(a for a in axes if self.mesh.get(a, 1) > 1)

    def is_stored(self, names: Iterable[str | None]) -> bool:
        """Return whether an array with these axes is a parameter, which is sharded as it is stored."""
        return self._is_stored(tuple(names))

    def over(self, dims: Dims) -> list[Axes]:
        """Return the mesh axes that each axis of an array is sharded over."""
        return self._over(tuple([n for n, _ in dims]))

    def local(self, dims: Dims, over: Sequence[Axes] | None = None) -> tuple[int, ...]:
        """Return the sizes of a shard."""
        over = [self.used(n) for n, _ in dims] if over is None else over
        return tuple(size // self.count(axes) for (_, size), axes in zip(dims, over, strict=True))

    def bytes(self, x: Value, over: Sequence[Axes] | None = None) -> int:
        """Return the bytes of a shard."""
        return math.prod(self.local(x.base, over)) * x.dtype.itemsize


def check_sizes(layout: Layout, trace: NamedTrace) -> None:
    """Raise an error if a mesh axis is unknown, or does not divide an axis."""
    for mapping in (layout.compute, layout.storage):
        for name in mapping:
            if unknown := [a for a in mapped_axes(name, mapping) if a not in layout.mesh]:
                raise ValueError(
                    f"explain: axis {name!r} is mapped to mesh axis {unknown[0]!r}, but the mesh has "
                    f"{describe_axes(layout.mesh)}."
                )
    for x in trace.sized:
        for (name, size), axes in zip(x.dims, layout.over(x.dims), strict=True):
            if size % layout.count(axes):
                problem = indivisible(f"axis {name!r}", size, {a: layout.mesh[a] for a in axes})
                raise ValueError(
                    f"explain: {problem} Names tell nothing of axes that are stored padded: count with a rounded size, "
                    "or explain the compiled program."
                )
