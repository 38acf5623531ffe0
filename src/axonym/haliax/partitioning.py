"""Distributing by name."""

# ruff: noqa: I001
# fmt: off
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import sharding as _sharding
from ..sharding import (
    PhysicalAxisSpec as PhysicalAxisSpec, ResourceMapping as ResourceMapping,
    axis_mapping as axis_mapping, current_mapping, current_mesh,
    physical_axis_name as physical_axis_name, physical_axis_size as physical_axis_size,
    pspec_for_axis as pspec_for_axis, round_axis_for_partitioning as round_axis_for_partitioning, set_mesh as set_mesh,
    sharding_for_axis as sharding_for_axis,
)
from ..named_array import NamedArray
from ..sharding.meshes import AnyMesh, required_mesh, with_devices
from ..sharding.placement import present_sharding
from ._signatures import with_parameters
from .util import StringHolderEnum
# fmt: on

T = TypeVar("T")

current_thread_local_mapping = current_mapping
mesh_context = set_mesh
named_jit = with_parameters(
    _sharding.named_jit, mapping="axis_resources", in_placement="in_axis_resources", out_placement="out_axis_resources"
)


class ResourceAxis(metaclass=StringHolderEnum):
    """The usual names of mesh axes, as strings; a class of your own may add to them.

    >>> class Axes(hax.partitioning.ResourceAxis):
    ...     EXPERT = "expert"
    >>> Axes.DATA, Axes.EXPERT
    ('data', 'expert')
    """

    MODEL = "model"
    DATA = "data"
    REPLICA = "replica"


def _get_mesh() -> AnyMesh | None:
    """Return the active mesh: user code calls this function, although its name begins with an underscore."""
    warnings.warn("_get_mesh: `axonym.current_mesh` is public.", DeprecationWarning, stacklevel=2)
    return current_mesh()


def shard(x: T, mapping: ResourceMapping | None = None, mesh: AnyMesh | None = None) -> T:
    """Shard every array of a tree as `axonym.shard` does; without a mapping or a mesh, warn and do nothing.

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

    >>> step = hax.fsdp(fn=lambda w: w * 2, parameter_mapping={"embed": "data"}, compute_mapping={})
    >>> with hax.set_mesh(axn.make_mesh({"data": -1})):
    ...     step(hax.ones({"embed": 16})).array.sharding.spec
    P('data',)
    """
    return _sharding.fsdp(*args, **kwargs) if fn is None else _sharding.fsdp(fn, *args, **kwargs)


def pspec_for(
    tree: Any, resource_mapping: ResourceMapping | None = None, preserve_existing_shardings: bool = True
) -> Any:
    """Return the partition spec of every array, in the structure of the tree; raw arrays are replicated.

    With `preserve_existing_shardings`, the spec is None for named arrays outside of jit, and for raw ones with a
    `NamedSharding`: these arrays keep their sharding.

    >>> tree = {"raw": jnp.ones(2), "w": hax.ones({"embed": 2})}
    >>> hax.partitioning.pspec_for(tree, {"embed": "model"}, preserve_existing_shardings=False)
    {'raw': P(None,), 'w': P('model',)}
    """
    mapping = _required_mapping("pspec_for", resource_mapping)

    def ask(left: list[Any]) -> list[Any]:
        return _sharding.pspec_for(left, mapping, False)

    return _of_leaves(tree, ask, lambda kept: None, lambda spec: spec, preserve_existing_shardings)


def infer_resource_partitions(
    tree: Any,
    resource_mapping: ResourceMapping | None = None,
    preserve_existing_shardings: bool = True,
    mesh: AnyMesh | None = None,
) -> Any:
    """Return the sharding of every array, in the structure of the tree; raw arrays are replicated.

    With `preserve_existing_shardings`, named arrays outside of jit, and raw ones with a `NamedSharding`, keep their
    sharding.

    >>> tree = {"raw": jnp.ones(2), "w": hax.ones({"embed": 2})}
    >>> mesh = axn.make_mesh({"data": 1})
    >>> hax.partitioning.infer_resource_partitions(tree, {"embed": "data"}, False, mesh)["w"].spec
    P('data',)
    """
    mapping = _required_mapping("infer_resource_partitions", resource_mapping)
    mesh = with_devices(required_mesh("infer_resource_partitions", mesh))

    def ask(left: list[Any]) -> list[Any]:
        return _sharding.infer_resource_partitions(left, mapping, False, mesh)

    def replicated(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    return _of_leaves(tree, ask, lambda kept: kept, replicated, preserve_existing_shardings)


def _required_mapping(what: str, mapping: ResourceMapping | None) -> ResourceMapping:
    mapping = current_mapping() if mapping is None else mapping
    if mapping is None:
        raise ValueError(f"{what}: no mapping is active. Use `axis_mapping`, or pass one.")
    return mapping


def _of_leaves(
    tree: Any,
    ask: Callable[[list[Any]], list[Any]],
    of_kept: Callable[[Any], Any],
    of_raw: Callable[[PartitionSpec], Any],
    preserve: bool,
) -> Any:
    """Apply `ask` to named arrays, `of_kept` to preserved shardings, and `of_raw` to everything else."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, NamedArray))
    kept = [_existing(leaf) if preserve else None for leaf in leaves]
    # `ask` gets None in place of the leaves that are answered here.
    asked = ask([x if isinstance(x, NamedArray) and k is None else None for x, k in zip(leaves, kept, strict=True)])

    def result(leaf: Any, kept: Any, answer: Any) -> Any:
        if kept is not None:
            return of_kept(kept)
        if isinstance(leaf, NamedArray) or (not hasattr(leaf, "shape") and not isinstance(leaf, (int, float, complex))):
            return answer
        return of_raw(PartitionSpec(None) if jnp.ndim(leaf) else PartitionSpec())

    return jax.tree.unflatten(structure, [result(*of_leaf) for of_leaf in zip(leaves, kept, asked, strict=True)])


def _existing(leaf: Any) -> Any:
    sharding = present_sharding(leaf)
    return sharding if isinstance(leaf, NamedArray) or isinstance(sharding, NamedSharding) else None


def auto_sharded(x: T, mesh: AnyMesh | None = None) -> T:
    """Shard a tree by the active mapping; without one, return it as it is.

    >>> hax.auto_sharded(hax.ones({"batch": 2}))
    NamedArray(float32[batch=2], [1. 1.])
    """
    return x if current_mapping() is None else shard(x, None, mesh)
