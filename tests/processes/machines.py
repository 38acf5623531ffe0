"""Meshes over two machines, which is what two boot ids are to JAX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import insight
from axonym.scalax.sharding import MeshShardingHelper
from axonym.sharding import slices_along
from axonym.state import load_state_dict, save_state_dict
from tests.processes import ROOT

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
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs/several_hosts.md").read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if "slices_along(mesh)" in block)
    # The block of the page: its first mesh has 16 devices, and the last ones 24, in six slices.
    *lines, last = code.replace('"model": 8', '"model": 4').replace('"model": 6', '"model": 2').splitlines()
    for line, along in zip(lines, ({"data": 2}, {"model": 2}, {"data": 2}), strict=True):
        exec(line, found := {"axn": axn})
        assert eval(last, found) == along
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


def check_the_page(folder: Path) -> None:
    """What the page says of hybrid FSDP runs as it stands there, on half as many devices."""
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs/several_hosts.md").read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if "hybrid = " in block)
    w, x = axn.ones({"embed": 16, "mlp": 8}), axn.ones({"batch": 8, "embed": 16})
    step = axn.grad(lambda w, x: (axn.dot(w, x, axis="embed") ** 2).mean().scalar())
    found: dict[str, Any] = {"axn": axn, "insight": insight, "step": step, "model": w, "batch": x}
    exec(code.replace('"data": 8', '"data": 4'), found)
    assert slices_along(found["mesh"]) == {"replica": 2}
    with jax.set_mesh(found["mesh"]):
        np.testing.assert_allclose(axn.to_host(found["fast"](w, x)).array, axn.to_host(step(w, x)).array)


def check_every_way_to_a_global_array(folder: Path) -> None:
    """Rows of the table of the page, on a mesh that crosses the machines, and the way back."""
    mesh = axn.make_mesh({"data": -1})
    assert slices_along(mesh) == {"data": 2}
    whole, me = np.arange(64.0, dtype=np.float32).reshape(8, 8), jax.process_index()
    rows = axn.named(whole[4 * me : 4 * me + 4], ("batch", "embed"))
    path = folder / "model.safetensors"
    with axn.set_mesh(mesh):
        same = axn.shard(axn.named(jnp.asarray(whole), ("batch", "embed")), {"batch": "data"}, mesh)
        own = axn.sharding.from_process_local_data(rows, "batch", mesh_axes="data")
        sharding = same.array.sharding
        parts = jax.make_array_from_callback((8, 8), sharding, lambda index: whole[index])
        save_state_dict({"x": same.array}, path)
        template = jax.eval_shape(lambda: {"x": axn.zeros({"batch": 8, "embed": 8})})
        read = axn.state.from_state_dict(template, load_state_dict(path), placement={"batch": "data"}, mesh=mesh)["x"]
    for x in (same, own, axn.named(parts, ("batch", "embed")), read):
        assert x.array.sharding == sharding
        np.testing.assert_array_equal(axn.to_host(x).array, whole)
