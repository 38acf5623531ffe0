"""`MoELinear` against a loop over rows, with rows and experts sharded over devices in every way."""

from __future__ import annotations

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn import MoELinear, moe
from tests.helpers import assert_named, spec

Experts, In, Out, Rows = axn.make_axes(experts=4, embed=8, mlp=16, rows=32)
SIZES = axn.named([7, 0, 21, 4], "experts")
KEY = jax.random.key(0)
X = axn.random.normal(jax.random.key(1), (Rows, In))
BIAS = axn.random.normal(jax.random.key(2), Out)


def make(**options: Any) -> MoELinear:
    layer = MoELinear.init(Experts, In, Out, key=KEY, **options)
    return eqx.tree_at(lambda m: m.bias, layer, BIAS)


def by_rows(layer: MoELinear, x: axn.NamedArray) -> axn.NamedArray:
    """Multiply each row by the weight of its expert."""
    expert = jnp.repeat(jnp.arange(4), SIZES.array, total_repeat_length=32)
    weight = layer.weight.rearrange(("experts", "embed", "mlp")).array[expert]
    product = jnp.einsum("re,rem->rm", x.rearrange(("rows", "embed")).array, weight)
    return axn.named(product, ("rows", "mlp")) + (0.0 if layer.bias is None else layer.bias)


def loss(layer: MoELinear, x: axn.NamedArray) -> jax.Array:
    return axn.sum(layer(x, SIZES) ** 2).scalar()


def reference(layer: MoELinear, x: axn.NamedArray) -> jax.Array:
    return axn.sum(by_rows(layer, x) ** 2).scalar()


@functools.cache
def expected(out_first: bool = False) -> tuple[axn.NamedArray, Any]:
    """Return the results of the rows one by one, and the gradients; called without a mesh, to compile it once."""
    layer = make(out_first=out_first)
    return by_rows(layer, X), jax.jit(jax.grad(reference, (0, 1)))(layer, X)


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("out_first", [False, True])
def test_each_row_has_the_weight_of_its_expert(out_first: bool) -> None:
    layer = make(out_first=out_first)
    assert layer.weight.axes == ((Experts, Out, In) if out_first else (Experts, In, Out))
    assert layer.out_first == out_first
    assert_named(layer(X, SIZES), by_rows(layer, X), rtol=1e-4, atol=1e-5)
    assert_named(layer(X, SIZES.array), by_rows(layer, X), rtol=1e-4, atol=1e-5)
    swapped = layer(X.rearrange(("embed", "rows")), SIZES)
    assert_named(swapped, by_rows(layer, X).rearrange(("mlp", "rows")), rtol=1e-4, atol=1e-5)
    assert_close(jax.grad(loss, (0, 1))(layer, X), expected(out_first)[1])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_sizes_of_every_dtype(dtype: Any, explicit_mesh: Mesh) -> None:
    """Small ones overflow if added up, and unsigned ones if compared with the first row of a device."""
    rows, sizes = Rows.resize(160), axn.named(np.array([90, 0, 30, 40], dtype), "experts")
    layer, x = make(), axn.random.normal(KEY, (rows, In))
    values = layer(x, sizes.astype(np.int32))
    assert_named(layer(x, sizes), values, rtol=1e-6)
    with jax.set_mesh(explicit_mesh):
        found = layer(axn.shard(x, {"rows": "data"}), sizes)
    assert_named(found, values, rtol=1e-4, atol=1e-5)


def test_initial_values() -> None:
    layer = MoELinear.init((Experts,), In.resize(256), Out.resize(64), key=KEY, init_scale=2.0)
    assert layer.bias is not None and not layer.bias.array.any() and layer.bias.axes == (Out.resize(64),)
    assert layer.weight.array.std() == pytest.approx(2 / 16, rel=0.05)
    assert np.abs(layer.weight.array).max() <= 3 * 2 / 16
    assert MoELinear.init(Experts, In, Out, use_bias=False, key=KEY).bias is None
    shapes = eqx.filter_eval_shape(lambda k: MoELinear.init(Experts, In, In, key=k), KEY)
    assert shapes.weight.shape == {"experts": 4, "embed_in": 8, "embed": 8}


def test_one_axis_in_and_out() -> None:
    layer = MoELinear.init(Experts, In, In, key=KEY, use_bias=False)
    renamed = MoELinear(layer.weight.rename({"embed": "mlp", "embed_in": "embed"}), None, Experts, In, In.alias("mlp"))
    assert_named(layer(X, SIZES), renamed(X, SIZES).rename({"mlp": "embed"}), rtol=1e-5)


