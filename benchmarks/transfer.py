"""Measure `axonym.transfer`: what is sent, the memory it takes, and the time beside `jax.device_put`."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import axonym as axn

from .harness import Row, timed_row

SIZES = {"vocab": 1024, "embed": 256, "heads": 8, "kv_heads": 4, "head_size": 32, "mlp": 768}
LAYER = {
    "q": ("embed", "heads", "head_size"),
    "k": ("embed", "kv_heads", "head_size"),
    "v": ("embed", "kv_heads", "head_size"),
    "o": ("heads", "head_size", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "norm": ("embed",),
    "mlp_norm": ("embed",),
}
FSDP = {"embed": "fsdp"}
TENSOR = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def weights(layers: int) -> dict[str, Any]:
    """Return abstract weights of a Llama; 80 layers have 233 MiB."""
    ends = {"embedding": ("vocab", "embed"), "head": ("embed", "vocab"), "norm": ("embed",)}
    names = ends | {f"layers/{i}/{name}": axes for i in range(layers) for name, axes in LAYER.items()}
    return {
        path: axn.named(jax.ShapeDtypeStruct([SIZES[a] for a in axes], jnp.float32), axes)
        for path, axes in names.items()
    }


def drawn(abstract: dict[str, Any]) -> dict[str, Any]:
    """Return an array of random values for each abstract one, sharded like it."""
    make = functools.cache(
        lambda shape, sharding: jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=sharding)
    )
    return {
        path: axn.named(make(x.array.shape, x.array.sharding)(jax.random.key(i)), x.names)
        for i, (path, x) in enumerate(abstract.items())
    }


def on(sizes: dict[str, int], first: int = 0) -> Mesh:
    count = functools.reduce(operator.mul, sizes.values())
    return axn.make_mesh(sizes, devices=jax.devices()[first : first + count])


def cases() -> dict[str, tuple[tuple[Any, Mesh], tuple[Any, Mesh]]]:
    return {
        "FSDP on four, tensor parallelism on four others": ((FSDP, on({"fsdp": 4})), (TENSOR, on({"model": 4}, 4))),
        "FSDP on eight, tensor parallelism on the same": (
            (FSDP, on({"fsdp": 8})),
            (TENSOR, on({"data": 2, "model": 4})),
        ),
        "two replicas of FSDP, tensor parallelism on the same": (
            (FSDP, on({"data": 2, "fsdp": 4})),
            (TENSOR, on({"data": 2, "model": 4})),
        ),
        "two replicas of FSDP on four, tensor parallelism on four others": (
            (FSDP, on({"data": 2, "fsdp": 2})),
            (TENSOR, on({"model": 4}, 4)),
        ),
    }


@contextlib.contextmanager
def watched(called: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call a function with what is sent, and where to, before and after each `jax.device_put`."""
    put = jax.device_put

    def watching(x: Any, device: Any = None, **kwargs: Any) -> Any:
        called(x, device)
        found = put(x, device, **kwargs)
        called(None, None)
        return found

    with mock.patch.object(jax, "device_put", watching):
        yield


def bytes_on_devices() -> dict[Any, int]:
    """Return the bytes of live arrays by device."""
    shards = {
        (s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes
        for x in jax.live_arrays()
        for s in x.addressable_shards
    }
    held = collections.Counter[Any]()
    for (device, _), nbytes in shards.items():
        held[device] += nbytes
    return held


def lacking(source: dict[str, Any], target: dict[str, Any]) -> int:
    """Return the bytes that the devices of the target do not hold: these have to be sent."""
    total = 0
    for path, x in source.items():
        here = x.array.sharding.devices_indices_map(x.array.shape)
        for device, index in target[path].array.sharding.devices_indices_map(x.array.shape).items():
            both = 1
            needs = 1
            for n, to, of in zip(x.array.shape, index, here.get(device, index), strict=True):
                (a, b, _), (c, d, _) = to.indices(n), of.indices(n)
                needs *= b - a
                both *= max(min(b, d) - max(a, c), 0)
            total += (needs - (both if device in here else 0)) * x.dtype.itemsize
    return total


def rows() -> list[Row]:
    found = []
    for what, (source, target) in cases().items():
        old, new = (axn.shard(weights(4), *place) for place in (source, target))
        found += counted(what, old, new)
    found.append(compiled())
    found += timed()
    return found


def counted(what: str, old: dict[str, Any], new: dict[str, Any], piece: int = 2**18) -> list[Row]:
    plan, tree = axn.transfer(old, new, piece_bytes=piece), jax.block_until_ready(drawn(old))
    sent, peak = collections.Counter[Any](), [0]
    others = bytes_on_devices()

    def see(x: Any, devices: Any) -> None:
        peak.append(max((n for n in bytes_on_devices().values()), default=0))
        if isinstance(devices, list):
            for y, device in zip(x, devices, strict=True):
                (own,) = y.devices()
                sent[own, device] += y.nbytes if own != device else 0

    with watched(see):
        result = jax.block_until_ready(plan(tree, check=True))
    live = max(bytes_on_devices().values())
    del result, others
    sent = {pair: n for pair, n in sent.items() if n}
    assert sum(sent.values()) == sum(plan.links.values())
    bound = lacking(old, new)
    total, busiest, mean = sum(sent.values()), max(sent.values()), sum(sent.values()) / len(sent)
    return [
        Row("transfer", f"bytes sent: {what}", f"{total}", f"{bound} needed", total / bound, 1.05),
        Row("transfer", f"busiest link: {what}", f"{busiest}", f"{mean:.0f} on average", busiest / mean, 1.2),
        Row(
            "transfer",
            f"peak on a device: {what}",
            f"{max(peak)}",
            f"{live} and a piece",
            max(peak) / (live + piece),
            1,
        ),
    ]


def compiled() -> Row:
    """Count the programs of 80 layers."""
    source, target = cases()["FSDP on eight, tensor parallelism on the same"]
    old, new = (axn.shard(weights(80), *place) for place in (source, target))
    tree, programs = jax.block_until_ready(drawn(old)), []
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: programs.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.block_until_ready(axn.transfer(old, new)(tree))
    count = len(programs)
    return Row("transfer", "programs compiled for 80 layers", f"{count}", "50 at most", count / 50, 1)


def timed() -> list[Row]:
    layouts = {
        "equal layout, other devices": ((FSDP, on({"fsdp": 4})), (FSDP, on({"fsdp": 4}, 4)), 1.3),
        "other layout, other devices": ((FSDP, on({"fsdp": 4})), (TENSOR, on({"model": 4}, 4)), 1),
        "other layout, the same devices": ((FSDP, on({"fsdp": 8})), (TENSOR, on({"data": 2, "model": 4})), 1),
    }
    found = []
    for what, (source, target, limit) in layouts.items():
        old, new = (axn.shard(weights(80), *place) for place in (source, target))
        tree, plan = jax.block_until_ready(drawn(old)), axn.transfer(old, new)
        ours, raw_jax = functools.partial(finished, plan, tree), functools.partial(finished, put, tree, new)
        found.append(timed_row("transfer", f"80 layers: {what}", ours, raw_jax, limit, repeats=3, rounds=2))
    return found


def finished(fn: Callable[..., Any], *args: Any) -> None:
    jax.block_until_ready(fn(*args))


def put(tree: dict[str, Any], target: dict[str, Any]) -> list[jax.Array]:
    """Let `jax.device_put` move new arrays of the same shards, since it keeps in an array what it gathered."""
    fresh = [
        jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])
        for x in (named.array for named in tree.values())
    ]
    return jax.device_put(fresh, [target[path].array.sharding for path in tree])
