"""Rules under the names of scalax: their position in a tree, and `apply`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PartitionSpec,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    match_sharding_rule,
    sharding_annotations,
    sjit,
    with_sharding_annotation,
    with_sharding_constraint,
)
from tests.sharding.test_rules import IN_JIT, SAME, TREE, check_everywhere


def by_arguments(compiled: Any) -> Any:
    arrays, rest = eqx.partition(TREE, eqx.is_array)
    return eqx.combine(compiled(arrays), rest)


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 2, tree)


WAYS = {
    "match": lambda p: axn.shard(TREE, match_sharding_rule(p, TREE)),
    "with_sharding_constraint": lambda p: with_sharding_constraint(TREE, p),
    "sjit arguments": lambda p: by_arguments(sjit(lambda t: t, in_shardings=(p,))),
    "sjit constraint": lambda p: by_arguments(sjit(lambda t: t, args_sharding_constraint=(p,))),
    "sjit results": lambda p: by_arguments(sjit(doubled, out_shardings=p)),
}


@pytest.mark.parametrize("way", WAYS)
def test_everywhere(way, mesh):
    check_everywhere(WAYS[way], mesh, SAME if "sjit" not in way else IN_JIT)


def test_a_rule_says_the_same_of_a_model_wherever_it_stands(mesh):
    """Paths begin where the rule stands, so that the names of arguments and of surrounding trees do not matter."""
    tree = {"layers": {"w": jnp.ones(8)}, "norm": {"w": jnp.ones(8)}}
    rule = TreePathShardingRule(("^layers/", P("data")), strict=False)

    def placed(found):
        whole = found["norm"]["w"].sharding.is_fully_replicated
        return whole and found["layers"]["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)

    identity = lambda norm: norm
    with axn.set_mesh(mesh):
        assert placed(sjit(identity, in_shardings=(rule,), out_shardings=rule)(tree))
        assert placed(sjit(identity, in_shardings=rule)(tree))
        assert placed(sjit(lambda x: (x, 0.0), out_shardings=(rule, None))(tree)[0])
        with pytest.raises(ValueError, match=r"norm/layers/w .*no pattern"):  # errors have the complete path
            sjit(identity, in_shardings=(TreePathShardingRule(("^norm", P())),))(tree)


# --- applied to trees ---

PARAMETERS = {"w": jnp.ones((6, 16)), "b": jnp.ones(8), "one": jnp.ones((1, 1)), "step": jnp.ones((), jnp.int32)}


def test_rules_are_applied_without_a_mesh():
    """Specs come out as they went in."""
    assert PartitionSpec is P
    assert FSDPShardingRule("x", min_fsdp_size=8).apply(PARAMETERS) == {
        "w": P(None, "x"),
        "b": P("x"),
        "one": P(),
        "step": P(),
    }
    assert FSDPShardingRule("x", fsdp_axis_size=3, min_fsdp_size=0).apply(PARAMETERS["w"]) == P("x", None)
    assert FSDPShardingRule("x", min_fsdp_size=0).apply(jnp.ones((1, 3))) == P(None, "x")
    by_path = TreePathShardingRule(("w|one|step", P("x")), ("b", P(None)))
    assert by_path.apply(PARAMETERS) == {"w": P("x"), "b": P(None), "one": P(), "step": P()}
    assert PolicyShardingRule(lambda path, x: P(path, x.ndim)).apply({"a": jnp.ones(2)}) == {"a": P("a", 1)}
    with pytest.raises(ValueError, match="no pattern of TreePathShardingRule"):
        TreePathShardingRule(("b", P())).apply(PARAMETERS)


def test_one_element_is_whole_whatever_matches_it(mesh):
    rule = TreePathShardingRule((".*", P("data")))
    tree = {"w": jnp.ones(8), "scale": jnp.ones(1), "step": jnp.ones(()), "one": axn.ones({"a": 1})}
    with axn.set_mesh(mesh):
        placed = sjit(lambda t: t, in_shardings=(rule,), out_shardings=rule)(tree)
        assert placed["w"].sharding.spec == P("data")
        assert all(placed[name].sharding.is_fully_replicated for name in ("scale", "step"))
        with pytest.raises(ValueError, match="scale"):
            axn.shard(tree, axn.sharding.TreePathShardingRule((".*", P("data"))))


class LargestOnly(ShardingRule):
    """A rule that looks at the tree as a whole, which rules for leaves cannot."""

    def apply(self, pytree):
        largest = max(x.size for x in jax.tree.leaves(pytree))
        return jax.tree.map(lambda x: P("data") if x.size == largest else P(), pytree)


class Transposed(FSDPShardingRule):
    def apply(self, pytree):
        return jax.tree.map(lambda spec: P(*reversed(spec)), super().apply(pytree), is_leaf=lambda x: isinstance(x, P))


def test_rules_that_override_apply(mesh):
    tree = {"a": {"w": jnp.ones((8, 8)), "v": jnp.ones(8)}, "b": jnp.ones(8)}

    def check(placed):
        found = jax.tree.map(lambda x: x if isinstance(x, NamedSharding) else x.sharding, placed)
        assert found["a"]["w"].is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        assert found["a"]["v"].is_fully_replicated
        assert found["b"].is_equivalent_to(NamedSharding(mesh, P("data" if isinstance(rule, dict) else None)), 1)

    with axn.set_mesh(mesh):
        for rule in (LargestOnly(), {"a": LargestOnly(), "b": LargestOnly()}):
            check(match_sharding_rule(rule, tree))
            check(with_sharding_constraint(tree, rule))
            check(sjit(lambda t: t, (rule,), rule)(tree))
            check(sjit(lambda t: t, args_sharding_constraint=(rule,))(tree))
            with sharding_annotations({"tree": rule}):
                check(with_sharding_annotation(tree, "tree"))
            check(axn.shard(tree, rule))
        # As part of another rule it gets one leaf at a time.
        parts = TreePathShardingRule(("a", LargestOnly()), (".*", P()))
        assert match_sharding_rule(parts, tree)["a"]["v"].spec == P("data")
    helper = MeshShardingHelper([8], ["data"])
    assert helper.match_sharding_rule(Transposed("data", min_fsdp_size=0), jnp.ones((8, 16))).spec == P("data", None)


def test_a_rule_that_defines_nothing(mesh):
    class Empty(ShardingRule):
        pass

    with pytest.raises(TypeError, match="a rule of your own defines `apply`"):
        match_sharding_rule(Empty(), jnp.ones(8), mesh)
