"""Rules: the answer of each for a leaf, composition, and use in place of a mapping."""

from __future__ import annotations

import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import (
    FSDPShardingRule,
    MappingShardingRule,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)

Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)

ANY_FSDP = FSDPShardingRule("data", min_fsdp_size=0)


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype("float32"))


def specs(tree: Any) -> Any:
    """Return the complete specs of arrays or shardings by path; named arrays count as their raw arrays."""

    def full(x: Any) -> tuple[Any, ...]:
        sharding = x if isinstance(x, NamedSharding) else x.sharding
        assert isinstance(sharding, NamedSharding)
        return tuple(sharding.spec)

    return jax.tree.map(full, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def shardings(rule: Any, tree: Any, mesh: Any = None) -> Any:
    return axn.sharding.infer_resource_partitions(tree, rule, mesh=mesh)


def spec_of(rule: Any, *shape: int, mesh: Any) -> tuple[Any, ...]:
    return tuple(shardings(rule, abstract(*shape), mesh).spec)


# --- what rules see ---


def seen_in(tree: Any, mesh: Any) -> dict[str, Any]:
    seen = {}

    class Watching(ShardingRule):
        def place(self, leaf, mesh):
            seen[leaf.path] = leaf.names if leaf.names is not None else leaf.shape
            return P()

    shardings(Watching(), tree, mesh)
    return seen


def test_paths_of_containers_read_alike(mesh):
    tree = {"layers": [{"attn": {"q": abstract(2)}}], "n": 3, "none": None}
    assert seen_in(tree, mesh) == {"layers/0/attn/q": (2,)}


def test_named_arrays_come_with_their_names(mesh):
    state = optax.adam(1.0).init({"w": axn.ones((Embed, Mlp))})
    assert seen_in(state, mesh) == {
        "0/count": (),
        "0/mu/w": ("embed", "mlp"),
        "0/nu/w": ("embed", "mlp"),
    }


def test_equinox_models(mesh):
    class Model(eqx.Module):
        layers: list[eqx.nn.Linear]
        table: jax.Array = axn.field(axis_names=("vocab", "embed"))

    model = Model([eqx.nn.Linear(2, 3, key=jax.random.key(0))], jnp.ones((4, 2)))
    assert seen_in(model, mesh) == {
        "layers/0/weight": (3, 2),
        "layers/0/bias": (3,),
        "table": ("vocab", "embed"),
    }


def test_flax_models(mesh):
    class Model(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    found = seen_in(nnx.state(Model()), mesh)
    assert {path.removesuffix("/value"): shape for path, shape in found.items()} == {
        "up/kernel": (2, 3),
        "up/bias": (3,),
    }


# --- FSDP ---


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), ()),
        ((3,), (None,)),
        ((6, 16), (None, "data")),
        ((16, 16), ("data", None)),
        ((12, 4), ("data", None)),  # both are divisible by 4 and not more; the first wins
        ((1000, 64), (None, "data")),
        ((2, 2), (None, None)),
        ((0, 8), (None, "data")),
    ],
)
def test_fsdp_splits_the_axis_with_the_largest_power_of_two(shape, expected, mesh):
    assert spec_of(ANY_FSDP, *shape, mesh=mesh) == expected


def test_fsdp_with_a_size_splits_the_largest_axis_that_it_divides(mesh):
    rule = FSDPShardingRule("data", fsdp_axis_size=4, min_fsdp_size=0)
    assert spec_of(rule, 16, 20, 1022, mesh=mesh) == (None, "data", None)
    assert spec_of(FSDPShardingRule("data", 3, 0), 32, 12, mesh=mesh) == (None, "data")
    assert spec_of(FSDPShardingRule("data", 3, 0), 32, 9, mesh=mesh) == (None, None)  # 4 devices do not divide 9


