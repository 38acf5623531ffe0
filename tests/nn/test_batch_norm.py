"""Batch normalization: against formulas and Equinox's own, however the batch is sharded, and its state in files."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import nn
from axonym.state import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from tests.helpers import assert_named, spec

Channels = axn.Axis("channels", 4)
BATCH = ("batch", "height")
X = axn.named(np.random.default_rng(0).normal(1, 3, (16, 4, 3)).astype(np.float32), ("batch", "channels", "height"))
RAW = np.asarray(X.array, np.float64)
MEAN, VARIANCE = RAW.mean((0, 2)), RAW.var((0, 2))
EXPECTED = (RAW - MEAN[:, None]) / np.sqrt(VARIANCE[:, None] + 1e-5)


def made(**options: Any) -> tuple[nn.BatchNorm, eqx.nn.State]:
    return eqx.nn.make_with_state(nn.BatchNorm.init)(Channels, BATCH, **options)


def copied(state: eqx.nn.State) -> eqx.nn.State:
    """Return a copy, since a state can be used only once."""
    return jax.tree.map(lambda x: x, state)


def assert_running(layer: nn.BatchNorm, state: eqx.nn.State, share: float) -> None:
    """Check the running statistics after one batch."""
    found = state.get(layer.running)
    np.testing.assert_allclose(found.running_mean.array, share * MEAN, rtol=1e-4)
    unbiased = VARIANCE * RAW[:, 0].size / (RAW[:, 0].size - 1)
    np.testing.assert_allclose(found.running_var.array, 1 - share + share * unbiased, rtol=1e-4)
    assert found.num_batches_tracked == 1


def test_training_and_inference() -> None:
    layer, state = made(momentum=0.25)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (axn.arange(Channels) + 1.0, axn.arange(Channels) * 2.0))
    y, state = jax.jit(lambda x, state: layer(x, state))(X, state)
    shift = np.arange(4)[:, None]
    assert_named(y, axn.named((EXPECTED * (shift + 1) + 2 * shift).astype(np.float32), X.axes), rtol=1e-4, atol=1e-4)
    assert_running(layer, state, 0.25)
    running = state.get(layer.running)
    center, variance = (np.asarray(s.array)[:, None] for s in (running.running_mean, running.running_var))
    expected = (RAW - center) / np.sqrt(variance + 1e-5) * (shift + 1) + 2 * shift
    for call in (
        lambda: layer(X, copied(state), inference=True),
        lambda: eqx.nn.inference_mode(layer)(X, copied(state)),
        # Under plain jit, the switch is traced.
        lambda: jax.jit(lambda layer, x, state: layer(x, state))(eqx.nn.inference_mode(layer), X, copied(state)),
    ):
        found, after = call()
        np.testing.assert_allclose(found.array, expected, rtol=1e-4, atol=1e-4)
        jax.tree.map(np.testing.assert_array_equal, after, state)


def test_like_equinox() -> None:
    """Its layer is mapped over the batch; results and gradients are the same."""
    theirs, their_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    layer, state = made()
    assert isinstance(state.get(layer.running), axn.nn.RunningStatistics)
    weights = np.cos(np.arange(X.size)).reshape(RAW.shape)

    def their_loss(x: jax.Array) -> Any:
        y, _ = jax.vmap(theirs, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, copied(their_state))
        return jnp.sum(y * weights), y

    def loss(x: axn.NamedArray) -> Any:
        y, _ = layer(x, copied(state))
        return jnp.sum(y.array * weights), y.array

    expected, found = (jax.jit(jax.grad(fn, has_aux=True))(x) for fn, x in ((their_loss, X.array), (loss, X)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("explicit", [False, True])
def test_statistics_are_of_the_whole_batch(explicit: bool) -> None:
    """They are all-reduced, and nothing else is sent; eager, in jit, and the gradient is that of one device."""
    layer, state = made()
    mapping = {"batch": "data", "channels": "model"}

    def loss(x: axn.NamedArray, state: eqx.nn.State) -> Any:
        y, state = layer(x, state)
        return axn.sum(axn.sin(y)).array, (y, state)

    step = jax.value_and_grad(loss, has_aux=True)
    expected = jax.jit(step)(X, copied(state))
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        x, placed = axn.shard(X, mapping), axn.shard(copied(state), mapping)
        compiled = axn.named_jit(step, mapping)
        for fn in (step, compiled):
            found = jax.block_until_ready(fn(x, copied(placed)))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        (_, (y, after)), gradient = found
        assert spec(y) == spec(gradient) == ("data", "model", None)
        assert spec(after.get(layer.running).running_mean) == ("model",)
        report = axn.insight.explain(lambda x, state: layer(x, state), x, copied(placed), mapping=mapping)
        assert {(c.kind, c.axes) for c in report.collectives} == {("all-reduce", ("data",))}


def test_inside_shard_map() -> None:
    layer, state = made()
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2})):
        mapped = axn.shard_map(
            lambda x, state: layer(x, state), in_specs=({"batch": "data"}, {}), out_specs=({"batch": "data"}, {})
        )
        y, after = jax.block_until_ready(jax.jit(mapped)(X, state))
    np.testing.assert_allclose(y.array, EXPECTED, rtol=1e-4, atol=1e-4)
    assert_running(layer, after, 0.1)


class Model(eqx.Module):
    norm: nn.BatchNorm
    group: nn.GroupNorm

    @staticmethod
    def init() -> Model:
        return Model(nn.BatchNorm.init(Channels, BATCH), nn.GroupNorm.init(Channels, 2, "height", use_bias=False))


def test_state_dicts_have_the_names_of_pytorch() -> None:
    model, state = eqx.nn.make_with_state(Model.init)()
    _, state = model.norm(X, state)
    entries = to_torch_compatible_state_dict(nn.with_state(model, state))
    norm = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert [*entries] == [*norm, "group.weight"]
    entries["norm.num_batches_tracked"] = np.int64(1)  # as PyTorch has it
    loaded = from_torch_compatible_state_dict(eqx.filter_eval_shape(Model.init), entries)
    found, model = eqx.nn.State(loaded), eqx.nn.delete_init_state(loaded)
    assert_running(model.norm, found, 0.1)
    assert not model.norm.inference
    for call in (to_torch_compatible_state_dict, lambda m: from_torch_compatible_state_dict(m, entries)):
        with pytest.raises(
            ValueError, match=r"not in the model but in its state, .* `axonym.nn.with_state\(model, state"
        ):
            call(model)


def test_half_precision_and_errors() -> None:
    layer, state = made(use_weight=False, use_bias=False)
    y, state = layer((X * 1000).astype(jnp.float16), state)
    assert y.dtype == jnp.float16 and state.get(layer.running).running_var.dtype == jnp.float32
    np.testing.assert_allclose(y.array, EXPECTED, rtol=1e-2, atol=1e-2)
    for x in (X["batch", 0], X.broadcast_axis(axn.Axis("pos", 2))):
        with pytest.raises(
            ValueError, match=r"for arrays with the axes \(batch, height, channels\), got .*outside of `vm"
        ):
            layer(x, state)
    with pytest.raises(ValueError, match="axis 'channels' of size 4 has no 3 groups of one size"):
        nn.GroupNorm.init(Channels, 3, ())


@pytest.mark.parametrize("explicit", [None, False, True])
def test_group_norm(explicit: bool | None) -> None:
    """As Equinox's, mapped over the batch. Sharded groups stay on their devices."""
    layer, theirs = nn.GroupNorm.init(Channels, 2, "height"), eqx.nn.GroupNorm(2, 4)
    weight, bias = np.arange(4, dtype=np.float32) + 1, np.ones(4, np.float32)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (axn.named(weight, Channels), axn.named(bias, Channels)))
    theirs = eqx.tree_at(lambda m: (m.weight, m.bias), theirs, (jnp.asarray(weight), jnp.asarray(bias)))
    expected = axn.named(jax.vmap(theirs)(X.array), X.axes)
    if explicit is None:
        assert_named(layer(X), expected, rtol=1e-4, atol=1e-4)
        return
    mapping = {"batch": "data", "channels": "model"}
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        x = axn.shard(X, mapping)
        found = jax.block_until_ready(axn.named_jit(lambda x: layer(x), mapping)(x))
        assert_named(found, expected, rtol=1e-4, atol=1e-4)
        assert spec(found) == ("data", "model", None)
        assert not axn.insight.explain(lambda x: layer(x), x, mapping=mapping).collectives
        mapped = axn.shard_map(lambda layer, x: layer(x), mapping=mapping)
        assert_named(jax.block_until_ready(jax.jit(mapped)(layer, X)), expected, rtol=1e-4, atol=1e-4)


def test_statistics_of_shards_that_a_pool_has_made_smaller(auto_mesh: Any) -> None:
    def pooled(x: axn.NamedArray) -> axn.NamedArray:
        layer, state = made()
        return layer(nn.max_pool(x, axn.Axis("batch", 2), stride=2), state)[0]

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data"}):
        assert_named(jax.jit(axn.shard_map(pooled))(X), pooled(X), rtol=1e-5, atol=1e-5)


def test_integers_are_normalized_as_floats() -> None:
    layer, state = made()
    found, _ = layer((X * 10).astype(int), state)
    assert jnp.issubdtype(found.dtype, jnp.floating) and found.max().item() > 1
