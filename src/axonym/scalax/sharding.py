"""`scalax.sharding`: a mesh whose `sjit` compiles by rules, the rules, and annotations."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as PartitionSpec

from ..named_array import NamedArray, wrap
from ..sharding import (
    CompiledFunction,
    FSDPShardingRule as _FSDPShardingRule,
    Leaf,
    LeafPlacement,
    Placement,
    PolicyShardingRule as _PolicyShardingRule,
    ShardingRule as _ShardingRule,
    TreePathShardingRule as _TreePathShardingRule,
    current_annotations,
    from_process_local_data,
    infer_resource_partitions,
    leaves_of,
    make_mesh,
    resolve,
    shard,
    shard_quietly,
    sharding_annotations as sharding_annotations,
    to_host,
    with_sharding_annotation as _annotated,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
AnyMesh: TypeAlias = Mesh | AbstractMesh

# --- rules ---


class ShardingRule(_ShardingRule):
    """A rule that is applied to a tree. Rules of your own define `apply`, or `place` for one leaf at a time.

    >>> class Rows(scalax.sharding.ShardingRule):
    ...     def apply(self, pytree):
    ...         return jax.tree.map(lambda x: jax.P("data"), pytree)
    >>> scalax.sharding.MeshShardingHelper([2], ["data"]).match_sharding_rule(Rows(), jnp.ones(2)).spec
    P('data',)
    """

    def apply(self, pytree: Any) -> Any:
        """Return the partition spec of every leaf, in the structure of the tree, whose arrays may be abstract.

        >>> rule = scalax.sharding.TreePathShardingRule((".*", jax.P("data")))
        >>> rule.apply({"w": jnp.ones((2, 2)), "step": jnp.ones(())})
        {'step': P(), 'w': P('data',)}
        """
        leaves, structure = leaves_of(pytree)
        specs, problems = [], []
        for leaf in leaves:
            specs.append(None if leaf.shape is None else self.answer(leaf, None))
            if leaf.shape is not None and specs[-1] is None and (refusal := self.refusal(leaf)):
                problems.append(f"{leaf.path} {leaf.shape}: {refusal}.")
        if problems:
            raise ValueError("\n  ".join([f"{self!r}.apply:", *problems]))
        return jax.tree.unflatten(structure, specs)

    def for_tree(self, tree: Any) -> Placement:
        return self if type(self).apply is ShardingRule.apply else self.apply(tree)

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        if type(self).apply is ShardingRule.apply:
            raise TypeError(f"{type(self).__name__}: a rule of your own defines `apply`, or `place`.")
        return self.apply({leaf.path: leaf.value})[leaf.path]  # another rule calls it, one leaf at a time


class FSDPShardingRule(_FSDPShardingRule, ShardingRule):
    """`axonym.sharding.FSDPShardingRule`, which can be applied to a tree.

    >>> scalax.sharding.FSDPShardingRule("data", min_fsdp_size=16).apply({"w": jnp.ones((6, 16)), "b": jnp.ones(8)})
    {'b': P(), 'w': P(None, 'data')}
    """


class TreePathShardingRule(_TreePathShardingRule, ShardingRule):
    """`axonym.sharding.TreePathShardingRule`, which replicates arrays of one element whatever pattern matches them.

    >>> scalax.sharding.TreePathShardingRule((".*", jax.P("data"))).apply({"w": jnp.ones(2), "scale": jnp.ones(1)})
    {'scale': P(), 'w': P('data',)}
    """

    def place(self, leaf: Leaf, mesh: AnyMesh | None) -> LeafPlacement:
        return PartitionSpec() if math.prod(leaf.shape or ()) == 1 else super().place(leaf, mesh)


class PolicyShardingRule(_PolicyShardingRule, ShardingRule):
    """`axonym.sharding.PolicyShardingRule`, which can be applied to a tree.

    >>> scalax.sharding.PolicyShardingRule(lambda path, x: jax.P(path)).apply({"data": jnp.ones(2)})
    {'data': P('data',)}
    """


# --- compiled functions ---


class ShardedJit(CompiledFunction[P, R]):
    """A function compiled by `sjit`.

    Placements are applied inside the compiled function. They are computed when it is traced, that is once for each
    structure and shapes of the arguments; a call with others computes them afresh.

    >>> type(scalax.sharding.sjit(lambda x: x * 2)).__name__
    'ShardedJit'
    """

    def __init__(self, fun: Callable[P, R], mesh: Mesh | None, **settings: Any):
        self._mesh = mesh
        super().__init__("sjit", fun, active={}, static_leaves=False, **settings)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._mesh is not None and _traced_without_mesh():
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                return self(*_on_devices(args, self._mesh), **_on_devices(kwargs, self._mesh))
        return super().__call__(*args, **kwargs)


@overload
def sjit(
    fun: Callable[P, R], in_shardings: Placement = None, out_shardings: Placement = None, *args: Any, **options: Any
) -> ShardedJit[P, R]: ...
@overload
def sjit(
    fun: None = None, in_shardings: Placement = None, out_shardings: Placement = None, *args: Any, **options: Any
) -> Callable[[Callable[P, R]], ShardedJit[P, R]]: ...
def sjit(
    fun: Callable[..., Any] | None = None,
    in_shardings: Placement = None,
    out_shardings: Placement = None,
    static_argnums: int | Sequence[int] | None = None,
    args_sharding_constraint: Placement = None,
    annotation_shardings: Mapping[str, Placement] | None = None,
    *,
    mesh: Mesh | None = None,
    **jit_arguments: Any,
) -> Any:
    """Compile a function on a mesh, with its arguments, results and annotated values placed by rules.

    Arguments:
        fun: the function. Without it, `sjit` is a decorator.
        in_shardings: the placements of the arguments: a tuple with one for each positional parameter that is not
            static, a dictionary with some by parameter, or one for all arguments. By default they keep their sharding;
            None for one of them leaves it to the active mapping.
        out_shardings: the placement of the results, or a tree prefix of placements. None leaves it to the compiler.
        static_argnums: the positional arguments that are part of the program.
        args_sharding_constraint: the placements of the arguments inside the function, in the form of `in_shardings`.
        annotation_shardings: the placements of annotated values: see `with_sharding_annotation`.
        mesh: the mesh; by default the active one.
        **jit_arguments: more arguments of `jax.jit`.

    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     scalax.sharding.sjit(lambda x: x * 2, out_shardings=jax.P("data"))(jnp.ones(2)).sharding.spec
    P('data',)
    """

    def results(arguments: Any, result: Any) -> Any:
        out = tuple(out_shardings) if type(out_shardings) is list and type(result) is tuple else out_shardings
        return shard_quietly(result, out, "sjit (results)")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if mesh is not None:
                stack.enter_context(_activate_mesh(mesh))
            if annotation_shardings is not None:
                stack.enter_context(sharding_annotations(annotation_shardings))
            yield

    make = functools.partial(
        ShardedJit,
        mesh=mesh,
        around=None if mesh is None and annotation_shardings is None else around,
        arguments=[("in_shardings", in_shardings), ("constraint", args_sharding_constraint)],
        results=None if out_shardings is None else results,
        static_argnums=static_argnums,
        jit_options=jit_arguments,
    )
    return make if fun is None else make(fun)


def _traced_without_mesh() -> bool:
    try:
        jax.sharding.get_mesh()
    except ValueError:  # a function is being traced
        return jax.sharding.get_abstract_mesh().empty
    return False


def _on_devices(arguments: T, mesh: Mesh) -> T:
    """Constrain arguments to a mesh, so that the surrounding program, which has none, runs on its devices.

    With Explicit axes, JAX refuses to run such a program; only its types are available.
    """
    if AxisType.Explicit in mesh.axis_types:
        return arguments

    def hold(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED,) * x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(hold, arguments)


def _activate_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Activate a mesh. In a traced function it must be active already: JAX cannot change it there."""
    try:
        return contextlib.nullcontext() if jax.sharding.get_mesh() == mesh else jax.set_mesh(mesh)
    except ValueError:  # a function is being traced
        around = jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in around.axis_types
    if around.shape == mesh.shape and (is_manual or around.axis_types == mesh.axis_types):
        return contextlib.nullcontext()
    raise ValueError(
        f"sjit: called in a traced function under mesh {_describe_mesh(around)}, but it is meant for mesh "
        f"{_describe_mesh(mesh)}. Activate that mesh outside: `with jax.set_mesh(mesh): ...`."
    )


