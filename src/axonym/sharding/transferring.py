"""`transfer`: copy the arrays of a tree to another mesh and sharding by a plan. `remap` plans, and moves, at once."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..core import errors
from ..core.processes import fail_together, from_all_processes
from ..core.tree_spec import is_key
from ..distribution.padded_array import is_padded
from ..named_array import raw, wrap_like
from .leaves import Leaf, leaves_of
from .meshes import AnyMesh, required_mesh, with_devices
from .moving import (
    Route,
    array_of_shards,
    copy_along_route,
    mesh_in_a_row,
    renew_if_empty,
    route_of,
    run_in_a_row,
    shards_by_device,
    without_cache,
)
from .placement import Placement, describe_leaf, list_problems, present_sharding, resolve
from .shard import NO_DEVICES, shard

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """One array of a plan."""

    path: str
    description: str
    shape: tuple[int, ...]
    itemsize: int
    source: Sharding | None
    """None if the array is in host memory, or every process has its own."""
    target: Sharding
    route: Route | None
    """None if `shard` or JAX moves it: also random keys, empty arrays, and those in another kind of memory."""

    def bytes_on(self, sharding: Sharding | None) -> dict[Any, int]:
        """Return the bytes of the shards of a sharding, by device."""
        if sharding is None:
            return {}
        return dict.fromkeys(sharding.device_set, math.prod(sharding.shard_shape(self.shape)) * self.itemsize)


class TransferPlan:
    """The copies that bring a tree to another mesh and sharding; `axonym.transfer` plans them.

    A plan can be called as often as you like. With several processes, all of them call it.

    >>> old, new = axn.make_mesh({"data": 8}), axn.make_mesh({"data": 2, "model": 4})
    >>> params = axn.shard({"w": axn.ones({"embed": 16, "mlp": 8})}, {"embed": "data"}, old)
    >>> axn.transfer(params, axn.shard(params, {"mlp": "model"}, new))
    TransferPlan of 1 array: 896 B over 56 links between devices, 16 B over the busiest; a device holds up to 384 B
    """

    links: Mapping[tuple[int, int], int]
    """The bytes that one device sends to another, by their numbers."""

    def __init__(self, structure: Any, paths: Sequence[str], tensors: Mapping[int, _Tensor]) -> None:
        self._structure, self._paths, self._tensors = structure, paths, tensors
        self.links = links = collections.Counter()
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for i, tensor in tensors.items():
            route = tensor.route
            alike[i if route is None else (route, tensor.description, tensor.source)].append(i)
            if route is not None:
                links.update({(s.id, d.id): nbytes for (s, d), nbytes in route.links().items()})
        self._steps: list[list[int]] = []
        for its in alike.values():  # in steps of at most two different lengths, each of which is compiled
            route = tensors[its[0]].route
            count = -(-len(its) // (1 if route is None else route.at_once))
            count = next((n for n in range(count, 2 * count) if len(its) % n == 0), count)
            ends = [len(its) * i // count for i in range(count + 1)]
            self._steps += [its[a:b] for a, b in itertools.pairwise(ends)]

    def peak_bytes(self, *, donate: bool = False) -> int:
        """Return the most bytes that a device holds at once: old and new shards, and pieces on their way.

        >>> old, new = axn.make_mesh({"data": 8}), axn.make_mesh({"data": 2, "model": 4})
        >>> params = axn.shard({"w": axn.ones({"embed": 16, "mlp": 8})}, {"embed": "data"}, old)
        >>> axn.transfer(params, axn.shard(params, {"mlp": "model"}, new)).peak_bytes()
        384
        """
        held = collections.Counter[Any]()
        for tensor in self._tensors.values():
            held.update(tensor.bytes_on(tensor.source))
        peak, last = max(held.values(), default=0), (0, [])
        for step in self._steps:  # two of them at a time
            tensors = [self._tensors[i] for i in step]
            for tensor in tensors:
                held.update(tensor.bytes_on(tensor.target))
            route = tensors[0].route
            flight = 0 if route is None else route.in_flight if len(step) == 1 else len(step) * route.in_flight_each
            peak = max(peak, flight + last[0] + max(held.values(), default=0))
            for tensor in last[1] if donate else ():
                held.subtract(tensor.bytes_on(tensor.source))
            last = flight, tensors
        return peak

    def __repr__(self) -> str:
        sent, links = sum(self.links.values()), len(self.links)
        text = f"TransferPlan of {errors.counted(len(self._tensors), 'array')}"
        if links:
            text += f": {errors.describe_bytes(sent)} over {errors.counted(links, 'link')} between devices, "
            text += f"{errors.describe_bytes(max(self.links.values()))} over the busiest"
        return f"{text}; a device holds up to {errors.describe_bytes(self.peak_bytes())}"

    def __call__(self, tree: T, *, donate: bool = False, check: bool = False) -> T:
        """Return the tree with its arrays in their new places.

        Arguments:
            tree: arrays with the axes, dtypes and shardings of the plan's source. A process that has no shards of it
                passes abstract arrays.
            donate: delete each array as soon as its copy is there. Otherwise the tree stays as it is, and the copies
                share no memory with it. An array that is in its new place already, or that shares memory with another
                one, is not deleted.
            check: compare a checksum of each array with the one of its copy; see `axonym.sharding.checksums`.
        """
        leaves, structure = leaves_of(tree)
        _check_structure(leaves, structure, self._structure, self._paths, "the plan")
        if problems := [p for i, tensor in self._tensors.items() for p in _differences_from_plan(leaves[i], tensor)]:
            raise ValueError(list_problems("transfer", problems, None))
        values = [raw(leaf.value) for leaf in leaves]
        before = self._sums(values) if check else {}
        found = self._carry_out(values, donate)
        after = self._sums(found) if check else {}
        if problems := [
            f"{path} has the checksum {a:08x}, and its copy {after[path]:08x}. A device or a link changed a value."
            for path, a in before.items()
            if a != after[path]
        ]:
            raise RuntimeError(list_problems("transfer", problems, None))
        return jax.tree.unflatten(structure, [wrap_like(x, leaf.value) for x, leaf in zip(found, leaves, strict=True)])

    def _carry_out(self, values: Sequence[Any], donate: bool) -> list[Any]:
        # An array that occurs twice stays one array. Other processes do not know which ones do.
        keys = {i: (id(values[i]) if jax.process_count() == 1 else i, t.target) for i, t in self._tensors.items()}
        moving = {key: values[i] for i, key in keys.items()}
        owners = collections.Counter(b for x in moving.values() for b in _buffer_addresses(x)) if donate else {}
        arrived: dict[Any, Any] = {}
        last: tuple[list[Any], list[Any]] = [], []
        for step in [*self._steps, []]:  # two of them at a time
            waiting = list(dict.fromkeys(keys[i] for i in step if keys[i] not in arrived))
            old = [moving[key] for key in waiting]
            new = _moved_arrays(old, self._tensors[step[0]], donate) if waiting else []
            arrived.update(zip(waiting, new, strict=True))
            jax.block_until_ready(last)
            for x, copy in zip(*last, strict=True) if donate else ():
                own = _buffer_addresses(x)
                if own and own.isdisjoint(_buffer_addresses(copy)) and all(owners[b] == 1 for b in own):
                    x.delete()
            last = old, new
        return [arrived[keys[i]] if i in keys else x for i, x in enumerate(values)]

    def _sums(self, values: Sequence[Any]) -> dict[str, int]:
        planned = {i: tensor for i, tensor in self._tensors.items() if tensor.source is not None}
        sums = sums_of([values[i] for i in planned], [True] * len(planned))
        return {tensor.path: one for tensor, one in zip(planned.values(), sums, strict=True)}


def transfer(source: Any, target: Any, *, piece_bytes: int = 2**26) -> TransferPlan:
    """Plan how to copy the arrays of a tree to another mesh and sharding, such as from training to serving.

    The meshes may have the same devices, others, or some in common. Shards go directly from device to device, without
    the host, each byte once; if several devices hold a shard, they share in sending it.

    With several processes, all of them call this and the plan, with the same shardings.

    Arguments:
        source: arrays, or abstract arrays with shardings.
        target: a tree of the same structure, whose arrays have the same axes, sizes and dtypes, and the shardings to
            copy to. `axonym.shard` gives abstract arrays their shardings.
        piece_bytes: the most bytes of pieces on a device at once, besides the old and the new shards.

    >>> train, serve = (axn.make_mesh({"data": 4}, devices=d) for d in (jax.devices()[:4], jax.devices()[4:]))
    >>> params = axn.shard({"w": axn.ones({"embed": 16, "mlp": 8})}, {"embed": "data"}, train)
    >>> plan = axn.transfer(params, axn.shard(jax.eval_shape(lambda: params), {"mlp": "data"}, serve))
    >>> plan(params)["w"].array.sharding.spec, sum(plan.links.values())
    (P(None, 'data'), 512)
    """
    leaves, structure = leaves_of(source)
    goals, other = leaves_of(target)
    _check_structure(goals, other, structure, [leaf.path for leaf in leaves], "the source")
    problems, targets = [], {}
    for i, (leaf, goal) in enumerate(zip(leaves, goals, strict=True)):
        if _describe_leaf(leaf) != _describe_leaf(goal):
            problems.append(
                f"{leaf.path} is {_describe_leaf(leaf)} in the source, and {_describe_leaf(goal)} in the target."
            )
        elif leaf.shape is not None:
            for which, x in (("source", raw(leaf.value)), ("target", raw(goal.value))):
                on_host, has = isinstance(x, np.ndarray) and which == "source", present_sharding(x)
                if not on_host and (has is None or isinstance(getattr(has, "mesh", None), AbstractMesh)):
                    problems.append(
                        f"{leaf.path} has no devices in the {which}. Place it by "
                        f"`axonym.shard({which}, placement, mesh)`."
                    )
            _refuse_padded("transfer", goal)
            targets[i] = present_sharding(goal.value)
    if problems:
        raise ValueError(list_problems("transfer", problems, None))
    return _make_plan("transfer", leaves, structure, targets, piece_bytes)


def remap(tree: T, placement: Placement, mesh: AnyMesh | None = None, *, piece_bytes: int = 2**26) -> T:
    """Move a state to another mesh or mapping, without a checkpoint.

    This is `axonym.transfer` to this placement, which deletes each array that has moved: do not use the arrays that you
    passed afterwards. Arrays that the placement does not cover, such as random keys and counters, are replicated over
    the mesh.

    Arguments:
        tree: parameters, the state of an optimizer, ...
        placement: the new placement, such as a resource mapping.
        mesh: the new mesh; by default the active one.
        piece_bytes: the most bytes on a device at once, besides the old and the new shards.

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
    targets = {}
    for i, leaf in enumerate(leaves):
        if leaf.shape is not None:
            _check_values(what, leaf)
            own: Any = found if leaf.mesh is None else with_devices(leaf.mesh)
            targets[i] = NamedSharding(own, PartitionSpec() if leaf.spec is None else leaf.spec)
    return _make_plan(what, leaves, structure, targets, piece_bytes)(tree, donate=True)


