"""Shard the arrays of trees: mappings, meshes, placements, rules, and compiled functions that apply them."""

from ..core.connecting import connect_processes as connect_processes
from ..core.processes import fail_together as fail_together
from ._compiled_function import CompiledFunction as CompiledFunction
from .annotations import (
    current_annotations as current_annotations,
    sharding_annotations as sharding_annotations,
    with_sharding_annotation as with_sharding_annotation,
)
from .jit import fsdp as fsdp, named_jit as named_jit
from .leaves import Leaf as Leaf, leaves_of as leaves_of
from .mapping import (
    PhysicalAxisSpec as PhysicalAxisSpec,
    ResourceMapping as ResourceMapping,
    axis_mapping as axis_mapping,
    current_mapping as current_mapping,
    in_context as in_context,
)
from .meshes import (
    current_mesh as current_mesh,
    make_mesh as make_mesh,
    set_mesh as set_mesh,
    slices_along as slices_along,
)
from .placement import LeafPlacement as LeafPlacement, Placement as Placement, resolve as resolve
from .process_local_data import from_process_local_data as from_process_local_data
from .queries import (
    Finding as Finding,
    MappingReport as MappingReport,
    infer_resource_partitions as infer_resource_partitions,
    lint_mapping as lint_mapping,
    physical_axis_name as physical_axis_name,
    physical_axis_size as physical_axis_size,
    pspec_for as pspec_for,
    pspec_for_axis as pspec_for_axis,
    round_axis_for_partitioning as round_axis_for_partitioning,
    sharding_for_axis as sharding_for_axis,
)
from .rules import (
    FSDPShardingRule as FSDPShardingRule,
    LogicalAxesRule as LogicalAxesRule,
    MappingShardingRule as MappingShardingRule,
    PolicyShardingRule as PolicyShardingRule,
    ShardingRule as ShardingRule,
    TreePathShardingRule as TreePathShardingRule,
)
from .shard import shard as shard, shard_quietly as shard_quietly, to_host as to_host, unshard as unshard
from .transferring import TransferPlan as TransferPlan, checksums as checksums, remap as remap, transfer as transfer
