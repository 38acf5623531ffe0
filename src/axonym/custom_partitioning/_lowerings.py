"""The two ways in which a rule is carried out.

`by_partitioner` leaves it to XLA's partitioner how operands are split, with `jax.experimental.custom_partitioning`. It
is decided when the program is compiled, and the function for one device is traced then, in surroundings that are made
here: the mesh with all axes manual. JAX gives custom partitioning no rule for `vmap` and none for
differentiation. The first is one more axis of the rule; the second is left to the other way.

`per_device` is a `jax.shard_map`. How operands are split must be known when the program is traced.

In both, JAX does not keep track of what varies over mesh axes: a partitioner has no such notion, and a function should
not be right in one way and wrong in the other. Gradients then count a value that is the same on several devices once
for each of them, on the way in and on the way out, which is correct for a function whose results are right. Only inside
a `shard_map` that keeps track, the one inside has to do so, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .._jax_versions import varying_axes
from .._mesh_axes import axes_in, axes_of_type, restricted
from .._per_device import run_per_device
from ..manual._axis_environment import activate
from ..sharding.meshes import AnyMesh
from .rule import WHOLE, Infer, PartitioningRule, Splits

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A rule, and functions of arrays that keep it."""

    what: str
    rule: PartitioningRule
    whole: Callable[..., Arrays]
    """The operation on unsharded arrays, which says what it means."""
    part: Callable[..., Arrays]
    """The operation of one device. It takes the shapes of its results first, then its shards of the operands."""
    infer: Infer | None = None
    """How it is sharded, where that does not follow from the rule."""

    def on_whole(self, *arrays: Any) -> Arrays:
        """The operation where nothing is split, or where what is split is not its business."""
        with activate(self.rule.environment(WHOLE, {})):
            return self.whole(*arrays)

    def on_part(self, mesh: AnyMesh, splits: Splits, checked: bool = False) -> Callable[..., Arrays]:
        """The function for one device."""
        shapes = [self.rule.local_shape(term, splits, mesh.shape) for term in self.rule.results]
        environment = self.rule.environment(splits, mesh.shape, checked)

        def part(*arrays: Any) -> Arrays:
            with activate(environment):
                results = self.part(shapes, *arrays)
            if not checked:
                return results
            around = set(getattr(mesh, "manual_axes", ()))
            kept = [around.union(*(splits.get(f, ()) for f in itertools.chain(*term))) for term in self.rule.results]
            return tuple(_one_value(x, axes) for x, axes in zip(results, kept, strict=True))

        return part

    def batched(self, size: int, batched: Sequence[bool]) -> Operation:
        """The operation with one more axis in front of some operands and of all results."""
        name = next(n for i in itertools.count() if (n := f"vmap{i}") not in self.rule.sizes)
        in_axes = tuple(0 if b else None for b in batched)

        def whole(*arrays: Any) -> Arrays:
            return jax.vmap(self.whole, in_axes=in_axes, axis_size=size)(*arrays)

        def part(shapes: Sequence[tuple[int, ...]], *arrays: Any) -> Arrays:
            one = functools.partial(self.part, [s[1:] for s in shapes])
            return jax.vmap(one, in_axes=in_axes, axis_size=shapes[0][0] if shapes else size)(*arrays)

        infer = self.infer

        def infer_rest(derived: Splits, operands: Sequence[Any], mesh: Mapping[str, int]) -> Mapping[str, Any]:
            assert infer is not None
            rest = {factor: axes for factor, axes in derived.items() if factor != name}
            said = infer(rest, tuple([s[1:] if b else s for s, b in zip(operands, batched, strict=True)]), mesh)
            taken = axes_in(said.values())
            return {name: tuple([a for a in derived.get(name, ()) if a not in taken]), **said}

        rule = self.rule.batched(name, size, batched)
        return Operation(self.what, rule, whole, part, None if infer is None else infer_rest)


