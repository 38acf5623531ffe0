"""Meshes over two machines, which is what two boot ids are to JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import axonym as axn
from axonym.scalax.sharding import MeshShardingHelper
from axonym.sharding import slices_along

# The sizes, `between`, and the number of machines along each axis.
MESHES: list[tuple[dict[str, int], Any, dict[str, int]]] = [
    ({"data": 2, "model": 4}, None, {"data": 2}),
    ({"data": -1}, None, {"data": 2}),
    ({"data": 4, "model": 2}, "model", {"model": 2}),
    ({"replica": 2, "data": -1}, {"replica": 2}, {"replica": 2}),
    ({"data": 3}, None, {}),
]


def check_meshes(folder: Path) -> None:
    """`jax.make_mesh` refuses these devices. Each mesh adds up an array that is placed on it."""
    assert {d.slice_index for d in jax.devices()} == {0, 1}
    for sizes, between, along in MESHES:
        mesh = axn.make_mesh(sizes, between=between)
        assert slices_along(mesh) == along
        if mesh.size == jax.device_count():
            placed = axn.shard(axn.arange(axn.Axis("batch", 16)), {"batch": mesh.axis_names}, mesh)
            with jax.set_mesh(mesh):
                assert int(axn.to_host(axn.named_jit(lambda x: x.sum())(placed)).array) == 120
    with pytest.raises(
        ValueError, match=r"2 slices of 4 devices .* cannot be divided by between='data' along the sizes"
    ):
        axn.make_mesh({"data": 1, "model": 8}, between="data")
    with pytest.raises(ValueError, match=r"2 slices of 3 or 4 devices .* pass `devices`, or start more processes"):
        axn.make_mesh({"data": 7}, devices=jax.devices()[1:])
    assert slices_along(MeshShardingHelper((-1, 2), ("data", "model")).mesh) == {"data": 2}


def check_fsdp(folder: Path) -> None:
    """Parameters are stored within a machine, and their gradients added up between the two."""
    mesh = axn.make_mesh({"replica": 2, "data": -1})
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=8)
    rows, weights = np.arange(128.0).reshape(8, 16) / 128, np.ones((16, 8))

    def gradient(w: axn.NamedArray, x: axn.NamedArray) -> axn.NamedArray:
        return axn.grad(lambda w: (axn.dot(w, x, axis=Embed) ** 2).mean().scalar())(w)

    with jax.set_mesh(mesh):
        step = axn.fsdp(gradient, {"embed": "data"}, {"batch": ("replica", "data")})
        found = step(axn.named(weights, (Embed, Mlp)), axn.named(rows, (Batch, Embed)))
        assert found.array.sharding == jax.NamedSharding(mesh, jax.P("data"))
        np.testing.assert_allclose(axn.to_host(found).array, 2 * rows.T @ (rows @ weights) / 64, rtol=1e-5)