def test_fsdp_leaves_small_arrays_whole(mesh):
    assert spec_of(FSDPShardingRule("data", min_fsdp_size=64), 8, 8, mesh=mesh) == ("data", None)
    assert spec_of(FSDPShardingRule("data", min_fsdp_size=65), 8, 8, mesh=mesh) == (None, None)
    assert spec_of(FSDPShardingRule("data"), 1024, 1024, mesh=mesh) == ("data", None)


def test_fsdp_over_several_mesh_axes(mesh):
    rule = FSDPShardingRule(("data", "model"), min_fsdp_size=0)
    assert spec_of(rule, 4, 24, mesh=mesh) == (None, ("data", "model"))


def test_fsdp_never_splits_what_the_mesh_does_not_divide(mesh):
    draw = random.Random(0)
    for _ in range(200):
        shape = tuple(draw.choice([1, 2, 3, 4, 6, 8, 10, 12, 20]) for _ in range(draw.randint(0, 4)))
        for size in (None, 2, 4, 5):
            rule = FSDPShardingRule("data", size, 0)
            chosen = [s for s, entry in zip(shape, spec_of(rule, *shape, mesh=mesh), strict=True) if entry]
            possible = [s for s in shape if s % 4 == 0 and s % (size or 1) == 0]
            assert len(chosen) == min(len(possible), 1) and set(chosen) <= set(possible)


def test_fsdp_says_what_is_wrong_with_it(mesh):
    with pytest.raises(ValueError, match=r"mesh \(data=4, model=2\) has no axis 'dat'. Did you mean 'data'"):
        shardings(FSDPShardingRule("dat"), abstract(2), mesh)
    with pytest.raises(ValueError, match="`fsdp_axis_size` is a size, got 0"):
        FSDPShardingRule("data", 0)


# --- paths ---

LAYERS = {
    "layers": [{"attn": {"q": abstract(16, 32), "o": abstract(32, 16)}, "norm": abstract(16)} for _ in range(2)],
    "table": abstract(64, 16),
}


def test_the_first_pattern_that_is_found_wins(mesh):
    rule = TreePathShardingRule(
        ("attn/q$", P("data", "model")), ("layers/1/.*", P()), ("attn/.*", P("model")), (".*", P())
    )
    found = specs(shardings(rule, LAYERS, mesh))
    assert found["layers"][0]["attn"] == {"q": ("data", "model"), "o": ("model", None)}
    assert found["layers"][1]["attn"] == {"q": ("data", "model"), "o": (None, None)}


def test_strict_lists_every_leaf_without_a_pattern(mesh):
    rule = TreePathShardingRule(("layers/0", P()), ("layers/1/atn/(q|o)", P()), ("tabel", P()))
    with pytest.raises(ValueError) as raised:
        shardings(rule, LAYERS, mesh)
    lines = str(raised.value).splitlines()
    assert lines[0] == "infer_resource_partitions on mesh (data=4, model=2), 4 problems:"
    assert [line.split()[0] for line in lines[1:]] == [
        "layers/1/attn/o",
        "layers/1/attn/q",
        "layers/1/norm",
        "table",
    ]
    assert "(32, 16)" in lines[1] and "'layers/1/atn/(q|o)'" in lines[1]
    assert "the nearest of 3: 'tabel'" in lines[4]


def test_what_has_no_axes_needs_no_pattern(mesh):
    rule = TreePathShardingRule(("table", P("data")))
    assert specs(shardings(rule, {"table": jnp.ones(8), "count": jnp.ones(())}, mesh)) == {
        "table": ("data",),
        "count": (),
    }


def test_without_strict_they_are_whole(mesh):
    assert specs(shardings(TreePathShardingRule(("q", P("data")), strict=False), LAYERS, mesh))["table"] == (None, None)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("w",), "a pair of a pattern and a placement"),
        ((P(), "w"), "a pair of a pattern and a placement"),
        (("w", None), r"P\(\) replicates"),
        (("w", "data"), "needs a placement"),
    ],
)
def test_patterns_go_to_placements(pair, message):
    with pytest.raises(TypeError, match=message):
        TreePathShardingRule(pair)


# --- policies ---


