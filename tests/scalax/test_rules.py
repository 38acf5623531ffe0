"""Rules under the names of scalax: where they stand, and what `apply` makes of a tree."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import TreePathShardingRule, match_sharding_rule, sjit, with_sharding_constraint
from tests.sharding.test_rules import SAME, TREE


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
    for name in SAME if "sjit" not in way else ("rule", "prefix with a mapping"):
        with axn.set_mesh(mesh):
            placed = WAYS[way](SAME[name])
        for x, spec in (
            (placed["named"].array, P("data", None)),
            (placed["raw"], P("data", None)),
            (placed["other"]["w"], P(None, "model")),
        ):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), (name, spec)
        assert placed["other"]["step"] == 3


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
        with pytest.raises(ValueError, match=r"norm/layers/w .*no pattern"):  # errors say the whole path
            sjit(identity, in_shardings=(TreePathShardingRule(("^norm", P())),))(tree)
