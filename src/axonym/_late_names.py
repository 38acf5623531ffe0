"""Public names whose modules load when one of them is first used; `axonym` has them all.

The modules imported here need more than named arrays and operations on them. Submodules such as `axonym.nn` are not
imported here: each of them loads by itself.
"""

from ._xarray import (
    Coordinates as Coordinates,
    Labelled as Labelled,
    from_xarray as from_xarray,
    groups as groups,
    to_xarray as to_xarray,
)
from .core import stability as _stability
from .core.module_field import field as field
from .custom_partitioning._top_k import top_k as top_k
from .custom_partitioning.decorator import partitioned as partitioned
from .manual.collectives import (
    MeshAxis as MeshAxis,
    all_gather as all_gather,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_offset as axis_offset,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    ppermute as ppermute,
    psum as psum,
    psum_scatter as psum_scatter,
    pvary as pvary,
    shift as shift,
)
from .manual.shard_map import shard_map as shard_map
from .manual.stencils import map_overlap as map_overlap, rolling as rolling, stencil as stencil
from .ref import NamedRef as NamedRef, freeze as freeze, get as get, new_ref as new_ref, swap as swap
from .sharding.jit import fsdp as fsdp, named_jit as named_jit
from .sharding.mapping import axis_mapping as axis_mapping, current_mapping as current_mapping, in_context as in_context
from .sharding.meshes import current_mesh as current_mesh, make_mesh as make_mesh, set_mesh as set_mesh
from .sharding.queries import lint_mapping as lint_mapping
from .sharding.shard import shard as shard, to_host as to_host, unshard as unshard
from .sharding.transferring import remap as remap, transfer as transfer
from .transforms.control import cond as cond, fori_loop as fori_loop, switch as switch, while_loop as while_loop
from .transforms.derivatives import (
    grad as grad,
    hessian as hessian,
    jacobian as jacobian,
    value_and_grad as value_and_grad,
)
from .transforms.lift import lift as lift
from .transforms.rematerialization import (
    ScanCheckpointPolicy as ScanCheckpointPolicy,
    tree_checkpoint_name as tree_checkpoint_name,
)
from .transforms.scan import associative_scan as associative_scan, fold as fold, map as map, scan as scan
from .transforms.vmap import vmap as vmap

_stability.note_changes(globals())
