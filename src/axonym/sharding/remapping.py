"""`remap`: move a live state to another mesh or mapping."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _errors
from ..named_array import NamedArray, is_jax_array_like, wrap
from .meshes import AnyMesh, required_mesh, with_devices
from .placement import Placement, resolve
from .shard import shard

T = TypeVar("T")


def remap(tree: T, placement: Placement, mesh: AnyMesh | None = None) -> T:
    """Move a state to another mesh or mapping, without a checkpoint.

    Arrays move one after the other, and each old one is deleted, so the devices never hold more than the old and the
    new shards of one array besides the shards of the rest. An array that shares memory with another one stays. The
    arrays that were passed are not to be used afterwards.
    Arrays that the placement says nothing about, such as random keys and counters, are replicated over the mesh.

    With several processes, the new mesh must have the devices of the old one. For fewer hosts, restore a checkpoint.

    Arguments:
        tree: parameters, the state of an optimiser, ...
        placement: the new placement, such as a resource mapping.
        mesh: the new mesh; by default the active one.

    >>> old, new = axn.make_mesh({"data": 8}), axn.make_mesh({"data": 4, "model": 2})
    >>> state = axn.shard({"w": axn.ones({"embed": 16, "mlp": 4})}, {"embed": "data"}, old)
    >>> axn.remap(state, {"embed": "data", "mlp": "model"}, new)["w"].array.sharding.spec
    P('data', 'model')
    """
    what = "remap"
    found = with_devices(required_mesh(what, mesh))
    if not isinstance(found, Mesh):
        raise TypeError(f"{what}: mesh {_errors.describe_shape(found.shape)} has no devices to move arrays to.")
    leaves, structure = resolve(tree, placement, found, what)
    moves = []
    for leaf in leaves:
        x: Any = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
        target = NamedSharding(
            found if leaf.mesh is None else with_devices(leaf.mesh),  # pyright: ignore[reportArgumentType]
            PartitionSpec() if leaf.spec is None else leaf.spec,
        )
        _check(what, x, target, leaf.path)
        moves.append((x, target))
    # Only now, so that nothing is deleted if something is refused.
    owners = collections.Counter(b for x in {id(x): x for x, _ in moves}.values() for b in _buffers(x))
    moved: dict[int, jax.Array] = {}  # an array that is in the tree twice stays one
    results = []
    for leaf, (x, target) in zip(leaves, moves, strict=True):
        if is_jax_array_like(x):
            if id(x) not in moved:
                moved[id(x)] = _moved(x, target, owners)
            x = moved[id(x)]
        results.append(wrap(x, leaf.value.names) if isinstance(leaf.value, NamedArray) else x)
    return jax.tree.unflatten(structure, results)


def _check(what: str, x: Any, target: NamedSharding, path: str) -> None:
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(f"{what}: {path} has no values to move. Call it outside of jit, with arrays.")
    if jax.process_count() == 1 or not isinstance(x, jax.Array) or x.is_fully_addressable:
        return
    if x.sharding.device_set != target.device_set:
        raise ValueError(
            f"{what}: {path} is on {len(x.sharding.device_set)} devices of several processes, and the new mesh has "
            f"{target.mesh.size}. Save a checkpoint, and restore it on the new mesh."
        )


def _moved(x: Any, target: NamedSharding, owners: Mapping[Any, int]) -> Any:
    """Move an array, and delete the old one, unless another one shares memory with it."""
    if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
        return shard(x, target)
    if x.sharding == target:
        return x
    found = jax.block_until_ready(jax.device_put(x, target))
    own = _buffers(x)
    if own and own.isdisjoint(_buffers(found)) and all(owners[b] == 1 for b in own):
        x.delete()
    return found


def _buffers(x: Any) -> set[tuple[Any, int]]:
    """Return the devices and addresses of the shards of an array; none for random keys, which are small."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
