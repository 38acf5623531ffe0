"""Run an operation with a partitioning rule, in one of two ways.

`by_partitioner` leaves the sharding of operands to XLA's partitioner, with `jax.experimental.custom_partitioning`. The
sharding is decided when the program is compiled, and the per-shard function is traced then, on the mesh with all axes
manual. JAX has no rules to `vmap` or differentiate custom partitioning. For `vmap`, the partitioning rule gets one more
axis; for derivatives, `per_device` is used.

`per_device` uses `jax.shard_map`. The sharding of operands must be known when the program is traced.

In both, JAX does not track which values are device-varying: the partitioner has no such notion, and a function should
not be correct in one way and wrong in the other. Gradients then count a value that is the same on several devices once
for each of them, on the way in and on the way out, which is correct if the results of the function are. Only a
`shard_map` inside another one that tracks this must do so, too.
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

from ..core.jax_versions import varying_axes
from ..distribution.mesh_axes import AnyMesh, axes_in, axes_of_type
from ..distribution.per_device import run_per_device
from ..manual._axis_environment import activate
from .rule import (
    REPLICATED,
    Infer,
    PartitioningRule,
    Shardings,
    batched_rule,
    derived_shardings,
    environment_of,
    for_shardy,
    inferred_shardings,
    local_shape,
    spec_of_term,
)

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class PartitionedOperation:
    """A partitioning rule, and functions of arrays that follow it."""

    what: str
    rule: PartitioningRule
    unsharded: Callable[..., Arrays]
    """The function of unsharded arrays, which defines the operation."""
    per_shard: Callable[..., Arrays]
    """The function for one device. It takes the shapes of its results first, then its shards of the operands."""
    infer: Infer | None = None
    """The function that decides the sharding, if it does not follow from the rule."""

    def call_unsharded(self, *arrays: Any) -> Arrays:
        """Run the operation where nothing is sharded, or where all arrays are shards already."""
        with activate(environment_of(self.rule, REPLICATED, {})):
            return self.unsharded(*arrays)

    def make_per_shard(self, mesh: AnyMesh, shardings: Shardings, checked: bool = False) -> Callable[..., Arrays]:
        """Make the function for one device of a mesh."""
        shapes = [local_shape(self.rule, term, shardings, mesh.shape) for term in self.rule.results]
        environment = environment_of(self.rule, shardings, mesh.shape, checked)

        def per_shard(*arrays: Any) -> Arrays:
            with activate(environment):
                results = self.per_shard(shapes, *arrays)
            if not checked:
                return results
            around = set(axes_of_type(mesh, AxisType.Manual))
            kept = [around.union(*(shardings.get(f, ()) for f in itertools.chain(*term))) for term in self.rule.results]
            return tuple(_made_invariant(x, axes) for x, axes in zip(results, kept, strict=True))

        return per_shard

    def batched(self, size: int, batched: Sequence[bool]) -> PartitionedOperation:
        """Add an axis in front of some operands and of all results."""
        name = next(n for i in itertools.count() if (n := f"vmap{i}") not in self.rule.sizes)
        in_axes = tuple(0 if b else None for b in batched)

        def unsharded(*arrays: Any) -> Arrays:
            return jax.vmap(self.unsharded, in_axes=in_axes, axis_size=size)(*arrays)

        def per_shard(shapes: Sequence[tuple[int, ...]], *arrays: Any) -> Arrays:
            one = functools.partial(self.per_shard, [s[1:] for s in shapes])
            return jax.vmap(one, in_axes=in_axes, axis_size=shapes[0][0] if shapes else size)(*arrays)

        infer = self.infer

        def infer_rest(derived: Shardings, operands: Sequence[Any], mesh: Mapping[str, int]) -> Mapping[str, Any]:
            assert infer is not None
            rest = {factor: axes for factor, axes in derived.items() if factor != name}
            said = infer(rest, tuple([s[1:] if b else s for s, b in zip(operands, batched, strict=True)]), mesh)
            # The rule of one element has said first: what it took cannot shard the axis of all elements, too.
            taken = axes_in(said.values())
            return {name: tuple([a for a in derived.get(name, ()) if a not in taken]), **said}

        rule = batched_rule(self.rule, name, size, batched)
        return PartitionedOperation(self.what, rule, unsharded, per_shard, None if infer is None else infer_rest)


def by_partitioner(operation: PartitionedOperation, known: AnyMesh | None, *arrays: Any) -> Arrays:
    """Run an operation on operands that XLA's partitioner shards; `known` is the active mesh, if any."""
    rule = operation.rule

    def partition(mesh: Any, operands: Arrays, results: Arrays) -> Any:
        everything = (*operands, *results)
        if mesh.empty:
            # The partitioner forgets the mesh if no argument of the program is on it.
            if known is None:
                raise ValueError(
                    f"{operation.what}: the partitioner does not know of a mesh. Activate one with `jax.set_mesh`."
                )
            sharding = everything[0].sharding
            # Only a shape that the shards divide has indices of devices: see `_partitioner_entries`.
            devices = list(sharding.devices_indices_map((sharding.num_devices,) * len(everything[0].shape)))
            mesh = Mesh(np.array(devices).reshape(tuple(known.shape.values())), known.axis_names)
        # Where operands disagree, the largest keeps its sharding.
        order = sorted(range(len(operands)), key=lambda i: -operands[i].size)
        terms = (*rule.operands, *rule.results)
        shardings = derived_shardings(
            rule,
            mesh.shape,
            [(terms[i], _partitioner_entries(everything[i], mesh)) for i in (*order, *range(len(order), len(terms)))],
        )
        of_operands = [_partitioner_entries(x, mesh) for x in operands]
        shardings = inferred_shardings(operation.what, rule, mesh.shape, operation.infer, shardings, of_operands)
        placed = [NamedSharding(mesh, spec_of_term(term, shardings)) for term in terms]
        here = all_manual(mesh)
        per_shard = operation.make_per_shard(here, shardings)

        def on_mesh(*xs: Any) -> Arrays:
            with jax.sharding.use_abstract_mesh(here):
                return per_shard(*xs)

        return mesh, on_mesh, tuple(placed[len(operands) :]), tuple(placed[: len(operands)])

    # Inside a jit of its own, the function can use arrays that are not its arguments.
    unsharded = jax.jit(operation.call_unsharded)
    partitioned = custom_partitioning(lambda *xs: unsharded(*xs))
    # JAX would decode shardings too, and raise for those that are not entries.
    partitioned.def_partition(partition=partition, sharding_rule=for_shardy(rule), decode_shardings=False)
    mappable = jax.custom_batching.custom_vmap(lambda *xs: partitioned(*xs))

    @mappable.def_vmap
    def mapped(size: int, batched: Sequence[bool], *xs: Any) -> tuple[Arrays, Arrays]:
        return by_partitioner(operation.batched(size, batched), known, *xs), (True,) * len(rule.results)

    return tuple(mappable(*arrays))


