"""Layers that stages do not divide: `Stacked` has added layers, which change nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import axonym as axn
from axonym import nn
from axonym.schedules import GPipe, OneFOneB

Batch, Embed, Layers = axn.make_axes(batch=16, embed=8, layers=30)
MAPPING = {"layers": "stage", "batch": "data"}
STORAGE = MAPPING | {"embed": "data"}


class Block(eqx.Module):
    """A layer that has no value, and no derivatives of anything, where its weights are zero."""

    linear: nn.Linear
    raw: jax.Array
    name: str = eqx.field(static=True, default="block")

    @staticmethod
    def init(start: Any = 1.0, *, key: Any) -> Block:
        return Block(nn.Linear.init(Embed, Embed, key=key), jnp.ones(3) * start)

    def __call__(self, x: axn.NamedArray, scale: Any, shift: Any, key: Any = None) -> axn.NamedArray:
        w = self.linear.weight
        y = axn.tanh(self.linear(x)) * self.raw.sum() / axn.sqrt(axn.sum(w * w)) + shift
        return x + y * scale * 0.1


def model(divisible_by: int = 1) -> nn.Stacked[Block]:
    """Return 30 layers."""
    starts = 1 + jnp.arange(30) / 30
    layers = nn.Stacked.init(Layers, Block, divisible_by=divisible_by)(starts, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(jnp.result_type(float)), layers)


def step(model: Any, x: Any, scale: Any, shift: Any, schedule: Any = None) -> Any:
    def loss(model: Any, x: Any, scale: Any, shift: Any) -> Any:
        of_layers = shift.rename({"numbers": "layers"})  # which no mesh axis shards, since none divides it
        then = lambda y: axn.sum(axn.sin(y)).scalar()
        return model.fold(x, scale, of_layers, schedule=schedule, then=then)

    return jax.value_and_grad(loss, (0, 1, 2, 3))(model, x, scale, shift)


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = {"batch": 16, "embed": 8}, {"embed": 8}, {"numbers": 30}
    return tuple(axn.named(rng.normal(size=tuple(s.values())), tuple(s)) for s in shapes)


@functools.cache
def expected() -> Any:
    return jax.jit(step)(model(), *arguments())


def assert_equal(found: Any, expected: Any) -> None:
    """Compare trees; the added layers of `found` are zeros."""
    for x, y in zip(jax.tree.leaves(axn.to_host(found)), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape:
            assert x.shape == (32, *y.shape[1:]) and not x[Layers.size :].any()
            x = x[: Layers.size]
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13 * max(1, np.abs(y).max()))


@pytest.mark.parametrize(
    ("kind", "schedule", "storage"),
    [
        (AxisType.Auto, GPipe(4, rounds=2), MAPPING),
        (AxisType.Explicit, GPipe(4, rounds=2, gather="inside"), STORAGE),
        (AxisType.Explicit, OneFOneB(4, rounds=2), MAPPING),
        (AxisType.Auto, OneFOneB(4, rounds=2, gather="inside"), STORAGE),
        (AxisType.Auto, OneFOneB(4), STORAGE),
    ],
    ids=["gpipe", "gpipe fsdp inside explicit", "1f1b explicit", "1f1b fsdp inside", "1f1b one round fsdp before"],
)
def test_thirty_layers_on_four_stages(kind: AxisType, schedule: Any, storage: Any) -> None:
    """Values and gradients are the model's, each stage stores eight layers, and added layers have gradients of zero."""
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((4, 2), ("stage", "data"), axis_types=(kind, kind))):
        jitted = axn.fsdp(functools.partial(step, schedule=schedule), storage, MAPPING)
        found = jax.block_until_ready(jitted(axn.shard(model(8), storage), *arguments()))
        weights = found[1][0].stacked.linear.weight.array
        assert {x.data.shape for x in weights.addressable_shards} == {(8, 8 if storage is MAPPING else 4, 8)}
        assert_equal(found, expected())


@pytest.mark.oldest
def test_methods() -> None:
    """They return the layers only, on Explicit mesh axes too."""
    plain = model()
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), axn.axis_mapping({"layers": "stage"}):
        layers = axn.shard(model(4))
        assert {x.data.shape[0] for x in layers.stacked.raw.addressable_shards} == {8}
        assert layers.Block == Layers and layers.padding == 2
        assert len(layers.unstacked()) == 30
        sums = jax.jit(lambda layers: layers.vmap_via(lambda layer, i: layer.raw.sum() + i)(jnp.arange(30)))(layers)
        scan = lambda layers, x: layers.scan_via(lambda layer, x: (layer(x, 1.0, 0.0), axn.sum(x)))(x)
        found = jax.jit(scan)(layers, axn.ones(Embed))
        get = jax.jit(lambda layers, i: layers.get_layer(i))
        last = layers.get_layer(-1), get(layers, -1), get(layers, 30), layers.unstacked()[-1]
        doubled = layers.map_layers(lambda layer: jax.tree.map(lambda x: 2 * x + 1, layer))
        assert not axn.to_host(doubled.stacked.linear.weight["layers", 30:]).array.any()
        entries = axn.state.to_numpy_state_dict(layers)
    np.testing.assert_allclose(sums, 3 + np.arange(30) / 10 + np.arange(30), rtol=1e-6)
    assert_equal(found, scan(plain, axn.ones(Embed)))
    for layer in last:
        assert_equal(layer, plain.get_layer(29))
    assert sorted(entries) == sorted(axn.state.to_state_dict(plain))
    zeros = jax.tree.map(jnp.zeros_like, model(8))
    assert_equal(axn.state.from_state_dict(zeros, entries), plain)


