"""Checks that several processes give the same values, shardings, texts and files as one.

Expected values come from NumPy, or from the same operation on arrays of this process alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.random import categorical, normal, permutation, uniform
from axonym.sharding import fail_together
from axonym.state import (
    from_state_dict,
    load_state_dict,
    restore_checkpoint,
    save_checkpoint,
    save_state_dict,
    to_state_dict,
)
from tests.manual.test_collectives import CASES, EXCHANGES, MAPPING as MANUAL, X as LOCAL

Batch, Embed, Mlp, Vocab = axn.make_axes(batch=8, embed=8, mlp=16, vocab=64)
MAPPING = {"batch": "data", "mlp": "model"}
ALL = {"batch": "data", "embed": "data", "mlp": "model", "vocab": "model"}


def data_outside() -> Mesh:
    """Return a mesh whose processes differ along "data"."""
    return axn.make_mesh({"data": 4, "model": 2})


def model_outside() -> Mesh:
    """Return a mesh whose processes differ along "model"."""
    return axn.make_mesh({"model": 2, "data": 4}, explicit=True)


def meshes() -> list[Mesh]:
    return [data_outside(), model_outside()]


def draw(*axes: axn.Axis, seed: int = 0) -> axn.NamedArray:
    values = np.random.default_rng(seed).normal(size=[a.size for a in axes])
    return axn.named(values.astype(np.float32), axes)


def assert_values(found: Any, expected: Any, atol: float = 1e-6) -> None:
    """Gather arrays, and compare them by name with those of this process.

    If the expected values are given as a function, the first process computes them for all, because compiling takes
    most of the time. The others compare their gathered arrays with those of the first.
    """
    found = jax.tree.map(np.asarray, axn.to_host(found))
    with fail_together("compare") as agree:
        if callable(expected):
            agree({"gathered": "\n".join(str(zlib.crc32(x.tobytes())) for x in jax.tree.leaves(found))})
            if jax.process_index() > 0:
                return
            expected = expected()
        expected = jax.tree.map(np.asarray, axn.to_host(expected))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


def assert_shards(x: axn.NamedArray, whole: np.ndarray) -> None:
    for shard in x.array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def check_shard(folder: Path) -> None:
    whole = draw(Batch, Mlp)
    for mesh in meshes():
        with axn.set_mesh(mesh), axn.axis_mapping(MAPPING):
            x = axn.shard(whole)
            assert x.array.sharding == NamedSharding(mesh, P("data", "model"))
            assert len(x.array.addressable_shards) == jax.local_device_count()
            assert_shards(x, np.asarray(whole.array))
            again = axn.shard(x, {"batch": "model"})
            assert again.array.sharding == NamedSharding(mesh, P("model", None))
            assert_shards(again, np.asarray(whole.array))
            assert_shards(axn.unshard(again), np.asarray(whole.array))
            assert_values(jax.jit(lambda x: axn.shard(x * 2, {"mlp": "data"}))(x), whole * 2)
    last, x = jax.devices()[-1].process_index, axn.shard(whole, MAPPING, data_outside())
    elsewhere = axn.make_mesh({"data": 2}, devices=[d for d in jax.devices() if d.process_index == last][:2])
    for value in (x, *([] if jax.process_index() == last else [whole])):
        with pytest.raises(ValueError, match=rf"cannot go to mesh \(data=2\), with devices of process {last} of"):
            axn.shard(value, {"batch": "data"}, elsewhere)


def check_local_data(folder: Path) -> None:
    """Each process passes its own rows, along a mesh axis that spans processes."""
    mesh = axn.make_mesh({"data": 8})
    whole = np.asarray(draw(Batch, Embed).array)
    rows = 8 // jax.process_count()
    mine = whole[rows * jax.process_index() :][:rows]
    found = axn.sharding.from_process_local_data(axn.named(mine, ("batch", "embed")), "batch", mesh=mesh)
    assert found.array.sharding == NamedSharding(mesh, P("data", None))
    assert_shards(found, whole)
    assert_values(found.sum("batch"), axn.named(whole.sum(0), "embed"))


def check_uneven_local_data(folder: Path) -> None:
    """Each process passes rows that its devices do not divide: processes that hold all rows may pad them."""
    load, count, me = axn.sharding.from_process_local_data, jax.process_count(), jax.process_index()
    line = axn.make_mesh({"data": 8})
    with pytest.raises(
        ValueError, match=r"5 along axis 0 cannot be sharded over data=8.* a process that holds all rows"
    ):
        load(np.full((5, 2), me), mesh=line, uneven="pad")
    if count > 2:
        return
    mesh = axn.make_mesh({"model": 2, "data": 4})  # each process has all of "data"
    whole = np.arange(15, dtype=np.float32).reshape(3, 5)
    found = load(axn.named(whole, ("embed", "batch")), "batch", "data", mesh, uneven="pad")
    assert found.shape == {"embed": 3, "batch": 5} and found.array.array.shape == (3, 8)
    assert_shards(found.array, np.pad(whole, [(0, 0), (0, 3)]))


def check_named_jit(folder: Path) -> None:
    x, w = draw(Batch, Embed), draw(Embed, Mlp, seed=1)
    fn = lambda x, w: {"y": axn.dot(x, w, axis="embed"), "n": x.sum()}
    for mesh in meshes():
        with axn.set_mesh(mesh):
            compiled = axn.named_jit(fn, MAPPING, in_placement=MAPPING, out_placement=MAPPING)
            found = compiled(x, w)
            assert found["y"].array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        assert_values(found, lambda: fn(x, w))


def check_fsdp(folder: Path) -> None:
    params = {"up": draw(Embed, Mlp, seed=1), "down": draw(Mlp, Embed, seed=2)}

    def loss(params: Any, x: axn.NamedArray) -> jax.Array:
        hidden = axn.nn.silu(axn.dot(x, params["up"], axis="embed"))
        return axn.mean((axn.dot(hidden, params["down"], axis="mlp") - x) ** 2).scalar()

    def step(params: Any, x: axn.NamedArray) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    x = draw(Batch, Embed)
    expected = functools.cache(lambda: step(params, x))
    for mesh in meshes():
        with axn.set_mesh(mesh):
            found = axn.fsdp(step, {"embed": "data", "mlp": "model"}, MAPPING)(params, x)
            assert found[1]["up"].array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        assert_values(found, expected)


def check_collectives(folder: Path) -> None:
    mesh = axn.make_mesh({"data": 4, "model": 2})
    x = axn.named(LOCAL, ("batch", "pos", "embed"))

    def all_of_them(x: axn.NamedArray) -> dict[str, Any]:
        cases = {name: axn.shard_map(fn, mapping=MANUAL)(x) for name, (fn, _) in CASES.items()}
        exchanges = EXCHANGES.items()
        return cases | {name: axn.shard_map(fn, mapping=MANUAL, out_specs=out)(x) for name, (fn, out, *_) in exchanges}

    with jax.set_mesh(mesh):
        found = axn.to_host(jax.jit(all_of_them)(x))
    for name, (_, expected) in CASES.items():
        np.testing.assert_allclose(np.asarray(found[name].array), expected, rtol=1e-5, err_msg=name)
    for name, (_, _, expected, _) in EXCHANGES.items():
        np.testing.assert_allclose(np.asarray(found[name].array), expected, rtol=1e-5, err_msg=name)


def check_remap(folder: Path) -> None:
    """A live state moves to another mesh over the same devices, in pieces, and then to a mesh of fewer devices."""
    old, new = meshes()
    tree = axn.shard({"w": draw(Embed, Mlp), "b": draw(Mlp, seed=1)}, {"embed": "data"}, old)
    moved = axn.remap(tree, {"embed": "model", "mlp": "data"}, new, piece_bytes=400)  # of `w` there are several
    assert moved["w"].array.sharding == NamedSharding(new, P("model", "data")) and tree["w"].array.is_deleted()
    assert_values(moved, {"w": draw(Embed, Mlp), "b": draw(Mlp, seed=1)})
    with jax.set_mesh(axn.make_mesh({"data": 2}, devices=jax.devices()[3:5])):
        few = axn.remap(moved, {"embed": "data"})
    for name, whole in (("w", draw(Embed, Mlp)), ("b", draw(Mlp, seed=1))):
        assert_shards(few[name], np.asarray(whole.array))


def check_transfer(folder: Path) -> None:
    """Weights go from the first half of the processes to the second; both plan the same, or both refuse."""
    first, second = (axn.make_mesh({"data": 4}, devices=jax.devices()[i : i + 4]) for i in (0, 4))
    abstract = jax.eval_shape(lambda: {"w": draw(Embed, Mlp), "b": draw(Mlp, seed=1)})
    source = axn.shard(abstract, {"embed": "data"}, first)
    tree = source
    if 2 * jax.process_index() < jax.process_count():
        whole = {"w": draw(Embed, Mlp), "b": draw(Mlp, seed=1)}
        tree = jax.tree.map(
            lambda x, y: jax.make_array_from_callback(y.shape, y.sharding, lambda index: np.asarray(x)[index]),
            whole,
            source,
        )
    plan = axn.transfer(source, axn.shard(abstract, {"mlp": "data"}, second))
    found = plan(tree, check=True)
    assert_shards(found["w"], np.asarray(draw(Embed, Mlp).array))
    assert len(plan.links) == 16
    # Shards as they are, and to devices of which only some are in a process that has shards.
    half = axn.make_mesh({"data": 4}, devices=jax.devices()[2:6])
    for placement, mesh in (({"embed": "data"}, second), ({"mlp": "data"}, half)):
        found = axn.transfer(source, axn.shard(abstract, placement, mesh))(tree)
        assert_shards(found["w"], np.asarray(draw(Embed, Mlp).array))
    with pytest.raises(ValueError, match="arrays must be the same in every process, but differ"):
        axn.transfer(source, axn.shard(abstract, {"mlp": "data"} if jax.process_index() else {}, second))


def check_draws(folder: Path) -> None:
    """Random numbers do not depend on the number of processes."""
    key = jax.random.key(3)
    fn = lambda key: {
        "normal": normal(key, (Batch, Mlp)),
        "uniform": uniform(key, (Mlp, Batch)),
        "mixed": permutation(key, axn.arange(Vocab), "vocab"),
    }
    mesh = data_outside()
    with axn.set_mesh(mesh), axn.axis_mapping(ALL):
        found = axn.named_jit(fn, ALL)(key)
        assert found["normal"].array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert_values(found, lambda: jax.jit(fn)(key))


def check_vocabulary(folder: Path) -> None:
    logits, targets = draw(Batch, Vocab) * 2, axn.arange(Batch) * 5
    key = jax.random.key(1)

    def fn(x: axn.NamedArray, targets: axn.NamedArray) -> Any:
        return {
            "top": axn.top_k(x, "vocab", 3),
            "largest": axn.argmax(x, "vocab"),
            "loss": axn.nn.cross_entropy_loss(x, "vocab", targets, reduction=None),
            "gradient": jax.grad(lambda x: axn.nn.cross_entropy_loss(x, "vocab", targets).scalar())(x),
            "tokens": categorical(key, x, "vocab", top_k=4),
        }

    with axn.set_mesh(model_outside()), axn.axis_mapping({"batch": "data", "vocab": "model"}):
        found = jax.jit(fn)(*axn.shard((logits, targets)))
    assert_values(found, lambda: jax.jit(fn)(logits, targets))


def check_schedules(folder: Path) -> None:
    """Stages, a ring and experts whose neighbours are in other processes: values and gradients."""
    Layers, Experts = axn.make_axes(layers=16, experts=8)
    blocks = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
    mixture = axn.nn.MoELinear.init(Experts, Embed, Embed, key=jax.random.key(1))
    expert = axn.named(np.arange(8) * 3 % 8, Batch)

    def loss(models: Any, x: axn.NamedArray, schedule: Any) -> jax.Array:
        blocks, mixture = models
        x = blocks.fold(x, schedule=schedule)
        x = x + axn.nn.dispatch(lambda layer, x, sizes: layer(x, sizes), mixture, x, expert, Experts)
        q, k = x.rename({"batch": "pos"}), x.rename({"batch": "key_pos"})
        context = "ring" if schedule is not None else None
        y = axn.nn.attention.dot_product_attention(q, k, k, "key_pos", "embed", context=context)
        return axn.sum(y * y).scalar()

    x = draw(Batch, Embed)
    compute = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    mapping = dict.fromkeys(("layers", "experts", "pos", "key_pos"), "ring")
    with axn.set_mesh(axn.make_mesh({"ring": 8})), axn.axis_mapping(mapping):
        schedule = axn.schedules.GPipe(microbatches=8, axis="batch")
        found = compute(*axn.shard(((blocks, mixture), x)), schedule)
    assert_values(found, lambda: compute((blocks, mixture), x, None), atol=2e-4)  # of gradients up to 75


def check_pictures(folder: Path) -> None:
    """Every process prints the same, with the numbers of hosts and of their devices."""
    x = axn.shard(draw(Batch, Mlp), MAPPING, axn.make_mesh({"data": 4, "model": 2}))
    text = axn.debug.describe_shardings({"x": x})
    with axn.sharding.fail_together("compare") as agree:
        agree({"texts": text})
    per_host = jax.local_device_count()
    labels = [f"{i // per_host}:{i % per_host}" for i in range(8)]
    assert all(f" {label} " in text for label in labels), text
    assert axn.debug.describe_devices(jax.devices()) == " ".join(f"{h}:0-{per_host - 1}" for h in range(8 // per_host))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        axn.debug.visualize_shardings({"x": x})
    assert all(f" {label} " in printed.getvalue() for label in labels)
    assert repr(x) == "NamedArray(float32[batch=8, mlp=16])"  # without values, of which others hold some


def check_reports(folder: Path) -> None:
    """Every process reports the same communication of a step, by mesh axes."""
    mapping = {"batch": "data", "embed": "model"}
    step = lambda x, w: axn.dot(x, w, axis="embed")
    args, mesh = (draw(Batch, Embed), draw(Embed, Mlp)), data_outside()
    report = axn.insight.explain(step, *args, mapping=mapping, mesh=mesh, by="partitioner")
    with fail_together("compare") as agree:
        agree({"reports": str(report)})
    assert [(c.kind, c.axes, c.devices) for c in report.collectives] == [("all-reduce", ("model",), 2)]


def check_state_dicts(folder: Path) -> None:
    """One file, written by the first process; every device reads its shard."""
    mesh = axn.make_mesh({"data": 4, "model": 2})
    tree = {"w": draw(Embed, Mlp), "b": draw(Mlp, seed=1)}
    with axn.set_mesh(mesh), axn.axis_mapping({"embed": "data", "mlp": "model"}):
        save_state_dict(to_state_dict(axn.shard(tree)), folder / "model.safetensors")
        found = from_state_dict(jax.eval_shape(lambda: tree), load_state_dict(folder / "model.safetensors"))
        assert found["w"].array.sharding == NamedSharding(mesh, P("data", "model"))
    assert_values(found, tree)


class Counted:
    """An entry of a state dict that counts the bytes read from it."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self.array[index]
        self.read += found.nbytes
        return found


