"""`MeshShardingHelper`: a mesh, and what is done with rules on it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _errors
from ..array import NamedArray, wrap
from ..axis import name_of
from .mapping import Entered
from .meshes import full_sizes
from .placement import Leaf, Placement, leaves_of, listed, resolve
from .rules import match_sharding_rule
from .shard import shard, to_host, unshard
from .sjit import ShardedJit, mesh_in_force

_HELPERS: contextvars.ContextVar[tuple[MeshShardingHelper, ...]] = contextvars.ContextVar("helpers", default=())


class MeshShardingHelper:
    """A mesh with `sjit` and the other ways to place trees on it. `with helper:` puts its mesh in force.

    >>> helper = axn.sharding.MeshShardingHelper([-1, 2], ["data", "model"])
    >>> double = helper.sjit(lambda x: x * 2, out_shardings=jax.P("model"))
    >>> double(jnp.ones(4)).sharding.spec
    P('model',)
    """

    def __init__(
        self,
        axis_dims: Sequence[int],
        axis_names: Sequence[str],
        mesh_axis_splitting: bool = False,
        *,
        explicit: bool = False,
    ):
        """Arguments:
        axis_dims: the size of each mesh axis. One of them can be -1: what the others leave of the devices.
        axis_names: the mesh axes.
        mesh_axis_splitting: a mesh axis may cut through a dimension of the physical network of the devices.
        explicit: make the axes Explicit, so that shardings are part of types; they are Auto by default.
        """
        if len(axis_dims) != len(axis_names):
            raise ValueError(
                f"MeshShardingHelper: {len(axis_dims)} sizes {tuple(axis_dims)} for {len(axis_names)} mesh axes "
                f"{tuple(axis_names)}."
            )
        sizes = full_sizes(dict(zip(axis_names, axis_dims, strict=True)), jax.device_count(), "MeshShardingHelper")
        shape = tuple(sizes.values())
        devices = mesh_utils.create_device_mesh(
            shape, devices=jax.devices()[: int(np.prod(shape))], allow_split_physical_axes=mesh_axis_splitting
        )
        kind = AxisType.Explicit if explicit else AxisType.Auto
        self.mesh = Mesh(devices, tuple(axis_names), axis_types=(kind,) * len(shape))
        self._entered = Entered()

    # --- the mesh in force ---

    def __enter__(self) -> MeshShardingHelper:
        stack = contextlib.ExitStack()
        stack.enter_context(mesh_in_force(self.mesh))
        token = _HELPERS.set((*_HELPERS.get(), self))
        stack.callback(_HELPERS.reset, token)
        self._entered.blocks.append(stack)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.blocks.pop().__exit__(*raised)

    @staticmethod
    def get_global_mesh() -> Mesh | None:
        """The mesh of the innermost helper entered, or None: see `get_global_mesh`.

        >>> with axn.sharding.MeshShardingHelper([2], ["data"]) as helper:
        ...     axn.sharding.MeshShardingHelper.get_global_mesh() is helper.mesh
        True
        """
        return get_global_mesh()

    # --- compiled functions ---

    def sjit(
        self,
        fun: Callable[..., Any] | None = None,
        in_shardings: Placement = None,
        out_shardings: Placement = None,
        static_argnums: int | Sequence[int] | None = None,
        args_sharding_constraint: Placement = None,
        annotation_shardings: Mapping[str, Placement] | None = None,
        **jit_arguments: Any,
    ) -> Any:
        """`axonym.sharding.sjit` on the mesh of this helper.

        Arguments:
            fun: the function. Without it, this is a decorator.
            in_shardings: where the arguments go: a tuple with a placement for each positional parameter that is not
                static, a dictionary with some by parameter, or one placement for all. By default they stay where they
                are.
            out_shardings: where the results go. None leaves it to the compiler.
            static_argnums: the positional arguments that are part of the program.
            args_sharding_constraint: where the arguments are moved when the function begins.
            annotation_shardings: where annotated values go: see `with_sharding_annotation`.
            **jit_arguments: more arguments of `jax.jit`.

        >>> helper = axn.sharding.MeshShardingHelper([2], ["data"])
        >>> helper.sjit(lambda x: x * 2, in_shardings=(jax.P("data"),))(jnp.ones(2)).shape
        (2,)
        """
        make = functools.partial(
            ShardedJit,
            mesh=self.mesh,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            args_sharding_constraint=args_sharding_constraint,
            annotation_shardings=annotation_shardings,
            jit_arguments=jit_arguments,
        )
        return make if fun is None else make(fun)

    # --- trees ---

    def match_sharding_rule(self, sharding_rules: Placement, pytree: Any) -> Any:
        """The sharding that a placement gives every leaf, in the structure of the tree.

        Arguments:
            sharding_rules: a rule, or any other placement, or a tree prefix of placements.
            pytree: any tree; its arrays may be abstract.

        >>> helper = axn.sharding.MeshShardingHelper([2], ["data"])
        >>> helper.match_sharding_rule(jax.P("data"), {"w": jnp.ones(2)})["w"].spec
        P('data',)
        """
        return match_sharding_rule(sharding_rules, pytree, self.mesh)

    def make_shard_and_gather_fns(self, pytree: Any, sharding_rules: Placement) -> tuple[Any, Any]:
        """For every leaf a function that places such a leaf, and one that fetches it whole to the host.

        Arguments:
            pytree: any tree; its arrays may be abstract.
            sharding_rules: where the leaves go.

        >>> helper = axn.sharding.MeshShardingHelper([2], ["data"])
        >>> place, fetch = helper.make_shard_and_gather_fns({"w": jnp.ones(2)}, jax.P("data"))
        >>> type(fetch["w"](place["w"](np.ones(2)))).__name__
        'ndarray'
        """
        leaves, structure = resolve(pytree, sharding_rules, self.mesh, "make_shard_and_gather_fns")

        def placer(leaf: Leaf) -> Callable[[Any], Any]:
            if leaf.shape is None:
                return lambda x: x
            sharding = NamedSharding(leaf.mesh or self.mesh, leaf.spec or PartitionSpec())
            return lambda x: shard(x, sharding)

        return structure.unflatten(map(placer, leaves)), structure.unflatten(to_host for _ in leaves)

    def make_replicated_args(self, *args: Any) -> Any:
        """Put the whole of every array of the arguments on every device; one argument is returned by itself.

        Arguments:
            *args: trees of arrays.

        >>> helper = axn.sharding.MeshShardingHelper([2], ["data"])
        >>> helper.make_replicated_args(jnp.ones(2)).sharding.is_fully_replicated
        True
        """
        placed = tuple(unshard(x, self.mesh) for x in args)
        return placed[0] if len(placed) == 1 else placed

    def local_data_to_global_array(
        self, pytree: Any, batch_axis: Any = 0, mesh_axis_subset: Sequence[str] | None = None
    ) -> Any:
        """Global arrays of which each process has loaded a part.

        Arguments:
            pytree: a tree of the arrays of this process, of the same shapes in every process.
            batch_axis: the axis along which the parts follow one another: a position, or the name of an axis where the
                arrays are named.
            mesh_axis_subset: the mesh axes that the axis is split over; all of them by default.

        >>> helper = axn.sharding.MeshShardingHelper([2, 1], ["data", "model"])
        >>> helper.local_data_to_global_array(np.ones((4, 3))).sharding.spec
        P(('data', 'model'), None)
        """
        what = "local_data_to_global_array"
        subset = self.mesh.axis_names if mesh_axis_subset is None else mesh_axis_subset
        mesh_axes = (subset,) if isinstance(subset, str) else tuple(subset)
        unknown = [a for a in mesh_axes if a not in self.mesh.shape]
        if unknown:
            raise ValueError(
                f"{what}: mesh {_errors.describe_shape(self.mesh.shape)} has no axis "
                f"{', '.join(map(repr, unknown))}.{_errors.suggestion(unknown[0], self.mesh.axis_names)}"
            )
        parts = self._parts_here(mesh_axes)
        leaves, structure = leaves_of(pytree)
        made, problems = [], []
        for leaf in leaves:
            x = np.asarray(leaf.value.array if isinstance(leaf.value, NamedArray) else leaf.value)
            shape = x.shape if leaf.names is None else _errors.describe_axes(leaf.names, x.shape)
            position = _position(leaf, x.ndim, batch_axis)
            if position is None:
                problems.append(f"{leaf.path} {shape} has no axis {batch_axis!r} along which parts could follow.")
            elif x.shape[position] % parts:
                over = " x ".join(f"{a}={self.mesh.shape[a]}" for a in mesh_axes)
                problems.append(
                    f"{leaf.path} {shape}: {x.shape[position]} along axis {batch_axis!r} cannot be split over {over}: "
                    f"the devices of this process hold {parts} parts."
                )
            else:
                spec = PartitionSpec(*(mesh_axes if i == position else None for i in range(x.ndim)))
                whole = jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), x)
                made.append(wrap(whole, leaf.value.names) if isinstance(leaf.value, NamedArray) else whole)
        if problems:
            raise ValueError(listed(what, problems, self.mesh))
        return jax.tree.unflatten(structure, made)

    def _parts_here(self, mesh_axes: Sequence[str]) -> int:
        """How many of the parts into which these mesh axes split an axis lie on devices of this process."""
        here = [i for i, d in np.ndenumerate(self.mesh.devices) if d.process_index == jax.process_index()]
        dimensions = [self.mesh.axis_names.index(a) for a in mesh_axes]
        return len({tuple([i[d] for d in dimensions]) for i in here})

    def __repr__(self) -> str:
        return f"MeshShardingHelper({', '.join(f'{n}={s}' for n, s in self.mesh.shape.items())})"


def _position(leaf: Leaf, ndim: int, axis: Any) -> int | None:
    """Where the axis stands in a leaf; None if it is not there."""
    if isinstance(axis, int):
        return axis % ndim if -ndim <= axis < ndim else None
    return leaf.names.index(name_of(axis)) if leaf.names and name_of(axis) in leaf.names else None


def get_global_mesh_helper() -> MeshShardingHelper | None:
    """The innermost helper entered, or None.

    >>> axn.sharding.get_global_mesh_helper() is None
    True
    """
    helpers = _HELPERS.get()
    return helpers[-1] if helpers else None


def get_global_mesh() -> Mesh | None:
    """The mesh of the innermost helper entered, or None.

    >>> axn.sharding.get_global_mesh() is None
    True
    """
    helper = get_global_mesh_helper()
    return None if helper is None else helper.mesh
