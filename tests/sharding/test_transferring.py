"""`transfer` and `remap`: arrays move to another mesh or mapping, each byte once, with little extra memory."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import moving

Embed, Mlp = axn.make_axes(embed=16, mlp=8)
OLD = {"embed": "data"}
NEW = {"embed": "model", "mlp": "data"}


def state(mesh: Mesh) -> dict[str, Any]:
    params = {f"w{i}": axn.random.normal(jax.random.key(i), (Embed, Mlp)) for i in range(6)}
    tree = {"params": params, "optimizer": optax.adam(1e-3).init(params), "key": jax.random.key(7), "step": 3}
    return jax.block_until_ready(axn.shard(tree, OLD, mesh))


def bytes_on(device: Any) -> int:
    """Return the bytes of live arrays on a device."""
    shards = (s for x in jax.live_arrays() if not x.is_deleted() for s in x.addressable_shards if s.device == device)
    return sum({s.data.unsafe_buffer_pointer(): s.data.nbytes for s in shards}.values())


@pytest.mark.parametrize("shape", [{"data": 2, "model": 4}, {"model": 8, "data": 1}, {"model": 2, "data": 2}])
def test_moves_to_another_mesh(mesh: Mesh, shape: dict[str, int]) -> None:
    """Also to fewer devices."""
    before = state(mesh)
    expected = jax.tree.map(lambda x: np.asarray(x) if x.dtype == jnp.float32 else x, before["params"])
    devices = jax.devices()[: shape["data"] * shape["model"]]
    new = axn.make_mesh(shape, devices=devices, explicit=mesh.axis_types[0] == jax.sharding.AxisType.Explicit)
    found = axn.remap(before, NEW, new)
    for x in jax.tree.leaves(found["params"]) + jax.tree.leaves(found["optimizer"][0].mu):
        assert x.sharding == NamedSharding(new, P("model", "data"))
    for x in (found["optimizer"][0].count, found["key"]):
        assert x.sharding == NamedSharding(new, P())
    assert found["step"] == 3 and all(x.array.is_deleted() for x in before["params"].values())
    for a, b in zip(jax.tree.leaves(found["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("donate", [True, False])
def test_peak_memory(donate: bool, auto_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time more than the plan says: the shards of the state, old or new, and two small steps."""
    before, device = state(auto_mesh)["params"], jax.devices()[0]
    plan = axn.transfer(before, axn.shard(before, {"embed": ("data", "model")}, auto_mesh), piece_bytes=300)
    one = Embed.size * Mlp.size * 4 // 8
    assert plan.peak_bytes(donate=donate) <= 6 * 2 * one + (4 if donate else 6) * one + 300
    others, seen = bytes_on(device) - 6 * 2 * one, [0]
    put = jax.device_put

    def measured(*args: Any, **kwargs: Any) -> Any:
        seen.append(bytes_on(device))
        found = put(*args, **kwargs)
        seen.append(bytes_on(device))
        return found

    monkeypatch.setattr(jax, "device_put", measured)
    after = plan(before, donate=donate)
    monkeypatch.undo()
    assert len(seen) > 6 and 6 * 2 * one < max(seen) - others <= plan.peak_bytes(donate=donate)
    assert bytes_on(device) - others == 6 * one * (1 if donate else 3)
    del after


