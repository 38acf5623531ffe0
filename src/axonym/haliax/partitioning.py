"""Distributing by name."""

# ruff: noqa: I001
# fmt: off
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from .. import sharding as _sharding
from ..sharding import (
    PhysicalAxisSpec as PhysicalAxisSpec, ResourceAxis as ResourceAxis, ResourceMapping as ResourceMapping,
    axis_mapping as axis_mapping, current_mapping, current_mesh,
    infer_resource_partitions as infer_resource_partitions, named_jit as named_jit,
    physical_axis_name as physical_axis_name, physical_axis_size as physical_axis_size, pspec_for as pspec_for,
    pspec_for_axis as pspec_for_axis, round_axis_for_partitioning as round_axis_for_partitioning, set_mesh as set_mesh,
    sharding_for_axis as sharding_for_axis,
)
from ..sharding.meshes import AnyMesh
from ..sharding.shard import shard_quietly
# fmt: on

T = TypeVar("T")

current_thread_local_mapping = current_mapping
mesh_context = set_mesh


def _get_mesh() -> AnyMesh | None:
    """Return the active mesh: code reaches for this name, although it begins with an underscore."""
    return current_mesh()


def shard(x: T, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None) -> T:
    """Put every array of a tree where the mapping says; without a mapping or a mesh, warn and do nothing.

    Arguments:
        x: the tree to place.
        mapping: the mapping, or whatever else `axonym.shard` takes; the active one by default.
        mesh: the mesh; the active one by default.

    >>> import axonym.haliax as hax
    >>> mesh = axn.make_mesh({"data": -1})
    >>> hax.shard(x=hax.ones({"batch": 16}), mapping={"batch": "data"}, mesh=mesh).array.sharding.spec
    P('data',)
    """
    missing = "mapping" if mapping is None and current_mapping() is None else "mesh"
    if missing == "mapping" or (mesh is None and current_mesh() is None):
        warnings.warn(f"shard: no {missing} is active, so nothing is sharded.", RuntimeWarning, stacklevel=2)
        return x
    return _sharding.shard(x, mapping, mesh)


shard_with_axis_mapping = shard


def fsdp(*args: Any, fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Compile a step as `axonym.fsdp` does; the function may be given by keyword, too.

    >>> import axonym.haliax as hax
    >>> step = hax.fsdp(fn=lambda w: w * 2, parameter_mapping={"embed": "data"}, compute_mapping={})
    >>> with hax.set_mesh(axn.make_mesh({"data": -1})):
    ...     step(hax.ones({"embed": 16})).array.sharding.spec
    P('data',)
    """
    return _sharding.fsdp(*args, **kwargs) if fn is None else _sharding.fsdp(fn, *args, **kwargs)


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
