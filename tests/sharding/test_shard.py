"""`shard` everywhere: real shardings outside jit, inside it, under transformations and inside `shard_map`."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import FSDPShardingRule
from axonym.state import save_state_dict
from tests.helpers import spec

MAPPING = {"batch": "data", "embed": "model"}


@pytest.fixture
def x() -> axn.NamedArray:
    return axn.arange(axn.make_axes(batch=8, embed=4)) * 1.0


CONTEXTS = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "jit of a constant": lambda f, x: jax.jit(lambda: f(x))(),
    "grad": lambda f, x: jax.grad(lambda a: (f(a) * f(a)).sum().array)(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda a: (f(a) * f(a)).sum().array))(x),
    "value and grad": lambda f, x: jax.value_and_grad(lambda a: ((y := f(a)) * y).sum().array)(x)[1],
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_named_arrays_by_name(x, mesh, context: str) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        y = jax.block_until_ready(CONTEXTS[context](axn.shard, x))
    assert spec(y) == ("data", "model")
    factor = 1 if context in ("eager", "jit", "jit of a constant") else 2
    np.testing.assert_array_equal(y.array, factor * x.array)


@pytest.mark.parametrize("jit", [False, True])
def test_under_vmap_and_scan(mesh, jit: bool) -> None:
    def mapped(a):
        return jax.vmap(lambda row: axn.shard(axn.named(row, "batch"), {"batch": "model"}).array)(a)

    def scanned(a):
        return jax.lax.scan(lambda c, row: (c, axn.shard(axn.named(row, "batch"), {"batch": "model"}).array), 0, a)[1]

    with jax.set_mesh(mesh):
        for fn in (mapped, scanned):
            result = jax.block_until_ready((jax.jit(fn) if jit else fn)(jnp.ones((3, 8))))
            assert spec(result) == (None, "model")


def test_in_place_is_free(x, mesh) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        y = axn.shard(x)
        assert axn.shard(y).array is y.array
        with jax.transfer_guard("disallow"):
            axn.shard(y)
    by_hand = axn.shard(y, MAPPING, mesh)
    assert by_hand.array is y.array


def test_in_place_is_looked_up(x, mesh, monkeypatch) -> None:
    """An eager array that lies where the mapping puts it is not resolved again; anything else is."""
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        y = axn.shard(x)
        axn.shard(y)
        monkeypatch.setattr(sys.modules["axonym.sharding.shard"], "resolve", lambda *_: pytest.fail("resolved"))
        assert axn.shard(y) is y
        assert axn.shard(y, mesh=mesh) is y
        assert axn.shard(y, MAPPING) is axn.shard(y, MAPPING, mesh) is y
        assert axn.shard(tree := {"layers": [y, y]}) is axn.shard(tree, MAPPING) is tree
        monkeypatch.undo()
        assert axn.shard(y, {name: [entry] for name, entry in MAPPING.items()}).array is y.array
        assert spec(axn.unshard(y, MAPPING)) == (None, None)
        assert spec(axn.shard(y, {"batch": "data"})) == ("data", None)
        assert [spec(z) for z in axn.shard([y, axn.unshard(y)])] == [spec(y)] * 2
        with pytest.warns(UserWarning, match="Did you mean 'batch'"):
            axn.shard(axn.unshard(y), {"bacth": "data"})
        assert axn.shard(y, mesh=on_some(4, 1)).array.sharding.device_set == {*jax.devices()[:4]}
        assert spec(axn.shard(axn.named(y.array, ("batch", "other")))) == ("data", None)
        with axn.axis_mapping({"batch": "model"}, merge=True):
            with pytest.raises(ValueError, match="are both sharded over mesh axis 'model'"):
                axn.shard(y)
        with axn.axis_mapping({"batch": "dat"}, merge=True):
            with pytest.raises(ValueError, match=r"'dat', which the mesh does not have\. Did you mean 'data'"):
                axn.shard(y)
        with axn.axis_mapping({"embed": None}, merge=True):
            assert spec(axn.shard(y)) == ("data", None)
        assert axn.shard(y) is y


def on_some(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))


READS = {
    "other boundaries": lambda x, path: axn.shard(x, MAPPING, on_some(1, 8)),
    "other devices": lambda x, path: axn.shard(x, MAPPING, on_some(1, 4)),
    "unshard": lambda x, path: axn.unshard(x, mesh=on_some(8, 1)),
    "remap of shared memory": lambda x, path: axn.remap(
        [x, x * 1, axn.named(x.array, x.names)], MAPPING, on_some(1, 4)
    ),
    "to the host": lambda x, path: axn.to_host(x),
    "to a file": lambda x, path: save_state_dict({"x": x.array}, path),
    "data of this process": lambda x, path: axn.sharding.from_process_local_data(x, "embed", "model", on_some(1, 8)),
    "an argument elsewhere": lambda x, path: axn.named_jit(
        lambda x: x, in_placement=NamedSharding(on_some(1, 4), P(None, "model"))
    )(x),
}


@pytest.mark.parametrize("read", READS)
def test_arrays_keep_no_copy_on_the_host(read: str, tmp_path: Path) -> None:
    make = lambda: axn.shard(axn.ones({"batch": 256, "embed": 256}), MAPPING, on_some(8, 1))
    jax.block_until_ready(READS[read](make(), tmp_path / "first"))  # what is compiled and cached does not count
    x = jax.block_until_ready(make())
    gc.collect()
    tracemalloc.start()  # NumPy's memory too
    try:
        jax.block_until_ready(READS[read](x, tmp_path / "second"))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < x.array.nbytes // 2


def test_large_arrays_are_exchanged_on_devices() -> None:
    mesh = on_some(2, 4)
    x = axn.shard(axn.ones({"batch": 2048, "embed": 2048}), {"batch": "data"}, mesh)
    axn.shard(x, {"embed": "model"}, mesh)
    tracemalloc.start()
    try:
        y = jax.block_until_ready(axn.shard(x, {"embed": "model"}, mesh))
        assert tracemalloc.get_traced_memory()[1] < x.array.nbytes // 8
    finally:
        tracemalloc.stop()
    assert spec(y) == (None, "model") and y.array.sharding.mesh == mesh


def test_a_moved_array_stays_weakly_typed() -> None:
    x = axn.shard(jax.lax.full_like(2.0, 2.0, shape=(8, 8)), P("data"), on_some(8, 1))
    assert axn.shard(x, P(None, "data"), on_some(8, 1)).weak_type


@pytest.mark.parametrize("inside", [False, True])
def test_mixed_axis_types(x, mixed_mesh, inside: bool) -> None:
    with jax.set_mesh(mixed_mesh), axn.axis_mapping(MAPPING):
        y = jax.jit(axn.shard)(x) if inside else axn.shard(x)
    assert spec(y) == ("data", "model")


def test_one_axis_over_mesh_axes_of_two_types_is_refused_in_jit(x, mixed_mesh) -> None:
    with jax.set_mesh(mixed_mesh), pytest.raises(ValueError, match="mesh axes of different types"):
        jax.jit(lambda a: axn.shard(a, {"batch": ("data", "model")}))(x)


def test_mesh_by_hand(x, mesh) -> None:
    assert spec(axn.shard(x, MAPPING, mesh)) == ("data", "model")
    inside = jax.jit(lambda a: axn.shard(a, MAPPING, mesh))
    if AxisType.Explicit in mesh.axis_types:
        with pytest.raises(ValueError, match="cannot be passed inside jit"):
            inside(x)
    else:
        assert spec(inside(x)) == ("data", "model")


def test_older_mesh_context(x, auto_mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with auto_mesh:
            assert spec(axn.shard(x, MAPPING)) == ("data", "model")
            assert spec(jax.jit(lambda a: axn.shard(a, MAPPING))(x)) == ("data", "model")
            with pytest.raises(ValueError, match="size 3 cannot be sharded"):
                jax.jit(lambda: axn.shard(axn.ones({"batch": 3}), MAPPING))()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("other", [slice(4, 8), slice(3, None, -1)], ids=["other devices", "another order"])
def test_the_same_shape_of_mesh_on_other_devices(x, other: slice, kind: AxisType) -> None:
    devices = np.array(jax.devices())
    old, new = (Mesh(found, ("data",), axis_types=(kind,)) for found in (devices[:4], devices[other]))
    mapping = {"batch": "data"}
    y, raw = axn.shard(x, mapping, old), jax.device_put(x.array, NamedSharding(old, P("data")))
    with jax.set_mesh(new), axn.axis_mapping(mapping):
        moved = axn.shard(y)
        assert axn.shard(moved).array is moved.array
        made, by_mapping = axn.named_jit(lambda y, raw: (y + axn.named(raw, y.names), y), in_placement=mapping)(y, raw)
    for z in (moved, by_mapping):
        assert z.array.sharding == NamedSharding(new, P("data", None))
        np.testing.assert_array_equal(z.array, x.array)
    assert made.array.sharding.mesh == new
    np.testing.assert_array_equal(made.array, 2 * x.array)


def test_mesh_axes_of_size_one(x) -> None:
    mesh = axn.make_mesh({"data": 1, "model": 1}, devices=jax.devices()[:1])
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        np.testing.assert_array_equal(jax.jit(axn.shard)(x).array, x.array)
        np.testing.assert_array_equal(axn.shard(x).array, x.array)


def test_several_mesh_axes_for_one_axis(x, mesh) -> None:
    with jax.set_mesh(mesh):
        y = axn.shard(x, {"batch": ("data", "model")})
        assert spec(y)[0] == ("data", "model")
        assert y.array.addressable_shards[0].data.shape == (1, 4)


def test_nothing_in_force_warns_and_changes_nothing(x, auto_mesh) -> None:
    with pytest.warns(UserWarning, match="no mapping is active"):
        assert axn.shard(x) is x
    with pytest.warns(UserWarning, match="no mesh is active"):
        assert axn.shard(x, MAPPING) is x
    with axn.axis_mapping(MAPPING), jax.set_mesh(auto_mesh):
        assert spec(axn.shard(x)) == ("data", "model")


WITHOUT_A_MESH = {
    "shard": lambda x: axn.shard(x, MAPPING),
    "unshard": lambda x: axn.unshard(x, {"batch": ("data", "model")}),
    "in_placement": lambda x: axn.named_jit(lambda x: x * 2, in_placement=MAPPING)(x),
    "out_placement": lambda x: axn.named_jit(lambda x: x * 2, out_placement=P("data", "model"))(x),
    "mapping": lambda x: axn.named_jit(lambda x: x * 2, MAPPING)(x),
    "active mapping": lambda x: axn.axis_mapping(MAPPING)(axn.named_jit(lambda x: x * 2))(x),
    "fsdp": lambda x: axn.fsdp(lambda x: x * 2, {"embed": "data"}, {"batch": ("data", "model")})(x),
    "a rule": lambda x: axn.named_jit(lambda x: x * 2, in_placement=FSDPShardingRule("data", min_fsdp_size=0))(x),
}


@pytest.mark.parametrize("what", WITHOUT_A_MESH)
def test_a_placement_without_a_mesh_says_what_to_add(x, what: str) -> None:
    call = WITHOUT_A_MESH[what]
    with pytest.warns(UserWarning, match="no mesh is active") as caught:
        call(x)
    assert [w.filename for w in caught] == [__file__]
    line = str(caught[0].message).split("`")[1]
    names = {"jax": jax, "axonym": axn, "call": call, "x": x}
    exec(f"{line}\n    y = jax.block_until_ready(call(x))", names)
    y: Any = names["y"]
    assert len(y.array.devices()) == 8
    assert what == "unshard" or any(spec(y))


def test_mappings_that_need_no_mesh_say_nothing(x, auto_mesh) -> None:
    axn.named_jit(lambda x: x, {"batch": None}, in_placement={"embed": None})(x)
    placed = axn.named_jit(lambda x: x, in_placement=NamedSharding(auto_mesh, P("data")))(x)
    assert spec(placed) == ("data", None)


class Layer(eqx.Module):
    weight: axn.NamedArray
    plain: jax.Array
    activation: Any
    depth: int
    table: jax.Array = axn.field(axis_names=("vocab", "embed"))

    @staticmethod
    def init() -> Layer:
        return Layer(axn.ones(axn.make_axes(embed=4, mlp=8)), jnp.ones(3), jnp.tanh, 2, jnp.ones((8, 4)))


def test_models_and_optimizer_states(mesh) -> None:
    mapping = {"embed": "model", "vocab": "data"}
    model = {"layers": [Layer.init(), Layer.init()], "numpy": axn.named(np.ones((4,), np.float32), "embed")}
    arrays = eqx.filter(model, eqx.is_array)
    state: Any = optax.adam(1e-3).init(arrays)
    with jax.set_mesh(mesh):
        placed, placed_state = axn.shard((model, state), mapping)
    layer = placed["layers"][1]
    assert spec(layer.weight) == ("model", None)
    assert spec(layer.table) == ("data", "model")
    assert not isinstance(layer.plain.sharding, NamedSharding)
    assert layer.activation is jnp.tanh and layer.depth == 2
    assert spec(placed["numpy"]) == ("model",)
    moments = placed_state[0].mu
    assert spec(moments["layers"][0].weight) == ("model", None)
    assert spec(moments["layers"][0].table) == ("data", "model")
    assert jax.tree.structure(placed) == jax.tree.structure(model)


def test_a_placement_can_be_a_tree_prefix(x, mesh) -> None:
    tree = {"a": x, "b": [x, x.array], "c": x}
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "model"}):
        placed = axn.shard(tree, {"a": MAPPING, "b": P(None, "data"), "c": None})
    assert spec(placed["a"]) == ("data", "model")
    assert [spec(b) for b in placed["b"]] == [(None, "data")] * 2
    assert spec(placed["c"]) == ("model", None)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="not a prefix of the tree"):
        axn.shard(tree, {"a": MAPPING})


def test_a_sharding_brings_its_mesh(x, auto_mesh) -> None:
    assert spec(axn.shard(x, NamedSharding(auto_mesh, P("data")))) == ("data", None)


def test_abstract_arrays_get_their_sharding(x, auto_mesh) -> None:
    abstract = jax.eval_shape(lambda: {"x": x})
    placed = axn.shard(abstract, MAPPING, auto_mesh)["x"]
    assert isinstance(placed.array, jax.ShapeDtypeStruct)
    assert placed.array.sharding.spec == P("data", "model")


def test_unshard_what_a_placement_shards(x, mesh) -> None:
    """Eagerly and in jit, the axes that the placement shards are replicated, and the others stay where they are."""
    raw = jnp.ones((8, 4))
    rule = axn.sharding.TreePathShardingRule(("x", {"batch": "data"}), ("raw", P(None, "model")))
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):  # which is not looked at
        tree = {"x": axn.shard(x), "raw": axn.shard(raw, P("data", "model")), "n": 3}
        for undo in (axn.unshard, jax.jit(axn.unshard, static_argnums=1)):
            found = jax.block_until_ready(undo(tree, rule))
            assert spec(found["x"]) == (None, "model") and spec(found["raw"])[0] == "data"
            assert spec(found["raw"]) in {("data",), ("data", None)}
            assert spec(undo(tree["x"], P("data"))) == (None, "model")
        assert spec(axn.unshard(tree, {"x": {"embed": "model"}, "raw": P("data"), "n": None})["raw"]) == (None, "model")
        abstract = axn.unshard(axn.shard(jax.eval_shape(lambda: x), MAPPING), {"batch": "data"})
        assert abstract.array.sharding.spec == P(None, "model")
    with pytest.raises(ValueError, match=r"unshard .* goes to mesh axis 'dat'"):
        axn.unshard(x, {"batch": "dat"}, mesh)


def test_unshard_and_to_host(x, mesh) -> None:
    with jax.set_mesh(mesh):
        y = axn.shard(x, MAPPING)
        assert axn.unshard(y).array.sharding.is_fully_replicated
        assert jax.jit(axn.unshard)(y).array.sharding.is_fully_replicated
    host = axn.to_host({"y": y})["y"]
    assert isinstance(host.array, np.ndarray) and host.names == x.names
    np.testing.assert_array_equal(host.array, x.array)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda a: axn.to_host(a))(x)


def test_inside_shard_map_manual_axes_are_left_alone(x, mesh) -> None:
    def body(a):
        assert a.shape["batch"] == 2
        assert axn.shard(a, MAPPING).array is a.array
        return a * 2

    with jax.set_mesh(mesh):
        y = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"))(axn.shard(x, {"batch": "data"}))
    np.testing.assert_array_equal(y.array, 2 * x.array)


def test_inside_partly_manual_shard_map_the_rest_is_placed(x, auto_mesh) -> None:
    def body(a):
        return axn.shard(a, MAPPING)

    fn = jax.jit(jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
    with jax.set_mesh(auto_mesh):
        assert spec(fn(x)) == ("data", "model")


def test_partly_manual_on_a_mixed_mesh_is_refused(x) -> None:
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "extra"), axis_types=types)

    def body(a):
        return axn.shard(a, MAPPING)

    with jax.set_mesh(mesh), pytest.raises(ValueError, match="mixes Manual, Explicit and Auto"):
        jax.jit(jax.shard_map(body, in_specs=P(), out_specs=P(), axis_names={"extra"}))(x)


ERRORS = {
    "indivisible": (
        {"layers": [{"w": {"batch": 6, "embed": 4}}], "b": {"batch": 7}},
        MAPPING,
        [
            "2 problems",
            "layers/0/w (batch=6, embed=4)",
            "axis 'batch' of size 6 cannot be sharded over data=4",
            "gives 8",
            "b (batch=7)",
        ],
    ),
    "unknown mesh axis": (
        {"w": {"batch": 8}},
        {"batch": "dta"},
        ["mesh axis 'dta'", "(data=4, model=2)", "Did you mean 'data'?"],
    ),
    "taken twice": (
        {"w": {"batch": 8, "embed": 4}},
        {"batch": "data", "embed": "data"},
        ["axis 'batch' and axis 'embed' are both sharded over mesh axis 'data'", "w (batch=8, embed=4)"],
    ),
    "rank": ({"w": {"batch": 8}}, P("data", None), ["has 2 entries for an array of shape (8,)"]),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_eager_and_in_jit(name: str, inside: bool, mesh) -> None:
    shapes, placement, parts = ERRORS[name]
    tree = jax.tree.map(
        axn.ones, shapes, is_leaf=lambda s: isinstance(s, dict) and all(isinstance(v, int) for v in s.values())
    )

    def place():
        return axn.shard(tree, placement)

    with jax.set_mesh(mesh), pytest.raises(ValueError) as error:
        jax.jit(place)() if inside else place()
    for part in parts:
        assert part in str(error.value)


def test_warnings_point_at_the_users_line(auto_mesh) -> None:
    x, elsewhere = axn.ones({"batch": 8}), {"head": "data"}
    with jax.set_mesh(auto_mesh):
        calls = [
            lambda: axn.shard(x, elsewhere),
            lambda: jax.jit(lambda x: axn.shard([x], [elsewhere]))(x),
            lambda: axn.named_jit(lambda x: x, out_placement=elsewhere)(x),
            lambda: axn.named_jit(lambda x: x, {"bath": "data"})(x),
        ]
        for call in calls:
            with pytest.warns(UserWarning, match="none of the mapping's axes|axis of the arguments") as caught:
                call()
            assert [(w.filename, w.lineno) for w in caught] == [(__file__, call.__code__.co_firstlineno)]
    with pytest.warns(UserWarning, match="no mapping is active") as caught:
        axn.shard(x)
    assert [w.filename for w in caught] == [__file__]


def test_a_mapping_by_hand_of_which_nothing_applies_warns(x, auto_mesh) -> None:
    hint = r"none of the mapping's axes 'bacth'.*Did you mean 'batch'\?"
    with jax.set_mesh(auto_mesh), pytest.warns(UserWarning, match=hint):
        axn.shard(x, {"bacth": "data"})


class Unnamed(eqx.Module):
    layers: list[eqx.nn.Linear]

    @staticmethod
    def init() -> Unnamed:
        return Unnamed([eqx.nn.Linear(6, 8, key=jax.random.key(0)), eqx.nn.Linear(8, 3, key=jax.random.key(0))])


@pytest.mark.parametrize("what", ["shard", "fsdp", "state"])
def test_a_mapping_for_a_tree_without_names_says_what_to_write(auto_mesh, what: str) -> None:
    model: Any = Unnamed.init()
    if what == "state":
        model = nnx.state(nnx.Linear(6, 8, rngs=nnx.Rngs(0)))
    calls = {
        "shard": lambda placement: axn.shard(model, placement),
        "state": lambda placement: axn.shard(model, placement),
        "fsdp": lambda placement: axn.fsdp(lambda m: (m, 1), placement, {"batch": "data"})(model)[0],
    }
    with jax.set_mesh(auto_mesh):
        with pytest.warns(UserWarning, match=r"no named axes\. Place arrays without names by path") as caught:
            calls[what]({"embed": "data"})
        advice = str(caught[-1].message).split("`")[1]
        placed = calls[what](eval(advice, {"axonym": axn, "jax": jax}))
    if what == "state":
        assert "'(^|/)kernel" in advice and "'(^|/)bias" in advice
        assert spec(placed["kernel"].get_value()) == (None, "data") and spec(placed["bias"].get_value()) == ("data",)
    else:
        assert "'(^|/)layers/0/weight$'" in advice and "'(^|/)layers/1/weight$'" in advice
        assert [spec(layer.weight) for layer in placed.layers] == [("data", None), (None, "data")]
        assert spec(placed.layers[0].bias) == (None,)


def test_a_mapping_for_an_array_without_names_says_what_to_write(auto_mesh) -> None:
    with jax.set_mesh(auto_mesh), pytest.warns(UserWarning, match=r"pass `jax\.P\(None, 'data'\)` instead"):
        axn.shard(jnp.ones((3, 4)), MAPPING)


def test_a_named_array_of_another_rank_is_an_error(auto_mesh) -> None:
    def body(a):
        axn.shard(a, MAPPING)
        return a.array

    with jax.set_mesh(auto_mesh), pytest.raises(ValueError, match=r"2 names \(batch, embed\) for an array of rank 1"):
        jax.vmap(body)(axn.ones({"batch": 8, "embed": 4}))


def test_make_mesh() -> None:
    mesh = axn.make_mesh({"data": -1, "model": 2})
    assert isinstance(mesh, Mesh) and dict(mesh.shape) == {"data": 4, "model": 2}
    assert axn.make_mesh((2, 4), ("a", "b"), explicit=True).axis_types == (AxisType.Explicit,) * 2
    assert axn.make_mesh((2, 4), ("a", "b"), explicit=["b"]).axis_types == (AxisType.Auto, AxisType.Explicit)
    with pytest.raises(ValueError, match="explicit has c; the mesh axes are a, b"):
        axn.make_mesh((2, 4), ("a", "b"), explicit="c")
    with pytest.raises(ValueError, match=r"^make_mesh: the name .* has no lone surrogates, got 'data\\ud800'"):
        axn.make_mesh({"data\ud800": 8})
    untyped: Any = {1: 8}
    with pytest.raises(TypeError, match=r"^make_mesh: a mesh axis has a name, such as 'data', got 1\.$"):
        axn.make_mesh(untyped)
    with pytest.raises(ValueError, match="cannot be divided by 3"):
        axn.make_mesh({"data": -1, "model": 3})
    with pytest.raises(ValueError, match="needs 16 devices; there are 8"):
        axn.make_mesh({"data": 16})
    with pytest.raises(ValueError, match="only one size can be left open"):
        axn.make_mesh({"data": -1, "model": -1})


def test_a_mesh_without_devices_is_refused(x, auto_mesh) -> None:
    """Even if another mesh with axes of the same names is active."""
    for around in (auto_mesh.abstract_mesh, on_some(1, 8)):
        with axn.set_mesh(around), pytest.raises(ValueError, match=r"mesh \(data=4, model=2\) is abstract"):
            axn.shard(x, MAPPING, auto_mesh.abstract_mesh)


def test_current_mesh(auto_mesh) -> None:
    assert axn.current_mesh() is None
    with axn.set_mesh(auto_mesh):
        assert axn.current_mesh() == auto_mesh.abstract_mesh
    with axn.set_mesh(auto_mesh.abstract_mesh):
        assert axn.current_mesh() == auto_mesh.abstract_mesh


def test_an_empty_array_that_was_computed_sharded(mesh: Mesh) -> None:
    """JAX 0.10 cannot copy it. A weakly typed one cannot be made from its shards."""
    weak = axn.named(jnp.full((8, 4), 0.0), ("batch", "embed"))
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        for x in (axn.ones({"batch": 8, "embed": 4}), weak):
            empty = axn.named_jit(lambda x: x["embed", 0:0] * 2)(axn.shard(x))
            moved = axn.shard(empty, {"batch": ("data", "model")})
            assert moved.array.weak_type == x.array.weak_type
            assert np.asarray(moved.array).shape == axn.to_host(empty).array.shape == (8, 0)
            assert moved.array.sharding.spec[0] == ("data", "model")
        whole = axn.broadcast_axis(weak["batch", 0]["embed", 0:0], axn.Axis("batch", 8))
        assert np.asarray(axn.shard(whole, {"batch": "data"}).array).shape == (8, 0)