@pytest.mark.parametrize(
    ("old", "new", "shape"),
    [
        ({"embed": "data"}, {"embed": "model"}, {"model": 8}),
        ({"embed": "data"}, {"mlp": "data", "embed": "model"}, {"data": 4, "model": 2}),
        ({"embed": ("data", "model")}, {"mlp": "model"}, {"model": 2}),
        ({}, {"mlp": "model"}, {"model": 2, "data": 3}),
    ],
)
def test_pieces_of_arrays(
    old: Any, new: Any, shape: dict[str, int], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces do not fit evenly, and each is no larger than it may be."""
    axes = axn.make_axes(layers=3, embed=16, mlp=28)
    x = axn.shard(axn.named(np.arange(3 * 16 * 28.0).reshape(3, 16, 28), axes), old, mesh)
    expected = np.asarray(x.rearrange(axes).array)
    devices = jax.devices()[-math.prod(shape.values()) :]
    explicit = mesh.axis_types[0] == jax.sharding.AxisType.Explicit
    target = axn.make_mesh(shape, devices=devices, explicit=explicit)
    sizes: list[int] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **kw: (sizes.extend(y.nbytes for y in x), put(x, *a, **kw))[1])
    with axn.set_mesh(mesh):
        found = axn.remap(x, new, target, piece_bytes=500)
    monkeypatch.undo()
    assert len(sizes) > 10 and max(sizes) <= 250  # some on both ends
    assert found.array.sharding.is_equivalent_to(axn.sharding.sharding_for_axis(found.axes, new, target), 3)
    np.testing.assert_array_equal(found.rearrange(axes).array, expected)


MEASURED = """
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_disable_most_optimizations", False)  # it computes more than it compiles
jax.config.update("jax_num_cpu_devices", 8)
import axonym as axn

def status(key):
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) * 1024

mesh = axn.make_mesh({"data": 4, "model": 2})
x = jnp.ones((2**13, 2**13), device=jax.NamedSharding(mesh, jax.P(("data", "model"))))
jax.block_until_ready(x)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
axn.remap(axn.named(x, ("embed", "mlp")), {"embed": "model", "mlp": "data"}, mesh, piece_bytes=2**22)
print((status("VmHWM") - before) / 2**28)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a stretch of time")
def test_peak_memory_of_the_process() -> None:
    """Beside an array of 256 MB there are its new shards, and a few pieces of 4 MB; as one, it takes twice its size."""
    ended = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=300, check=True)
    assert 1 < float(ended.stdout) < 1.5


@pytest.mark.parametrize("spec", [P("data", "model"), P(("data", "model"))])
def test_joining_pieces_takes_no_more_than_is_counted(spec: P, auto_mesh: Mesh) -> None:
    """Along two axes, the compiler keeps a shard in between."""
    shape, mesh = (64, 64), axn.make_mesh({"all": 8})
    target = NamedSharding(mesh, P())
    route = moving.route_of(shape, 4, NamedSharding(auto_mesh, spec), target, 2**25)
    grid = tuple(n // m for n, m in zip(shape, route.piece, strict=True))
    piece = jax.ShapeDtypeStruct(
        (8 * route.piece[0], route.piece[1]),
        jnp.float32,
        sharding=NamedSharding(mesh, moving.spec_over_devices(mesh)),
    )
    with jax.set_mesh(mesh):
        program = moving._program_that_tiles(target, grid, 1).lower([piece] * math.prod(grid)).compile()
    memory = program.memory_analysis()
    assert route.tiled and memory.temp_size_in_bytes + memory.argument_size_in_bytes <= route.in_flight


def test_what_stays_and_what_is_there_twice(auto_mesh: Mesh) -> None:
    w = axn.shard(axn.ones((Embed, Mlp)), OLD, auto_mesh)
    same = axn.remap({"w": w, "again": w}, OLD, auto_mesh)
    assert same["w"].array is w.array
    moved = axn.remap({"w": w, "again": w}, NEW, auto_mesh)
    assert moved["w"].array is moved["again"].array and w.array.is_deleted()
    with axn.set_mesh(auto_mesh):
        host = axn.remap({"w": np.ones((8, 2)), "f": jnp.tanh}, P("data"))
    assert host["w"].sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data")), 2) and host["f"] is jnp.tanh


def test_what_it_refuses(auto_mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="remap: no mesh is active"):
        axn.remap({"w": axn.ones(Embed)}, OLD)
    with pytest.raises(TypeError, match="remap: w has no values to move"):
        axn.remap({"w": jax.eval_shape(lambda: axn.ones(Embed))}, OLD, auto_mesh)
    w = axn.ones({"embed": 6})
    with pytest.raises(ValueError, match="embed"):
        axn.remap({"w": w}, OLD, auto_mesh)
    assert not w.array.is_deleted()


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (2, 8), (8, 2), (8, 8)])
def test_what_is_replicated_can_be_read_afterwards(before: int, after: int) -> None:
    old, new = axn.make_mesh({"data": before}), axn.make_mesh({"model": after})
    tree = axn.shard({"count": jnp.arange(3), "key": jax.random.key(1), "w": axn.ones({"embed": 16})}, OLD, old)
    found = axn.remap(tree, {"embed": "model"}, new)
    assert found["count"].tolist() == [0, 1, 2] and jax.random.bits(found["key"]) == jax.random.bits(jax.random.key(1))
    assert found["w"].sum().item() == 16 and found["w"].array.sharding.device_set == set(new.devices.flat)


