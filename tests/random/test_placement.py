"""The shardings of results on meshes of every kind, and the part that each device draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym import random
from tests.random.samplers import (
    AXES,
    KEY,
    LARGE,
    MAPPING,
    REPRESENTATIVE,
    SAMPLERS,
    Batch,
    Embed,
    Pos,
    Vocab,
    assert_same,
    entries,
    largest_buffer,
    parameters,
    sample,
)


@pytest.mark.parametrize("name", SAMPLERS)
def test_types_on_explicit_axes(name: str, explicit_mesh: Mesh) -> None:
    """Every sampler, whose type alone says where the result lies."""

    def typed(key: Any, *values: Any) -> axn.NamedArray:
        drawn = sample(name, key, *values)
        assert entries(drawn) == MAPPING
        return drawn

    with jax.set_mesh(explicit_mesh), axn.axis_mapping(MAPPING):
        jax.eval_shape(typed, KEY, *parameters(name).values())


def draw_some(key: Any, given: dict[str, list[Any]]) -> dict[str, axn.NamedArray]:
    logits = random.normal(key, (Vocab, Batch, Embed))
    return {name: sample(name, key, *values) for name, values in given.items()} | {
        "categorical": random.categorical(key, logits, "vocab", AXES),
        "choice": random.choice(key, (Batch, Pos), logits.rename({"batch": "row"}), "row"),
        "gamma": random.gamma(key, AXES, axn.arange(Embed) + 0.5),
        "permutation": random.permutation(key, logits, "batch"),
    }


@pytest.fixture(scope="module")
def without_a_mesh() -> dict[str, axn.NamedArray]:
    return jax.jit(draw_some)(KEY, {name: list(parameters(name).values()) for name in REPRESENTATIVE})


def test_results_lie_where_the_mapping_says(mesh: Mesh, without_a_mesh: dict[str, axn.NamedArray]) -> None:
    """Whatever is drawn, it is the same on any mesh."""
    given = {name: list(parameters(name).values()) for name in REPRESENTATIVE}
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(jax.jit(draw_some)(KEY, given))
    for name, drawn in found.items():
        assert entries(drawn) == MAPPING, name
        assert_same(drawn, without_a_mesh[name].array, name)


def test_eagerly(mesh: Mesh) -> None:
    p = axn.named(jnp.linspace(0.0, 1.0, 8), "batch")
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        drawn = jax.block_until_ready(random.bernoulli(KEY, AXES, p))
        again = jax.block_until_ready(random.bernoulli(KEY, AXES, axn.shard(p)))
        with axn.axis_mapping({"embed": "data"}):
            elsewhere = jax.block_until_ready(random.bernoulli(KEY, AXES, axn.shard(p)))
    assert entries(drawn) == entries(again) == MAPPING
    assert entries(elsewhere) == {"embed": "data"}
    for x in (drawn, again, elsewhere):
        assert_same(x, jax.random.bernoulli(KEY, jnp.broadcast_to(p.array[:, None, None], (8, 3, 4))))


def test_without_a_mapping(explicit_mesh: Mesh) -> None:
    """On Explicit axes the result then lies as its parameters do."""
    p = axn.shard(axn.full((Embed, Batch), 0.5), MAPPING, explicit_mesh)
    with jax.set_mesh(explicit_mesh):
        assert entries(random.bernoulli(KEY, AXES, p)) == MAPPING
        assert entries(random.bernoulli(KEY, AXES)) == {}
    assert entries(random.bernoulli(KEY, AXES, p)) == MAPPING


def test_mixed_and_older_meshes(auto_mesh: Mesh) -> None:
    mixed = Mesh(auto_mesh.devices, auto_mesh.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mixed), axn.axis_mapping(MAPPING):
        drawn = jax.block_until_ready(random.normal(KEY, AXES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of `with mesh:`
        with Mesh(auto_mesh.devices, auto_mesh.axis_names), axn.axis_mapping(MAPPING):
            older = jax.block_until_ready(random.normal(KEY, AXES))
    assert entries(drawn) == entries(older) == MAPPING
    assert_same(drawn, jax.random.normal(KEY, (8, 3, 4)))
    assert_same(older, jax.random.normal(KEY, (8, 3, 4)))


def test_inside_shard_map(mesh: Mesh) -> None:
    """The shape is then that of one shard, and so is what is drawn."""

    def local(keys: Any) -> jax.Array:
        return random.normal(keys[0], Batch).array

    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        keys = jax.device_put(jax.random.split(KEY, 4), P("data"))
        drawn = jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))(keys)
    assert_same(drawn, jnp.concatenate([jax.random.normal(key, (8,)) for key in jax.random.split(KEY, 4)]))


def test_vmap_and_gradients_on_a_mesh(mesh: Mesh) -> None:
    a = axn.named(jnp.linspace(1.0, 2.0, 8), "batch")

    def loss(a: axn.NamedArray, key: Any) -> jax.Array:
        return axn.sum(random.uniform(key, AXES, minval=a, maxval=a * 3)).array

    keys = jax.random.split(KEY, 2)
    wanted = jax.vmap(jax.grad(loss), (None, 0))(a, keys)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(axn.shard(a), keys))
    np.testing.assert_allclose(found.array, wanted.array, rtol=1e-5)


LARGE_OF_FOUR = axn.make_axes(batch=128, pos=4, embed=64, rest=4)

# The draws, and how many numbers the program keeps for each element.
DRAWS: dict[str, tuple[Callable[[Any, axn.NamedArray], axn.NamedArray], int]] = {
    "normal": (lambda key, p: random.normal(key, LARGE), 1),
    "normal, with axes that are merged": (lambda key, p: random.normal(key, LARGE_OF_FOUR), 1),
    "uniform": (lambda key, p: random.uniform(key, LARGE, maxval=p), 1),
    "gamma": (lambda key, p: random.gamma(key, LARGE, p), 6),
    "categorical": (lambda key, p: random.categorical(key, axn.log(p), "batch", LARGE[1]), 1),
}


def test_a_key_for_each_index(mesh: Mesh) -> None:
    """A function that draws is mapped over keys, and each device draws with its own."""
    keys, scale = axn.named(jax.random.split(KEY, Batch.size), Batch), axn.arange((Embed, Batch)) * 1.0

    def drawn(keys: axn.NamedArray, scale: axn.NamedArray) -> axn.NamedArray:
        return axn.vmap(lambda key, scale: scale * random.normal(key, (Pos, Embed)), Batch)(keys, scale)

    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(axn.named_jit(drawn)(*axn.shard((keys, scale))))
    assert entries(found) == MAPPING
    for i in range(Batch.size):
        wanted = scale["batch", i] * random.normal(keys.array[i], (Pos, Embed))
        assert_same(found["batch", i], wanted.array)


@pytest.mark.parametrize("name", DRAWS)
def test_no_device_draws_the_whole(name: str, mesh: Mesh) -> None:
    fn, numbers = DRAWS[name]
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        largest = largest_buffer(fn, KEY, axn.shard(axn.ones(LARGE[::-1])))
    assert largest <= numbers * axn.axis.axis_size(LARGE) // 4, f"{largest} elements of {axn.axis.axis_size(LARGE)}"


def test_what_jit_shards_without_a_mapping_is_drawn_in_shards(mesh: Mesh) -> None:
    """The axes are not merged there, since nothing says yet which of them are sharded."""
    sharding = NamedSharding(mesh, P(None, "data"))
    fn = jax.jit(lambda key: random.normal(key, LARGE).array, out_shardings=sharding)
    assert largest_buffer(fn, KEY) <= axn.axis.axis_size(LARGE) // mesh.shape["data"]


def test_without_a_mapping_each_device_draws_the_whole(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        assert largest_buffer(lambda key: random.normal(key, LARGE), KEY) >= axn.axis.axis_size(LARGE)
