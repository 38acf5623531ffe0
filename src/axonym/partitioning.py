"""Distributing by name, under the name that existing code imports it by."""

from .sharding.fsdp import fsdp as fsdp
from .sharding.jit import named_jit as named_jit
from .sharding.mapping import (
    PhysicalAxisSpec as PhysicalAxisSpec,
    ResourceAxis as ResourceAxis,
    ResourceMapping as ResourceMapping,
    axis_mapping as axis_mapping,
    current_mapping as current_mapping,
    current_thread_local_mapping as current_thread_local_mapping,
)
from .sharding.meshes import current_mesh as current_mesh, set_mesh as set_mesh
from .sharding.queries import (
    infer_resource_partitions as infer_resource_partitions,
    physical_axis_name as physical_axis_name,
    physical_axis_size as physical_axis_size,
    pspec_for as pspec_for,
    pspec_for_axis as pspec_for_axis,
    round_axis_for_partitioning as round_axis_for_partitioning,
    sharding_for_axis as sharding_for_axis,
)
from .sharding.shard import (
    auto_sharded as auto_sharded,
    shard as shard,
    shard_with_axis_mapping as shard_with_axis_mapping,
)
