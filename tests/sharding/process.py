"""One of two processes that `test_processes.py` starts: `process.py ADDRESS RANK`, four devices each."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import MeshShardingHelper

FEATURES = 3


def rows(first: int, last: int) -> np.ndarray:
    """Rows of a batch, each of which tells which one it is."""
    return np.arange(first, last, dtype=np.float32)[:, None] * 10 + np.arange(FEATURES, dtype=np.float32)


def check_shards(x: jax.Array, whole: np.ndarray, shape: tuple[int, ...]) -> None:
    """Every shard that this process holds has the values that are due at its place."""
    assert x.shape == whole.shape, (x.shape, whole.shape)
    assert len(x.addressable_shards) == 4
    for shard in x.addressable_shards:
        assert shard.data.shape == shape, (shard.data.shape, shape)
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def check(rank: int, explicit: bool) -> None:
    helper = MeshShardingHelper([-1, 2], ["data", "model"], explicit=explicit)
    assert dict(helper.mesh.shape) == {"data": 4, "model": 2}
    local = {"x": rows(8 * rank, 8 * rank + 8), "named": axn.named(rows(8 * rank, 8 * rank + 8), ("batch", "feature"))}

    # Each process holds half of the batch, over all mesh axes or over some of them.
    loaded = helper.local_data_to_global_array(local)
    check_shards(loaded["x"], rows(0, 16), (2, FEATURES))
    over_data = helper.local_data_to_global_array(local, mesh_axis_subset=["data"])
    check_shards(over_data["x"], rows(0, 16), (4, FEATURES))
    check_shards(over_data["named"].array, rows(0, 16), (4, FEATURES))
    assert over_data["named"].names == ("batch", "feature")

    # Along another axis, by its position and by its name.
    sideways = helper.local_data_to_global_array(local["x"].T, 1, ["data"])
    check_shards(sideways, rows(0, 16).T, (FEATURES, 4))
    by_name = helper.local_data_to_global_array(local["named"], "batch", ["data"])
    check_shards(by_name.array, rows(0, 16), (4, FEATURES))

    # The mesh axis that lies within a process: each has loaded all of the batch.
    within = axn.sharding.from_process_local_data(rows(0, 16), mesh_axes="model", mesh=helper.mesh)
    check_shards(within, rows(0, 16), (8, FEATURES))
    # With scalax, processes never load the same.
    appended = helper.local_data_to_global_array(local, mesh_axis_subset=["model"])
    check_shards(appended["x"], rows(0, 16), (8, FEATURES))
    check_shards(appended["named"].array, rows(0, 16), (8, FEATURES))

    try:
        helper.local_data_to_global_array({"a": [rows(0, 6)]})
    except ValueError as error:
        assert "a/0 (6, 3): 6 along axis 0 cannot be sharded over data=4 x model=2" in str(error), error
        assert "hold 4 parts" in str(error), error
    else:
        raise AssertionError("six rows were sharded over four devices")

    # What is loaded is computed with, and comes back whole.
    total = helper.sjit(lambda batch: {"sum": batch["x"].sum(0)}, in_shardings=(P("data"),), out_shardings=P())(loaded)
    np.testing.assert_allclose(axn.to_host(total)["sum"], rows(0, 16).sum(0))
    np.testing.assert_array_equal(axn.to_host(loaded["x"]), rows(0, 16))
    replicated: Any = helper.make_replicated_args(rows(0, 4))
    check_shards(replicated, rows(0, 4), (4, FEATURES))
    place, fetch = helper.make_shard_and_gather_fns({"w": rows(0, 8)}, P("data"))
    placed = place["w"](rows(0, 8))
    check_shards(placed, rows(0, 8), (2, FEATURES))
    np.testing.assert_array_equal(fetch["w"](placed), rows(0, 8))


def main() -> None:
    address, rank = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank, initialization_timeout=60)
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    for explicit in (False, True):
        check(rank, explicit)
    print(f"process {rank}: as it should be", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
