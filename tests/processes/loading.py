"""Data that several processes load becomes one batch."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import MeshShardingHelper

FEATURES = 3


def rows(first: int, last: int) -> np.ndarray:
    """Make rows of a batch whose values are their numbers."""
    return np.arange(first, last, dtype=np.float32)[:, None] * 10 + np.arange(FEATURES, dtype=np.float32)


def assert_shards(x: jax.Array, whole: np.ndarray, shape: tuple[int, ...]) -> None:
    """Check that every shard on this process has the values for its position."""
    assert x.shape == whole.shape, (x.shape, whole.shape)
    assert len(x.addressable_shards) == jax.local_device_count()
    for shard in x.addressable_shards:
        assert shard.data.shape == shape, (shard.data.shape, shape)
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def check(rank: int, explicit: bool) -> None:
    helper = MeshShardingHelper([-1, 2], ["data", "model"], explicit=explicit)
    assert dict(helper.mesh.shape) == {"data": 4, "model": 2}
    each = 16 // jax.process_count()
    mine = rows(each * rank, each * rank + each)
    local = {"x": mine, "named": axn.named(mine, ("batch", "feature"))}

    # Each process holds its rows of the batch, over all mesh axes or over some of them.
    loaded = helper.local_data_to_global_array(local)
    assert_shards(loaded["x"], rows(0, 16), (2, FEATURES))
    over_data = helper.local_data_to_global_array(local, mesh_axis_subset=["data"])
    assert_shards(over_data["x"], rows(0, 16), (4, FEATURES))
    assert_shards(over_data["named"].array, rows(0, 16), (4, FEATURES))
    assert over_data["named"].names == ("batch", "feature")

    # Along another axis, by its position and by its name.
    sideways = helper.local_data_to_global_array(local["x"].T, 1, ["data"])
    assert_shards(sideways, rows(0, 16).T, (FEATURES, 4))
    by_name = helper.local_data_to_global_array(local["named"], "batch", ["data"])
    assert_shards(by_name.array, rows(0, 16), (4, FEATURES))

    # A mesh axis within each process: each has loaded the complete batch.
    within = axn.sharding.from_process_local_data(rows(0, 16), mesh_axes="model", mesh=helper.mesh)
    assert_shards(within, rows(0, 16), (8, FEATURES))
    # With scalax, processes never load the same.
    appended = helper.local_data_to_global_array(local, mesh_axis_subset=["model"])
    assert_shards(appended["x"], rows(0, 16), (8, FEATURES))
    assert_shards(appended["named"].array, rows(0, 16), (8, FEATURES))

    try:
        helper.local_data_to_global_array({"a": [rows(0, 5)]})
    except ValueError as error:
        assert "a/0 (5, 3): 5 along axis 0 cannot be sharded over data=4 x model=2" in str(error), error
        assert f"hold {jax.local_device_count()} parts" in str(error), error
    else:
        raise AssertionError("five rows were sharded over several devices")

    # Compute with the loaded batch, and gather the result.
    total = helper.sjit(lambda batch: {"sum": batch["x"].sum(0)}, in_shardings=(P("data"),), out_shardings=P())(loaded)
    np.testing.assert_allclose(axn.to_host(total)["sum"], rows(0, 16).sum(0))
    np.testing.assert_array_equal(axn.to_host(loaded["x"]), rows(0, 16))
    place, fetch = helper.make_shard_and_gather_fns({"w": rows(0, 8)}, P("data"))
    placed = place["w"](rows(0, 8))
    assert_shards(placed, rows(0, 8), (2, FEATURES))
    np.testing.assert_array_equal(fetch["w"](placed), rows(0, 8))


def check_one_batch(folder: Path) -> None:
    for explicit in (False, True):
        check(jax.process_index(), explicit)