def test_mapped_over() -> None:
    """Inputs, sizes and layers along further axes go through `vmap`."""
    Batch = axn.Axis("batch", 2)
    x = axn.stack([X, X * 2], Batch)
    sizes = axn.stack([SIZES, axn.named([8, 8, 8, 8], "experts")], Batch)
    layers = axn.vmap(lambda key: MoELinear.init(Experts, In, Out, key=key), Batch)(jax.random.split(KEY, 2))
    result = axn.vmap(lambda layer, x, sizes: layer(x, sizes), Batch)(layers, x, sizes)
    for i in range(2):
        layer = jax.tree.map(lambda a, i=i: a["batch", i], layers, is_leaf=axn.is_named_array)
        assert_named(result["batch", i], layer(x["batch", i], sizes["batch", i]), rtol=1e-4, atol=1e-5)


# The shardings of rows and weights, that of the result, and the collectives of the forward pass.
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, set[str]]] = {
    "rows": ({"rows": "data"}, {}, "data", set()),
    "experts": ({}, {"experts": "model"}, None, {"all-reduce"}),
    "both": ({"rows": "data"}, {"experts": "model"}, "data", {"all-reduce"}),
    "both over one": ({"rows": "data"}, {"experts": "data"}, "data", {"all-gather", "reduce-scatter"}),
    "both over the last": (
        {"rows": ("model", "data")},
        {"experts": "data"},
        ("model", "data"),
        {"all-gather", "reduce-scatter"},
    ),
    "weights rest split": ({"rows": "data"}, {"mlp": "data"}, "data", {"all-gather"}),
    "input split": ({"rows": "data", "embed": "model"}, {"embed": "model"}, "data", {"all-reduce"}),
}


@pytest.mark.parametrize("how", SPLITS)
def test_split_over_explicit_axes(how: str, explicit_mesh: Mesh) -> None:
    """As the arrays lie, without any mapping."""
    layer = make()
    in_rows, in_weight, rows, collectives = SPLITS[how]
    values, gradients = expected()
    with jax.set_mesh(explicit_mesh):
        placed = eqx.tree_at(
            lambda m: m.weight, layer, axn.shard(layer.weight, in_weight) if in_weight else layer.weight
        )
        x = axn.shard(X, in_rows) if in_rows else X
        forward = jax.jit(lambda layer, x: layer(x, SIZES))
        assert _collectives(forward, placed, x) == collectives
        for result in (forward(placed, x), placed(x, SIZES)):
            assert_named(result, values, rtol=1e-4, atol=1e-4)
            assert spec(result) == (rows, None)
        found = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(placed, x))
        assert spec(found[0].weight) == tuple(in_weight.get(n) for n in layer.weight.names)
    assert_close(found, gradients)


@pytest.mark.parametrize("how", ["rows", "both", "both over one"])
def test_split_by_the_mapping(how: str, auto_mesh: Mesh) -> None:
    layer = make(out_first=True)
    in_rows, in_weight, rows, collectives = SPLITS[how]
    mapping = in_rows | in_weight
    values, gradients = expected(out_first=True)
    with jax.set_mesh(auto_mesh), axn.axis_mapping(mapping):
        placed, x = axn.shard((layer, X), mapping)
        forward = jax.jit(lambda layer, x: layer(x, SIZES))
        assert _collectives(forward, placed, x) == collectives
        assert_named(jax.block_until_ready(forward(placed, x)), values, rtol=1e-4, atol=1e-4)
        assert spec(placed(x, SIZES)) == (rows, None)
        found = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(placed, x))
    assert_close(found, gradients)


@pytest.mark.parametrize(
    ("in_rows", "in_weight"),
    [
        ({"rows": "data", "embed": "model"}, {}),
        ({"rows": "data"}, {"embed": "model"}),
        ({"rows": "model", "embed": "data"}, {"embed": "model"}),
        ({"rows": "model"}, {"mlp": ("data", "model")}),
        ({"rows": "model"}, {"mlp": ("model", "data")}),
        ({"embed": "model"}, {"experts": "data"}),
    ],
)
def test_gathered_over_mesh_axes_that_rows_do_not_have(
    in_rows: dict[str, Any], in_weight: dict[str, Any], explicit_mesh: Mesh
) -> None:
    layer = make()
    values, gradients = expected()
    with jax.set_mesh(explicit_mesh):
        placed = eqx.tree_at(
            lambda m: m.weight, layer, axn.shard(layer.weight, in_weight) if in_weight else layer.weight
        )
        x = axn.shard(X, in_rows)
        assert_named(placed(x, SIZES), values, rtol=1e-4, atol=1e-4)
        found = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(placed, x))
    assert_close(found, gradients)


