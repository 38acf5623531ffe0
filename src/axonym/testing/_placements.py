"""The placements under which a function is compared: drawn meshes and mappings, or the shardings of its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ..core.tree_spec import ARRAYS, is_key
from ..distribution.mesh_axes import AnyMesh, mesh_axes
from ..sharding.leaves import leaves_of
from ..sharding.mapping import ResourceMapping, axis_mapping, normalize_mapping
from ..sharding.meshes import current_mesh
from ..sharding.moving import renew_if_empty
from ..sharding.shard import shard


@dataclasses.dataclass(frozen=True)
class AsPlaced:
    """The shardings that the arguments have, or one device instead."""

    mesh: Mesh | None
    alone: bool = False
    traced_under: AnyPlacement | None = None
    """The placement under which the function is traced, if it is another one. Its program runs here unsharded."""

    def __str__(self) -> str:
        return "the shardings of its arguments"

    def on_one_device(self) -> AsPlaced:
        if self.mesh is None:
            return AsPlaced(None, alone=True)
        return AsPlaced(_mesh_of_one_device(self.mesh.axis_names, self.mesh.axis_types), alone=True)

    def without_mesh(self) -> AsPlaced:
        return _without_mesh(self, self.mesh.axis_names if self.mesh else ())

    def active(self) -> Any:
        return jax.set_mesh(self.mesh) if self.mesh and (self.alone or current_mesh()) else contextlib.nullcontext()

    def place(self, args: Any) -> Any:
        return jax.tree.map(lambda x: self._alone(x) if isinstance(x, ARRAYS) else x, args) if self.alone else args

    def _alone(self, x: Any) -> Any:
        if is_key(x):
            return jax.random.wrap_key_data(self._alone(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        spec = getattr(getattr(x, "sharding", None), "spec", None)
        weak, x = isinstance(x, jax.Array) and x.weak_type, jnp.asarray(np.asarray(renew_if_empty(x)))
        if weak:  # as it was, or it would promote the dtypes of others
            x = jnp.full(x.shape, x.dtype.type().item()).at[...].set(x)
        # On Explicit axes, the spec is part of the type, on one device too.
        explicit = spec is not None and self.mesh is not None and AxisType.Explicit in self.mesh.axis_types
        return jax.device_put(x, spec) if explicit else x


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A mesh and a mapping."""

    mesh: Mapping[str, int]
    explicit: frozenset[str]
    """The mesh axes that are Explicit; the others are Auto."""
    mapping: Mapping[str, tuple[str, ...]]

    @property
    def alone(self) -> bool:
        return math.prod(self.mesh.values()) == 1

    def __str__(self) -> str:
        explicit = f", explicit={self.explicit == set(self.mesh) or sorted(self.explicit)}" if self.explicit else ""
        mapping = {n: axes[0] if len(axes) == 1 else axes for n, axes in self.mapping.items() if axes}
        return f"jax.set_mesh(axn.make_mesh({dict(self.mesh)}{explicit})), axn.axis_mapping({mapping})"

    def make_mesh(self) -> Mesh:
        count = math.prod(self.mesh.values())
        kinds = tuple(AxisType.Explicit if a in self.explicit else AxisType.Auto for a in self.mesh)
        devices = np.array(jax.devices()[:count]).reshape(tuple(self.mesh.values()))
        return Mesh(devices, tuple(self.mesh), axis_types=kinds)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with jax.set_mesh(self.make_mesh()), axis_mapping(self.mapping):
            yield

    def place(self, args: Any) -> Any:
        # Arrays that lie on other devices come from there first, also raw ones, which no mapping places.
        def here(x: Any) -> Any:
            elsewhere = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
            return AsPlaced(None, alone=True).place(x) if elsewhere else x

        args = jax.tree.map(here, args)
        return shard(args) if self.mapping else args

    def without_mesh(self) -> AsPlaced:
        return _without_mesh(self, tuple(self.mesh))

    def smaller(self) -> Iterator[Distribution]:
        """Yield simpler placements: without one entry, on fewer devices, on Auto axes."""
        for name, axes in self.mapping.items():
            for i in range(len(axes)):
                yield dataclasses.replace(self, mapping={**self.mapping, name: axes[:i] + axes[i + 1 :]})
        for axis, size in self.mesh.items():
            for fewer in range(1, size):
                if size % fewer == 0:
                    yield dataclasses.replace(self, mesh={**self.mesh, axis: fewer})
        for axis in sorted(self.explicit):
            yield dataclasses.replace(self, explicit=self.explicit - {axis})


AnyPlacement = Distribution | AsPlaced


