"""Attention on meshes: the shardings of results, and minimal communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import axonym as axn
from axonym.nn.attention import Causal, apply_rotary, dot_product_attention
from tests.helpers import assert_named, draw, spec
from tests.ops.test_contraction_program import COLLECTIVES

Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=8, pos=8, key_pos=8, heads=2, group=3, head_size=4)
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}

Q, K, V = draw(Batch, Pos, Heads, Group, Size), draw(Batch, KPos, Heads, Size), draw(Batch, KPos, Heads, Size) * 2


def attend(q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray) -> axn.NamedArray:
    return dot_product_attention(q, k, v, "key_pos", "head_size", Causal("pos"))


def loss(q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray) -> Any:
    return axn.sum(axn.sin(attend(q, k, v))).scalar()


def collectives(program: str) -> set[str]:
    return {kind for kind in COLLECTIVES if f" {kind}(" in program or f" {kind}-start(" in program}


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.jit(attend)(Q, K, V), jax.jit(jax.grad(loss, (0, 1, 2)))(Q, K, V)


SPLITS = {
    "batch and heads": ({"batch": "data", "heads": "model"}, set()),
    "queries": ({"pos": "data", "heads": "model"}, set()),
    "queries and keys": ({"batch": "model", "pos": "data", "key_pos": "data"}, {"collective-permute"}),
    "keys": ({"batch": "data", "key_pos": "model"}, {"all-reduce"}),
}


@pytest.mark.parametrize("in_force", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_split_attention(split: str, in_force: bool, mesh: Mesh, expected: Any) -> None:
    """Without an active mapping, too: the query says how the result is split."""
    mapping, moved = SPLITS[split]
    if "collective-permute" in moved and not in_force and AxisType.Auto in mesh.axis_types:
        moved = {"all-gather"}  # by the partitioner: nothing else knows how keys are sharded
    with jax.set_mesh(mesh), axn.axis_mapping(mapping if in_force else {}):
        operands = axn.shard((Q, K, V), mapping)
        compiled = jax.jit(attend).lower(*operands).compile()
        result = jax.block_until_ready(compiled(*operands))
    assert collectives(compiled.as_text() or "") == moved
    assert spec(result) == tuple(mapping.get(n) for n in Q.names)
    assert_named(axn.to_host(result), expected[0], **CLOSE)


def test_eager(explicit_mesh: Mesh, expected: Any) -> None:
    with jax.set_mesh(explicit_mesh):
        result = jax.block_until_ready(attend(*axn.shard((Q, K, V), SPLITS["queries and keys"][0])))
    assert spec(result) == ("model", "data", None, None, None)
    assert_named(axn.to_host(result), expected[0], **CLOSE)


def test_gradients_are_split_like_the_operands(explicit_mesh: Mesh, expected: Any) -> None:
    with jax.set_mesh(explicit_mesh):
        operands = axn.shard((Q, K, V), SPLITS["queries and keys"][0])
        found = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*operands))
    for x, wanted, operand in zip(found, expected[1], operands, strict=True):
        assert spec(x) == spec(operand)
        assert_named(axn.to_host(x), wanted, **CLOSE)


def test_rotary_embeddings_are_split_like_what_they_turn(explicit_mesh: Mesh) -> None:
    positions = axn.named(jnp.arange(64).reshape(8, 8), (Batch, Pos))
    turn = jax.jit(lambda x, positions: apply_rotary(x, Size, positions))
    with jax.set_mesh(explicit_mesh):
        x = axn.shard(Q, {"batch": "data", "pos": "model"})
        compiled = turn.lower(x, positions).compile()
        result = jax.block_until_ready(compiled(x, positions))
    assert not collectives(compiled.as_text() or "")
    assert spec(result) == ("data", "model", None, None, None)
    assert_named(axn.to_host(result), turn(Q, positions), **CLOSE)