def test_a_policy_sees_the_path_and_the_leaf(mesh):
    tree = {"named": axn.ones((Batch, Embed)), "raw": abstract(8)}

    def policy(path: str, x: Any) -> Any:
        return {"embed": "data"} if isinstance(x, axn.NamedArray) else P("model") if path == "raw" else P()

    found = shardings(PolicyShardingRule(policy), tree, mesh)
    assert (found["named"].spec, found["raw"].spec) == (P(None, "data"), P("model"))


def test_a_policy_without_an_answer(mesh):
    with pytest.raises(ValueError, match=r"w \(2,\): the policy undecided gave no placement for it"):

        def undecided(path, x):
            return None

        shardings(PolicyShardingRule(undecided), {"w": abstract(2)}, mesh)
    wrong: Any = lambda path, x: "data"
    with pytest.raises(TypeError, match="gave 'data' for w, which is not a placement"):
        shardings(PolicyShardingRule(wrong), {"w": abstract(2)}, mesh)


# --- composing ---


def test_a_mapping_then_a_rule(mesh):
    tree = {"named": axn.ones((Batch, Embed)), "raw": abstract(16, 3)}
    for rule in (MappingShardingRule({Batch: "data"}) | ANY_FSDP, {Batch: "data"} | ANY_FSDP):
        found = shardings(rule, tree, mesh)
        assert (tuple(found["named"].spec), tuple(found["raw"].spec)) == (("data", None), ("data", None))
    with pytest.raises(ValueError, match=r"raw .* it has no named axes that a resource mapping could place"):
        shardings(MappingShardingRule({"batch": "data"}), tree, mesh)


def test_exclude_and_fall_back(mesh):
    rule = ANY_FSDP.exclude("norm") | TreePathShardingRule(("layers/0", P())) | P("model")
    found = specs(shardings(rule, LAYERS, mesh))
    assert [layer["norm"] for layer in found["layers"]] == [(None,), ("model",)]
    assert found["table"] == ("data", None)
    with pytest.raises(ValueError, match=r"2 problems:\n  layers/0/norm .*: 'norm' excludes it from FSDPShardingRule"):
        shardings(ANY_FSDP.exclude("norm"), LAYERS, mesh)


def test_a_rule_that_hands_on_to_a_rule(mesh):
    rule = TreePathShardingRule(("attn", ANY_FSDP.exclude("q") | P("model")), ("norm", MappingShardingRule({})))
    tree = {"attn": {"q": abstract(8), "o": abstract(8)}}
    assert specs(shardings(rule, tree, mesh)) == {"attn": {"q": ("model",), "o": ("data",)}}
    with pytest.raises(ValueError, match=r"norm .*: it has no named axes that a resource mapping could place"):
        shardings(rule, {"norm": abstract(8)}, mesh)


def test_what_cannot_be_split_is_an_error_or_left_whole_if_asked(mesh):
    rule = TreePathShardingRule(("w", P("model", "data")), (".*", {Mlp: "data", "batch": "model"}))
    odd = {"w": abstract(6, 6), "v": {"w": abstract(3, 4)}, "n": axn.ones({"mlp": 6, "batch": 4})}
    with pytest.raises(ValueError) as raised:
        shardings(rule, odd, mesh)
    for part in ("3 problems", "n (mlp=6, batch=4)", "over data=4", "w (6, 6)", "v/w (3, 4)", "over model=2"):
        assert part in str(raised.value)
    found = shardings(rule.lenient(), odd, mesh)
    assert tuple(found["w"].spec) == ("model", None) and tuple(found["v"]["w"].spec) == (None, "data")
    assert tuple(found["n"].spec) == (None, "model")


def test_lenient_forgives_nothing_else(mesh):
    with pytest.raises(ValueError, match="has 2 entries for an array of shape"):
        shardings(TreePathShardingRule((".*", P(None, "data"))).lenient(), abstract(4), mesh)
    with pytest.raises(ValueError, match="mesh axis 'modle', which the mesh does not have"):
        shardings(TreePathShardingRule((".*", P("modle"))).lenient(), abstract(3), mesh)
    with pytest.raises(ValueError, match="no pattern"):
        shardings(TreePathShardingRule(("w", P())).lenient(), abstract(3), mesh)