def _describe_mesh(mesh: AnyMesh) -> str:
    kinds = " and ".join(sorted({kind.name for kind in mesh.axis_types}))
    return f"({', '.join(f'{n}={s}' for n, s in mesh.shape.items())}) of {kinds} axes"


# --- the mesh ---


def with_sharding_constraint(pytree: T, sharding_rule: Placement) -> T:
    """Shard a tree as a rule or any other placement says; without a mesh, return it unchanged.

    >>> with scalax.sharding.MeshShardingHelper([2], ["data"]):
    ...     scalax.sharding.with_sharding_constraint(jnp.ones(2), jax.P("data")).sharding.spec
    P('data',)
    """
    return shard_quietly(pytree, sharding_rule, "with_sharding_constraint")


def with_sharding_annotation(pytree: T, sharding_name: str) -> T:
    """Annotate a tree with a name, so that the innermost `sjit` places it: see `axonym.sharding`.

    >>> scalax.sharding.with_sharding_annotation(jnp.ones(2), "hidden").shape
    (2,)
    """
    return _annotated(pytree, sharding_name)


_HELPERS: contextvars.ContextVar[tuple[MeshShardingHelper, ...]] = contextvars.ContextVar("helpers", default=())
_BLOCKS: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("blocks", default=())
"""The with-blocks of helpers that the code is in, the innermost last."""


