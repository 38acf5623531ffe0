"""Read lazy arrays into JAX arrays, each device its own shard.

`shardings_of` resolves the placement of a tree that is loaded: an array that the placement does not cover takes the
sharding of the template's array.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..core import errors
from ..distribution import active_settings
from ..distribution.padded_array import PaddedArray, padded_array, stored, with_padding
from ..named_array import is_jax_array_like, raw, wrap_like
from ..sharding.leaves import Leaf, is_placed_whole, leaves_of
from ..sharding.meshes import AnyMesh, current_mesh, in_trace, required_mesh, with_devices
from ..sharding.placement import Placement, list_problems, present_sharding, resolve, shardings_in
from ..sharding.shard import padded_shape, shard
from .lazy_arrays import (
    LazyArray,
    has_missing,
    is_missing,
    is_on_device,
    read_all,
    with_abstract_arrays,
    with_missing_from,
)

T = TypeVar("T")


def read_sharded(tree: T, template: T, placement: Placement, mesh: AnyMesh | None, what: str) -> T:
    """Replace the lazy arrays of a tree with JAX arrays; if one was not found, keep its value in the template."""
    values, structure = jax.tree.flatten(tree, is_leaf=is_placed_whole)
    leaves = shardings_of(with_abstract_arrays(tree), template, placement, mesh, what)
    results, problems = [], []
    for value, (leaf, mine, sharding) in zip(values, leaves, strict=True):
        array = raw(value)
        if isinstance(array, LazyArray) and has_missing(array):
            own = raw(mine)
            if not has_values(mine):
                problems.append(no_value(leaf.path))
            same_axes = getattr(mine, "names", None) == getattr(value, "names", None)
            if same_axes and isinstance(own, (jax.Array, np.ndarray)) and not is_missing(array):
                value = wrap_like(with_missing_from(own, array), value)  # such as one layer of several
            else:
                value = mine
        # After a problem nothing more is read, but the other problems are still found.
        if not problems:
            x = raw(value)
            if isinstance(x, LazyArray) and sharding is not None and not is_on_device(x) and not in_trace():
                x = _read_by_device(leaf, x, sharding)
            else:
                x = jnp.asarray(read_all(x)) if isinstance(x, LazyArray) else x
                if sharding is not None and is_jax_array_like(x):  # whether it may pad was decided with the sharding
                    x = shard(x, sharding.spec, sharding.mesh, uneven="pad")
            value = wrap_like(x, value)
        results.append(value)
    if problems:
        raise ValueError(list_problems(what, problems, None))
    return jax.tree.unflatten(structure, results)


def shardings_of(
    tree: Any, template: Any, placement: Placement, mesh: AnyMesh | None, what: str
) -> list[tuple[Leaf, Any, NamedSharding | None]]:
    """Return the leaves of a tree of abstract arrays, each with the matching leaf of the template and its sharding.

    Arrays that the placement does not cover have the sharding that they have in the template.
    """
    if placement is not None and not shardings_in(placement):
        mesh = required_mesh(what, mesh)
    mesh = current_mesh() if mesh is None else mesh
    mesh = None if mesh is None else with_devices(mesh)
    if placement is None and (mesh is None or not active_settings.active_mapping()):
        leaves, structure = leaves_of(tree)
    else:
        leaves, structure = resolve(tree, placement, mesh, what, pads=True)
    own, own_structure = jax.tree.flatten(template, is_leaf=is_placed_whole)
    if own_structure != structure:  # a module's own `from_state_dict` returned another structure
        own = [None] * len(leaves)
    return [(leaf, mine, _wanted_sharding(leaf, mine, mesh)) for leaf, mine in zip(leaves, own, strict=True)]


def has_values(x: Any) -> bool:
    """Return whether a leaf is an array with values, not only a shape and a dtype."""
    array = stored(raw(x))
    return is_jax_array_like(array) and not isinstance(array, jax.ShapeDtypeStruct)


def no_value(path: str) -> str:
    """Say that a missing leaf has no value in the tree either."""
    return f"{path} is missing, and the tree has only its shape and dtype."


def _wanted_sharding(leaf: Leaf, mine: Any, mesh: AnyMesh | None) -> NamedSharding | None:
    mesh = mesh if leaf.mesh is None else leaf.mesh
    if leaf.spec is not None and mesh is not None:
        return NamedSharding(mesh, leaf.spec)
    if getattr(mine, "names", None) != getattr(leaf.value, "names", None):  # its axes are in another order
        return None
    has = present_sharding(mine)
    if not isinstance(has, NamedSharding):
        return None
    if isinstance(has.mesh, AbstractMesh):  # as `jax.eval_shape` leaves it on Explicit mesh axes
        return NamedSharding(mesh, has.spec) if mesh is not None and mesh.abstract_mesh == has.mesh else None
    return has


def stored_shape(shape: tuple[int, ...], sharding: NamedSharding | None) -> tuple[int, ...]:
    """Return the shape of an array with the padding that it needs for a sharding."""
    return shape if sharding is None else padded_shape(shape, sharding.spec, sharding.mesh)


def _read_by_device(leaf: Leaf, x: LazyArray, sharding: NamedSharding) -> jax.Array | PaddedArray:
    """Make a sharded array by reading each local device's shard; a shard that several devices hold is read once.

    One shard is in host memory at a time: it is on its devices before the next one is read.
    """
    if not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"{leaf.path}: mesh {errors.describe_shape(sharding.mesh.shape)} is abstract: it has no devices to load "
            "arrays to. Pass a concrete mesh, or use jax.set_mesh."
        )
    users: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    shape = stored_shape(x.shape, sharding)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        users.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in users.items():
        within = [(min(start, size), min(end, size)) for (start, end), size in zip(bounds, x.shape, strict=True)]
        values: np.ndarray = x.read(tuple(slice(*b) for b in within))
        values = with_padding(values, [end - start for start, end in bounds])
        shards += jax.block_until_ready([jax.device_put(values, device) for device in devices])
        del values
    made = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return made if shape == x.shape else padded_array(made, x.shape)
