"""Find the argument of a step that each array in its program belongs to, and where it lies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import describe_bytes
from ..core.parameter_names import parameter_names
from ..core.tree_spec import PROGRAM_ARRAYS
from ..distribution.mesh_axes import mesh_axes, padded
from ..distribution.padded_array import stored
from ..named_array import raw
from ..names.distributing import DistributedFunction
from ..sharding._compiled_function import BoundCompiledFunction, Stage
from ..sharding.leaves import leaves_of
from ..sharding.placement import present_sharding

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PlacedArgument:
    """An array in the arguments of a step, and where it lies.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> step = lambda w: axn.sum(w["up"])
    >>> report = axn.insight.explain(step, {"up": axn.ones({"embed": 8})}, mapping={}, mesh=mesh, by="partitioner")
    >>> print(report.placed[0])
    w/up: 32 B in 2 copies, over data
    """

    path: str
    """The argument and the path in it: `model/layers/0/weight`."""
    dtype: str
    axes: tuple[str | None, ...]
    """The names of its axes; None for an axis without one."""
    sizes: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]
    """The mesh axes that each axis is sharded over, as far as known."""
    bytes: int
    """The bytes on each device."""
    copies: int
    """The number of devices with the same shard."""
    replicated_over: tuple[str, ...]
    """The mesh axes along which devices have the same shard; empty if it is not known which."""

    def __str__(self) -> str:
        over = f", over {' and '.join(self.replicated_over)}" if self.replicated_over else ""
        copies = f" in {self.copies} copies{over}" if self.copies > 1 else ""
        return f"{self.path}: {describe_bytes(self.bytes)}{copies}"


@dataclasses.dataclass(frozen=True)
class GivenArray:
    """An array in the arguments of a step."""

    argument: str
    """The parameter."""
    path: str
    scope: str
    """The name that JAX gives it in the program."""
    dtype: str
    axes: tuple[str | None, ...]
    sizes: Sizes
    itemsize: int
    over: tuple[tuple[str, ...], ...] | None
    """The mesh axes that each axis is sharded over, if the argument says it."""

    def on_devices(
        self, local: Sequence[int], mesh: Mapping[str, int], mappings: Sequence[Mapping[str, Any]]
    ) -> PlacedArgument:
        """Describe the array, of which each device has a shard of some sizes."""
        counts = [size // max(own, 1) for size, own in zip(self.sizes, local, strict=True)]
        over, shards = self.over or (), math.prod(counts)
        if [math.prod(mesh.get(a, 1) for a in axes) for axes in over] != counts:
            over = tuple(_chosen(n, count, mesh, mappings) for n, count in zip(self.axes, counts, strict=True))
        copies = math.prod(mesh.values()) // max(shards, 1)
        used = {a for axes in over for a in axes}
        left = tuple(a for a, n in mesh.items() if n > 1 and a not in used)
        known = math.prod(mesh[a] for a in left) == copies
        size = math.prod(local) * self.itemsize
        replicated_over = left if known and copies > 1 else ()
        return PlacedArgument(self.path, self.dtype, self.axes, self.sizes, over, size, copies, replicated_over)


def _chosen(
    name: str | None, shards: int, mesh: Mapping[str, int], mappings: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return the mesh axes that make so many shards: the ones that a mapping says, or else the only ones possible."""
    if shards <= 1:
        return ()
    said = [mesh_axes(mapping[name]) for mapping in mappings if mapping.get(name) is not None] if name else []
    fitting = [axes for axes in said if math.prod(mesh.get(a, 1) for a in axes) == shards]
    return fitting[0] if fitting else only_axes(mesh, shards)


def only_axes(mesh: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Return the mesh axes along which there are so many devices; none if several sets of them have as many."""
    large = [a for a, n in mesh.items() if n > 1]
    any_of = (axes for n in range(1, len(large) + 1) for axes in itertools.combinations(large, n))
    found = [axes for axes in any_of if math.prod(mesh[a] for a in axes) == count]
    return found[0] if len(found) == 1 else ()


def step_name(step: Any) -> str:
    """Return the name of a step in reports."""
    return getattr(step, "__name__", None) or type(step).__name__


def arrays_of(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[GivenArray]:
    """Return the arrays in the arguments of a step, in the order of the program."""
    if isinstance(step, DistributedFunction):
        args, kwargs = step.named(args, kwargs)
    if isinstance(step, BoundCompiledFunction):
        step, args = step.__func__, (step.__self__, *args)
    given = [*zip(parameter_names(step, len(args), kwargs), args, strict=True), *sorted(kwargs.items())]
    return [
        GivenArray(
            argument=name,
            path="/".join(filter(None, [name, "" if not leaf.keys else leaf.path])),
            scope=name + jax.tree_util.keystr(leaf.keys),
            dtype=str(array.dtype),
            axes=tuple(None if n == "_" else n for n in leaf.names or (None,) * np.ndim(array)),
            sizes=tuple(np.shape(array)),
            itemsize=array.dtype.itemsize,
            over=None if spec is None else tuple(map(mesh_axes, padded(spec, np.ndim(array)))),
        )
        for name, tree in given
        for leaf in leaves_of(tree)[0]
        if isinstance(array := stored(raw(leaf.value)), PROGRAM_ARRAYS) and not isinstance(array, np.character)
        for spec in [getattr(present_sharding(leaf.value), "spec", None)]
    ]


class ArgumentNames:
    """The arguments of a lowered step, by the names that JAX gives their arrays in the program."""

    def __init__(self, lowered: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.arrays = arrays_of(step, args, kwargs)
        self._known = frozenset(x.argument for x in self.arrays)
        numbers = range(len(self.arrays))
        self._lists = lowered.by_parameter(numbers) if isinstance(lowered, Stage) else {}
        self._by_scope = {_plain(x.scope): i for i, x in enumerate(self.arrays)}

    def find(self, scope: str) -> GivenArray | None:
        """Return the array with a name such as `state[0].count`, `rest[1]` or `options['scale']`."""
        listed = re.fullmatch(r"(\w+)\[(\d+)\]", scope)
        if listed and listed[1] in self._lists:
            return self.arrays[self._lists[listed[1]][int(listed[2])]]
        if flax := re.fullmatch(r"(\w+)\.states\[0\]\[(\d+)\]", scope):  # a module, which `nnx.jit` flattens
            own = [x for x in self.arrays if x.argument == flax[1]]
            return own[int(flax[2])] if int(flax[2]) < len(own) else None
        number = self._by_scope.get(_plain(scope))
        return None if number is None else self.arrays[number]

    def argument(self, scope: str) -> str:
        """Return the argument that contains an array, with such a name."""
        if (array := self.find(scope)) is not None:
            return array.argument
        found = re.match(r"(\w+)(?:\[(\d+)\]|\[\\?'(\w+)\\?'\])?", scope)
        if found is None:
            return "not known"
        name, place, key = found.groups()
        return next((n for n in (name, f"{name}[{place}]", key) if n in self._known), name)


def _plain(scope: str) -> str:
    """Return the name of an array without quotes, which programs write differently, and without the parts of it."""
    return re.sub(r"[\\'\"]", "", scope).removesuffix(".array")
