"""`remap`: move a live state to another mesh or mapping."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import errors
from ..distribution.per_device import run_per_device
from ..named_array import is_jax_array_like, raw, wrap_like
from .meshes import AnyMesh, required_mesh, with_devices
from .placement import Placement, resolve
from .shard import moved, shard

T = TypeVar("T")


def remap(tree: T, placement: Placement, mesh: AnyMesh | None = None, *, piece_bytes: int = 2**26) -> T:
    """Move a state to another mesh or mapping, without a checkpoint.

    Arrays move one at a time, and each old one is deleted, so only the array that is moving takes memory twice.
    Anything else that moving needs, such as a copy on the host, takes a few times `piece_bytes`. An array that shares
    memory with another one is not deleted. Do not use the arrays that you passed afterwards. Arrays that the placement
    does not cover, such as random keys and counters, are replicated over the mesh.

    With several processes, the new mesh must have the devices of the old one. For fewer hosts, restore a checkpoint.

    Arguments:
        tree: parameters, the state of an optimizer, ...
        placement: the new placement, such as a resource mapping.
        mesh: the new mesh; by default the active one.
        piece_bytes: the largest piece to move at once, in bytes; smaller arrays move as one.

    >>> old, new = axn.make_mesh({"data": 8}), axn.make_mesh({"data": 4, "model": 2})
    >>> state = axn.shard({"w": axn.ones({"embed": 16, "mlp": 4})}, {"embed": "data"}, old)
    >>> axn.remap(state, {"embed": "data", "mlp": "model"}, new)["w"].array.sharding.spec
    P('data', 'model')
    """
    what = "remap"
    found = with_devices(required_mesh(what, mesh))
    if not isinstance(found, Mesh):
        raise TypeError(f"{what}: mesh {errors.describe_shape(found.shape)} has no devices to move arrays to.")
    leaves, structure = resolve(tree, placement, found, what)
    moves = []
    for leaf in leaves:
        x: Any = raw(leaf.value)
        target = NamedSharding(
            found if leaf.mesh is None else with_devices(leaf.mesh),  # pyright: ignore[reportArgumentType]
            PartitionSpec() if leaf.spec is None else leaf.spec,
        )
        _check(what, x, target, leaf.path)
        moves.append((x, target))
    # Only after all checks, so that nothing is deleted if one fails.
    owners = collections.Counter(b for x in {id(x): x for x, _ in moves}.values() for b in _buffers(x))
    arrived: dict[int, jax.Array] = {}  # an array that occurs twice stays one array
    results = []
    for leaf, (x, target) in zip(leaves, moves, strict=True):
        if is_jax_array_like(x):
            if id(x) not in arrived:
                arrived[id(x)] = _moved(x, target, owners, piece_bytes)
            x = arrived[id(x)]
        results.append(wrap_like(x, leaf.value))
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


def _moved(x: Any, target: NamedSharding, owners: Mapping[Any, int], piece_bytes: int) -> Any:
    """Move an array, and delete the old one, unless another one shares memory with it."""
    if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
        return shard(x, target)
    if x.sharding == target:
        return x
    found = _in_pieces(x, target, piece_bytes)
    own = _buffers(x)
    if own and own.isdisjoint(_buffers(found)) and all(owners[b] == 1 for b in own):
        x.delete()
    return found


def _in_pieces(x: jax.Array, target: NamedSharding, piece_bytes: int) -> jax.Array:
    """Move an array. If it is large, move pieces one after another into the new shards."""
    source = x.sharding
    if isinstance(source, jax.sharding.SingleDeviceSharding):
        source = NamedSharding(Mesh(np.array(list(source.device_set)), ("device",)), PartitionSpec())
    small = x.nbytes <= piece_bytes or jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if small or not isinstance(source, NamedSharding) or source.memory_kind != target.memory_kind:
        return jax.block_until_ready(moved(x, target))
    # A dimension consists of blocks, each within one old and one new shard. A piece has the same stretch of every
    # block, so that no other device is needed to cut it out or put it in.
    counts = [[n // m for n, m in zip(x.shape, s.shard_shape(x.shape), strict=True)] for s in (source, target)]
    sizes = tuple(n // math.lcm(a, b) for n, a, b in zip(x.shape, *counts, strict=True))
    lengths, nbytes = list(sizes), x.nbytes
    for i, size in enumerate(sizes):
        if nbytes > piece_bytes:
            lengths[i] = max(size * piece_bytes // nbytes, 1)
            nbytes = nbytes // size * lengths[i]
    old: Any = source.mesh
    new: Any = target.mesh
    with jax.set_mesh(new):
        found = jnp.zeros(x.shape, x.dtype, device=target)
    # The last stretch may overlap the one before it.
    stretches = [[min(at, n - m) for at in range(0, n, m)] for n, m in zip(sizes, lengths, strict=True)]
    for starts in itertools.product(*stretches):
        at = np.array(starts, np.int32)
        with jax.set_mesh(old):
            piece = _cut(x, at, source, sizes, tuple(lengths))
        piece = moved(piece, target)
        with jax.set_mesh(new):
            found = jax.block_until_ready(_put(found, piece, at, target, sizes, tuple(lengths)))
    return found


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _cut(x: jax.Array, at: Any, sharding: NamedSharding, sizes: Sequence[int], lengths: Sequence[int]) -> jax.Array:
    """Return stretches of the blocks along all dimensions."""

    def local(x: jax.Array, at: jax.Array) -> jax.Array:
        blocks = _in_blocks(x, sizes)
        shape = [n for pair in zip(blocks.shape[::2], lengths, strict=True) for n in pair]
        piece = lax.dynamic_slice(blocks, _starts(at), shape)
        return piece.reshape([a * b for a, b in zip(shape[::2], shape[1::2], strict=True)])

    spec = sharding.spec
    return run_per_device(local, (x, at), (spec, PartitionSpec()), spec, sharding.mesh)


@functools.partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _put(
    x: jax.Array, piece: jax.Array, at: Any, sharding: NamedSharding, sizes: Sequence[int], lengths: Sequence[int]
) -> jax.Array:
    """Put the result of `_cut` in its place."""

    def local(x: jax.Array, piece: jax.Array, at: jax.Array) -> jax.Array:
        blocks = lax.dynamic_update_slice(_in_blocks(x, sizes), _in_blocks(piece, lengths), _starts(at))
        return blocks.reshape(x.shape)

    specs = (sharding.spec, sharding.spec, PartitionSpec())
    return run_per_device(local, (x, piece, at), specs, sharding.spec, sharding.mesh)


def _in_blocks(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Split each dimension into two: the block index, and the position in the block."""
    return x.reshape([n for total, size in zip(x.shape, sizes, strict=True) for n in (total // size, size)])


def _starts(at: jax.Array) -> list[Any]:
    return [start for i in range(len(at)) for start in (np.int32(0), at[i])]


def _buffers(x: Any) -> set[tuple[Any, int]]:
    """Return the devices and addresses of the shards of an array; none for random keys, which are small."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
