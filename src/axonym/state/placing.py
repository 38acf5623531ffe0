"""From lazy arrays to arrays on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _context, _errors
from ..array import NamedArray, is_named_array, wrap
from ..jax_utils import is_jax_array_like
from ..sharding.meshes import AnyMesh, current_mesh, required_mesh, with_devices
from ..sharding.placement import Leaf, Placement, leaves_of, listed, resolve, shardings_in
from ..sharding.shard import in_trace, shard
from .lazy import LazyArray, abstract, is_absent, is_on_device, whole

T = TypeVar("T")


def placed(tree: T, template: T, placement: Placement, mesh: AnyMesh | None, what: str) -> T:
    """The tree with JAX arrays in place of its lazy ones.

    Arguments:
        tree: a tree with lazy arrays.
        template: the tree that was asked for, which has the arrays that are not there.
        placement: where the arrays go.
        mesh: the mesh; that in force by default.
        what: the operation, for messages.
    """
    values, structure = jax.tree.flatten(tree, is_leaf=is_named_array)
    leaves = shardings_of(_mapped(abstract, tree), template, placement, mesh, what)
    results, problems = [], []
    for value, (leaf, mine, sharding) in zip(values, leaves, strict=True):
        array = value.array if isinstance(value, NamedArray) else value
        if isinstance(array, LazyArray) and is_absent(array):
            if not has_values(mine):
                problems.append(no_value(leaf.path))
            value = mine
        results.append(value if problems else _put(leaf, value, sharding))
    if problems:
        raise ValueError(listed(what, problems, None))
    return jax.tree.unflatten(structure, results)


def shardings_of(
    tree: Any, template: Any, placement: Placement, mesh: AnyMesh | None, what: str
) -> list[tuple[Leaf, Any, NamedSharding | None]]:
    """The leaves of a tree, each with the leaf of the template that it is for, and with where it goes.

    Arguments:
        tree: a tree with abstract arrays.
        template: the tree that was asked for. It says where arrays go of which the placement says nothing.
        placement: where the arrays go.
        mesh: the mesh; that in force by default.
        what: the operation, for messages.
    """
    if placement is not None and not shardings_in(placement):
        mesh = required_mesh(what, mesh)
    mesh = current_mesh() if mesh is None else mesh
    mesh = None if mesh is None else with_devices(mesh)
    if placement is None and (mesh is None or _context.mapping_in_force() is None):
        leaves, structure = leaves_of(tree)
    else:
        leaves, structure = resolve(tree, placement, mesh, what)
    own, own_structure = jax.tree.flatten(template, is_leaf=is_named_array)
    if own_structure != structure:  # a method of the model gave a tree of another kind
        own = [None] * len(leaves)
    return [(leaf, mine, _sharding(leaf, mine, mesh)) for leaf, mine in zip(leaves, own, strict=True)]


def _mapped(fn: Callable[[LazyArray], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: fn(x) if isinstance(x, LazyArray) else x, tree)


def has_values(x: Any) -> bool:
    """Whether a leaf is an array that is more than a shape and a dtype."""
    array = x.array if isinstance(x, NamedArray) else x
    return is_jax_array_like(array) and not isinstance(array, jax.ShapeDtypeStruct)


def no_value(path: str) -> str:
    """Why a leaf cannot stay as it is."""
    return f"{path} is missing, and the tree has only its shape and dtype."


def _sharding(leaf: Leaf, mine: Any, mesh: AnyMesh | None) -> NamedSharding | None:
    mesh = mesh if leaf.mesh is None else leaf.mesh
    if leaf.spec is not None and mesh is not None:
        return NamedSharding(mesh, leaf.spec)
    if getattr(mine, "names", None) != getattr(leaf.value, "names", None):  # the axes are in another order
        return None
    array = mine.array if isinstance(mine, NamedArray) else mine
    has = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    if not isinstance(has, NamedSharding):
        return None
    if isinstance(has.mesh, AbstractMesh):  # as `jax.eval_shape` gives it on Explicit mesh axes
        return NamedSharding(mesh, has.spec) if mesh is not None and mesh.abstract_mesh == has.mesh else None
    return has


def _put(leaf: Leaf, value: Any, sharding: NamedSharding | None) -> Any:
    if isinstance(value, NamedArray):
        return wrap(_put_array(leaf, value.array, sharding), value.names)
    return _put_array(leaf, value, sharding)


def _put_array(leaf: Leaf, x: Any, sharding: NamedSharding | None) -> Any:
    if isinstance(x, LazyArray):
        if sharding is not None and not is_on_device(x) and not in_trace():
            return _read_by_device(leaf, x, sharding)
        x = jnp.asarray(whole(x))
    if sharding is None or not is_jax_array_like(x):
        return x
    return shard(x, sharding.spec, sharding.mesh)


def _read_by_device(leaf: Leaf, x: LazyArray, sharding: NamedSharding) -> jax.Array:
    """An array of which each device of this process is given its part. A part that several have is read once."""
    if not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"{leaf.path}: mesh {_errors.describe_shape(sharding.mesh.shape)} has no devices to which arrays could go. "
            "Pass the mesh, or use jax.set_mesh."
        )
    users: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(x.shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index or (), x.shape, strict=True))
        users.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in users.items():
        part: np.ndarray = x.read(tuple(slice(*b) for b in bounds))
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
