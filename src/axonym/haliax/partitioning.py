"""Distributing by name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh as Mesh, NamedSharding, PartitionSpec

from .. import shard_map as _shard_map, sharding as _sharding
from ..axis import AxisSelection
from ..named_array import NamedArray, raw
from ..sharding import (
    PhysicalAxisSpec as PhysicalAxisSpec,
    Placement,
    ResourceMapping as ResourceMapping,
    current_mapping,
    current_mesh,
    physical_axis_name as physical_axis_name,
    physical_axis_size as physical_axis_size,
    pspec_for_axis as pspec_for_axis,
    round_axis_for_partitioning as round_axis_for_partitioning,
    set_mesh as set_mesh,
    sharding_for_axis as sharding_for_axis,
)
from ._signatures import with_parameters
from .jax_utils import is_in_jit
from .util import StringHolderEnum

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

MeshLike: TypeAlias = Mesh | AbstractMesh
"""A mesh, with devices or without."""

current_thread_local_mapping = current_mapping
mesh_context = set_mesh


def axis_mapping(mapping: ResourceMapping, *, merge: bool = False, **kwargs: PhysicalAxisSpec | None) -> Any:
    """Activate a mapping as `axonym.axis_mapping` does; in jit, an axis that the mesh does not divide is replicated.

    >>> with hax.axis_mapping({"batch": "data"}, merge=True, embed="model"):
    ...     hax.partitioning.current_thread_local_mapping()
    {'batch': 'data', 'embed': 'model'}
    """
    return _sharding.axis_mapping(mapping, merge=merge, **{"uneven": "replicate", **dict[str, Any](kwargs)})


@functools.wraps(_sharding.named_jit, assigned=("__name__", "__qualname__", "__doc__"))
def _lenient_jit(*args: Any, **kwargs: Any) -> Any:
    return _sharding.named_jit(*args, **{"uneven": "replicate", **kwargs})


named_jit = with_parameters(
    _lenient_jit, mapping="axis_resources", in_placement="in_axis_resources", out_placement="out_axis_resources"
)


class WrappedCallable(Protocol[P, R_co]):
    """The type of the functions that `named_jit` makes."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered: ...


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
    REPLICA_DCN = "replica_dcn"
    CONTEXT = "context"


def _get_mesh() -> MeshLike | None:
    """Return the active mesh: user code calls this function, although its name begins with an underscore."""
    warnings.warn("_get_mesh: `axonym.current_mesh` is public.", DeprecationWarning, stacklevel=2)
    return current_mesh()


def shard(x: T, mapping: ResourceMapping | None = None, mesh: MeshLike | None = None) -> T:
    """Shard every array of a tree as `axonym.shard` does; without a mapping or a mesh, warn and do nothing.

    In jit, an axis that the mesh does not divide is replicated, with a warning.

    >>> mesh = axn.make_mesh({"data": -1})
    >>> hax.shard(x=hax.ones({"batch": 16}), mapping={"batch": "data"}, mesh=mesh).array.sharding.spec
    P('data',)
    """
    missing = "mapping" if mapping is None and current_mapping() is None else "mesh"
    if missing == "mapping" or (mesh is None and current_mesh() is None):
        if not is_in_jit():
            warnings.warn(f"shard: no {missing} is active, so nothing is sharded.", RuntimeWarning, stacklevel=2)
        return x
    with _sharding.axis_mapping(merge=True, uneven="replicate"):
        return _sharding.shard(x, mapping, mesh)


shard_with_axis_mapping = shard


