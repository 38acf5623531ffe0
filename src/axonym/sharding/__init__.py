"""Where the arrays of a tree go: mappings, meshes, placements, rules, and what is compiled with them."""

from .annotations import (
    sharding_annotations as sharding_annotations,
    with_sharding_annotation as with_sharding_annotation,
    with_sharding_constraint as with_sharding_constraint,
)
from .helper import (
    MeshShardingHelper as MeshShardingHelper,
    get_global_mesh as get_global_mesh,
    get_global_mesh_helper as get_global_mesh_helper,
)
from .placement import Leaf as Leaf
from .rules import (
    FSDPShardingRule as FSDPShardingRule,
    MappingShardingRule as MappingShardingRule,
    PolicyShardingRule as PolicyShardingRule,
    ShardingRule as ShardingRule,
    TreePathShardingRule as TreePathShardingRule,
    match_sharding_rule as match_sharding_rule,
)
from .sjit import ShardedJit as ShardedJit, sjit as sjit