def test_random_keys_of_the_layers() -> None:
    """They are those of the layers alone."""

    def noisy(layers: Any) -> Any:
        layer = lambda layer, x, key: x + axn.random.normal(key, Embed)
        return layers.fold_via(layer)(axn.zeros(Embed), key=jax.random.key(1))

    assert_equal(noisy(model(8)), noisy(model()))


def by_layer(optimizer: optax.GradientTransformation) -> Any:
    """Apply an optimizer to each layer, so that its means and its shapes are one layer's."""

    def of_layer(gradients: Any, state: Any, layer: Any) -> Any:
        updates: Any
        updates, state = optimizer.update(jax.tree.leaves(gradients), state, jax.tree.leaves(layer))
        return jax.tree.unflatten(jax.tree.structure(layer), updates), state

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        both = updates.map_layers(of_layer, state, params)
        updates, state = (eqx.tree_at(lambda x: x.stacked, both, both.stacked[i]) for i in range(2))
        return updates, state

    init: Any = lambda layers: layers.map_layers(lambda layer: optimizer.init(jax.tree.leaves(layer)))
    return optax.GradientTransformation(init, update)


@pytest.mark.oldest
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1, weight_decay=0.1)),
        by_layer(optax.chain(optax.adafactor(0.1, min_dim_size_to_factor=4), optax.contrib.muon(0.1))),
    ],
    ids=["norms of all layers", "adafactor and muon of each layer"],
)
def test_optimizers_see_the_norms_of_the_layers(optimizer: Any) -> None:
    def trained(layers: Any) -> Any:
        def update(layers: Any, state: Any) -> Any:
            gradients = step(layers, *arguments())[1][0]
            updates, state = optimizer.update(gradients, state, layers)
            return optax.apply_updates(layers, updates), state

        state, update = optimizer.init(layers), jax.jit(update)
        for _ in range(2):
            layers, state = update(layers, state)
        return layers, state

    with jax.enable_x64(True):
        found, wanted = trained(model(8)), trained(model())
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(x[: Layers.size], y, rtol=1e-9)
        assert not x[Layers.size :].any()


@pytest.mark.parametrize("in_background", [False, True], ids=["", "asynchronous"])
def test_checkpoints_have_the_layers_alone(tmp_path: Path, in_background: bool) -> None:
    """They are restored for other stages, and for none."""
    optimizer: Any = optax.adam(0.1)
    tree = lambda layers: {"model": layers, "optimizer": optimizer.init(layers), "key": jax.random.key(1)}
    path = tmp_path / "1"
    with jax.set_mesh(axn.make_mesh({"stage": 4, "data": 2})), axn.axis_mapping(STORAGE):
        saved = axn.shard(tree(model(8)))
        if in_background:
            axn.state.save_checkpoint_async(path, saved).wait()
        else:
            axn.state.save_checkpoint(path, saved)
        axn.state.verify(path)
        abstract = jax.eval_shape(lambda: tree(model(4)))
        restored = axn.state.restore_checkpoint(path, abstract)
        moments = restored["optimizer"][0].mu.stacked.linear.weight.array
        assert {x.data.shape for x in moments.addressable_shards} == {(8, 4, 8)}
    for found in (restored, axn.state.restore_checkpoint(path, tree(jax.tree.map(jnp.zeros_like, model())))):
        assert_equal(found["model"], model())
        assert_equal(found["optimizer"], optimizer.init(model()))
    with pytest.raises(ValueError, match=r"has axes \(layers=30, embed=8\), but in the tree it is .*layers=28"):
        axn.state.restore_checkpoint(path, tree(nn.Stacked.init(Layers.resize(28), Block)(key=jax.random.key(0))))


# --- two layers and an added one ---

WEIGHTS = axn.named([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]], ("layers", "embed"))
X = axn.named([1.0, 2.0], "embed")


def three(stacked: Any, number: int = 2) -> Any:
    return nn.Stacked(stacked, Layers.resize(number), padding=3 - number)


def two_of(stacked: Any) -> Any:
    return nn.Stacked(jax.tree.map(lambda x: x[:2], stacked), Layers.resize(2))


