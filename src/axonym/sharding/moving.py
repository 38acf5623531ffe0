"""Move arrays: to another sharding, to the host, and from each process to one global array.

Large arrays go directly from device to device, in pieces. All pieces of a route have one shape, and where they are cut
out and put in is data, so that one program serves all devices, and all arrays of a shape.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..core.tree_spec import is_key
from ..distribution.mesh_axes import padded
from ..distribution.padded_array import padded_array, with_padding
from ..distribution.per_device import run_per_device


def copied_to_host(x: jax.Array) -> np.ndarray:
    """Copy an array to host memory. With several hosts, each must call this for the same arrays in the same order."""
    if x.is_fully_addressable:
        return np.asarray(without_cache(renew_if_empty(x)))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


_COMPILED_BYTES = 2**24
"""Compiled programs move arrays of at least this many bytes. For smaller ones, copying through the host is faster."""
_PIECE_BYTES = 2**26


def move_to_sharding(x: Any, target: NamedSharding) -> jax.Array:
    """Move an array to a sharding, and leave no copy of it on the host.

    If shards get other boundaries, `jax.device_put` copies the array to the host, and the array keeps that copy.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or is_key(x):
        return jax.device_put(x, target)
    # `without_cache` returns weakly typed arrays unchanged. Empty arrays have nothing to exchange.
    if x.size and (x.nbytes >= _COMPILED_BYTES or x.weak_type) and _is_exchange(x.sharding, target, x.ndim):
        return program_to(target, x.shape)(x)
    if x.nbytes >= _COMPILED_BYTES and x.is_fully_addressable and _is_of_mesh(x.sharding, target) and not x.weak_type:
        return copy_along_route([x], route_of(x.shape, x.dtype.itemsize, x.sharding, target, _PIECE_BYTES))[0]
    return jax.device_put(without_cache(x), target)


def without_cache(x: Any) -> Any:
    """Return a new array with the same buffers, without what JAX caches in the old one, such as a copy on the host.

    Weakly typed arrays and random keys, which JAX cannot make from buffers, are returned as they are.
    """
    if not isinstance(x, jax.Array) or is_key(x) or x.weak_type or not x.is_fully_addressable:
        return x
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])