def _make_plan(
    what: str, leaves: Sequence[Leaf], structure: Any, targets: Mapping[int, Sharding], piece_bytes: int
) -> TransferPlan:
    with fail_together(what) as agree:
        several = jax.process_count() > 1
        # Whether this process may have an array of its own, as has every other one: then `shard` places it.
        own: list[bool] = []
        for i, target in targets.items():
            here, there = _processes_of(present_sharding(raw(leaves[i].value))), _processes_of(target)
            own.append(not here or (here == {jax.process_index()} and here < there))
        if several and own:
            agree({"number of arrays": str(len(own))})
            own = np.min(from_all_processes(np.array(own)), 0).tolist()
        tensors = {
            i: _plan_array(what, leaves[i], target, piece_bytes, each_has)
            for (i, target), each_has in zip(targets.items(), own, strict=True)
        }
        if several:
            lines = []  # the same in all processes if they plan the same
            for t in tensors.values():
                both = [s and s.devices_indices_map(t.shape).items() for s in (t.source, t.target)]
                places = [None if s is None else sorted((d.id, str(index)) for d, index in s) for s in both]
                lines.append(f"{t.path} {t.description} goes by plan {zlib.crc32(repr(places).encode()):08x}")
            agree({"arrays": "\n".join(lines)})
    return TransferPlan(structure, [leaf.path for leaf in leaves], tensors)