def fsdp(*args: Any, fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Compile a step as `axonym.fsdp` does; the function may be given by keyword, too.

    >>> step = hax.fsdp(fn=lambda w: w * 2, parameter_mapping={"embed": "data"}, compute_mapping={})
    >>> with hax.set_mesh(axn.make_mesh({"data": -1})):
    ...     step(hax.ones({"embed": 16})).array.sharding.spec
    P('data',)
    """
    kwargs = {"uneven": "replicate", **kwargs}
    return _sharding.fsdp(*args, **kwargs) if fn is None else _sharding.fsdp(fn, *args, **kwargs)


def pspec_for(
    tree: Any, resource_mapping: ResourceMapping | None = None, preserve_existing_shardings: bool = True
) -> Any:
    """Return the partition spec of every array, in the structure of the tree.

    Raw arrays are replicated, unless their field has `axis_names`. With `preserve_existing_shardings`, the spec is None
    for arrays with names outside of jit, and for others with a `NamedSharding`: these arrays keep their sharding.

    >>> tree = {"raw": jnp.ones(2), "w": hax.ones({"embed": 2})}
    >>> hax.partitioning.pspec_for(tree, {"embed": "model"}, preserve_existing_shardings=False)
    {'raw': P(None,), 'w': P('model',)}
    """
    mapping = _required_mapping("pspec_for", resource_mapping)

    def ask(left: Any) -> Any:
        return _sharding.pspec_for(left, mapping, False)

    return _of_leaves(tree, ask, lambda kept: None, lambda spec: spec, preserve_existing_shardings)


def infer_resource_partitions(
    tree: Any,
    resource_mapping: ResourceMapping | None = None,
    preserve_existing_shardings: bool = True,
    mesh: MeshLike | None = None,
) -> Any:
    """Return the sharding of every array, in the structure of the tree: by `pspec_for`, or else the array's own.

    >>> tree = {"raw": jnp.ones(2), "w": hax.ones({"embed": 2})}
    >>> mesh = axn.make_mesh({"data": 1})
    >>> hax.partitioning.infer_resource_partitions(tree, {"embed": "data"}, False, mesh)["w"].spec
    P('data',)
    """
    mapping = _required_mapping("infer_resource_partitions", resource_mapping)
    # The active mesh by default, or an error.
    mesh_here: MeshLike = _sharding.infer_resource_partitions(jnp.ones(()), PartitionSpec(), mesh=mesh).mesh

    def ask(left: Any) -> Any:
        return _sharding.infer_resource_partitions(left, mapping, False, mesh_here)

    def replicated(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh_here, spec)

    return _of_leaves(tree, ask, lambda kept: kept, replicated, preserve_existing_shardings)


def _required_mapping(what: str, mapping: ResourceMapping | None) -> ResourceMapping:
    mapping = current_mapping() if mapping is None else mapping
    if mapping is None:
        raise ValueError(f"{what}: no mapping is active. Use `axis_mapping`, or pass one.")
    return mapping


def _of_leaves(
    tree: Any,
    ask: Callable[[Any], Any],
    of_kept: Callable[[Any], Any],
    of_raw: Callable[[PartitionSpec], Any],
    preserve: bool,
) -> Any:
    """Apply `ask` to arrays with names, `of_kept` to preserved shardings, and `of_raw` to everything else."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, NamedArray))

    def answers(tree: Any, ask: Callable[[Any], Any]) -> list[Any]:
        return jax.tree.leaves(ask(tree), is_leaf=lambda x: x is None)

    with_names = [spec is not None for spec in answers(tree, lambda tree: _sharding.pspec_for(tree, {}, False))]
    kept = [_existing(x, named) if preserve else None for x, named in zip(leaves, with_names, strict=True)]
    # `ask` gets an object in place of the leaves that are answered here.
    left = [x if n and k is None else object() for x, n, k in zip(leaves, with_names, kept, strict=True)]
    asked = answers(jax.tree.unflatten(structure, left), ask)

    def result(leaf: Any, kept: Any, answer: Any) -> Any:
        if kept is not None:
            return of_kept(kept)
        is_array = hasattr(leaf, "shape") or isinstance(leaf, (int, float, complex))
        if answer is not None or isinstance(leaf, NamedArray) or not is_array:
            return answer
        return of_raw(PartitionSpec(None) if jnp.ndim(leaf) else PartitionSpec())

    return jax.tree.unflatten(structure, [result(*of_leaf) for of_leaf in zip(leaves, kept, asked, strict=True)])


def _existing(leaf: Any, named: bool) -> Any:
    array = raw(leaf)
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    return sharding if named or isinstance(sharding, NamedSharding) else None


def auto_sharded(x: T, mesh: MeshLike | None = None) -> T:
    """Shard a tree by the active mapping; without one, return it as it is.

    >>> hax.auto_sharded(hax.ones({"batch": 2}))
    NamedArray(float32[batch=2], [1. 1.])
    """
    return x if current_mapping() is None else shard(x, None, mesh)


def all_mesh_axes_explicit(mesh: MeshLike | None, pspec: PartitionSpec | None) -> bool:
    """Return whether all mesh axes that a partition spec mentions are Explicit; false without one of the two.

    >>> mesh = axn.make_mesh({"data": 1, "model": 1}, explicit="data")
    >>> [hax.partitioning.all_mesh_axes_explicit(mesh, jax.P(axis)) for axis in ("data", "model")]
    [True, False]
    """
    if mesh is None or pspec is None:
        return False
    entries = [e for e in pspec if e is not None and e is not PartitionSpec.UNCONSTRAINED]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [axis for e in entries for axis in ((e,) if isinstance(e, str) else e)]
    return all(types.get(axis) == AxisType.Explicit for axis in axes if axis in types)


def get_pspec_for_manual_mesh(
    axis: AxisSelection, mapping: ResourceMapping | None = None, *, mesh: MeshLike | None = None
) -> PartitionSpec | None:
    """Return the partition spec of axes if all its mesh axes are Explicit, as the `out_sharding` of JAX needs; or None.

    >>> mesh = axn.make_mesh({"data": 1}, explicit=True)
    >>> hax.partitioning.get_pspec_for_manual_mesh("batch", {"batch": "data"}, mesh=mesh)
    P('data',)
    """
    mesh, spec = current_mesh() if mesh is None else mesh, pspec_for_axis(axis, mapping)
    return spec if all_mesh_axes_explicit(mesh, spec) else None


def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    in_specs: Placement = None,
    out_specs: Placement = None,
    mesh: MeshLike | None = None,
    axis_mapping: ResourceMapping | None = None,
    check_rep: bool = False,
    **shmap_kwargs: Any,
) -> Any:
    """Run a function per device as `axonym.shard_map` does, which finds the specs that are not given.

    `check_rep` is the `check_vma` of JAX. Without the function, this is a decorator.

    >>> @hax.shard_map(mesh=axn.make_mesh({"data": -1}), axis_mapping={"batch": "data"})
    ... def double(x):
    ...     return x * 2
    >>> double(hax.ones({"batch": 16})).array.sharding.spec
    P('data',)
    """
    options = {"check_vma": check_rep, **shmap_kwargs}
    return _shard_map(f, mesh=mesh, mapping=axis_mapping, in_specs=in_specs, out_specs=out_specs, **options)
