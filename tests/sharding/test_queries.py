"""Questions to a mapping, and checks of one against a model."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.sharding import queries

MAPPING = {"batch": ("data", "model"), "embed": "model", "pos": None}


def test_physical_axis_name() -> None:
    assert axn.sharding.physical_axis_name("embed", MAPPING) == "model"
    assert axn.sharding.physical_axis_name(axn.Axis("batch", 3), MAPPING) == ("data", "model")
    assert axn.sharding.physical_axis_name("pos", MAPPING) is None
    assert axn.sharding.physical_axis_name("embed") is None
    with axn.axis_mapping(MAPPING):
        assert axn.sharding.physical_axis_name("embed") == "model"


def test_physical_axis_size(auto_mesh) -> None:
    assert axn.sharding.physical_axis_size("batch", MAPPING, auto_mesh) == 8
    assert axn.sharding.physical_axis_size("pos", MAPPING, auto_mesh) is None
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        assert axn.sharding.physical_axis_size("embed") == 2
    with pytest.raises(ValueError, match="no mesh is active"):
        axn.sharding.physical_axis_size("batch", MAPPING)
    with pytest.raises(ValueError, match=r"mesh axis 'modl', which mesh .* does not have. Did you mean 'model'"):
        axn.sharding.physical_axis_size("embed", {"embed": "modl"}, auto_mesh)


def test_specs_and_shardings(auto_mesh) -> None:
    assert axn.sharding.pspec_for_axis(("batch", "pos", "embed"), {"batch": "data", "embed": "model"}) == P(
        "data", None, "model"
    )
    assert axn.sharding.pspec_for_axis("embed", MAPPING) == P("model")
    sharding = axn.sharding.sharding_for_axis(axn.make_axes(batch=8, pos=3), MAPPING, auto_mesh)
    assert sharding == NamedSharding(auto_mesh, P(("data", "model"), None))
    with pytest.raises(ValueError, match="axis 'embed' of size 3 cannot be sharded over model=2"):
        axn.sharding.sharding_for_axis(axn.Axis("embed", 3), MAPPING, auto_mesh)


def test_whole_trees(auto_mesh) -> None:
    placed = jax.device_put(jnp.ones(8), NamedSharding(auto_mesh, P("data")))
    tree = {"w": axn.ones({"embed": 4}), "raw": placed, "text": "x"}
    assert axn.sharding.pspec_for(tree, MAPPING) == {"w": P("model"), "raw": P("data"), "text": None}
    assert axn.sharding.pspec_for(tree, MAPPING, preserve_existing_shardings=False)["raw"] is None
    shardings = axn.sharding.infer_resource_partitions(tree, MAPPING, mesh=auto_mesh)
    assert shardings["w"] == NamedSharding(auto_mesh, P("model")) and shardings["raw"].spec == P("data")


def test_round_axis(auto_mesh) -> None:
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        assert axn.sharding.round_axis_for_partitioning(axn.Axis("batch", 9)) == axn.Axis("batch", 16)
        assert axn.sharding.round_axis_for_partitioning(axn.Axis("batch", 16)) == axn.Axis("batch", 16)
        assert axn.sharding.round_axis_for_partitioning(axn.Axis("pos", 9)) == axn.Axis("pos", 9)
    assert axn.sharding.round_axis_for_partitioning(axn.Axis("other", 9)) == axn.Axis("other", 9)


def test_lint(auto_mesh) -> None:
    model = {
        "layers": [{"w": axn.ones({"embed": 3, "mlp": 4})}],
        "twice": axn.ones({"batch": 8, "embed": 4}),
        "big": jax.eval_shape(lambda: axn.ones({"vocab": 4096, "hidden": 128})),
        "text": "x",
    }
    report = axn.lint_mapping(model, {"batch": "model", "embed": "model", "mlpp": "data"}, auto_mesh)
    assert {(f.kind, f.where) for f in report} == {
        ("unused", "mlpp"),
        ("problem", "layers/0/w"),
        ("problem", "twice"),
        ("replicated", "big"),
    }
    assert report and len(report) == 4
    text = str(report)
    for part in (
        "3 arrays, 4 findings",
        "axis 'mlpp' is in the mapping but not in the tree. Did you mean 'mlp'?",
        "axis 'embed' of size 3 cannot be sharded over model=2",
        "axis 'batch' and axis 'embed' are both sharded over mesh axis 'model'",
        "big (vocab=4096, hidden=128), 2 MiB, is replicated on 8 devices",
    ):
        assert part in text
    fine = axn.lint_mapping({"w": axn.ones({"embed": 4})}, {"embed": "model"}, auto_mesh)
    assert not fine and str(fine) == "1 array, nothing found."
    one = axn.lint_mapping({"w": axn.ones({"embed": 4})}, {"embd": None}, auto_mesh)
    assert str(one).startswith("1 array, 1 finding:")
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"embed": "model"}):
        assert not axn.lint_mapping({"w": axn.ones({"embed": 4})})


def test_a_mapping_of_many_names_is_read_once(auto_mesh, monkeypatch) -> None:
    """A shared mapping may have thousands of entries, so none of them looks at all the others."""
    mapping, looked = {f"name{i}": "data" for i in range(2000)}, []
    normalize = queries.normalize_mapping
    monkeypatch.setattr(queries, "normalize_mapping", lambda *args: looked.append(args) or normalize(*args))
    assert len(axn.lint_mapping(axn.ones({"embed": 4}), mapping, auto_mesh).findings) == 2000
    assert len(looked) == 1


def test_lint_sees_what_shard_would_refuse_or_leave_whole(auto_mesh) -> None:
    class Layer(eqx.Module):
        w: Any = axn.field(axis_names=("embed", "mlp"))

    stack = axn.lint_mapping(Layer(jnp.ones((3, 4, 4))), {"embed": "data"}, auto_mesh)
    assert [f.kind for f in stack] == ["problem"] and "A stack of modules has one more axis" in str(stack)
    narrow = axn.make_mesh({"data": 8, "model": 1})
    whole = axn.lint_mapping(axn.zeros({"vocab": 1024, "embed": 1024}), {"vocab": "model"}, narrow)
    assert [f.kind for f in whole] == ["replicated"]
    misspelled = axn.lint_mapping(axn.zeros({"vocab": 8}), {"vocb": "modl"}, auto_mesh)
    assert [f.kind for f in misspelled] == ["unused", "problem"] and "Did you mean 'model'" in str(misspelled)


def test_lint_of_rules_and_other_placements(auto_mesh) -> None:
    from axonym.sharding import FSDPShardingRule, MappingShardingRule, TreePathShardingRule

    large = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    model = {"attn": {"q": large}, "norm": jnp.ones(3), "table": axn.named(large, ("vocab", "embed"))}

    def found(placement, mesh=auto_mesh):
        return {(f.kind, f.where) for f in axn.lint_mapping(model, placement, mesh)}

    paths = TreePathShardingRule(("atn/q", P("model")), ("norm", P("data")), ("table", {"vocb": "data"}), (".*", P()))
    assert found(paths) == {
        ("unused", "atn/q"),
        ("unused", "vocb"),
        ("problem", "norm"),
        ("replicated", "attn/q"),
        ("replicated", "table"),
    }
    assert found(paths.lenient()) == found(paths) - {("problem", "norm")}
    assert found(TreePathShardingRule(("attn", P("data")))) == {("problem", "norm"), ("problem", "table")}
    assert found(FSDPShardingRule("data")) == {("replicated", "attn/q"), ("replicated", "table")}  # fewer elements
    assert found(FSDPShardingRule("data", min_fsdp_size=8).exclude("nrom|attn")) == {("problem", "attn/q")}
    assert found(FSDPShardingRule("data", min_fsdp_size=8).exclude("nrom")) == {("unused", "nrom")}
    both = MappingShardingRule({"vocba": "data"}) | FSDPShardingRule("data", min_fsdp_size=8)
    assert found(both) == {("unused", "vocba")}
    assert found(FSDPShardingRule("dat")) == {("problem", "the placement")}
    assert found(P("data", "model")) == {("problem", "norm")}
    prefix = {"attn": P("data"), "norm": None, "table": {"embed": "model", "mlp": "model"}}
    assert found(prefix) == {("unused", "mlp")}
    assert found({**prefix, "table": jax.NamedSharding(auto_mesh, P())}, None) == {("replicated", "table")}
    assert found({"attn": P("data")}) == {("problem", "the placement")}


@pytest.mark.parametrize("axes", [("a", "b"), (axn.Axis("a", 8), axn.Axis("b", 8))])
def test_one_array_uses_a_mesh_axis_once(axes, auto_mesh) -> None:
    with pytest.raises(ValueError, match="'a' and 'b' are both sharded over mesh axis 'data'"):
        axn.sharding.sharding_for_axis(axes, {"a": "data", "b": "data"}, auto_mesh)