def check_bytes_read(folder: Path) -> None:
    """Each process reads only the rows of its devices, from arrays and from data."""
    whole = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    mesh = axn.make_mesh({"data": 8})
    entry = Counted(whole)
    template = {"w": jax.eval_shape(lambda: axn.zeros({"x": 64, "y": 4}))}
    found = from_state_dict(template, {"w": entry}, placement={"x": "data"}, mesh=mesh)
    assert entry.read == whole.nbytes // jax.process_count()
    assert_shards(found["w"], whole)
    text = Counted(np.arange(64, dtype=np.uint8).repeat(4))

    def part(index: Any) -> np.ndarray:
        return text[index[0].start * 4 : index[0].stop * 4].reshape(-1, 4)

    tokens = jax.make_array_from_callback((64, 4), NamedSharding(mesh, P("data")), part)
    assert text.read == 256 // jax.process_count()
    assert_shards(axn.named(tokens, ("x", "y")), np.arange(64).repeat(4).reshape(64, 4))


def state() -> dict[str, Any]:
    """Return the state that one number of processes saves and another restores."""
    return {"w": draw(Embed, Mlp), "key": jax.random.key(7), "count": jnp.arange(3), "step": 5}


TEMPLATE = {
    "w": axn.named(jax.ShapeDtypeStruct((8, 16), np.float32), ("embed", "mlp")),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
    "count": jax.ShapeDtypeStruct((3,), np.int32),
    "step": 0,
}