def test_lenient_looks_at_the_mesh_of_a_sharding(mesh):
    two = axn.make_mesh({"data": 2}, devices=jax.devices()[:2])
    rule = TreePathShardingRule((".*", NamedSharding(two, P("data")))).lenient()
    assert shardings(rule, abstract(6), mesh) == NamedSharding(two, P("data"))


# --- a placement is a placement ---

TREE = {"named": axn.ones((Batch, Embed)), "raw": jnp.ones((16, 4)), "other": {"w": jnp.ones((4, 8)), "step": 3}}

# Four ways to say the same.
SAME = {
    "rule": {"batch": "data"} | TreePathShardingRule(("raw", P("data")), ("other", P(None, "model"))),
    "policy": PolicyShardingRule(
        lambda path, x: P("data", None) if path.split("/")[-1] in ("named", "raw") else P(None, "model")
    ),
    "prefix": {"named": MappingShardingRule({"batch": "data"}), "raw": P("data"), "other": P(None, "model")},
    "prefix with a mapping": {
        "named": {"batch": "data"},
        "raw": ANY_FSDP,
        "other": {"w": P(None, "model"), "step": None},
    },
}

IN_JIT = ("rule", "prefix with a mapping")

WAYS = {
    "shard": lambda p: axn.shard(TREE, p),
    "infer": lambda p: axn.shard(TREE, axn.sharding.infer_resource_partitions(TREE, p)),
    "pspec_for": lambda p: axn.shard(TREE, axn.sharding.pspec_for(TREE, p)),
    "named_jit arguments": lambda p: axn.named_jit(lambda t: t, in_placement=(p,))(TREE),
    "named_jit results": lambda p: axn.named_jit(lambda t: t, out_placement=p)(TREE),
}


def check_everywhere(placed_by, mesh, names):
    for name in names:
        with axn.set_mesh(mesh):
            placed = placed_by(SAME[name])
        for x, spec in (
            (placed["named"].array, P("data", None)),
            (placed["raw"], P("data", None)),
            (placed["other"]["w"], P(None, "model")),
        ):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), (name, spec)
        assert placed["other"]["step"] == 3


@pytest.mark.parametrize("way", WAYS)
def test_everywhere(way, mesh):
    check_everywhere(WAYS[way], mesh, SAME if "jit" not in way else IN_JIT)


def test_fsdp_takes_a_rule(mesh):
    def step(params, x):
        return params["w"] * 2, axn.dot(x, params["named"], axis=Embed)

    params = {"w": jnp.ones((8, 4)), "named": axn.ones((Embed, Mlp))}
    with axn.set_mesh(mesh):
        w, y = axn.fsdp(step, ANY_FSDP, {"batch": "data"})(params, axn.ones((Batch, Embed)))
        assert w.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
        assert y.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
        np.testing.assert_array_equal(y.array, np.full((8, 32), 16.0))
        with pytest.raises(ValueError, match=r"2 problems:\n  params/named .*no pattern"):
            axn.fsdp(step, TreePathShardingRule(("nothing", P())), {"batch": "data"})(params, axn.ones((Batch, Embed)))


def test_pspec_for_sees_the_mesh_in_force(mesh):
    with axn.set_mesh(mesh):
        assert axn.sharding.pspec_for(abstract(6, 4), ANY_FSDP) == P(None, "data")
    assert axn.sharding.pspec_for(abstract(6, 4), ANY_FSDP) == P(None, "data")
    assert axn.sharding.pspec_for(abstract(6, 1), ANY_FSDP) == P("data", None)  # no mesh is known that could refuse it


def test_what_is_not_a_placement(mesh):
    with axn.set_mesh(mesh), pytest.raises(TypeError, match="shard: 'data', for 'raw', is not a placement"):
        axn.shard(TREE, {"named": P(), "raw": "data", "other": P()})


