"""`top_k` and `argmax` over a vocabulary: values, ties, numbers of elements, and communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import argmax, top_k
from tests.vocabulary.helpers import LOGITS, Batch, Vocab, moved, run

BOTH = {"batch": "data", "vocab": "model"}
COUNTS = axn.named(np.arange(8) % 5, Batch)
TIES = axn.named(np.tile(np.arange(4, dtype=np.float32), (8, 16)), (Batch, Vocab))


def expected(x, k):
    return tuple(np.asarray(y) for y in jax.lax.top_k(x.array, k))


def assert_found(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.array, b)


# --- all shardings ---


def test_the_largest(mesh, mapping):
    """Also as many as each example says, and of equal ones more than a part has."""

    def several(x, ties, counts):
        few = top_k(x, "vocab", counts, max_k=4, replacement=axn.arange(Batch).astype(jnp.float32))
        return top_k(x, "vocab", 3), few, top_k(ties, Vocab, 40, "rank")

    three, few, equal = run(several, *axn.shard((LOGITS, TIES, COUNTS)))
    assert three[0].shape == {"batch": 8, "vocab": 3} and equal[1].shape == {"batch": 8, "rank": 40}
    assert_found(three, expected(LOGITS, 3))
    values, places = expected(LOGITS, 4)
    beyond = np.arange(4)[None] >= np.asarray(COUNTS.array)[:, None]
    assert_found(few, (np.where(beyond, np.arange(8.0)[:, None], values), places))
    assert_found(equal, expected(TIES, 40))


def test_what_is_beyond_the_number_is_the_lowest_of_the_dtype():
    """Also of a dtype without infinity."""
    for dtype, lowest in ((jnp.float32, -np.inf), (jnp.float8_e4m3fn, -448), (jnp.int8, -128)):
        values, _ = top_k(axn.zeros(Vocab, dtype), "vocab", 1, max_k=2)
        np.testing.assert_array_equal(values.array.astype(jnp.float32), [0, lowest])


def test_all_of_them_and_where_the_result_lies(mesh):
    with axn.axis_mapping(BOTH):
        values, places = jax.block_until_ready(top_k(axn.shard(LOGITS), "vocab", 64))
    assert_found((values, places), expected(LOGITS, 64))
    for x in (values, places):
        assert x.array.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 2)


def test_gradient(mesh):
    def total(x, counts):
        return axn.sum(top_k(x, "vocab", counts, max_k=4, replacement=0.0)[0] ** 2).scalar()

    with axn.axis_mapping(BOTH):
        gradient = run(jax.grad(total), axn.shard(LOGITS), axn.shard(COUNTS))
    largest = np.argsort(np.argsort(-LOGITS.array, axis=1), axis=1) < np.asarray(COUNTS.array)[:, None]
    np.testing.assert_allclose(gradient.array, np.where(largest, 2 * LOGITS.array, 0))


@pytest.mark.parametrize(("rows", "parts"), [(2, 2), (8, 8), (2, 1)])
def test_only_candidates_move(mesh, rows, parts):
    with axn.axis_mapping({(2, 2): BOTH, (8, 8): {"vocab": ("data", "model")}, (2, 1): {"batch": "data"}}[rows, parts]):
        x = axn.shard(LOGITS)
        for fn, k in (
            (lambda x: top_k(x, "vocab", jnp.int32(2), max_k=5), 5),
            (lambda x: argmax(x, "vocab"), 1),
        ):
            # values and places
            assert moved(fn, x) == ({"all-gather": 2 * 4 * rows * parts * k} if parts > 1 else {})


# --- on one device ---


def test_layout_is_kept():
    turned = axn.named(LOGITS.array.T, (Vocab, Batch))
    values, places = top_k(turned, "vocab", 3, "rank")
    assert values.names == places.names == ("rank", "batch")
    assert_found((values.rearrange(("batch", "rank")), places.rearrange(("batch", "rank"))), expected(LOGITS, 3))


def test_what_is_beyond_k():
    x = axn.named([3, 1, 2], "vocab")
    for given, lowest in ((x, np.iinfo(np.int32).min), (x.astype(jnp.bfloat16), -np.inf)):
        values, places = top_k(given, "vocab", 1, max_k=2)
        assert values.dtype == given.dtype and values.tolist() == [3, lowest]
        assert places.tolist() == [0, 2]
    assert top_k(x, "vocab", jnp.int32(7), max_k=2)[0].tolist() == [3, 2]
    assert top_k(x, "vocab", 0)[0].shape == {"vocab": 0}


def test_numbers_that_are_none():
    x = axn.named([1.0, np.nan, -np.inf, np.inf], "vocab")
    assert top_k(x, "vocab", 4)[1].tolist() == [1, 3, 0, 2]
    assert argmax(x, "vocab").item() == 1
    assert top_k(axn.named([-np.inf] * 3, "vocab"), "vocab", 2)[1].tolist() == [0, 1]


def test_refusals():
    with pytest.raises(ValueError, match=r"^top_k: k=65, but axis 'vocab' has 64 elements"):
        top_k(LOGITS, "vocab", 65)
    with pytest.raises(ValueError, match=r"max_k=-1, but axis 'vocab' has 64"):
        top_k(LOGITS, "vocab", 3, max_k=-1)
    with pytest.raises(TypeError, match=r"`k` is an array, .* Say with `max_k` how many there are at most"):
        top_k(LOGITS, "vocab", COUNTS)
    axis: Any = axn.Axis("k", 2)
    with pytest.raises(TypeError, match=r"`k` is a number of elements, got k\(2\): pass its size, 2\."):
        top_k(LOGITS, "vocab", axis)
    with pytest.raises(TypeError, match=r"`replacement` is the value of elements beyond `k`, so it needs `max_k`"):
        top_k(LOGITS, "vocab", 3, replacement=0.0)
    with pytest.raises(ValueError, match=r"`k` has axes \(pos\) that the array \(batch\) lacks"):
        top_k(LOGITS, "vocab", axn.named([1, 2], "pos"), max_k=3)
    with pytest.raises(ValueError, match=r"Did you mean 'vocab'\?"):
        top_k(LOGITS, "vocb", 3)
    with pytest.raises(ValueError, match="axis 'rank' has conflicting sizes: 4 in the argument, 3 in the result"):
        top_k(LOGITS, "vocab", 3, axn.Axis("rank", 4))


# --- wherever it is called ---


def test_raw_arrays_have_no_axis_to_search() -> None:
    raw: Any = LOGITS.array
    with pytest.raises(TypeError, match="top_k: expected a NamedArray, got"):
        top_k(raw, "vocab", 3)


def test_gradient_without_a_mapping(mesh):
    """There is none to say how operands are sharded, so the partitioner has the say."""
    x = axn.shard(LOGITS, BOTH)
    total = lambda x, counts: axn.sum(top_k(x, "vocab", counts, max_k=4, replacement=0.0)[0] ** 2).scalar()
    gradient = run(jax.grad(total), x, COUNTS)
    largest = np.argsort(np.argsort(-LOGITS.array, axis=1), axis=1) < np.asarray(COUNTS.array)[:, None]
    np.testing.assert_allclose(gradient.array, np.where(largest, 2 * LOGITS.array, 0))


@pytest.mark.parametrize("mapping", [BOTH, None], ids=["mapping", "none"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_inside_a_shard_map_over_some_mesh_axes(kind, mapping, auto_mesh, explicit_mesh):
    mesh = {"auto": auto_mesh, "explicit": explicit_mesh}[kind]
    specs = {"in_specs": jax.P("data"), "axis_names": {"data"}}

    def squares(x):
        x = axn.named(x, ("batch", "vocab"))
        with axn.axis_mapping(mapping or {}):
            return top_k(x, "vocab", 3)[0].array ** 2

    with jax.set_mesh(mesh):
        raw = jax.device_put(LOGITS.array, jax.P("data", "model"))
        values = run(jax.shard_map(squares, out_specs=jax.P("data"), **specs), raw)
        np.testing.assert_allclose(values, expected(LOGITS, 3)[0] ** 2)
        gradient = run(jax.shard_map(jax.grad(lambda x: squares(x).sum()), out_specs=jax.P("data"), **specs), raw)
        assert np.count_nonzero(gradient) == 3 * 8
        np.testing.assert_allclose(gradient, np.where(gradient != 0, 2 * LOGITS.array, 0))


def test_a_program_for_one_device_is_that_of_lax():
    def compiled(fn):
        return fn.lower(jax.ShapeDtypeStruct((8, 64), jnp.float32)).compile().as_text().partition("\n")[2]

    ours = jax.jit(lambda x: tuple(y.array for y in top_k(axn.named(x, (Batch, Vocab)), "vocab", 3)))
    count = lambda text: sorted(line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = " in line)
    assert count(compiled(ours)) == count(compiled(jax.jit(lambda x: tuple(jax.lax.top_k(x, 3)))))