def test_a_mapped_function_does_not_see_zeros() -> None:
    def total(layers: Any) -> Any:
        unit = axn.tree.scan_aware_map(lambda w: w / axn.sqrt(axn.sum(w * w)), layers)
        return axn.sum(unit.fold_via(lambda w, x: x * w)(X)).scalar()

    with jax.debug_nans(True):
        found = jax.grad(total)(three(WEIGHTS)).stacked.array
    np.testing.assert_allclose(found[:2], jax.grad(total)(two_of(WEIGHTS)).stacked.array, atol=1e-6)
    assert not found[2:].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: three(WEIGHTS).fold_via(lambda w, x: x.sum("embed"))(X), r"goes in as .*embed=2.* comes out as"),
        (lambda: three(WEIGHTS).fold_via(lambda w, x: x.astype(jnp.bfloat16))(X), "comes out as bfloat16"),
        (lambda: three(WEIGHTS).fold_via(lambda w, x: "x")(X), "comes out as 'x'"),
        (lambda: three(WEIGHTS).scan_via(lambda w, x: x + w)(X), "must return a pair"),
        (lambda: three(WEIGHTS).fold_via(lambda w, x, y: x)(X, jnp.ones(7)), r"args\[0\]"),
    ],
    ids=["axis", "dtype", "static", "pair", "position"],
)
def test_mistakes_in_a_layer_are_errors_as_without_added_layers(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_carries_of_all_kinds() -> None:
    """Also numbers that become arrays, axes in another order, and values that are not arrays."""

    def layer(w: Any, carry: Any) -> Any:
        y = carry["y"].rearrange(("embed", "batch")) * w
        return carry | {"y": y, "count": carry["count"] + 1, "sum": carry["sum"] + w.sum().astype(jnp.bfloat16).array}

    start = {"y": axn.ones({"batch": 2, "embed": 2}), "count": 0, "sum": 0.0, "name": "a", "fn": jnp.tanh}
    found, expected = (layers.fold_via(layer)(start) for layers in (three(WEIGHTS), two_of(WEIGHTS)))
    assert found.pop("name") == "a" and found.pop("fn") is jnp.tanh and found["sum"].dtype == jnp.bfloat16
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves({name: expected[name] for name in found}), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_raw_carry_that_comes_out_sharded() -> None:
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        weights = jax.device_put(WEIGHTS.array, jax.P(None, "data"))
        found = jax.jit(lambda w: three(w).fold_via(lambda w, x: x + w)(jnp.zeros(2)))(weights)
        assert found.sharding.spec == jax.P("data")
        np.testing.assert_array_equal(jax.device_get(found), [9, 12])


def test_a_random_key_in_each_layer() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, x: x + jax.random.normal(key)
    layers = three(keys).map_layers(jax.random.fold_in, three(jnp.arange(3)))
    expected = sum(jax.random.normal(jax.random.fold_in(keys[i], i)) for i in range(2))
    np.testing.assert_allclose(layers.fold_via(draw)(0.0), expected, rtol=1e-6)


def test_results_have_added_layers_if_arguments_have_them() -> None:
    """So a loop can pass results on as the next arguments, and keep them sharded over the stages."""
    step = lambda w, x, cache: (x + w, cache + x + 1)
    for size in (2, 3):
        cache = axn.ones({"layers": size, "embed": 2})
        _, found = three(WEIGHTS).scan_via(step)(X, cache)
        np.testing.assert_array_equal(found.array, [[3, 4], [6, 8], [0, 0]][:size])
        mapped = three(WEIGHTS).vmap_via(lambda w, cache: cache + w)(cache)
        np.testing.assert_array_equal(mapped.array, [[4, 5], [7, 9], [0, 0]][:size])


class Images(eqx.Module, axn.tree.LayerStack):
    """A stack of another kind, with a field of the same name."""

    weight: Any
    padding: str = eqx.field(static=True, default="SAME")

    def map_layers(self, fn: Any, *others: Any) -> Any: ...


def test_checkpoints_of_stacks_in_stacks(tmp_path: Path) -> None:
    """An added layer of the inner ones is not a layer of the outer ones, of which there are as many."""
    weights = np.arange(1.0, 19).reshape(3, 3, 2)
    weights[:, 2] = 0
    named = axn.named(weights, ("outer", "layers", "embed"))
    inner, outer = three({"raw": jnp.asarray(weights), "named": named}), axn.Axis("outer", 3)
    tree = {"stack": nn.Stacked(inner, outer), "images": Images(jnp.ones(3))}
    axn.state.save_checkpoint(tmp_path / "1", tree)
    restored = axn.state.restore_checkpoint(tmp_path / "1", jax.tree.map(jnp.zeros_like, tree))
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=r"named' has axes \(outer=3, layers=2, embed=2\), but"):
        axn.state.restore_checkpoint(tmp_path / "1", jax.tree.map(lambda x: x[..., None], tree))


def test_results_of_each_layer_with_arguments_that_are_no_arrays() -> None:
    def scaled(block: Block, x: axn.NamedArray, by: float, how: str) -> axn.NamedArray:
        return getattr(axn, how)(block.linear(x) * by)

    x = axn.ones(Embed)
    found, wanted = (m.vmap_via(scaled)(x, 2.0, "sin") for m in (model(divisible_by=4), model()))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.array, wanted.array, rtol=1e-6)