def test_no_argument_has_a_placement(mesh):
    x = axn.ones((Batch, Embed))
    with axn.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        a, b = axn.named_jit(lambda a, b: (a, b), in_placement=(None, None))(x, x)
    for y in (a, b):
        assert y.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)


def test_a_rule_says_the_same_of_a_model_wherever_it_stands(mesh):
    """Paths begin where the rule stands, so that the names of arguments and of surrounding trees do not matter."""
    tree = {"layers": {"w": jnp.ones(8)}, "norm": {"w": jnp.ones(8)}}
    rule = TreePathShardingRule(("^layers/", P("data")), strict=False)

    def placed(found):
        whole = found["norm"]["w"].sharding.is_fully_replicated
        return whole and found["layers"]["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)

    identity = lambda norm: norm
    with axn.set_mesh(mesh):
        assert placed(axn.shard(tree, rule))
        assert placed(axn.shard({"model": tree}, {"model": rule})["model"])
        assert placed(axn.named_jit(identity, in_placement=(rule,))(tree))
        assert placed(axn.named_jit(identity, in_placement={"norm": rule})(tree))
        with pytest.raises(ValueError, match=r"norm/layers/w .*no pattern"):  # errors have the complete path
            axn.named_jit(identity, in_placement=(TreePathShardingRule(("^norm", P())),))(tree)


@pytest.mark.parametrize("answer", ["data", ("data",), {"a": P("data")}], ids=repr)
def test_an_answer_that_is_no_placement(mesh, answer):
    class Odd(axn.sharding.ShardingRule):
        def place(self, leaf, mesh):
            return answer

    with axn.set_mesh(mesh), pytest.raises(TypeError, match=r"Odd .*gave .* for layers/w, which is not a placement"):
        axn.shard({"layers": {"w": jnp.ones(8)}}, Odd())


def test_shardings_have_devices(mesh):
    with axn.set_mesh(mesh):
        found = shardings({"w": P("data")}, {"w": jnp.ones(8)})
        inferred = axn.sharding.infer_resource_partitions({"w": axn.ones({"batch": 8})}, {"batch": "data"})
    for sharding in (found["w"], inferred["w"]):
        assert jax.device_put(np.ones(8), sharding).sharding.spec == P("data")


def test_mappings_in_rules_keep_their_guards(mesh):
    tree = {"w": axn.ones({"embed": 8}), "b": jnp.ones(8)}
    misspelled = TreePathShardingRule(("w", {"embd": "model"}), ("b", P()))
    with pytest.warns(UserWarning, match=r"mapping's axes 'embd'.* Did you mean 'embed'"):
        shardings(misspelled, tree, mesh)
    with pytest.raises(ValueError, match=r"b \(8,\): it has no named axes"):
        shardings(TreePathShardingRule((".*", {"embed": "model"})), tree, mesh)
    rule = {"batch": "data"} | FSDPShardingRule("data", min_fsdp_size=1)
    found = shardings(rule, tree, mesh)
    assert found["w"].spec == found["b"].spec == P("data")
    with pytest.warns(UserWarning, match="none of the mapping's axes 'batch'"):
        rule = {"batch": "data"} | MappingShardingRule({"seq": "data"})
        assert shardings(rule, tree["w"], mesh).spec == P(None)


def test_rules_made_alike_are_equal():
    def make():
        path = TreePathShardingRule(("w", P("data")), ("v", {"embed": "data"}), strict=False)
        return [
            FSDPShardingRule("data"),
            path,
            path.lenient(),
            path.exclude("w"),
            {"embed": "data"} | path,
            MappingShardingRule({"embed": "data"}),
        ]

    assert make() == make() and list(map(hash, make())) == list(map(hash, make()))
    assert len(set(make())) == len(make())
    assert FSDPShardingRule("data") != FSDPShardingRule("data", min_fsdp_size=1)
    assert PolicyShardingRule(lambda path, x: P()) != PolicyShardingRule(lambda path, x: P())