def test_nothing_is_deleted_if_something_is_refused() -> None:
    tree = {"a": axn.shard(axn.ones({"embed": 16}), OLD, axn.make_mesh({"data": 8}))}
    with pytest.raises(TypeError, match="has no values to move"):
        axn.remap({**tree, "b": jax.ShapeDtypeStruct((4,), jnp.float32)}, NEW, axn.make_mesh({"data": 4, "model": 2}))
    assert tree["a"].sum().item() == 16


def test_arrays_that_share_memory() -> None:
    x = jax.device_put(jnp.arange(16.0), NamedSharding(axn.make_mesh({"data": 8}), P("data")))
    same = jax.device_put(x, NamedSharding(axn.make_mesh({"other": 8}), P("other")))
    found = axn.remap([axn.named(x, "embed"), axn.named(same, "mlp")], NEW, axn.make_mesh({"data": 4, "model": 2}))
    assert found[0].tolist() == found[1].tolist() == list(range(16))


def on(sizes: dict[str, int], first: int = 0, *, explicit: bool = False, reverse: bool = False) -> Mesh:
    devices = jax.devices()[first : first + math.prod(sizes.values())]
    return axn.make_mesh(sizes, devices=devices[::-1] if reverse else devices, explicit=explicit)


PLACES = {
    "others": (({"embed": "data"}, on({"data": 4})), ({"mlp": "data"}, on({"data": 4}, 4))),
    "others, equal shards": (({"embed": "data"}, on({"data": 4})), ({"embed": "model"}, on({"model": 4}, 4))),
    "the same, equal shards": (
        ({"embed": "data"}, on({"data": 8})),
        ({"embed": "data"}, on({"data": 8}, reverse=True)),
    ),
    "in another order": (({"embed": "data"}, on({"data": 8})), ({"mlp": "data"}, on({"data": 8}, reverse=True))),
    "some in common": (({"embed": "data"}, on({"data": 6})), ({"embed": "data"}, on({"data": 4}, 4))),
    "from one": (({}, on({"data": 1})), ({"mlp": "data"}, on({"data": 8}))),
    "to one": (({"mlp": "data"}, on({"data": 8})), ({}, on({"data": 1}, 7))),
    "replicas": (({"embed": "fsdp"}, on({"data": 2, "fsdp": 2})), ({"mlp": "model"}, on({"model": 4}, 4))),
    "to replicas": (
        ({"embed": "data", "mlp": "model"}, on({"data": 2, "model": 4}, explicit=True)),
        ({"mlp": "model"}, on({"data": 4, "model": 2}, explicit=True)),
    ),
    "replicas on both": (
        ({"embed": "model"}, on({"data": 2, "model": 4})),
        ({"mlp": "model"}, on({"data": 2, "model": 4})),
    ),
}