def _refuse_padded(what: str, leaf: Leaf) -> None:
    if is_padded(raw(leaf.value)):
        raise ValueError(
            f"{what}: {leaf.path}, {_describe_leaf(leaf)}, is stored padded, which plans cannot copy. Place it by "
            "`axonym.shard(tree, placement, mesh, uneven='pad')`, or gather it with `axonym.unshard` first."
        )


def _processes_of(sharding: Sharding | None) -> set[int]:
    return set() if sharding is None else {d.process_index for d in sharding.device_set}


def _plan_array(what: str, leaf: Leaf, target: Sharding, piece_bytes: int, each_has: bool) -> _Tensor:
    """Plan one array; `each_has` says that every process has an array of its own."""
    x, source = raw(leaf.value), None if each_has else present_sharding(raw(leaf.value))
    _refuse_padded(what, leaf)
    here, there = _processes_of(source), _processes_of(target)
    kinds = {s.memory_kind or next(iter(s.device_set)).default_memory().kind for s in (source, target) if s is not None}
    route, plain = None, not jnp.issubdtype(x.dtype, jax.dtypes.extended) and not getattr(x, "weak_type", False)
    if isinstance(source, NamedSharding) and isinstance(target, NamedSharding) and len(kinds) == 1 and x.size and plain:
        route = route_of(tuple(x.shape), x.dtype.itemsize, source, target, max(piece_bytes // 2, 1))
    if source is not None and route is None and here | there != {jax.process_index()} and here != there:
        raise ValueError(
            f"{what}: {leaf.path}, {_describe_leaf(leaf)}, cannot go to devices of other processes. Convert random "
            "keys with jax.random.key_data first."
        )
    return _Tensor(leaf.path, _describe_leaf(leaf), tuple(x.shape), x.dtype.itemsize, source, target, route)


def _moved_arrays(arrays: list[Any], tensor: _Tensor, donate: bool) -> list[Any]:
    if tensor.source is None:
        return [shard(x, tensor.target) for x in arrays]
    if donate and tensor.source == tensor.target:
        return arrays
    if tensor.route is None:
        may_alias = None if donate else False
        return [jax.device_put(without_cache(renew_if_empty(x)), tensor.target, may_alias=may_alias) for x in arrays]
    return copy_along_route(arrays, tensor.route, reuse=donate)


def _buffer_addresses(x: Any) -> set[tuple[Any, int]]:
    """Return the devices and addresses of the shards of an array; none for random keys, which are small."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}


# --- checks ---


def _check_structure(leaves: Sequence[Leaf], found: Any, expected: Any, paths: Sequence[str], which: str) -> None:
    if found == expected:
        return
    has, wanted = {leaf.path for leaf in leaves}, set(paths)
    hints = [
        f" Only {where} has {errors.quoted(sorted(some)[:3])}{' and more' if len(some) > 3 else ''}."
        for some, where in ((has - wanted, "the tree"), (wanted - has, which))
        if some
    ]
    raise ValueError(f"transfer: the tree has another structure than {which}.{''.join(hints)}")


def _differences_from_plan(leaf: Leaf, tensor: _Tensor) -> list[str]:
    """Return the differences between an array and what was planned."""
    if (found := _describe_leaf(leaf)) != tensor.description:
        return [f"{leaf.path} is {found}, and was planned as {tensor.description}."]
    if tensor.source is None or any(d.process_index == jax.process_index() for d in tensor.source.device_set):
        _check_values("transfer", leaf)
    has = present_sharding(leaf.value)
    planned = tensor.source
    if planned is None or has == planned or (has and has.is_equivalent_to(planned, len(tensor.shape))):
        return []
    return [f"{leaf.path} has the sharding {has}, and was planned with {tensor.source}. Plan again."]


def _check_values(what: str, leaf: Leaf) -> None:
    if isinstance(raw(leaf.value), (Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(f"{what}: {leaf.path} has no values to move. Call it outside of jit, with arrays.")


def _describe_leaf(leaf: Leaf) -> str:
    return "no array" if leaf.shape is None else f"{raw(leaf.value).dtype}{describe_leaf(leaf)}"


# --- checksums ---


def checksums(tree: Any) -> dict[str, int]:
    """Return a checksum of the values of each array of a tree, by path.

    Equal arrays have equal checksums, however they are sharded. Values in another order have another one. Each device
    adds up its shards, so this takes little memory. With several processes, all of them call it.

    >>> x, mesh = axn.arange({"embed": 16}), axn.make_mesh({"data": 8})
    >>> axn.sharding.checksums({"w": x}) == axn.sharding.checksums({"w": axn.shard(x, {"embed": "data"}, mesh)})
    True
    """
    leaves = [leaf for leaf in leaves_of(tree)[0] if leaf.shape is not None]
    arrays = [raw(leaf.value) for leaf in leaves]
    spread = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in arrays]
    return dict(zip((leaf.path for leaf in leaves), sums_of(arrays, spread), strict=True))


def sums_of(arrays: Sequence[Any], spread: Sequence[bool]) -> list[int]:
    """Return checksums of arrays, some of which have shards in several processes; abstract arrays have none."""
    sums = np.array([_sum_of_shards(x) for x in arrays], np.uint32)
    if jax.process_count() > 1 and any(spread):
        sums = np.where(spread, from_all_processes(sums).sum(0, dtype=np.uint32), sums)
    return sums.tolist()


def _sum_of_shards(x: Any) -> int:
    """Return the sum of a number for each element of this process, each counted once."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return 0
    x = jnp.asarray(x)
    with jax.set_mesh(NO_DEVICES):
        x = jax.random.key_data(x) if is_key(x) else jnp.atleast_1d(x)
    starts = {s.device: [i.start or 0 for i in s.index] for s in x.addressable_shards if s.replica_id == 0}
    if not x.size or not starts:
        return 0
    mesh = mesh_in_a_row(starts)
    with jax.set_mesh(mesh):
        parts, places = array_of_shards(shards_by_device(x), mesh), np.array([*starts.values()], np.uint32)
        sums = _sums_of_pieces(parts, places, x.shape, mesh)
    return int(np.sum(np.asarray(sums), dtype=np.uint32))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sums_of_pieces(x: jax.Array, starts: Any, shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    def local(x: jax.Array, starts: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag], -1)
        whole = x.dtype == bool or (x.dtype.itemsize <= 4 and jnp.issubdtype(x.dtype, jnp.integer))
        width = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 64  # some floats have 4 bits
        bits = x if whole else lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}"))
        at = jnp.uint32(0)  # the position in the whole array
        for i, n in enumerate(bits.shape):
            start = starts[0, i] if i < len(shape) else jnp.uint32(0)
            at = at * np.uint32(shape[i] if i < len(shape) else n) + start
            at = at[..., None] + lax.iota(jnp.uint32, n).reshape([1] * i + [n])
        mixed = bits.astype(jnp.uint32) + at * np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # as in MurmurHash3
            mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
        return jnp.sum(mixed, dtype=jnp.uint32)[None]

    return run_in_a_row(local, mesh, x, starts)
