"""`axonym.testing` finds functions that depend on their sharding, and accepts those that do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import axonym as axn
from axonym.testing import check_shard_invariance

X = axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 16})
W = axn.random.normal(jax.random.key(1), {"embed": 16, "mlp": 8})


def test_plain_functions_pass_on_every_placement() -> None:
    def layer(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        hidden = axn.nn.softmax(axn.dot(x, w, axis="embed"), "mlp")
        return {"hidden": hidden, "top": axn.argmax(hidden, "mlp"), "count": 3}

    result = check_shard_invariance(layer, X, W, draws=8)
    assert result.compared >= 6 and result.compared + len(result.refusals) == 8
    assert all("'batch' and 'mlp' of the result would both be sharded over" in m for m in result.refusals.values())


def test_missing_psum_is_found_and_made_small() -> None:
    def forgetful(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        return axn.shard_map(lambda x, w: axn.dot(x, w, axis="embed"), check_vma=False)(x, w)

    with pytest.raises(AssertionError) as raised:
        check_shard_invariance(forgetful, X, W)
    message = str(raised.value)
    assert "forgetful depends on how it is distributed" in message and "the result.array differs" in message
    mesh = "axn.make_mesh({'data': 2, 'model': 1})", "axn.make_mesh({'data': 1, 'model': 2})"
    assert any(m in message for m in mesh)
    assert "{'embed': 'data'}" in message or "{'embed': 'model'}" in message


def test_psum_in_place_passes() -> None:
    def summed(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        return axn.shard_map(lambda x, w: axn.psum(axn.dot(x, w, axis="embed"), "embed"))(x, w)

    result = check_shard_invariance(summed, X, W, draws=20)
    assert result.compared and result.refusals, "mappings that leave embed alone are refused"
    assert all("psum: 'embed' is neither" in m or "both go to mesh axis" in m for m in result.refusals.values())


def test_wrong_gradients_are_found() -> None:
    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (g * (2 + jax.sharding.get_abstract_mesh().size - 1),)

    double.defvjp(lambda x: (double(x), None), backward)

    def doubled(x: axn.NamedArray) -> axn.NamedArray:
        return axn.named(double(x.array), x.axes)

    with pytest.raises(AssertionError, match=r"the gradient.* differs"):
        check_shard_invariance(doubled, X)
    assert check_shard_invariance(doubled, X, gradients=False, draws=4).compared == 4


def test_an_axis_may_have_several_sizes() -> None:
    kernel = axn.ones({"batch": 3})
    result = check_shard_invariance(lambda x, k: x.sum() + k.sum(), X, kernel, draws=10, gradients=False)
    assert result.compared == 10


def test_empty_results_are_compared() -> None:
    assert check_shard_invariance(lambda x: x["batch", :0], X, draws=10).compared == 10


def test_random_draws_that_depend_on_the_device_are_found() -> None:
    def local_noise(x: axn.NamedArray, key: jax.Array) -> Any:
        def noisy(x: axn.NamedArray) -> Any:
            return x + axn.named(jax.random.normal(key, x.array.shape), x.names)

        return axn.shard_map(noisy)(x)

    with pytest.raises(AssertionError, match="depends on how it is distributed"):
        check_shard_invariance(local_noise, X, jax.random.key(3))

    def noise(x: axn.NamedArray, key: jax.Array) -> Any:
        return x + axn.random.normal(key, x.axes)

    assert check_shard_invariance(noise, X, jax.random.key(3), draws=6).compared == 6


def test_the_same_seed_draws_the_same_placements() -> None:
    seen: list[Any] = []

    def watch(x: axn.NamedArray) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        seen.append((mesh.shape_tuple, mesh.axis_types, str(axn.current_mapping())))
        return x

    for _ in range(2):
        check_shard_invariance(watch, X, draws=30, gradients=False, seed=4)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert any(len(set(kinds)) == 2 for _, kinds, _ in seen), "mixed meshes are drawn too"
    assert any("('data', 'model')" in mapping for _, _, mapping in seen), "and mappings to two mesh axes"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no argument has named axes"):
        check_shard_invariance(jnp.sum, jnp.ones(4))

    def only_one_device(x: axn.NamedArray) -> Any:
        if jax.sharding.get_abstract_mesh().size > 1:
            raise ValueError("one device only")
        return x

    with pytest.raises(ValueError, match=r"every placement was refused, the first:\n.*\n.*one device only"):
        check_shard_invariance(only_one_device, X, draws=3, refusals="one device only")


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, KeyError])
def test_an_error_on_several_devices_is_no_refusal(error: type[Exception]) -> None:
    def shaky(x: axn.NamedArray) -> axn.NamedArray:
        if jax.sharding.get_abstract_mesh().size > 2:
            raise error("an axis was lost")
        return x

    with pytest.raises(AssertionError, match=r"shaky depends on how .*\n.*\nit raises .*an axis was lost") as raised:
        check_shard_invariance(shaky, X, draws=10)
    assert isinstance(raised.value.__cause__, error)
    result = check_shard_invariance(shaky, X, draws=10, refusals="axis was lost")
    assert result.compared and set(map(type, result.refusals.values())) == {str}


def test_what_jax_refuses_of_raw_arrays_is_named() -> None:
    def reshaped(x: axn.NamedArray) -> jax.Array:
        return x.array.reshape(4, 32)

    with pytest.raises(AssertionError, match="it raises ShardingTypeError"):
        check_shard_invariance(reshaped, X)
    result = check_shard_invariance(reshaped, X, refusals="reshape")
    assert result.compared and result.refusals