def sent_and_needed(plan: Any, source: Any, target: Any) -> tuple[int, int]:
    """Return the bytes that a plan sends, and those that the target's devices do not hold."""
    needed = 0
    for x, y in zip(jax.tree.leaves(source), jax.tree.leaves(target), strict=True):
        held: dict[Any, np.ndarray] = {d: np.zeros(x.shape, bool) for d in y.sharding.device_set}
        for device, index in y.sharding.devices_indices_map(x.shape).items():
            held[device][index] = True
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            if device in held:
                held[device][index] = False
        needed += sum(int(lacks.sum()) for lacks in held.values()) * x.dtype.itemsize
    return sum(plan.links.values()), needed


@pytest.mark.parametrize("places", PLACES)
def test_each_byte_is_sent_once(places: str) -> None:
    """The links are balanced, the source stays, and the copies share no memory with it."""
    place, goal = PLACES[places]
    axes = {"embed": 48, "mlp": 64}
    whole = {f"w{i}": axn.named(np.random.default_rng(i).normal(size=(48, 64)), axes) for i in range(3)}
    source = axn.shard(jax.tree.map(jnp.float32, whole) | {"b": axn.arange({"mlp": 64})}, *place)
    target = axn.shard(jax.eval_shape(lambda: source), *goal)
    plan = axn.transfer(source, target)
    found = plan(source, check=True)
    assert axn.sharding.checksums(found) == axn.sharding.checksums(source)
    for x, y, z in zip(*map(jax.tree.leaves, (source, found, target)), strict=True):
        assert y.sharding == z.sharding
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])
    sent, needed = sent_and_needed(plan, source, target)
    assert sent == needed == sum(plan.links.values()) > 0
    if places != "some in common":  # there, two devices have what they need
        assert max(plan.links.values()) <= 1.2 * sent / len(plan.links)
    if places == "replicas on both":  # each sends to its own, also what all devices need
        assert all(a // 4 == b // 4 for a, b in plan.links)
    jax.tree.map(lambda x: x.delete(), source)
    assert np.isfinite(found["w0"].sum().item())


@pytest.mark.parametrize("places", ["others", "others, equal shards", "in another order"])
def test_large_arrays_between_meshes(places: str) -> None:
    """From 16 MiB, `shard` copies as a plan does, and copies outlive their source."""
    (placement, mesh), (goal, other) = PLACES[places]
    x = axn.shard(axn.arange({"embed": 2**11, "mlp": 2**11}), placement, mesh)
    expected = np.array(x.array)
    y = axn.shard(x, goal, other)
    plan = axn.transfer(x, y)
    copies = [y, plan(x), plan(x, donate=True)]
    assert x.array.is_deleted()
    filler = jax.block_until_ready([jnp.full(2**22, i) for i in range(4)])  # may get the memory that is free now
    for moved in copies:
        assert moved.array.sharding.is_equivalent_to(axn.sharding.sharding_for_axis(x.axes, goal, other), 2)
        np.testing.assert_array_equal(moved.array, expected)
    del filler


def test_layers_share_programs() -> None:
    """Twenty layers take as many programs as one, apart from the number of arrays in a step."""
    (place, goal), programs = PLACES["in another order"], []
    layers = {f"{i}/{name}": axn.ones({"embed": 16, "mlp": n}) for i in range(20) for name, n in (("up", 8), ("o", 24))}
    source = axn.shard(layers, *place)
    plan = axn.transfer(source, axn.shard(jax.eval_shape(lambda: source), *goal))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: programs.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.block_until_ready(plan(source))
    assert 2 <= len(programs) <= 8  # to cut and to put, of two shapes
    jax.block_until_ready(plan(jax.tree.map(lambda x: x * 2, source)))
    one = {"w": axn.shard(axn.ones({"embed": 32, "mlp": 64}), *place)}
    many = axn.transfer(one, axn.shard(jax.eval_shape(lambda: one), *goal), piece_bytes=128)
    programs.clear()
    jax.block_until_ready(many(one))
    assert 2 <= len(programs) <= 4  # of many rounds


def test_a_changed_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    place, goal = PLACES["others"]
    tree = axn.shard({"up": axn.arange({"embed": 8, "mlp": 8}), "o": axn.ones({"embed": 8, "mlp": 4})}, *place)
    plan = axn.transfer(tree, axn.shard(jax.eval_shape(lambda: tree), *goal))
    put = jax.device_put
    flip = lambda x: x.at[(0,) * x.ndim].add(jnp.asarray(x.size == 4, x.dtype))
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **kw: put([flip(y) for y in x], *a, **kw))
    with pytest.raises(RuntimeError, match=r"up has the checksum .* A device or a link changed a value"):
        plan(tree, check=True)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "float4_e2m1fn", "int4"]
)
def test_checksums(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).clip(0) * 3).astype(dtype)
    mesh = on({"data": 2, "model": 4})
    specs = P("data"), P("model", "data"), P(None, "data"), P()
    found = {axn.sharding.checksums(jax.device_put(x, NamedSharding(mesh, spec)))["the array"] for spec in specs}
    assert found == {axn.sharding.checksums(x)["the array"]}
    assert found.isdisjoint(axn.sharding.checksums([x.T, x[:, 1:], jnp.roll(x, 1, 0)]).values())


