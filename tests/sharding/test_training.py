"""A small model learns the same, however it is distributed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import axonym as axn
from tests.helpers import covering

In, Hidden, Out, Batch = axn.make_axes(features=8, hidden=16, targets=8, batch=16)
STEPS = 4


def parameters() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *axes: axn.named(rng.normal(size=[a.size for a in axes]).astype(np.float32) / 4, axes)
    return {"up": draw(In, Hidden), "bias": draw(Hidden), "down": draw(Hidden, Out)}


def data(i: int) -> tuple[axn.NamedArray, axn.NamedArray]:
    rng = np.random.default_rng(100 + i)
    x = rng.normal(size=(Batch.size, In.size)).astype(np.float32)
    return axn.named(x, (Batch, In)), axn.named(np.sin(x), (Batch, Out))


def loss(params: Any, x: axn.NamedArray, y: axn.NamedArray) -> Any:
    h = axn.dot(x, params["up"], axis=In)
    h = axn.tanh((axn.shard(h) if axn.current_mapping() else h) + params["bias"])
    return axn.mean((axn.dot(h, params["down"], axis=Hidden) - y) ** 2).scalar()


def step(params: Any, x: axn.NamedArray, y: axn.NamedArray) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return value, jax.tree.map(lambda p, g: p - 0.2 * g, params, grads)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return curve(jax.jit(step))


def curve(fn: Any) -> list[float]:
    params, losses = parameters(), []
    for i in range(STEPS):
        value, params = jax.block_until_ready(fn(params, *data(i)))
        losses.append(float(value))
    return losses


STRATEGIES = {
    "data": (None, {"batch": "data"}),
    "tensor": (None, {"hidden": "data"}),
    "fsdp": ({"features": "data", "targets": "data"}, {"batch": "data"}),
    "fsdp over hidden": ({"hidden": "data"}, {"batch": "data"}),
}


@pytest.mark.parametrize(("strategy", "devices", "explicit"), covering(STRATEGIES, [1, 8], [False, True]))
def test_one_mesh_axis(strategy: str, devices: int, explicit: bool, expected) -> None:
    storage, compute = STRATEGIES[strategy]
    mesh = axn.make_mesh({"data": devices}, explicit=explicit, devices=jax.devices()[:devices])
    fn = axn.named_jit(step, compute) if storage is None else axn.fsdp(step, storage, compute)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(curve(fn), expected, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("storage", "compute"),
    [
        (None, {"batch": "data", "hidden": "model"}),
        ({"features": "data", "targets": "data", "hidden": "model"}, {"batch": "data", "hidden": "model"}),
        ({"hidden": ("data", "model")}, {"batch": ("data", "model")}),
        ({"features": "model"}, {"batch": ("data", "model")}),
    ],
    ids=["data and tensor", "fsdp and tensor", "fsdp over both", "fsdp over one of the batch's"],
)
def test_two_mesh_axes(storage: Any, compute: Any, explicit: bool, expected) -> None:
    fn = axn.named_jit(step, compute) if storage is None else axn.fsdp(step, storage, compute)
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        np.testing.assert_allclose(curve(fn), expected, rtol=1e-5)