def renew_if_empty(x: Any) -> Any:
    """Replace an array of size 0 by a new one: jax 0.10 cannot copy one that a sharded computation made."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.size or is_key(x):
        return x
    empty = np.zeros(x.shape, x.dtype)
    return jnp.full(x.shape, empty.dtype.type().item()) if x.weak_type else empty


def _is_of_mesh(has: Any, target: NamedSharding) -> bool:
    """Return whether an array has a sharding on a mesh, in the same kind of memory as another sharding."""
    return isinstance(has, NamedSharding) and has.memory_kind == target.memory_kind


@functools.lru_cache(maxsize=4096)
def _is_exchange(has: Any, target: NamedSharding, ndim: int) -> bool:
    """Return whether an array stays on its mesh and gets other shards there, so that a program can exchange them.

    Between meshes with different axes, XLA may replicate the whole array on each device.
    """
    return _is_of_mesh(has, target) and has.mesh == target.mesh and not has.is_equivalent_to(target, ndim)


@functools.lru_cache(maxsize=256)
def program_to(
    target: NamedSharding, shape: tuple[int, ...], true_shape: tuple[int, ...] = ()
) -> Callable[[Any], jax.Array]:
    """Make a program that exchanges shards, and changes the padding of an array with a true shape to get a shape."""

    def move(x: Any) -> jax.Array:
        return with_padding(padded_array(x, true_shape).unpadded(), shape) if true_shape else x

    return jax.jit(move, out_shardings=target)


def from_each_process(x: Any, sharding: NamedSharding) -> jax.Array:
    """Make one global array from equal arrays of all processes.

    `jax.device_put` would gather the values of all processes to compare them, and does not accept random keys.
    """
    if is_key(x):
        spec = PartitionSpec(*padded(sharding.spec, x.ndim))
        data = from_each_process(jax.random.key_data(x), NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    values = np.asarray(without_cache(x), jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


# --- in pieces ---

Start = tuple[int, ...]
Sent = tuple[tuple[Any, int, Any], ...]
Copies = dict[Any, list[tuple[Any, Start, Start]]]
_MOST_AT_ONCE = 32
"""So many arrays share a program: more would take longer to compile."""
_WORTH_SPLITTING = 2**9
"""Bytes of a block from which its replicas share in sending it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The copies that bring any array of one shape and sharding to another sharding."""

    shape: tuple[int, ...]
    itemsize: int
    source: NamedSharding
    target: NamedSharding
    piece: tuple[int, ...]
    cut: bool
    """True if pieces are smaller than the source's shards."""
    put: bool
    """True if pieces are smaller than the target's shards."""
    tiled: bool
    """True if pieces of one round lie beside each other in all of the target's shards, without overlaps."""
    straight: bool
    """True if `jax.device_put` does the same: each shard goes to another device as it is."""
    rounds: tuple[Round, ...]
    in_flight: int
    """The most bytes on a device, beside the shards, while one array is copied."""
    in_flight_each: int
    """The same for each of several arrays that are copied together, and stacked for that."""
    at_once: int
    """The number of arrays that are copied together."""

    def links(self) -> dict[tuple[Any, Any], int]:
        """Return the bytes that each device sends to each other device."""
        nbytes = math.prod(self.piece) * self.itemsize
        copies = [(source, to) for step in self.rounds for sent in step.sent for source, _, to in sent if source != to]
        return {pair: n * nbytes for pair, n in collections.Counter(copies).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """Copies that are made together: as many for each target device."""

    cuts: dict[Any, tuple[Start, ...]]
    """By source device, the start of each piece that is cut out of its shard."""
    sent: tuple[Sent, ...]
    """For each piece that a target device gets: the source device, the number of its cut, and the target device."""
    puts: dict[Any, tuple[tuple[Start, int], ...]]
    """For each target device, the places of its pieces in order, each with the number of the piece in `sent`."""


@functools.lru_cache(maxsize=4096)
def route_of(shape: tuple[int, ...], itemsize: int, source: NamedSharding, target: NamedSharding, most: int) -> Route:
    """Plan the copies between two shardings of a shape, with at most `most` bytes of pieces on a device at once."""
    limit, (own, new) = most, (s.shard_shape(shape) for s in (source, target))
    while True:
        piece, copies = _copies_to_each_device(shape, itemsize, source, target, max(limit // 2, 1))
        rounds, flight = _fewest_rounds(copies, piece != own, piece != new, math.prod(piece) * itemsize, most)
        if flight <= most or math.prod(piece) == 1:
            break
        limit //= 2
    cut, put = piece != own, piece != new
    grid = list(itertools.product(*(range(0, n, m) for n, m in zip(new, piece, strict=True))))
    # Pieces are joined along one axis after the other, with a whole target shard in between.
    between = max(sum(n > m for n, m in zip(new, piece, strict=True)) - 1, 0) * math.prod(new) * itemsize
    tiled = len(rounds) == 1 and flight + between <= most
    tiled = tiled and all([at for at, _ in puts] == grid for puts in rounds[0].puts.values())
    flight += between if tiled else 0
    # Arrays that are copied together are stacked.
    several = math.prod(own) * itemsize + flight if cut or put else math.prod(new) * itemsize
    at_once = max(most // several, 1) if tiled else 1
    if cut or put:  # whole shards need no program
        at_once = min(at_once, _MOST_AT_ONCE)
    # Each device's shard goes to one other device of this process, in order.
    both = source.device_set | target.device_set
    apart = not source.device_set & target.device_set and len(both) == len(_of_this_process(both))
    here, there = (list(s.devices_indices_map(shape).values()) for s in (source, target))
    straight = not (cut or put) and apart and here == there
    each = 0 if straight else several
    return Route(shape, itemsize, source, target, piece, cut, put, tiled, straight, rounds, flight, each, at_once)


def _fewest_rounds(copies: Copies, cut: bool, put: bool, nbytes: int, most: int) -> tuple[tuple[Round, ...], int]:
    """Return as few rounds as there can be with so many bytes of pieces on a device, and how many there are."""
    total = together = len(next(iter(copies.values())))
    while True:
        rounds = tuple(_make_round(copies, i, min(i + together, total)) for i in range(0, total, together))
        cuts = max(len(starts) for step in rounds for starts in step.cuts.values())
        flight = ((cuts if cut else 0) + (together if put else 0)) * nbytes
        if flight <= most or together == 1:
            return rounds, flight
        together = -(-together // 2)


def _copies_to_each_device(
    shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding, most: int
) -> tuple[Start, Copies]:
    """Return the shape of the pieces, and what each target device gets: from which device, from where, to where.

    A block lies within one old and one new shard. If several devices hold a block, they share in sending it.
    """
    old, new = source.shard_shape(shape), target.shard_shape(shape)
    block = tuple(map(math.gcd, old, new))
    holders: dict[Start, list[Any]] = collections.defaultdict(list)
    for device, start in _shard_starts(source, shape).items():
        holders[start].append(device)
    shards = _shard_starts(target, shape)
    blocks = list(itertools.product(*map(range, [0] * len(new), new, block)))
    lacking: dict[Start, list[Any]] = collections.defaultdict(list)
    for (device, base), offset in itertools.product(shards.items(), blocks):
        if device not in holders[_shard_of(start := _sum_of_starts(base, offset), old)]:
            lacking[start].append(device)
    piece = block
    if block != old or block != new:  # a shard that moves as it is takes no other memory
        piece = _piece_shape(block, itemsize, len(next(iter(holders.values()))), lacking.values(), most)
    # If a size does not divide the block's, the last piece overlaps the one before it a little.
    parts = [[min(i, n - m) for i in range(0, n, m)] for n, m in zip(block, piece, strict=True)]
    ranks = {device: i for i, device in enumerate(dict.fromkeys((*_shard_starts(source, shape), *shards)))}
    found: Copies = {device: [] for device in shards}
    for (device, base), offset in itertools.product(shards.items(), blocks):
        start = _sum_of_starts(base, offset)
        held, wanting = holders[_shard_of(start, old)], lacking[start]
        turn = sum(map(int.__floordiv__, start, block))
        inside = tuple(map(int.__mod__, start, old))
        for i, part in enumerate(itertools.product(*parts)):
            sender = device
            if device in wanting:
                rank, (each, rest) = wanting.index(device), divmod(len(wanting), len(held))
                # Neighbors get a block from one holder, so that a replica of the source sends to one of the target.
                sender = held[(turn + i * len(wanting) + rank) % len(held) if rest else rank // each]
            found[device].append((sender, _sum_of_starts(inside, part), _sum_of_starts(offset, part)))
    for device, copies in found.items():  # in this order, devices send to different ones at a time
        copies.sort(key=lambda copy, rank=ranks[device]: (ranks[copy[0]] - rank) % len(ranks))
    return piece, found


def _piece_shape(block: Start, itemsize: int, replicas: int, lacking: Collection[list[Any]], most: int) -> Start:
    """Return the shape of pieces that take at most so many bytes, and that replicas share in sending."""
    sizes = list(block)
    senders = max((min(replicas // math.gcd(replicas, len(devices)), 8) for devices in lacking), default=1)
    shared = next((i for i, n in enumerate(block) if n % senders == 0), None)
    if shared is not None and math.prod(block) * itemsize >= _WORTH_SPLITTING:
        sizes[shared] //= senders
    for i, n in enumerate(sizes):
        if (nbytes := math.prod(sizes) * itemsize) > most:
            longest = max(n * most // nbytes, 1)
            sizes[i] = next(m for m in range(longest, 0, -1) if -(-n // m) * m - n <= n // 32)
    return tuple(sizes)


def _shard_of(start: Start, sizes: Start) -> Start:
    """Return where the shard begins that has an element."""
    return tuple(i // n * n for i, n in zip(start, sizes, strict=True))


def _shard_starts(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Start]:
    return {d: tuple(i.start or 0 for i in index) for d, index in sharding.devices_indices_map(shape).items()}


def _sum_of_starts(a: Start, b: Start) -> Start:
    return tuple(i + j for i, j in zip(a, b, strict=True))


def _make_round(copies: Copies, first: int, last: int) -> Round:
    """Return the copies with these numbers of every target device. What several devices get is cut out once."""
    now = {device: its[first:last] for device, its in copies.items()}
    cuts: dict[Any, set[Start]] = collections.defaultdict(set)
    for source, at, _ in itertools.chain(*now.values()):
        cuts[source].add(at)
    ordered = {source: {at: i for i, at in enumerate(sorted(starts))} for source, starts in cuts.items()}
    sent = [
        tuple((its[i][0], ordered[its[i][0]][its[i][1]], device) for device, its in now.items())
        for i in range(last - first)
    ]
    puts = {device: tuple(sorted((to, i) for i, (_, _, to) in enumerate(its))) for device, its in now.items()}
    return Round({source: tuple(starts) for source, starts in ordered.items()}, tuple(sent), puts)


# --- carrying it out ---


def copy_along_route(arrays: Sequence[Any], route: Route, reuse: bool = False) -> list[jax.Array]:
    """Copy arrays of one shape and sharding along a route; in a process without shards, they are abstract.

    If memory may be reused, shards that do not change stay as they are.
    """
    # The pieces of several arrays are sent as one, but not whole shards.
    target, several = route.target, len(arrays) > 1 and (route.cut or route.put)
    if route.straight:
        return jax.device_put(list(arrays), [target] * len(arrays))
    make = functools.partial(jax.make_array_from_single_device_arrays, arrays[0].shape, target, dtype=arrays[0].dtype)
    kind = jax.ShapeDtypeStruct((len(arrays), *route.piece) if several else route.piece, arrays[0].dtype)
    if not (route.cut or route.put):
        ((whole,),) = (step.sent for step in route.rounds)
        sent = [tuple((source, i, device) for source, _, device in whole) for i in range(len(arrays))]
        moved = _sent_pieces(sent, [shards_by_device(x) for x in arrays], kind, None if reuse else False)
        return [make(list(shards.values())) for shards in moved]
    found: list[jax.Array] = []
    for step in route.rounds:
        jax.block_until_ready(found)
        cut = _cut_pieces(arrays, step, route) if route.cut or several else arrays
        pieces = _sent_pieces(step.sent, [shards_by_device(x) for x in cut], kind)
        del cut
        if not (route.put or several):
            return [make(list(pieces[0].values()))]
        found = (
            _put_pieces(found, pieces, step, route, len(arrays)) if _of_this_process(target.device_set) else [make([])]
        )
    return found if len(found) == len(arrays) else found * len(arrays)


def _cut_pieces(arrays: Sequence[Any], step: Round, route: Route) -> list[jax.Array]:
    mesh: Any = route.source.mesh
    if not _of_this_process(mesh.devices.flat):
        return []
    most, nowhere = max(map(len, step.cuts.values())), (0,) * len(route.piece)
    starts = [(*(its := step.cuts.get(d, ())), *[nowhere] * (most - len(its))) for d in mesh.devices.flat]
    # If all devices cut at the same places, these are constants of the program, which is faster. Rounds share programs.
    constant = len(set(starts)) == len(route.rounds) == 1
    same, differ = (starts[0], ()) if constant else (None, (np.array(starts, np.int32),))
    with jax.set_mesh(mesh):
        return _cut_locally(list(arrays), differ, same, route.piece, route.source)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _cut_locally(
    arrays: list[jax.Array],
    differ: tuple[jax.Array, ...],
    same: tuple[Start, ...] | None,
    piece: tuple[int, ...],
    source: NamedSharding,
) -> list[jax.Array]:
    def local(*args: jax.Array) -> list[jax.Array]:
        arrays, starts = args[len(differ) :], args[0][0] if same is None else same
        lead = [len(arrays)] * (len(arrays) > 1)
        # Otherwise there would be as many slices as arrays, which compile slowly.
        x = jnp.stack(arrays) if lead else arrays[0]
        return [
            lax.dynamic_slice(x, [*[0] * len(lead), *at], [*lead, *piece], allow_negative_indices=False)
            for at in starts
        ]

    each = spec_over_devices(source.mesh)
    specs = [*[each] * len(differ), *[source.spec] * len(arrays)]
    return run_per_device(local, (*differ, *arrays), specs, each, source.mesh, check_vma=False)


def _put_pieces(
    old: list[jax.Array], pieces: list[dict[Any, jax.Array]], step: Round, route: Route, count: int
) -> list[jax.Array]:
    mesh: Any = route.target.mesh
    ordered = [{d: pieces[its[i][1]][d] for d, its in step.puts.items() if d in pieces[0]} for i in range(len(pieces))]
    parts, shape = [array_of_shards(x, mesh) for x in ordered], route.target.shard_shape(route.shape)
    with jax.set_mesh(mesh):
        if route.tiled:
            grid = tuple(n // m for n, m in zip(shape, route.piece, strict=True))
            return _program_that_tiles(route.target, grid, count)(parts)
        starts = np.array([[at for at, _ in step.puts[d]] for d in mesh.devices.flat], np.int32)
        return _program_that_puts(route.target, shape)(old, parts, starts)


@functools.lru_cache(maxsize=1024)
def _program_that_tiles(target: NamedSharding, grid: tuple[int, ...], count: int) -> Any:
    """Make a program that joins pieces to arrays, of which each device has so many pieces along each axis."""

    def tiled(parts: list[jax.Array]) -> jax.Array:
        for axis in reversed(range(len(grid))):
            parts = [jnp.concatenate(parts[i : i + grid[axis]], axis) for i in range(0, len(parts), grid[axis])]
        return parts[0]

    def local(*pieces: jax.Array) -> list[jax.Array]:
        return [tiled([x[i] for x in pieces] if count > 1 else list(pieces)) for i in range(count)]

    def put(pieces: list[jax.Array]) -> list[jax.Array]:
        specs = [spec_over_devices(target.mesh)] * len(pieces)
        return run_per_device(local, tuple(pieces), specs, target.spec, target.mesh, check_vma=False)

    return jax.jit(put, out_shardings=target)


@functools.lru_cache(maxsize=1024)
def _program_that_puts(target: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Make a program that puts pieces into an array, a new one or an old one."""

    def put(old: list[jax.Array], pieces: list[jax.Array], starts: jax.Array) -> list[jax.Array]:
        def local(starts: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
            found = arrays[0] if old else jnp.zeros(shape, arrays[0].dtype)
            for piece, at in zip(arrays[len(old) :], starts[0], strict=True):
                found = lax.dynamic_update_slice(found, piece, list(at), allow_negative_indices=False)
            return [found]

        each = spec_over_devices(target.mesh)
        specs = [each, *[target.spec] * len(old), *[each] * len(pieces)]
        return run_per_device(local, (starts, *old, *pieces), specs, target.spec, target.mesh, check_vma=False)

    return jax.jit(put, donate_argnums=0, out_shardings=target)


def _sent_pieces(
    sent: Sequence[Sent], parts: list[dict[Any, jax.Array]], kind: Any, may_alias: bool | None = None
) -> list[dict[Any, jax.Array]]:
    """Send pieces to their devices, and return them by device."""
    found: list[dict[Any, jax.Array]] = []
    within = []
    for copies in sent:
        if any(source.process_index != device.process_index for source, _, device in copies):
            found.append(_pieces_from_processes(copies, parts, kind))
        else:
            found.append({})
            here = (copy for copy in copies if copy[-1].process_index == jax.process_index())
            within += [(found[-1], device, parts[number][source]) for source, number, device in here]
    devices = [device for _, device, _ in within]
    arrived = jax.device_put([x for *_, x in within], devices, may_alias=may_alias)
    for (pieces, device, _), x in zip(within, arrived, strict=True):
        pieces[device] = x
    return found


def _pieces_from_processes(sent: Sent, parts: list[dict[Any, jax.Array]], kind: Any) -> dict[Any, jax.Array]:
    """Send pieces between processes, which takes a collective of all devices that send or receive one."""
    found: dict[Any, jax.Array] = {}
    while sent:
        now = {source: (number, device) for source, number, device in sent}  # a device sends one at a time
        sent = tuple((s, n, d) for s, n, d in sent if now[s] != (n, d))
        mesh = mesh_in_a_row(dict.fromkeys((*now, *(device for _, device in now.values()))))
        if not (devices := _of_this_process(mesh.devices.flat)):
            continue
        nothing = np.zeros(kind.shape, kind.dtype)  # an array of JAX would lie on the active mesh
        own = {d: parts[now[d][0]][d] if d in now else jax.device_put(nothing, d) for d in devices}
        position = {d: n for n, d in enumerate(mesh.devices.flat)}
        with jax.set_mesh(mesh):
            pairs = tuple((position[s], position[d]) for s, (_, d) in now.items())
            arrived = shards_by_device(jax.block_until_ready(_permuted_shards(array_of_shards(own, mesh), pairs, mesh)))
        found |= {d: arrived[d] for _, d in now.values() if d in arrived}
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _permuted_shards(x: jax.Array, pairs: tuple[tuple[int, int], ...], mesh: Mesh) -> jax.Array:
    return run_in_a_row(lambda x: lax.ppermute(x, "device", pairs), mesh, x)


@functools.lru_cache(maxsize=256)
def _mesh_of(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), ("device",))


def mesh_in_a_row(devices: Iterable[Any]) -> Mesh:
    """Return a mesh of devices along one mesh axis."""
    return _mesh_of(tuple(devices))


def spec_over_devices(mesh: Any) -> PartitionSpec:
    """Return the spec of an array with one shard for each device of a mesh."""
    return PartitionSpec(mesh.axis_names)


def _of_this_process(devices: Iterable[Any]) -> list[Any]:
    return [d for d in devices if d.process_index == jax.process_index()]


def shards_by_device(x: Any) -> dict[Any, jax.Array]:
    """Return the shards of an array in this process; an abstract array has none."""
    return {s.device: s.data for s in x.addressable_shards} if isinstance(x, jax.Array) else {}


def array_of_shards(shards: dict[Any, jax.Array], mesh: Any) -> jax.Array:
    """Return an array of equal shards, one on each device of a mesh, along the first axis."""
    parts = [shards[d] for d in _of_this_process(mesh.devices.flat)]
    first, *others = parts[0].shape
    return jax.make_array_from_single_device_arrays(
        (first * mesh.size, *others), NamedSharding(mesh, spec_over_devices(mesh)), parts
    )


def run_in_a_row(local: Any, mesh: Mesh, *arrays: Any) -> Any:
    """Run a function on the shards that each device of `mesh_in_a_row` has."""
    each = spec_over_devices(mesh)
    return run_per_device(local, arrays, [each] * len(arrays), each, mesh, check_vma=False)