def get_global_mesh_helper() -> MeshShardingHelper | None:
    """Return the innermost helper that was entered, or None.

    >>> scalax.sharding.get_global_mesh_helper() is None
    True
    """
    helpers = _HELPERS.get()
    return helpers[-1] if helpers else None


def get_global_mesh() -> Mesh | None:
    """Return the mesh of the innermost helper that was entered, or None.

    >>> scalax.sharding.get_global_mesh() is None
    True
    """
    helper = get_global_mesh_helper()
    return None if helper is None else helper.mesh


def get_global_annotation_shardings() -> dict[str, Placement] | None:
    """Return the active placements of annotated values by name, or None.

    >>> helper = scalax.sharding.MeshShardingHelper([2], ["data"])
    >>> with helper.get_context(annotation_shardings={"hidden": jax.P("data")}):
    ...     scalax.sharding.get_global_annotation_shardings()
    {'hidden': P('data',)}
    """
    return current_annotations()


def match_sharding_rule(sharding_rules: Placement, pytree: Any, mesh: AnyMesh | None = None) -> Any:
    """Return the sharding of every leaf, in the structure of the tree; leaves without a placement are replicated.

    Arguments:
        sharding_rules: a rule, or any other placement, or a tree prefix of placements.
        pytree: any tree; its arrays may be abstract. Leaves that are not arrays get None.
        mesh: the mesh; the active one by default.

    >>> mesh = axn.make_mesh({"data": 2})
    >>> scalax.sharding.match_sharding_rule({"w": jax.P("data")}, {"w": jnp.ones(2)}, mesh)["w"].spec
    P('data',)
    """
    # The active mesh by default, or an error.
    here: AnyMesh = infer_resource_partitions(np.zeros(()), PartitionSpec(), mesh=mesh).mesh
    leaves, structure = resolve(pytree, sharding_rules, here, "match_sharding_rule")

    def sharding(leaf: Leaf) -> Any:
        if leaf.shape is None:
            return None
        found = NamedSharding(leaf.mesh or here, leaf.spec or PartitionSpec())
        return wrap(found, leaf.names) if isinstance(leaf.value, NamedArray) and leaf.names is not None else found

    return jax.tree.unflatten(structure, [sharding(leaf) for leaf in leaves])


