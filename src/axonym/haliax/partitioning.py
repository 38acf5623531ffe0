"""Distributing by name."""

# ruff: noqa: I001
# fmt: off
from typing import TypeVar

from ..sharding import (
    PhysicalAxisSpec as PhysicalAxisSpec, ResourceAxis as ResourceAxis, ResourceMapping as ResourceMapping,
    axis_mapping as axis_mapping, current_mapping, fsdp as fsdp,
    infer_resource_partitions as infer_resource_partitions, named_jit as named_jit,
    physical_axis_name as physical_axis_name, physical_axis_size as physical_axis_size, pspec_for as pspec_for,
    pspec_for_axis as pspec_for_axis, round_axis_for_partitioning as round_axis_for_partitioning, set_mesh as set_mesh,
    shard as shard, sharding_for_axis as sharding_for_axis,
)
from ..sharding.meshes import AnyMesh
from ..sharding.shard import shard_quietly
# fmt: on

T = TypeVar("T")

current_thread_local_mapping = current_mapping
shard_with_axis_mapping = shard


def auto_sharded(x: T, mesh: AnyMesh | None = None) -> T:
    """`shard` by the active mapping; without one, or without a mesh, the tree as it is.

    Arguments:
        x: the tree to place.
        mesh: the mesh; the active one by default.

    >>> import axonym.haliax as hax
    >>> hax.auto_sharded(hax.ones({"batch": 2}))
    NamedArray(float32[batch=2], [1. 1.])
    """
    return shard_quietly(x, None, "auto_sharded", mesh)