def test_trees_that_differ() -> None:
    place, goal = PLACES["others"]
    tree = axn.shard({"w": axn.ones({"embed": 8, "mlp": 4}), "key": jax.random.key(0)}, *place)
    tree["key"] = axn.shard(tree["key"], P(), place[1])
    abstract = jax.eval_shape(lambda: tree)
    target = axn.shard(abstract, {"w": goal[0], "key": P()}, goal[1])
    plan = axn.transfer(tree, target)
    assert jax.random.bits(plan(tree)["key"]).item() == jax.random.bits(tree["key"]).item()
    assert "2 arrays: 128 B over 16 links between devices, 8 B over the busiest" in repr(plan)
    with pytest.raises(ValueError, match=r"(?s)w has no devices in the target\. Place it by `axonym\.shard\(target"):
        axn.transfer(tree, abstract)
    with pytest.raises(ValueError, match=r"another structure than the source\. Only the source has 'key'"):
        axn.transfer(tree, {"w": target["w"]})
    with pytest.raises(
        ValueError, match=r"w is float32\(embed=8, mlp=4\) in the source, and float32\(mlp=4, embed=8\)"
    ):
        axn.transfer(tree, target | {"w": axn.shard(axn.ones({"mlp": 4, "embed": 8}), *goal)})
    with pytest.raises(TypeError, match="key has no values to move"):
        plan(abstract)
    with pytest.raises(ValueError, match=r"w has the sharding .* and was planned with"):
        plan(tree | {"w": plan(tree)["w"]})
    with pytest.raises(ValueError, match=r"w is float32\(embed=4\), and was planned as float32\(embed=8, mlp=4\)"):
        plan(tree | {"w": axn.ones({"embed": 4})})


def test_scalars_under_an_explicit_mesh() -> None:
    train, serve = (axn.make_mesh({"data": 4}, devices=jax.devices()[i : i + 4], explicit=True) for i in (0, 4))
    tree = {"w": axn.ones({"x": 8}), "count": jnp.int32(3)}
    with jax.set_mesh(train):
        state = axn.shard(tree, {"x": "data"}, train)
        found = axn.transfer(state, axn.shard(tree, {"x": "data"}, serve))(state, check=True)
    assert int(found["count"]) == 3 and found["w"].array.sharding.mesh == serve


def test_plans_count_what_jax_moves() -> None:
    x = axn.named(jax.device_put(jnp.ones((8, 4)), jax.devices()[0]), ("x", "y"))
    plan = axn.transfer(x, axn.shard(x, {"x": "data"}, axn.make_mesh({"data": 8})))
    assert plan.peak_bytes() == 128 + 16