def _mesh_of_one_device(names: tuple[str, ...], kinds: tuple[AxisType, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names, axis_types=kinds)


def _without_mesh(placement: AnyPlacement, names: tuple[str, ...]) -> AsPlaced:
    """Return one device, for a program that is traced under a placement."""
    mesh = _mesh_of_one_device(names, (AxisType.Auto,) * len(names)) if names else None
    return AsPlaced(mesh, alone=True, traced_under=placement)


def on_one_device(draw: Draw, axes: Iterable[str], draws: int) -> list[Distribution]:
    """List mappings on one device, where all give the same results, but some may not fit the function."""
    mesh = dict.fromkeys(axes, 1)
    return [Distribution(mesh, frozenset(), dict.fromkeys(draw.sizes, ())), *draw.placements([mesh], draws)]


def mesh_of(args: Any) -> Mesh | None:
    """Return the active mesh, or one on which arguments are sharded."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    meshes = [current_mesh(), *(s.mesh for s in shardings if isinstance(s, NamedSharding))]
    return next((_on_devices(mesh) for mesh in meshes if mesh is not None), None)


def _on_devices(mesh: AnyMesh) -> Mesh:
    """Return a mesh with devices of this machine if it has none."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh.size > jax.device_count():
        raise ValueError(
            f"check_shard_invariance: the mesh {dict(mesh.shape)} has {mesh.size} devices and this process "
            f"{jax.device_count()}. On a CPU, they can be simulated: `jax.config.update('jax_num_cpu_devices', "
            f"{mesh.size})` before JAX starts."
        )
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def under_mapping(mapping: ResourceMapping, mesh: Mesh) -> Distribution:
    """Return the placement that a mapping makes on a mesh."""
    entries = normalize_mapping(mapping, "check_shard_invariance")
    explicit = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
    return Distribution(dict(mesh.shape), frozenset(explicit), {n: mesh_axes(axes) for n, axes in entries.items()})


def is_abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def with_values(args: Any, simple: bool = False) -> Any:
    """Give abstract arrays random values; simple ones are positive, or integers below 2, as roots and indices need."""
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> Any:
        if not is_abstract(x):
            return x
        if is_key(x):
            data = drawn(jax.eval_shape(jax.random.key_data, x))
            impls = list[Any]()
            jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), x)
            found = jax.random.wrap_key_data(data, impl=impls[0])
        elif jnp.issubdtype(x.dtype, jnp.inexact):  # not too large for weights, whose products add up
            sizes = (np.abs(rng.normal(size=x.shape)) + 0.1) / math.sqrt(max(x.shape[1:], default=1))
            signs = [1, -1j] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [1, -1]
            found = jnp.asarray(sizes if simple else sizes * rng.choice(signs, x.shape), x.dtype)
        else:
            most = 2 if simple or x.dtype == bool else min(32, int(jnp.iinfo(x.dtype).max))
            found = jnp.asarray(rng.integers(0, most, x.shape), x.dtype)
        if not isinstance(x.sharding, NamedSharding):
            return found
        return jax.device_put(found, NamedSharding(_on_devices(x.sharding.mesh), x.sharding.spec))

    return jax.tree.map(drawn, args)


def meshes_of_several(axes: Sequence[str]) -> list[dict[str, int]]:
    """List the meshes of several devices whose number divides the number of available devices."""
    devices = jax.device_count()
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = [s for s in itertools.product(divisors, repeat=len(axes)) if devices % math.prod(s) == 0]
    return [dict(zip(axes, shape, strict=True)) for shape in shapes if math.prod(shape) > 1]


class Draw:
    """Draws random placements for given arguments."""

    def __init__(self, args: Any, seed: int):
        self._rng = random.Random(seed)
        arrays = [leaf for leaf in leaves_of(args)[0] if leaf.names]
        self.sizes: dict[str, int] = {}
        """The size that mesh axes must divide for each name: the gcd, since images and kernels can differ in size."""
        for leaf in arrays:
            for n, s in zip(leaf.names or (), leaf.shape or (), strict=True):
                self.sizes[n] = math.gcd(self.sizes.get(n, 0), s)
        self._together = {
            n: {m for leaf in arrays if n in (leaf.names or ()) for m in leaf.names or ()} for n in self.sizes
        }

    def placements(self, meshes: Sequence[Mapping[str, int]], draws: int) -> Iterator[Distribution]:
        """Draw placements whose mesh axes divide the axes mapped to them, and that use each once in an array."""
        for _ in range(draws):
            mesh = self._rng.choice(meshes)
            kinds = self._rng.choice(("auto", "explicit", "mixed"))
            explicit = {a for a in mesh if kinds == "explicit" or (kinds == "mixed" and self._rng.random() < 0.5)}
            useful = [a for a, parts in mesh.items() if parts > 1] or list(mesh)
            mapping: dict[str, tuple[str, ...]] = {}
            for name in self._rng.sample(list(self.sizes), len(self.sizes)):
                taken = {a for other in self._together[name] for a in mapping.get(other, ())}
                free = [a for a in useful if a not in taken]
                # JAX cannot shard one axis over mesh axes of different types.
                pairs = [p for p in itertools.permutations(free, 2) if len(explicit.intersection(p)) != 1]
                candidates = [(), *((a,) for a in free), *pairs]
                fitting = [c for c in candidates if self.sizes[name] % math.prod(mesh[a] for a in c) == 0]
                mapping[name] = self._rng.choice(fitting)
            yield Distribution(mesh, frozenset(explicit), mapping)