def per_device(operation: PartitionedOperation, mesh: AnyMesh, shardings: Shardings, *arrays: Any) -> Arrays:
    """Run an operation per device, on operands with known shardings; mesh axes that are already manual stay manual."""
    rule = operation.rule
    checked = any(varying_axes(x) for x in arrays)
    return tuple(
        run_per_device(
            operation.make_per_shard(mesh, shardings, checked),
            arrays,
            [spec_of_term(term, shardings) for term in rule.operands],
            tuple(spec_of_term(term, shardings) for term in rule.results),
            mesh,
            check_vma=checked,
        )
    )


def all_manual(mesh: AnyMesh) -> AbstractMesh:
    """Return a mesh with Manual axes only, as the per-shard function sees it."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Manual,) * len(mesh.axis_names))


def _made_invariant(x: Any, kept: set[str]) -> Any:
    """Make the type of a result that is the same on all devices invariant, except over some mesh axes."""
    axes = tuple(sorted(varying_axes(x) - kept))
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, axes)
    return jax.lax.pmax(x.astype(jnp.int32), axes).astype(x.dtype) if x.dtype == bool else jax.lax.pmax(x, axes)


def _partitioner_entries(x: Any, mesh: Mesh) -> tuple[Any, ...]:
    """Return how the partitioner shards an array, one entry for each dimension.

    Some of its own shardings are not entries, such as one over half a mesh axis. Those dimensions count as replicated.
    """
    # The sharding exposes nothing but the indices of each device. Any number of shards divides the number of devices,
    # while it may not divide the shape.
    ndim, devices = len(x.shape), mesh.devices
    indices = x.sharding.devices_indices_map((devices.size,) * ndim)
    starts = np.array([[i.start or 0 for i in indices[device]] for device in devices.flat], int)
    starts = starts.reshape(*devices.shape, ndim)
    entries = []
    for along in np.moveaxis(starts, -1, 0):
        # A dimension is sharded over a mesh axis if a step along the mesh axis is a step along the dimension.
        steps = [np.take(along, 1, i).flat[0] if n > 1 else 0 for i, n in enumerate(devices.shape)]
        if np.array_equal(along, np.tensordot(steps, np.indices(devices.shape), 1)):
            by_step = sorted((i for i, step in enumerate(steps) if step), key=steps.__getitem__, reverse=True)
            entries.append(tuple(mesh.axis_names[i] for i in by_step) or None)
        else:
            entries.append(None)
    return tuple(entries)
