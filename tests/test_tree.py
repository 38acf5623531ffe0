"""Trees with named arrays: our functions, and those of other libraries."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym import NamedArray, tree
from axonym.sharding.shard import shard
from axonym.transforms.vmap import vmap
from tests.helpers import assert_named

In, Out, Layers = axn.make_axes(embed=4, mlp=3, layers=2)


class Linear(eqx.Module):
    weight: NamedArray
    bias: NamedArray | None
    activation: Any
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x: NamedArray) -> NamedArray:
        y = axn.dot(x, self.weight, axis=In.name)
        return self.activation(y if self.bias is None else y + self.bias)


class Stack(eqx.Module, tree.LayerStack):
    layers: Any
    axis: axn.Axis = eqx.field(static=True)

    def map_layers(self, fn: Any, *others: Any) -> Any:
        mapped = vmap(fn, self.axis)(self.layers, *(o.layers if isinstance(o, Stack) else o for o in others))
        return dataclasses.replace(self, layers=mapped)


def linear(*outer: axn.Axis) -> Linear:
    weight = axn.arange((*outer, In, Out)) * 0.1
    return Linear(weight, axn.zeros((*outer, Out)), axn.tanh)


# --- those of jax.tree ---


def test_a_named_array_is_one_leaf() -> None:
    model = {"w": axn.ones(In), "n": 3, "raw": jnp.ones(2), "none": None}
    assert [type(x) for x in tree.leaves(model)] == [int, type(jnp.ones(2)), NamedArray]
    found, structure = tree.flatten(model)
    assert structure == tree.structure(model) == jax.tree.structure({"w": 0, "n": 0, "raw": 0, "none": None})
    assert tree.unflatten(structure, found)["w"] is model["w"]
    assert tree.map(lambda x, y: (x, y), model, model)["w"] == (model["w"], model["w"])


def test_what_else_is_a_leaf() -> None:
    model = [linear(), axn.ones(In)]
    is_linear = lambda x: isinstance(x, Linear)
    assert tree.leaves(model, is_leaf=is_linear) == model
    assert tree.structure(model, is_linear) == jax.tree.structure([0, 0])
    assert tree.flatten(model, is_linear)[0] == model
    assert tree.map(type, model, is_leaf=is_linear) == [Linear, NamedArray]


def test_paths() -> None:
    model = {"a": [axn.ones(In), 1], "b": axn.ones(Out)}
    paths = ["['a'][0]", "['a'][1]", "['b']"]
    assert [jax.tree_util.keystr(p) for p, _ in tree.leaves_with_path(model)] == paths
    found, structure = tree.flatten_with_path(model)
    assert [jax.tree_util.keystr(p) for p, _ in found] == paths and structure == tree.structure(model)
    assert tree.map_with_path(lambda p, x: jax.tree_util.keystr(p), model)["b"] == "['b']"


# --- stacked layers ---


def test_scan_aware_map_sees_single_layers() -> None:
    seen = []

    def center(x: Any) -> Any:
        if isinstance(x, NamedArray):
            seen.append(x.names)
            return x - x.mean()
        return x

    stack = Stack(linear(Layers), Layers)
    found = tree.scan_aware_map(center, {"stack": stack, "head": linear()})
    assert seen == [("embed", "mlp"), ("mlp",)] * 2
    weight = np.asarray(stack.layers.weight.array)
    assert_named(
        found["stack"].layers.weight,
        axn.named(weight - weight.mean((1, 2), keepdims=True), ("layers", "embed", "mlp")),
        rtol=1e-6,
        atol=1e-6,
    )
    assert found["stack"].layers.activation is axn.tanh, "what is no array is passed on"


def test_scan_aware_map_with_modules_as_leaves() -> None:
    def halved(x: Any) -> Any:
        return eqx.tree_at(lambda m: m.weight, x, x.weight / 2) if isinstance(x, Linear) else x

    stack = Stack(linear(Layers), Layers)
    found = tree.scan_aware_map(halved, stack, is_leaf=lambda x: isinstance(x, Linear))
    assert_named(found.layers.weight, stack.layers.weight / 2)
    assert_named(found.layers.bias, stack.layers.bias)
    whole = tree.scan_aware_map(type, [stack], is_leaf=lambda x: isinstance(x, Stack))
    assert whole == [Stack]


def test_scan_aware_map_of_stacks_in_stacks_and_several_trees() -> None:
    Outer = axn.Axis("outer", 5)
    x = axn.arange((Outer, Layers, In)) * 1.0
    stack = Stack(Stack({"w": x}, Layers), Outer)
    seen = []

    def add(a: NamedArray, b: NamedArray) -> NamedArray:
        seen.append((a.names, b.names))
        return a + b

    found = tree.scan_aware_map(add, stack, stack)
    assert seen == [(("embed",), ("embed",))]
    assert_named(found.layers.layers["w"], x * 2)


# --- resize_axis ---


def test_resize_to_less_keeps_what_comes_first() -> None:
    x = axn.arange((Out, In))
    found = tree.resize_axis({"x": x, "y": axn.ones(Out), "raw": jnp.ones(4), "n": 3}, In, 2)
    assert_named(found["x"], axn.named(np.asarray(x.array)[:, :2], ("mlp", "embed")))
    assert found["y"].axes == (Out,) and found["raw"].shape == (4,) and found["n"] == 3
    assert tree.resize_axis(x, "embed", 4) is x


def test_resize_to_more_fills_with_the_mean() -> None:
    x = axn.named(np.arange(12.0, dtype=np.float32).reshape(4, 3), ("embed", "mlp"))
    found = tree.resize_axis(x, "embed", 6)
    expected = np.concatenate([x.array, np.broadcast_to(x.array.mean(0, keepdims=True), (2, 3))])
    assert_named(found, axn.named(expected, ("embed", "mlp")), rtol=1e-6)


def test_resize_with_a_key_samples_like_the_others() -> None:
    rows = jnp.stack([jnp.linspace(-1, 1, 50), jnp.linspace(9, 11, 50)])
    x = axn.named(rows, ("mlp", "embed"))
    model = {"a": x, "b": x.astype(jnp.bfloat16)}
    found = tree.resize_axis(model, "embed", 3050, key=jax.random.key(0))
    new = np.asarray(found["a"].array)[:, 50:]
    assert found["a"].names == ("mlp", "embed") and found["b"].dtype == jnp.bfloat16
    np.testing.assert_allclose(new.mean(1), [0, 10], atol=0.05)
    np.testing.assert_allclose(new.std(1), np.std(rows, 1), rtol=0.05)
    assert np.abs(new[0]).max() <= 2.3 * np.std(rows[0])
    other = np.asarray(found["b"].array.astype(jnp.float32))[:, 50:]
    assert np.abs(new - other).mean() > 0.1, "every array has samples of its own"


@pytest.mark.parametrize("mesh_name", ["auto_mesh", "explicit_mesh"])
def test_resize_of_sharded_arrays(mesh_name: str, request: pytest.FixtureRequest) -> None:
    mesh: Mesh = request.getfixturevalue(mesh_name)
    host = axn.arange((axn.Axis("vocab", 8), axn.Axis("embed", 2))) * 1.0
    with jax.set_mesh(mesh):
        x = shard(host, {"vocab": "data", "embed": "model"})
        for size in (4, 16):
            found = jax.block_until_ready(tree.resize_axis(x, "vocab", size, key=jax.random.key(0)))
            expected = tree.resize_axis(host, "vocab", size, key=jax.random.key(0))
            assert_named(jax.device_get(found), expected, rtol=1e-5)
            assert found.array.sharding.spec[1] == "model"


def test_resize_of_one_part_of_a_model() -> None:
    model = {"w": axn.ones((In, Out)), "ids": axn.arange(In)}
    floats, others = eqx.partition(model, eqx.is_inexact_array)
    found = eqx.combine(tree.resize_axis(floats, "embed", 6), others)
    assert found["w"].shape == {"embed": 6, "mlp": 3} and found["ids"].array is model["ids"].array


def test_resize_errors() -> None:
    model = {"w": axn.ones((In, Out)), "ids": {"pos": axn.arange(axn.Axis("pos", 3))}}
    with pytest.raises(ValueError, match=r"resize_axis: axis 'embed' of w float32\[embed=0\] has no elements"):
        tree.resize_axis({"w": axn.zeros({"embed": 0})}, "embed", 2)
    with pytest.raises(ValueError, match=r"resize_axis: no axis 'embd' in \(pos, embed, mlp\). Did you mean 'embed'"):
        tree.resize_axis(model, "embd", 3)
    with pytest.raises(ValueError, match=r"resize_axis: axis 'embed' has conflicting sizes: 4 in the array, 5"):
        tree.resize_axis(model, axn.Axis("embed", 5), 3)
    with pytest.raises(TypeError, match=r"resize_axis: ids/pos is int32\[pos=3\]: .* cannot grow"):
        tree.resize_axis(model, "pos", 4)
    assert tree.resize_axis(model, "pos", 2)["ids"]["pos"].tolist() == [0, 1]


# --- partitions and keys ---


def test_hashable_partition() -> None:
    model = {"linear": linear(), "n": 3}
    dynamic, static = tree.hashable_partition(model, eqx.is_array)
    again = tree.hashable_partition(jax.tree.map(lambda x: x, model), eqx.is_array)[1]
    assert hash(static) == hash(again) and static == again
    assert static != tree.hashable_partition({**model, "n": 4}, eqx.is_array)[1]
    assert dynamic["n"] is None
    assert eqx.tree_equal(tree.hashable_combine(dynamic, static), model)
    total = jax.jit(lambda d, s: tree.hashable_combine(d, s)["linear"](axn.ones(In)).sum().array, static_argnums=1)
    assert total(dynamic, static).shape == ()


def test_what_cannot_be_static() -> None:
    with pytest.raises(TypeError, match=r"hashable_partition: a/0 \(ArrayImpl\), b \(set\) cannot be hashed"):
        tree.hashable_partition({"a": [jnp.ones(2)], "b": {1}}, lambda x: False)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_maybe_rng_split(make: Any) -> None:
    key = make(0)
    assert list(tree.maybe_rng_split(None, 3)) == [None] * 3
    (one,) = tree.maybe_rng_split(key, 1)
    assert jnp.array_equal(jax.random.key_data(one), jax.random.key_data(key))
    found = tree.maybe_rng_split(key, 3)
    assert len(found) == 3
    assert jnp.array_equal(jax.random.key_data(found), jax.random.key_data(jax.random.split(key, 3)))


# --- named arrays in the trees of others ---


def test_jax_tree_descends() -> None:
    model = linear()
    doubled = jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, model)
    assert_named(doubled.weight, model.weight * 2)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(model)[0]]
    assert paths[:2] == [".weight.array", ".bias.array"]
    named = jax.tree_util.tree_map_with_path(lambda p, x: jax.tree_util.keystr(p), model)
    assert named.weight.array == ".weight.array" and named.weight.names == ("embed", "mlp")


def test_partition_and_combine() -> None:
    model = linear()
    arrays, others = eqx.partition(model, eqx.is_array)
    assert others.weight.array is None and others.weight.names == ("embed", "mlp")
    assert eqx.tree_equal(eqx.combine(arrays, others), model)
    only_named = eqx.filter(model, axn.is_named_array, is_leaf=axn.is_named_array)
    assert only_named.activation is None and only_named.weight is model.weight


def test_tree_at() -> None:
    model = linear()
    assert_named(eqx.tree_at(lambda m: m.weight, model, model.weight * 0).weight, axn.zeros((In, Out)))
    assert eqx.tree_at(lambda m: m.bias, model, None).bias is None
    inner = eqx.tree_at(lambda m: m.weight.array, model, jnp.zeros((4, 3)))
    assert_named(inner.weight, axn.zeros((In, Out)))


def test_gradients() -> None:
    model, x = linear(), axn.ones((axn.Axis("batch", 2), In))

    @eqx.filter_jit
    def loss(model: Linear) -> jax.Array:
        return (model(x) ** 2).mean().scalar()

    grads = eqx.filter_grad(loss)(model)
    assert grads.activation is None and grads.weight.axes == (In, Out)
    raw = jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.ones((2, 4)) @ w) ** 2))(model.weight.array)
    np.testing.assert_allclose(grads.weight.array, raw, rtol=1e-5)
    assert eqx.apply_updates(model, grads).weight.axes == (In, Out)


def test_serialization(tmp_path: Path) -> None:
    model = linear()
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    like = eqx.filter_eval_shape(linear)
    assert isinstance(like.weight.array, jax.ShapeDtypeStruct)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "model.eqx", like), model)


def test_pickle() -> None:
    found = pickle.loads(pickle.dumps({"w": axn.ones(In), "model": linear().weight}))
    assert_named(found["w"], axn.ones(In))
    assert all(a is b for a, b in zip(found["w"].names, axn.ones(In).names, strict=True)), "names are interned"


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd"])
def test_optimizers(name: str) -> None:
    """The same numbers as for raw arrays, and states that keep the names."""
    make = {"sgd": lambda: optax.sgd(0.1, momentum=0.9), "adafactor": lambda: optax.adafactor(0.1)}
    optimizer = make[name]() if name in make else getattr(optax, name)(0.1)
    params = {"w": axn.arange((In, Out)) * 0.1}
    raw = jax.tree.map(lambda x: x.array, params, is_leaf=axn.is_named_array)
    state, raw_state = optimizer.init(params), optimizer.init(raw)
    if name != "adafactor":
        assert {x.names for x in tree.leaves(state) if isinstance(x, NamedArray)} == {("embed", "mlp")}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(p)))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
        raw, raw_state = step(raw, raw_state)
    assert params["w"].axes == (In, Out)
    np.testing.assert_array_equal(params["w"].array, raw["w"])
    assert jax.tree.structure(jax.tree.leaves(state)) == jax.tree.structure(jax.tree.leaves(raw_state))


def test_masks_and_labels_of_optimizers() -> None:
    params = linear()
    mask = tree.map(lambda x: isinstance(x, NamedArray) and x.ndim > 1, eqx.filter(params, eqx.is_array))
    state = optax.masked(optax.adam(0.1), mask).init(eqx.filter(params, eqx.is_array))
    found = [x for x in tree.leaves(state) if isinstance(x, NamedArray) and isinstance(x.array, jax.Array)]
    assert [x.names for x in found] == [("embed", "mlp")] * 2


def test_jax_tree_map_with_named_operations() -> None:
    """It passes raw arrays: errors say so, and name the function that does not."""
    tree = {"w": axn.ones({"batch": 2, "embed": 3})}
    way_out = re.escape(
        "`jax.tree.map` passes the raw arrays in named ones; `axonym.tree.map` passes the named arrays."
    )
    for fn in (lambda w: axn.sum(w, "batch"), lambda w: axn.dot(w, w, axis="batch"), lambda w: axn.sort(w, "batch")):
        with pytest.raises(TypeError, match=f"expected .*NamedArray.*{way_out}"):
            jax.tree.map(fn, tree)
    with pytest.raises(
        ValueError, match=r"rank 0, shape \(\)\. A positional function .* or `jax\.tree\.map` .* `axonym\.tree\.map`"
    ):
        _ = jax.tree.map(axn.sum, tree)["w"].axes