def by_partitioner(operation: Operation, known: AnyMesh | None, *arrays: Any) -> Arrays:
    """Carry an operation out as XLA's partitioner splits its operands.

    Arguments:
        operation: the operation.
        known: the active mesh, if there is one.
        arrays: its operands.
    """
    rule = operation.rule

    def partition(mesh: Any, operands: Arrays, results: Arrays) -> Any:
        everything = (*operands, *results)
        if mesh.empty:
            mesh = _with_devices(operation.what, known, everything)
        # Where operands disagree, it is the largest that stays where it is.
        order = sorted(range(len(operands)), key=lambda i: -operands[i].size)
        terms = (*rule.operands, *rule.results)
        splits = rule.splits(
            mesh.shape,
            [(terms[i], _entries(everything[i], mesh)) for i in (*order, *range(len(order), len(terms)))],
        )
        of_operands = [_entries(x, mesh) for x in operands]
        splits = rule.inferred(operation.what, mesh.shape, operation.infer, splits, of_operands)
        placed = [NamedSharding(mesh, rule.spec(term, splits)) for term in terms]
        here = all_manual(mesh)
        on_part = operation.on_part(here, splits)

        def part(*xs: Any) -> Arrays:
            with jax.sharding.use_abstract_mesh(here):
                return on_part(*xs)

        return mesh, part, tuple(placed[len(operands) :]), tuple(placed[: len(operands)])

    # Inside a jit of its own, the function can use arrays that are not its arguments.
    whole = jax.jit(operation.on_whole)
    partitioned = custom_partitioning(lambda *xs: whole(*xs))
    partitioned.def_partition(partition=partition, sharding_rule=rule.for_shardy())
    mappable = jax.custom_batching.custom_vmap(lambda *xs: partitioned(*xs))

    @mappable.def_vmap
    def mapped(size: int, batched: Sequence[bool], *xs: Any) -> tuple[Arrays, Arrays]:
        return by_partitioner(operation.batched(size, batched), known, *xs), (True,) * len(rule.results)

    return tuple(mappable(*arrays))


def per_device(operation: Operation, mesh: AnyMesh, splits: Splits, *arrays: Any) -> Arrays:
    """Carry an operation out on the parts that this way of splitting makes.

    Arguments:
        operation: the operation.
        mesh: the mesh; axes of it that are manual already are left alone.
        splits: how factors are split.
        arrays: the operands.
    """
    rule = operation.rule
    checked = any(varying_axes(x) for x in arrays)
    return tuple(
        run_per_device(
            operation.on_part(mesh, splits, checked),
            arrays,
            [rule.spec(term, splits) for term in rule.operands],
            tuple(rule.spec(term, splits) for term in rule.results),
            mesh,
            check_vma=checked,
        )
    )


def all_manual(mesh: AnyMesh) -> AbstractMesh:
    """The mesh as the function for one device sees it."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Manual,) * len(mesh.axis_names))


def _one_value(x: Any, but_for: set[str]) -> Any:
    """A result of which JAX shall know that it is the same on all devices, but for those along some mesh axes."""
    axes = tuple(sorted(varying_axes(x) - but_for))
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, axes)
    return jax.lax.pmax(x.astype(jnp.int32), axes).astype(x.dtype) if x.dtype == bool else jax.lax.pmax(x, axes)


def _with_devices(what: str, mesh: AnyMesh | None, arrays: Sequence[Any]) -> Mesh:
    """The active mesh, with devices. The partitioner forgets it where no argument of the program lies on it."""
    if mesh is None:
        raise ValueError(f"{what}: the partitioner does not know of a mesh. Activate one with `jax.set_mesh`.")
    devices = list(arrays[0].sharding.devices_indices_map(arrays[0].shape))
    return Mesh(np.array(devices).reshape(tuple(mesh.shape.values())), mesh.axis_names)


def _entries(x: Any, mesh: Mesh) -> tuple[Any, ...]:
    """Return how the partitioner shards an array, one entry for each dimension."""
    if isinstance(x.sharding, NamedSharding):
        return (*x.sharding.spec, *(None,) * (len(x.shape) - len(x.sharding.spec)))
    # It only tells which device has what: a mesh axis splits a dimension if a step along it is one in the dimension.
    parts = x.sharding.devices_indices_map(x.shape)
    starts = np.array([[part.start or 0 for part in parts[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, len(x.shape))
    entries = []
    for dimension in range(len(x.shape)):
        steps = {}
        for i, axis in enumerate(mesh.axis_names):
            if mesh.shape[axis] > 1:
                steps[axis] = starts[(0,) * i + (1,) + (0,) * (len(mesh.axis_names) - i - 1)][dimension]
        entries.append(tuple(sorted((a for a in steps if steps[a]), key=steps.__getitem__, reverse=True)) or None)
    return tuple(entries)


def explicit_entries(x: Any) -> tuple[Any, ...]:
    """Return how an array is sharded over Explicit mesh axes, one entry for each dimension."""
    sharding = jax.typeof(x).sharding
    return tuple(restricted(sharding.spec, axes_of_type(sharding.mesh, AxisType.Explicit)))
