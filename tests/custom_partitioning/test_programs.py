"""The communication in compiled programs of operations."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.custom_partitioning import partitioned
from tests.custom_partitioning.operations import (
    Batch,
    Vocab,
    check,
    collectives,
    draw,
    log_normalizer,
    raw_total,
    scalar_loss,
    top,
)

LOGITS = draw(Batch, Vocab)


def loss(x):
    return scalar_loss(log_normalizer(x, 2.0))


def test_programs_move_no_more_than_by_hand(mesh, mapping):
    x = axn.shard(LOGITS)
    rows = 2 if mapping.get("batch") else 8
    split = bool(mapping.get("vocab"))
    assert collectives(lambda x: log_normalizer(x, 2.0), x) == [("all-reduce", rows)] * 2 * split
    # k candidates of each of the two parts, values and indices; never the vocabulary
    assert collectives(lambda x: top(x, k=3), x) == [("all-gather", rows * 6)] * 2 * split


def test_what_must_be_whole_is_gathered_and_nothing_else(mesh):
    op = partitioned(lambda x: axn.logsumexp(x, "vocab"))
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        assert collectives(op, axn.shard(LOGITS)) == [("all-gather", 2 * 16)]


def test_an_operand_that_disagrees_with_a_larger_one_is_moved(mesh):
    op = partitioned(lambda x, row: x + row)
    x, row = axn.shard(LOGITS, {"batch": "data"}), axn.shard(draw(Vocab), {"vocab": "data"})
    check(op(x, row).array, LOGITS.array + np.asarray(row.array)[None])
    assert collectives(op, x, row) == [("all-gather", 16)]
    assert op(x, row).array.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_program_of_a_gradient_moves_what_one_writes_by_hand(mesh):
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        assert collectives(jax.grad(loss), axn.shard(LOGITS)) == [("all-reduce", 2)] * 3


def test_program_inside_shard_map_over_some_mesh_axes(auto_mesh):
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data", "vocab": "model"}):
        inside = axn.shard_map(lambda x: log_normalizer(x, 2.0), axis_names="data")
        assert collectives(inside, axn.shard(LOGITS)) == [("all-reduce", 2)] * 2


def test_program_of_a_vmap_is_still_split(auto_mesh):
    x = jax.device_put(np.stack([LOGITS.array] * 4), NamedSharding(auto_mesh, P("data", None, "model")))
    twice = jax.vmap(jax.vmap(raw_total, (0, None)), (None, 0))
    assert {kind for kind, _ in collectives(twice, x, jnp.array([1.0, 3.0]))} == {"all-reduce"}


def test_program_inside_shard_map_over_all_mesh_axes(mesh):
    inside = axn.shard_map(lambda x: log_normalizer(x, 2.0), mapping={"batch": ("data", "model")})
    assert collectives(inside, axn.shard(LOGITS, {"batch": ("data", "model")})) == []


def test_an_operand_that_is_sharded_over_half_of_a_mesh_axis(auto_mesh):
    """Two of the four shards are in each row: no entry of a spec says so, and JAX raises when it decodes shardings."""

    def best(x):
        rows = axn.unflatten_axis(x * 2, "batch", (axn.Axis("rows", 2), axn.Axis("batch", 4)))
        return axn.top_k(rows, "vocab", 3)[0]

    with jax.set_mesh(auto_mesh):
        x = axn.shard(LOGITS, {"batch": "data"})
        check(jax.jit(best)(x).array, best(LOGITS).array)