def test_rows_split_over_what_splits_the_experts_first(explicit_mesh: Mesh) -> None:
    """Parts of the rows that are gathered would not be neighbors; still, the result is right and lies as they do."""
    layer = make()
    with jax.set_mesh(explicit_mesh):
        placed = eqx.tree_at(lambda m: m.weight, layer, axn.shard(layer.weight, {"experts": "data"}))
        result = placed(axn.shard(X, {"rows": ("data", "model")}), SIZES)
        assert spec(result) == (("data", "model"), None)
    assert_named(result, expected()[0], rtol=1e-4, atol=1e-4)


def test_not_divided_evenly(mesh: Mesh) -> None:
    """Where mesh axes do not divide the rows, and where nothing is split, it is left to the partitioner."""
    layer = make()
    values, gradients = expected()
    with jax.set_mesh(mesh):
        assert_named(layer(X, SIZES), values, rtol=1e-4, atol=1e-5)
        assert_close(jax.jit(jax.grad(loss))(layer, X), gradients[0])
        with axn.axis_mapping({"experts": "data"}):
            few = axn.named([30, 0, 1], "experts")
            some = eqx.tree_at(lambda m: m.weight, layer, layer.weight["experts", axn.ds(0, 3)])
            assert some(X["rows", axn.ds(0, 31)], few).shape == {"rows": 31, "mlp": 16}


def _collectives(fn: Any, *args: Any) -> set[str]:
    text = fn.lower(*args).compile().as_text()
    return set(re.findall(r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text))


def test_gmm(monkeypatch: pytest.MonkeyPatch, explicit_mesh: Mesh) -> None:
    """The Pallas kernel, simulated: also for rows that are no multiple of its tiles, and device by device."""
    layer, gmm = make(out_first=True), make(out_first=True, use_gmm=True)
    with pytest.raises(ValueError, match="megablox, which runs on TPU only; the devices here are CPUs"):
        gmm(X, SIZES)
    monkeypatch.setattr(moe, "active_platform", lambda: "tpu")
    monkeypatch.setattr(moe, "_megablox", functools.partial(moe._megablox, interpret=True))
    gmm = MoELinear(gmm.weight, gmm.bias, Experts, In, Out.alias("mlp"), use_gmm=True)
    x = X["rows", axn.ds(0, 31)]
    fewer = axn.named([6, 0, 21, 4], "experts")
    square = lambda layer, x: axn.sum(layer(x, fewer) ** 2).scalar()
    assert_close(jax.grad(square, (0, 1))(gmm, x), jax.grad(square, (0, 1))(layer, x))
    with jax.set_mesh(explicit_mesh):
        placed = eqx.tree_at(lambda m: m.weight, gmm, axn.shard(gmm.weight, {"experts": "model"}))
        found = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(placed, axn.shard(X, {"rows": "data"})))
    assert_close(found, expected(out_first=True)[1])


def test_refusals() -> None:
    layer = make()
    with pytest.raises(ValueError, match=r"MoELinear: no axis 'embed' in \(rows=32, embde=8\). Did you mean 'embde'"):
        layer(X.rename({"embed": "embde"}), SIZES)
    with pytest.raises(ValueError, match=r"but has \(batch, rows\). Merge them"):
        layer(axn.stack([X, X], "batch"), SIZES)
    with pytest.raises(ValueError, match=r"but has \(\)"):
        layer(X["rows", 0], SIZES)
    with pytest.raises(ValueError, match="axis 'embed' has conflicting sizes: 4 in the argument, 8 in the layer"):
        layer(X["embed", axn.ds(0, 4)], SIZES)
    with pytest.raises(ValueError, match="axis 'experts' has conflicting sizes: 3 in the argument, 4 in the layer"):
        layer(X, axn.named([1, 2, 3], "experts"))
    with pytest.raises(ValueError, match=r"MoELinear: no axis 'experts' in \(expert=4\). Did you mean 'expert'"):
        layer(X, SIZES.rename({"experts": "expert"}))
    with pytest.raises(TypeError, match="`group_sizes` must be integers, got float32"):
        layer(X, SIZES * 1.0)
    with pytest.raises(ValueError, match="'mlp' would name more than one axis"):
        layer(X.rename({"rows": "mlp"}), SIZES)
    with pytest.raises(ValueError, match="`Experts` must be one axis"):
        MoELinear.init((Experts, Rows), In, Out, key=KEY)
    with pytest.raises(ValueError, match="'experts' would name more than one axis"):
        MoELinear.init(Experts, In.alias("experts"), Out, key=KEY)
    layers = axn.vmap(lambda key: MoELinear.init(Experts, In, Out, key=key), axn.Axis("layers", 2))
    with pytest.raises(ValueError, match=r"the axes of the weight are \(layers, .*stacked layers with `axonym.vmap`"):
        layers(jax.random.split(KEY, 2))(X, SIZES)
