"""The draws of samplers, and parameters that broadcast by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import random
from tests.helpers import compilations
from tests.random.samplers import (
    AXES,
    KEY,
    REPRESENTATIVE,
    SAMPLERS,
    Batch,
    Pos,
    assert_same,
    expected,
    parameters,
    sample,
    whole,
)

# --- what is drawn ---


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_program_is_that_of_jax(name: str) -> None:
    """Operation by operation, for scalar parameters and for those that have all axes in the order of the result."""
    values = parameters(name).values()
    for given in ([1 if isinstance(x, int) else 0.5 for x, _ in SAMPLERS[name].values()], [*map(whole, values)]):
        named = [axn.named(x, AXES) if jnp.ndim(x) else x for x in given]
        found = jax.make_jaxpr(lambda key, *xs: sample(name, key, *xs).array)(KEY, *named)
        wanted = jax.make_jaxpr(lambda key, *xs: expected(name, key, *xs))(KEY, *given)
        assert str(found) == str(wanted)


@pytest.mark.parametrize("name", SAMPLERS)
def test_parameters_by_name(name: str) -> None:
    """In another order, with part of the axes, by keyword."""
    values = parameters(name)
    drawn = jax.eval_shape(lambda key, xs: getattr(random, name)(key, AXES, **xs), KEY, values)
    assert drawn.axes == AXES
    shapes = [jax.eval_shape(whole, x) if isinstance(x, axn.NamedArray) else x for x in values.values()]
    assert drawn.dtype == jax.eval_shape(functools.partial(expected, name), KEY, *shapes).dtype


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_draws_what_jax_draws(name: str) -> None:
    values = list(parameters(name).values())
    drawn = sample(name, KEY, *values)
    assert drawn.axes == AXES
    assert_same(drawn, expected(name, KEY, *map(whole, values)))


@pytest.mark.parametrize("name", ["normal", "bernoulli", "gamma", "randint"])
def test_merged_axes_change_nothing(name: str) -> None:
    """Eagerly, the numbers are drawn along one axis; in jit on several devices, without a mapping, along all three."""
    values = [low for low, _ in SAMPLERS[name].values()]
    drawn = sample(name, KEY, *values).array
    assert jnp.array_equal(drawn, jax.jit(lambda key: sample(name, key, *values).array)(KEY))
    assert jnp.array_equal(drawn, sample(name, jax.random.key_data(KEY), *values).array)


def test_the_order_of_a_parameter_does_not_matter() -> None:
    """In jit, as elsewhere."""
    low, high = parameters("uniform").values()
    drawn = jax.jit(lambda key, low: random.uniform(key, AXES, minval=low.rearrange(("batch", "embed")), maxval=high))
    assert_same(drawn(KEY, low), expected("uniform", KEY, whole(low), whole(high)))


def test_every_sampler_takes_its_parameters() -> None:
    for name, intervals in SAMPLERS.items():
        taken = list(inspect.signature(getattr(random, name)).parameters)
        assert taken[:2] == ["key", "shape"] and set(taken[2:]) - {"dtype"} == intervals.keys()


def test_keys_of_both_kinds() -> None:
    raw = jax.random.PRNGKey(7)
    assert_same(random.normal(raw, AXES), jax.random.normal(raw, (8, 3, 4)))
    assert_same(random.normal(axn.NamedArray(KEY, ()), AXES), jax.random.normal(KEY, (8, 3, 4)))
    rbg = jax.random.key(7, impl="rbg")
    assert_same(random.normal(rbg, AXES), jax.random.normal(rbg, (8, 3, 4)))


def test_shapes_of_every_form() -> None:
    assert random.normal(KEY, Batch).axes == (Batch,)
    assert random.normal(KEY, ()).axes == ()
    assert random.normal(KEY, [Batch, Pos]).axes == (Batch, Pos)
    assert random.normal(KEY, {"batch": 0}).shape == {"batch": 0}


def test_dtypes() -> None:
    def dtype(draw: Callable[[Any], axn.NamedArray]) -> Any:
        return jax.eval_shape(draw, KEY).dtype

    assert dtype(lambda key: random.normal(key, Batch, dtype=jnp.bfloat16)) == jnp.bfloat16
    assert dtype(lambda key: random.gamma(key, Batch, 2.0, jnp.float16)) == jnp.float16
    assert dtype(lambda key: random.normal(key, Batch, None)) == jnp.float32
    assert dtype(lambda key: random.rademacher(key, Batch, int)) == jnp.int32
    assert dtype(lambda key: random.randint(key, Batch, 0, 256, jnp.uint8)) == jnp.uint8


def test_probabilities_of_a_small_dtype() -> None:
    """Drawn in bfloat16, of which there are 128 numbers, one in 128 would be a success."""
    many = {"draw": 20000}
    assert random.bernoulli(KEY, many, jnp.bfloat16(0.001)).mean() < 0.002
    chosen = random.choice(KEY, many, axn.arange({"x": 1000}), "x", p=axn.full({"x": 1000}, 0.001, jnp.bfloat16))
    assert 0.48 < (chosen < 500).mean().item() < 0.52


def test_traced_parameters_without_axes() -> None:
    drawn = jax.jit(lambda p: random.bernoulli(KEY, Batch, p))(0.25)
    assert_same(drawn, jax.random.bernoulli(KEY, 0.25, (8,)))


@pytest.mark.parametrize("name", ["normal", "bernoulli"])
def test_vmap_and_scan_over_keys(name: str) -> None:
    keys = jax.random.split(KEY, 2)
    values = list(parameters(name).values())
    wanted = jnp.stack([expected(name, key, *map(whole, values)) for key in keys])
    assert_same(jax.vmap(lambda key: sample(name, key, *values).array)(keys), wanted)
    assert_same(jax.lax.scan(lambda carry, key: (carry, sample(name, key, *values).array), 0, keys)[1], wanted)


def test_gradients() -> None:
    """Of what is drawn, with respect to a parameter."""
    first, second = parameters("uniform").values()

    def by_name(p: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.square(sample("uniform", KEY, p, second))).array

    def by_position(p: jax.Array) -> jax.Array:
        return jnp.sum(
            jnp.square(expected("uniform", KEY, jnp.broadcast_to(p.T[:, None, :], (8, 3, 4)), whole(second)))
        )

    found = jax.jit(jax.grad(by_name))(first)
    assert found.names == ("embed", "batch")
    np.testing.assert_allclose(found.array, jax.jit(jax.grad(by_position))(first.array), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gamma", "beta", "t", "weibull_min"])
def test_gradients_are_those_of_jax(name: str) -> None:
    """Also through distributions whose draws have a gradient of their own, such as gamma."""
    values = [whole(x) for x in parameters(name).values()]
    drawn = jax.grad(lambda x: sample(name, KEY, x, *(axn.named(v, AXES) for v in values[1:])).array.sum())
    wanted = jax.grad(lambda x: expected(name, KEY, x, *values[1:]).sum())
    found = jax.make_jaxpr(drawn)(axn.named(values[0], AXES))
    assert str(found) == str(jax.make_jaxpr(wanted)(values[0]))


def test_nothing_is_compiled_twice() -> None:
    random.normal(KEY, AXES)
    with compilations() as seen:
        random.normal(KEY, list(AXES))
        random.normal(KEY, {a.name: a.size for a in AXES}, dtype=jnp.float32)
    assert not seen
