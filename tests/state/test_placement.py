"""Loading onto several devices: the data that is read, and its placement."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym import nn
from axonym.state import (
    from_state_dict,
    from_torch_compatible_state_dict,
    load_state_dict,
    save_state_dict,
    to_numpy_state_dict,
    to_torch_compatible_state_dict,
)
from tests.state.models import Model, assert_same_entries, assert_same_tree, torch_form

MAPPING = {"embed": "data", "heads": "model", "vocab": "data"}


class Watched(np.ndarray):
    """An array that counts how many of its elements are read, in total and at once."""

    read: int = 0
    most: int = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.root.read += found.size
        self.root.most = max(self.root.most, found.size)
        return found

    def __array_finalize__(self, parent: Any) -> None:
        self.root: Watched = getattr(parent, "root", self)


def watched(entries: dict[str, Any]) -> dict[str, Watched]:
    return {key: x.view(Watched) for key, x in entries.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "model.safetensors"
    save_state_dict(to_torch_compatible_state_dict(Model.init()), path)
    return path


def test_each_device_reads_its_part_of_a_file(file: Path, mesh: Mesh) -> None:
    entries = watched(load_state_dict(file))
    abstract = eqx.filter_eval_shape(Model.init)
    with axn.set_mesh(mesh), axn.axis_mapping(MAPPING):
        model = from_torch_compatible_state_dict(abstract, entries)
    block = model.layers.stacked
    assert block.attend.weight.array.sharding == NamedSharding(mesh, P(None, "model", None, "data"))
    assert block.project.weight.array.sharding == NamedSharding(mesh, P(None, "model", None, "data"))
    assert block.norm.weight.array.sharding == NamedSharding(mesh, P(None, "data"))
    assert model.embed.weight.array.sharding == NamedSharding(mesh, P("data", "model", None))
    assert_same_tree(model, Model.init())
    for key, x in entries.items():
        parts = {"bias": 2, "gain": 1}.get(key.split(".")[-1], 8) if "norm" not in key else 4
        # No more at once than one part of one layer, and nothing twice, however many devices have it.
        assert x.most == x.size // parts and x.read == x.size, key


def test_scaled_weights_are_read_in_parts(mesh: Mesh) -> None:
    def init() -> nn.Linear:
        In, Out = axn.make_axes(embed=16, label=8)
        return nn.Linear.init(In, Out, key=jax.random.key(0), reparam_cls=nn.mup.OutputLinearMup)

    entries = watched(to_numpy_state_dict(init()))
    found = from_state_dict(eqx.filter_eval_shape(init), entries, placement=MAPPING, mesh=mesh)
    assert entries["weight"].most == 8 * 16 // 4 and found.weight.array.sharding.spec == P(None, "data")
    assert_same_tree(found, init())  # a power of two scales exactly


def test_host_memory_is_that_of_one_shard(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked and scaled weights too."""

    def init() -> nn.Stacked[nn.Linear]:
        In, Out, Layers = axn.make_axes(embed=512, heads=1024, layers=16)
        make = nn.Stacked.init(Layers, nn.Linear)
        return make(In, Out, key=jax.random.key(0), use_bias=False, reparam_cls=nn.mup.OutputLinearMup)

    save_state_dict(to_torch_compatible_state_dict(init()), tmp_path / "model.safetensors")
    abstract = eqx.filter_eval_shape(init)

    def load() -> Any:
        entries = load_state_dict(tmp_path / "model.safetensors")
        return from_torch_compatible_state_dict(abstract, entries, placement=MAPPING, mesh=mesh)

    load()  # what is compiled and cached does not count either
    # What is on a simulated device can be NumPy's memory, so something else goes there.
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device=None: put(jnp.zeros(x.shape, x.dtype), device))
    tracemalloc.start()
    try:
        weight = load().stacked.weight.array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    shard = weight.addressable_shards[0].data.nbytes
    assert shard == weight.nbytes // 8 == 4 * 2**20
    assert peak < 1.5 * shard


def test_placements_by_hand(file: Path, mesh: Mesh) -> None:
    abstract = eqx.filter_eval_shape(Model.init)
    entries = watched(load_state_dict(file))
    model = from_torch_compatible_state_dict(abstract, entries, placement={"size": "model"}, mesh=mesh)
    assert model.layers.stacked.attend.weight.array.sharding.spec == P(None, None, "model", None)
    assert all(x.most == x.size // 2 for key, x in entries.items() if "attend" in key or "project" in key)
    assert_same_tree(model, Model.init())
    with pytest.raises(ValueError, match="from_state_dict: no mesh is active"):
        from_state_dict(abstract.embed, {"weight": np.zeros((8, 2, 6))}, placement={"vocab": "data"})
    with pytest.raises(ValueError, match=r"weight .*axis 'size' of size 6 cannot be sharded over data=4"):
        from_state_dict(abstract.embed, {"weight": np.zeros((8, 2, 6))}, placement={"size": "data"}, mesh=mesh)


def test_arrays_go_where_those_of_the_tree_are(mesh: Mesh) -> None:
    model = axn.shard(Model.init(), MAPPING, mesh)
    for template in (model, axn.shard(eqx.filter_eval_shape(Model.init), MAPPING, mesh)):
        entries = watched(torch_form(model))
        found = from_torch_compatible_state_dict(template, entries)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
            assert not isinstance(b, jax.Array) or a.sharding == b.sharding
        assert entries["layers.0.attend.weight"].most == 12 * 4 // 8


def test_state_dicts_of_models_on_several_devices(mesh: Mesh) -> None:
    model = Model.init()
    placed = axn.shard(model, {**MAPPING, "layers": None}, mesh)
    with axn.set_mesh(mesh), axn.axis_mapping(MAPPING):
        assert_same_entries(to_torch_compatible_state_dict(placed), torch_form(model))
        numpy = to_numpy_state_dict(placed)
        assert numpy["layers.2.attend.weight"].shape == (2, 6, 4)
        again = from_state_dict(jax.tree.map(lambda x: x, placed), numpy)
        assert again.embed.weight.array.sharding == placed.embed.weight.array.sharding
    assert_same_tree(again, model)


def test_jax_arrays_are_placed_too(mesh: Mesh) -> None:
    model = Model.init()
    entries = {k: jax.numpy.asarray(x) for k, x in torch_form(model).items()}
    with axn.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = from_torch_compatible_state_dict(eqx.filter_eval_shape(Model.init), entries)
        assert found.layers.stacked.attend.weight.array.sharding.spec == P(None, "model", None, "data")
    assert_same_tree(found, model)


def test_in_a_compiled_function(mesh: Mesh) -> None:
    entries = torch_form(Model.init())
    with axn.set_mesh(mesh), axn.axis_mapping(MAPPING):
        load = jax.jit(lambda e: from_torch_compatible_state_dict(eqx.filter_eval_shape(Model.init), e).embed.weight)
        weight = load(entries)
    assert weight.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 3)
    np.testing.assert_array_equal(weight.array, entries["embed.weight"].reshape(8, 2, 6))
