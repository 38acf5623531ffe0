"""`sjit`: `jax.jit` whose arguments, results and annotated values are placed by rules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _errors
from ..sharding._compiled_function import CompiledFunction
from ..sharding.annotations import hashable_annotations
from ..sharding.meshes import AnyMesh
from ..sharding.placement import Placement
from ..sharding.shard import shard_quietly

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class ShardedJit(CompiledFunction[P, R]):
    """A function compiled by `sjit`.

    Placements are applied inside the compiled function. They are worked out when it is traced, that is once for each
    structure and shapes of the arguments; a call with others works them out afresh.

    >>> from axonym.scalax.sharding import sjit
    >>> type(sjit(lambda x: x * 2)).__name__
    'ShardedJit'
    """

    def __init__(
        self,
        fun: Callable[P, R],
        mesh: Mesh | None,
        in_shardings: Placement,
        out_shardings: Placement,
        static_argnums: int | Sequence[int] | None,
        args_sharding_constraint: Placement,
        annotation_shardings: Mapping[str, Placement] | None,
        jit_arguments: Mapping[str, Any],
    ):
        self._mesh = mesh

        def results(arguments: Any, result: Any) -> Any:
            out = tuple(out_shardings) if type(out_shardings) is list and type(result) is tuple else out_shardings
            return shard_quietly(result, out, "sjit (results)")

        annotations = hashable_annotations(annotation_shardings)
        super().__init__(
            "sjit",
            fun,
            active={} if annotations is None else {"annotations": annotations},
            arguments=[("in_shardings", in_shardings), ("constraint", args_sharding_constraint)],
            results=None if out_shardings is None else results,
            static_argnums=static_argnums,
            static_leaves=False,
            around=None if mesh is None else functools.partial(activate_mesh, mesh),
            jit_options=jit_arguments,
        )

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
    **jit_arguments: Any,
) -> Any:
    """Compile a function on the active mesh; arguments, results and annotated values are placed by rules.

    Arguments:
        fun: the function. Without it, `sjit` is a decorator.
        in_shardings: where the arguments go: a tuple with a placement for each positional parameter that is not static,
            a dictionary with some by parameter, or one placement for all arguments. By default they stay where they
            are; None for one of them leaves it to the active mapping.
        out_shardings: where the results go: a placement or a tree prefix of placements. None leaves it to the compiler.
        static_argnums: the positional arguments that are part of the program.
        args_sharding_constraint: where the arguments are moved when the function begins, in the form of `in_shardings`.
        annotation_shardings: where annotated values go: see `with_sharding_annotation`.
        **jit_arguments: more arguments of `jax.jit`.

    >>> from axonym.scalax.sharding import sjit
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     sjit(lambda x: x * 2, out_shardings=jax.P("data"))(jnp.ones(2)).sharding.spec
    P('data',)
    """
    make = functools.partial(
        ShardedJit,
        mesh=None,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        args_sharding_constraint=args_sharding_constraint,
        annotation_shardings=annotation_shardings,
        jit_arguments=jit_arguments,
    )
    return make if fun is None else make(fun)


def _traced_without_mesh() -> bool:
    try:
        jax.sharding.get_mesh()
    except ValueError:  # a function is being traced
        return jax.sharding.get_abstract_mesh().empty
    return False


def _on_devices(arguments: T, mesh: Mesh) -> T:
    """Arguments that have the program around them run on the devices of a mesh, which nothing else tells it of.

    Where axes are Explicit JAX refuses to run it, and only its types can be asked for.
    """
    if AxisType.Explicit in mesh.axis_types:
        return arguments

    def hold(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED,) * x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(hold, arguments)


def activate_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Activate a mesh. In a traced function it must be active already: JAX cannot change it there."""
    try:
        return contextlib.nullcontext() if jax.sharding.get_mesh() == mesh else jax.set_mesh(mesh)
    except ValueError:  # a function is being traced
        around = jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in around.axis_types
    if around.shape == mesh.shape and (is_manual or around.axis_types == mesh.axis_types):
        return contextlib.nullcontext()
    raise ValueError(
        f"sjit: called in a traced function under mesh {_described(around)}, but it is meant for mesh "
        f"{_described(mesh)}. Activate that mesh outside: `with jax.set_mesh(mesh): ...`."
    )


def _described(mesh: AnyMesh) -> str:
    kinds = ", ".join(dict.fromkeys(str(t) for t in mesh.axis_types))
    return f"{_errors.describe_shape(mesh.shape)} of {kinds} axes" if mesh.axis_types else "()"
