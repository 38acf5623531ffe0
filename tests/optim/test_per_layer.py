from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import axonym as axn
from tests.optim.models import gradients, model

OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lars": lambda: optax.lars(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_of_a_stack_is_updated_as_the_layer_alone(name: str) -> None:
    tx = OPTIMIZERS[name]()
    params = model(3)
    grads = gradients(params)
    each = axn.optim.per_layer(tx, "layers")

    def second(tx: Any, params: Any, grads: Any) -> Any:
        _, state = tx.update(grads, tx.init(params), params)
        return tx.update(grads, state, params)[0]

    found = second(each, params, grads)
    for i in range(3):
        one, g = ([x[i] for x in jax.tree.leaves(tree.blocks.stacked)] for tree in (params, grads))
        expected = second(tx, one, g)
        for a, b in zip(jax.tree.leaves(found.blocks.stacked), expected, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-9)
    for a, b in zip(jax.tree.leaves(found.head), jax.tree.leaves(second(tx, params.head, grads.head)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_check_names_the_leaves() -> None:
    params = model(3)
    assert axn.optim.check(optax.adamw(1e-3), params) == {}
    assert axn.optim.check(axn.optim.muon(1e-2), params) == {}
    found = axn.optim.check(optax.contrib.muon(1e-2), params)
    assert "blocks/stacked/up/weight" in found and "blocks/stacked/up/bias" in found
    assert all(path.startswith("blocks/") for path in found)


@pytest.mark.parametrize("how", [jax.jit, axn.named_jit, lambda init: init], ids=["jit", "named_jit", "eager"])
def test_layers_may_be_sharded(mesh: Mesh, how: Any) -> None:
    tx = axn.optim.per_layer(optax.lamb(1e-2), "layers")
    params = model(4)
    grads = gradients(params)
    expected: Any = tx.update(grads, tx.init(params), params)[0]
    with axn.set_mesh(mesh), axn.axis_mapping({"layers": "data"}):
        params, grads = axn.shard((params, grads))
        state = how(tx.init)(params)
        updates, after = jax.block_until_ready(jax.jit(tx.update)(grads, state, params))
    if mesh.axis_types[0] == AxisType.Explicit:  # so that a loop can carry the state
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
    weight = updates.blocks.stacked.up.weight
    assert weight.names == params.blocks.stacked.up.weight.names
    assert weight.array.sharding.shard_shape(weight.array.shape)[0] == 1
    np.testing.assert_allclose(weight.array, expected.blocks.stacked.up.weight.array, rtol=2e-4, atol=1e-7)


def test_an_axis_that_no_parameter_has() -> None:
    with pytest.raises(ValueError, match=r"optim.per_layer.*'layer'.*Did you mean 'layers'"):
        axn.optim.per_layer(optax.lars(1e-2), "layer").init({"weight": axn.ones({"layers": 2, "embed": 4})})
