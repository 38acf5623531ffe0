"""Where the arrays of a tree go: mappings, meshes, placements, rules, and what is compiled with them."""

from .annotations import (
    sharding_annotations as sharding_annotations,
    with_sharding_annotation as with_sharding_annotation,
)
from .loading import from_process_local_data as from_process_local_data
from .placement import Leaf as Leaf
from .rules import (
    FSDPShardingRule as FSDPShardingRule,
    MappingShardingRule as MappingShardingRule,
    PolicyShardingRule as PolicyShardingRule,
    ShardingRule as ShardingRule,
    TreePathShardingRule as TreePathShardingRule,
)