def _without_trailing_none(x: jax.Array) -> jax.Array:
    """Write the sharding of an array as scalax does, without the axes after the last one that is sharded."""
    assert isinstance(x.sharding, NamedSharding)
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*entries))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])


class MeshShardingHelper:
    """A mesh with `sjit` and the other ways to place trees on it. `with helper:` makes its mesh active.

    >>> helper = scalax.sharding.MeshShardingHelper([-1, 2], ["data", "model"])
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
        axis_dims: the size of each mesh axis. One of them can be -1, for all devices that the others leave.
        axis_names: the mesh axes.
        mesh_axis_splitting: changes nothing: mesh axes share a dimension of the physical network where they must.
        explicit: make the axes Explicit, so that shardings are part of types; they are Auto by default.
        """
        if len(axis_dims) != len(axis_names):
            raise ValueError(
                f"MeshShardingHelper: {len(axis_dims)} sizes {tuple(axis_dims)} for {len(axis_names)} mesh axes "
                f"{tuple(axis_names)}."
            )
        self.axis_dims = tuple(axis_dims)
        self.axis_names = tuple(axis_names)
        self.mesh = make_mesh(dict(zip(axis_names, axis_dims, strict=True)), explicit=explicit)

    # --- the active mesh ---

    def __enter__(self) -> MeshShardingHelper:
        block = self.get_context()
        block.__enter__()
        _BLOCKS.set((*_BLOCKS.get(), block))
        return self

    def __exit__(self, *raised: Any) -> None:
        *outer, block = _BLOCKS.get()
        _BLOCKS.set(tuple(outer))
        block.__exit__(*raised)

    @contextlib.contextmanager
    def get_context(self, annotation_shardings: Mapping[str, Placement] | None = None) -> Iterator[MeshShardingHelper]:
        """Make the mesh of this helper active inside a with-block, and the placements of annotated values.

        >>> helper = scalax.sharding.MeshShardingHelper([2], ["data"])
        >>> with helper.get_context(annotation_shardings={"hidden": jax.P("data")}):
        ...     helper.with_sharding_annotation(jnp.ones(2), "hidden").sharding.spec
        P('data',)
        """
        with _activate_mesh(self.mesh), self._global(), contextlib.ExitStack() as stack:
            if annotation_shardings is not None:
                stack.enter_context(sharding_annotations(annotation_shardings))
            yield self

    @contextlib.contextmanager
    def _global(self) -> Iterator[None]:
        """Make `get_global_mesh_helper` return this helper."""
        token = _HELPERS.set((*_HELPERS.get(), self))
        try:
            yield
        finally:
            _HELPERS.reset(token)

    get_global_mesh_helper = staticmethod(get_global_mesh_helper)
    get_global_mesh = staticmethod(get_global_mesh)
    get_global_annotation_shardings = staticmethod(get_global_annotation_shardings)

    # --- functions ---

    def sjit(self, fun: Callable[..., Any] | None = None, *placements: Any, **options: Any) -> Any:
        """Compile a function as `sjit` does, with the same arguments, on the mesh of this helper."""

        def make(fun: Callable[..., Any]) -> Any:
            @functools.wraps(fun)
            def inside(*args: Any, **kwargs: Any) -> Any:
                with self._global():
                    return fun(*args, **kwargs)

            return sjit(inside, *placements, mesh=self.mesh, **options)

        return make if fun is None else make(fun)

    # --- trees ---

    def match_sharding_rule(self, sharding_rules: Placement, pytree: Any) -> Any:
        """Return the sharding of every leaf on the mesh of this helper: see `match_sharding_rule`."""
        return match_sharding_rule(sharding_rules, pytree, self.mesh)

    with_sharding_constraint = staticmethod(with_sharding_constraint)
    with_sharding_annotation = staticmethod(with_sharding_annotation)

    def make_shard_and_gather_fns(self, pytree: Any, sharding_rule: Placement) -> tuple[Any, Any]:
        """Return a tree of functions that shard a leaf, and a tree of functions that gather it to the host.

        >>> helper = scalax.sharding.MeshShardingHelper([2], ["data"])
        >>> place, fetch = helper.make_shard_and_gather_fns({"w": jnp.ones(2)}, jax.P("data"))
        >>> placed = helper.apply_shard_and_gather_fns(place, {"w": np.ones(2)})
        >>> placed["w"].sharding.spec, helper.apply_shard_and_gather_fns(fetch, placed)
        (P('data',), {'w': array([1., 1.], dtype=float32)})
        """
        leaves, structure = resolve(pytree, sharding_rule, self.mesh, "make_shard_and_gather_fns")

        def placer(leaf: Leaf) -> Callable[[Any], Any]:
            if leaf.shape is None:
                return lambda x: x
            sharding = NamedSharding(leaf.mesh or self.mesh, leaf.spec or PartitionSpec())
            return lambda x: shard(x, sharding)

        return structure.unflatten(map(placer, leaves)), structure.unflatten(to_host for _ in leaves)

    @staticmethod
    def apply_shard_and_gather_fns(fns: Any, pytree: Any) -> Any:
        """Apply functions of `make_shard_and_gather_fns`, each to its leaf in a tree of the same structure."""
        return jax.tree.map(lambda f, x: f(x), fns, pytree)

    def local_data_to_global_array(
        self, pytree: Any, batch_axis: Any = 0, mesh_axis_subset: Sequence[str] | None = None
    ) -> Any:
        """Make global arrays from the arrays that each process has loaded, concatenated along an axis.

        Arguments:
            pytree: a tree of the arrays of this process, of the same shapes in every process.
            batch_axis: the axis to concatenate along: a position, or a name for named arrays.
            mesh_axis_subset: the mesh axes that the axis is sharded over; all of them by default.

        >>> helper = scalax.sharding.MeshShardingHelper([2, 1], ["data", "model"])
        >>> helper.local_data_to_global_array(np.ones((4, 3))).sharding.spec
        P(('data', 'model'),)
        """
        if mesh_axis_subset is None or self._tells_processes_apart(mesh_axis_subset):
            made = from_process_local_data(pytree, batch_axis, mesh_axis_subset, self.mesh)
            return jax.tree.map(_without_trailing_none, made)
        # Data of different processes must lie on different devices: load it over all mesh axes, then reshard it.
        subset = mesh_axis_subset if isinstance(mesh_axis_subset, str) else tuple(mesh_axis_subset)

        def over_subset(x: jax.Array) -> jax.Array:
            assert isinstance(x.sharding, NamedSharding)
            spec = PartitionSpec(*(None if entry is None else subset for entry in x.sharding.spec))
            return _without_trailing_none(shard(x, NamedSharding(self.mesh, spec)))

        return jax.tree.map(over_subset, from_process_local_data(pytree, batch_axis, None, self.mesh))

    def _tells_processes_apart(self, mesh_axes: str | Sequence[str]) -> bool:
        """Return whether each shard of an axis sharded over these mesh axes is on devices of one process."""
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
        kept = [self.mesh.axis_names.index(a) for a in names if a in self.mesh.shape]
        owners: dict[tuple[int, ...], set[int]] = {}
        for index, device in np.ndenumerate(self.mesh.devices):
            owners.setdefault(tuple([index[i] for i in kept]), set()).add(device.process_index)
        return all(len(processes) == 1 for processes in owners.values())

    def __repr__(self) -> str:
        return f"MeshShardingHelper({', '.join(f'{n}={s}' for n, s in self.mesh.shape.items())})"