def restored(path: Path) -> None:
    """Check that a checkpoint written by any number of processes is the state."""
    mesh = axn.make_mesh({"model": 4, "data": 2})
    found = restore_checkpoint(path, TEMPLATE, axn.sharding.MappingShardingRule({"mlp": "model"}) | P(), mesh=mesh)
    assert found["w"].array.sharding == NamedSharding(mesh, P(None, "model")) and found["step"] == 5
    data = jax.jit(jax.random.key_data)(found["key"])
    assert_values([found["w"], found["count"]], [state()["w"], state()["count"]])
    np.testing.assert_array_equal(axn.to_host(data), jax.random.key_data(jax.random.key(7)))


def check_checkpoint_of_one_process(folder: Path) -> None:
    restored(folder / "of-one")


def check_checkpoint_for_other_processes(folder: Path) -> None:
    mesh = axn.make_mesh({"data": 4, "model": 2})
    replicated = jax.jit(
        lambda: {"key": state()["key"], "count": jnp.arange(3)}, out_shardings=NamedSharding(mesh, P())
    )
    tree = state() | replicated()
    tree["w"] = axn.shard(tree["w"], {"embed": "data", "mlp": "model"}, mesh)
    save_checkpoint(folder / "of-several", tree)
    restored(folder / "of-several")


