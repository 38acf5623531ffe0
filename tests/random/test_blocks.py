"""Drawing block by block."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import random
from tests.helpers import compilations
from tests.random.samplers import AXES, KEY, LARGE, MAPPING, Batch, Embed, assert_same, entries, largest_buffer, noise


@pytest.mark.parametrize("axis", [None, "pos"])
def test_blocks(axis: Any) -> None:
    along = Batch if axis is None else axn.axis.resolve_axis(AXES, axis)
    scale = axn.arange((Embed, Batch)) * 1.0
    drawn = random.generate_sharded(noise, axis)(KEY, AXES, scale, shift=2.0)
    assert drawn.axes == AXES
    rest = tuple(a for a in AXES if a is not along)
    for i, key in enumerate(jax.random.split(KEY, along.size)):
        part = scale[along.name, i] if scale.has_axis(along) else scale
        block = part.broadcast_to(rest).array * jax.random.normal(key, tuple(a.size for a in rest)) + 2
        assert_same(drawn[along.name, i], block)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_blocks_on_a_mesh(mesh: Mesh, impl: str) -> None:
    """The values are the same on any mesh, also with keys that JAX cannot split between devices."""
    key = jax.random.key(3, impl=impl)
    scale = axn.arange((Embed, Batch)) * 1.0
    sampler = random.generate_sharded(noise)
    wanted = sampler(key, AXES, scale)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        drawn = jax.block_until_ready(sampler(key, AXES, axn.shard(scale)))
    assert entries(drawn) == MAPPING
    assert_same(drawn, wanted.array)


def test_blocks_are_drawn_where_they_lie(mesh: Mesh) -> None:
    """Also with such keys, with which the sampler itself draws the whole on every device."""
    key = jax.random.key(3, impl="rbg")
    with jax.set_mesh(mesh), axn.axis_mapping({"embed": "model"}):
        assert largest_buffer(lambda key: random.normal(key, LARGE), key) >= axn.axis.axis_size(LARGE)
        sampler = random.generate_sharded(random.normal, "embed")
        assert largest_buffer(lambda key: sampler(key, LARGE), key) <= axn.axis.axis_size(LARGE) // 2


def test_gradients_through_blocks(mesh: Mesh) -> None:
    sampler = random.generate_sharded(noise)
    scale = axn.ones((Batch, Embed))

    def loss(scale: axn.NamedArray) -> jax.Array:
        return axn.sum(sampler(KEY, AXES, scale)).array

    wanted = jax.grad(loss)(scale)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(jax.jit(jax.grad(loss))(axn.shard(scale)))
    np.testing.assert_allclose(found.array, wanted.array, rtol=1e-4, atol=1e-5)


def test_block_samplers_look_like_their_function() -> None:
    sampler = random.generate_sharded(noise)
    assert sampler.__name__ == "noise" and inspect.signature(sampler) == inspect.signature(noise)
    sampler(KEY, AXES, 2.0)
    with compilations() as seen:
        sampler(KEY, AXES, 2.0)
    assert not seen


def test_block_samplers_can_be_collected() -> None:
    sampler = random.generate_sharded(lambda key, shape: random.normal(key, shape))
    sampler(KEY, AXES)
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    assert gone() is None
