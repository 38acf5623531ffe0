"""`sjit`: `jax.jit` whose arguments, results and annotated values are placed by rules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from .. import _context, _errors
from .._arguments import parameter_names
from .annotations import kept_annotations
from .placement import Placement, is_placement
from .shard import shard_arguments, shard_quietly

P = ParamSpec("P")
R = TypeVar("R")


class ShardedJit(Generic[P, R]):
    """A function compiled by `sjit`.

    Placements are applied inside the compiled function. They are worked out when it is traced, that is once for each
    structure and shapes of the arguments; a call with others works them out afresh.

    >>> type(axn.sharding.sjit(lambda x: x * 2)).__name__
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
        static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums or ())
        self._mesh = mesh
        self._annotations = kept_annotations(annotation_shardings)

        @functools.wraps(fun)
        def placed(*args: P.args, **kwargs: P.kwargs) -> R:
            fixed = {i if i >= 0 else i + len(args) for i in static}
            dynamic = [i for i in range(len(args)) if i not in fixed]
            names = parameter_names(fun, len(args), kwargs)
            for placement, which in ((in_shardings, "in_shardings"), (args_sharding_constraint, "constraint")):
                if placement is not None:
                    args, kwargs = _place_arguments(args, kwargs, dynamic, names, placement, which)
            result = fun(*args, **kwargs)
            return result if out_shardings is None else shard_quietly(result, out_shardings, "sjit (results)")

        self._jitted = jax.jit(placed, static_argnums=static or None, **jit_arguments)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._in_force():
            return self._jitted(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lower the function for these arguments, which may be abstract: see `jax.jit(f).lower`.

        >>> axn.sharding.sjit(lambda x: x * 2).lower(jnp.ones(2)).compile() is not None
        True
        """
        with self._in_force():
            return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function for these arguments, which may be abstract: see `jax.jit(f).trace`.

        >>> axn.sharding.sjit(lambda x: x * 2).trace(jnp.ones(2)).jaxpr is not None
        True
        """
        with self._in_force():
            return self._jitted.trace(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        mesh = contextlib.nullcontext() if self._mesh is None else mesh_in_force(self._mesh)
        settings = outer = _context.settings_in_force()
        if self._annotations is not None:
            settings = _context.changed(outer, annotations=self._annotations)
        with mesh, contextlib.nullcontext() if settings is outer else _context.in_force(settings):
            yield


def sjit(
    fun: Callable[P, R],
    in_shardings: Placement = None,
    out_shardings: Placement = None,
    static_argnums: int | Sequence[int] | None = None,
    args_sharding_constraint: Placement = None,
    annotation_shardings: Mapping[str, Placement] | None = None,
    **jit_arguments: Any,
) -> ShardedJit[P, R]:
    """Compile a function on the mesh in force; arguments, results and annotated values are placed by rules.

    Arguments:
        fun: the function.
        in_shardings: where the arguments go: a tuple with a placement for each positional argument that is not static,
            or one placement for all arguments. None leaves them where they are.
        out_shardings: where the results go: a placement or a tree prefix of placements. None leaves it to the compiler.
        static_argnums: the positional arguments that are part of the program.
        args_sharding_constraint: where the arguments are moved when the function begins, in the form of `in_shardings`.
        annotation_shardings: where annotated values go: see `with_sharding_annotation`.
        **jit_arguments: more arguments of `jax.jit`.

    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     axn.sharding.sjit(lambda x: x * 2, out_shardings=jax.P("data"))(jnp.ones(2)).sharding.spec
    P('data',)
    """
    return ShardedJit(
        fun,
        None,
        in_shardings,
        out_shardings,
        static_argnums,
        args_sharding_constraint,
        annotation_shardings,
        jit_arguments,
    )


def mesh_in_force(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Put a mesh in force. In a traced function it must be in force already: JAX cannot change it there."""
    try:
        return contextlib.nullcontext() if jax.sharding.get_mesh() == mesh else jax.set_mesh(mesh)
    except ValueError:  # a function is being traced
        around = jax.sharding.get_abstract_mesh()
    if around.shape == mesh.shape:
        return contextlib.nullcontext()
    raise ValueError(
        f"sjit: called in a traced function under mesh {_errors.describe_shape(around.shape)}, but it is meant for "
        f"mesh {_errors.describe_shape(mesh.shape)}. Put that mesh in force outside: `with jax.set_mesh(mesh): ...`."
    )


def _place_arguments(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic: Sequence[int],
    names: Sequence[str],
    placement: Placement,
    which: str,
) -> Any:
    """The arguments in their places. Errors call them by the names of the parameters."""
    what = f"sjit ({which})"
    values = {names[i]: args[i] for i in dynamic}
    if is_placement(placement):
        placed = shard_quietly({**values, **kwargs}, placement, what)
    else:
        if not isinstance(placement, Sequence):
            raise TypeError(f"{what}: expected a placement, or a tuple with one for each argument, got {placement!r}.")
        placements = tuple(placement)
        if len(placements) == len(args) != len(dynamic):
            placements = tuple(placements[i] for i in dynamic)
        if len(placements) != len(dynamic):
            raise ValueError(
                f"{what}: {len(placements)} placements for {len(dynamic)} positional arguments that are not static; "
                "None leaves an argument where it is."
            )
        given = {n: p for n, p in zip(values, placements, strict=True) if p is not None}
        placed = {**kwargs, **values, **shard_arguments({n: values[n] for n in given}, given.values(), what)}
    return (
        tuple(placed[names[i]] if i in dynamic else x for i, x in enumerate(args)),
        {n: placed[n] for n in kwargs},
    )
