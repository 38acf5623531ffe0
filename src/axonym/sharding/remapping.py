"""`remap`: move a live state to another mesh or mapping."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _errors
from ..array import NamedArray, is_jax_array_like, wrap
from .meshes import AnyMesh, required_mesh, with_devices
from .placement import Placement, resolve
from .shard import shard

T = TypeVar("T")


def remap(tree: T, placement: Placement, mesh: AnyMesh | None = None) -> T:
    """Move a state to another mesh or mapping, without a checkpoint.

    Arrays move one after the other, and each old one is deleted, so the devices never hold more than the old and the
    new shards of one array besides the shards of the rest. The arrays that were passed cannot be used afterwards.
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
    moved: dict[int, jax.Array] = {}  # an array that is in the tree twice stays one

    def move(x: Any, spec: PartitionSpec | None, mesh: Mesh, path: str) -> Any:
        if not is_jax_array_like(x):
            return x
        if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(f"{what}: {path} has no values to move. Call it outside of jit, with arrays.")
        target = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
            return shard(x, target)
        if jax.process_count() > 1 and x.sharding.device_set != target.device_set:
            raise ValueError(
                f"{what}: {path} is on {len(x.sharding.device_set)} devices of several processes, and the new mesh has "
                f"{mesh.size}. Save a checkpoint, and restore it on the new mesh."
            )
        if id(x) not in moved:
            moved[id(x)] = x if x.sharding == target else _moved(x, target)
        return moved[id(x)]

    results = []
    for leaf in leaves:
        array = leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value
        target_mesh = found if leaf.mesh is None else with_devices(leaf.mesh)
        array = move(array, leaf.spec, target_mesh, leaf.path)  # pyright: ignore[reportArgumentType]
        results.append(wrap(array, leaf.value.names) if isinstance(leaf.value, NamedArray) else array)
    return jax.tree.unflatten(structure, results)


def _moved(x: jax.Array, target: NamedSharding) -> jax.Array:
    found = jax.block_until_ready(jax.device_put(x, target, may_alias=False))
    x.delete()  # nothing of it lives on in what was found
    return found