def check_data_that_differ(folder: Path) -> None:
    """Data that should be the same in all processes, but is not, is an error that has its name, but not its values."""
    mesh = axn.make_mesh({"data": 8})
    same, nan = draw(Batch, Embed), axn.named(np.full((8, 8), np.nan, np.float32), ("batch", "embed"))
    mine = {"same": same, "nan": nan, "other": draw(Batch, Embed, seed=jax.process_index())}
    with pytest.raises(ValueError, match=r"^shard: arrays must be the same in every process, but differ:") as caught:
        axn.shard(mine, {"batch": "data"}, mesh)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == jax.process_count() and all("other float32[8, 8] with checksum" in line for line in lines)
    with pytest.raises(
        ValueError, match=r"process 0: the array float32\[2\] .*\n  process 1.*: the array float32\[3\]"
    ):
        axn.shard(np.zeros(2 if jax.process_index() == 0 else 3, np.float32), P(), mesh)
    assert_shards(axn.shard({"same": same, "nan": nan}, {"batch": "data"}, mesh)["nan"], np.asarray(nan.array))
    keys = axn.shard(jax.random.split(jax.random.key(0), 8), P("data"), mesh)
    assert keys.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert axn.shard(np.ones(8), P("data"), mesh).dtype == np.float32


def check_rows_that_are_misread(folder: Path) -> None:
    """Processes may not load the same rows instead of their own, or different rows where they hold the same."""
    load = axn.sharding.from_process_local_data
    mesh = axn.make_mesh({"rows": 8})
    same = {"x": np.asarray(draw(Batch, Embed).array)}
    with pytest.raises(ValueError, match="all processes loaded the same data, but each should load its own part"):
        load(same, mesh=mesh)
    load({**same, "mine": np.full((8, 2), jax.process_index())}, mesh=mesh)
    other = axn.make_mesh({"outside": jax.process_count(), "inside": 8 // jax.process_count()})
    mine = {"x": np.full((8, 2), jax.process_index()), "same": same["x"]}
    with pytest.raises(ValueError, match=r"x differs between processes 0, 1.*, whose devices hold the same part"):
        load(mine, mesh_axes="inside", mesh=other)
    with pytest.raises(ValueError, match="arrays must be the same in every process, but differ"):
        load({"x": np.ones(8 * (1 + jax.process_index()))}, mesh_axes="inside", mesh=other)
    load({"x": np.ones((8, 2))}, mesh_axes="outside", mesh=other)  # a mask of ones is right in every process
    load(same, mesh_axes="inside", mesh=other)
    gathers = axn.to_host(load({"x": np.full((8, 1), jax.process_index())}, mesh=mesh))["x"]
    assert sorted(set(gathers[:, 0])) == list(range(jax.process_count()))
