"""`named_jit`: `jax.jit` that places arguments and results by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax

from .. import _context, _errors
from .._parameter_names import parameter_names
from ._apart import ARRAYS, Form, constant, joined, separated
from ._bound import BoundMethod
from ._stages import staged
from .annotations import kept_annotations
from .mapping import is_resource_mapping, normalize_mapping
from .meshes import current_mesh
from .placement import Placement, check_mesh_axes, leaves_of
from .shard import call_on_mesh, shard_arguments, shard_quietly

P = ParamSpec("P")
R = TypeVar("R")


@overload
def named_jit(fn: Callable[P, R], axis_resources: Placement = None, **options: Any) -> NamedJit[P, R]: ...
@overload
def named_jit(
    fn: None = None, axis_resources: Placement = None, **options: Any
) -> Callable[[Callable[P, R]], NamedJit[P, R]]: ...
def named_jit(
    fn: Callable[..., Any] | None = None,
    axis_resources: Placement = None,
    *,
    in_axis_resources: Placement = None,
    out_axis_resources: Placement = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    annotation_shardings: Mapping[str, Placement] | None = None,
    **jit_arguments: Any,
) -> Any:
    """Compile a function, with a mapping in force inside it and its arguments and results placed by name.

    Arguments can be anything: what is not an array (strings, functions, Python numbers, fields of models) is static,
    and a call with another value compiles again. The same holds for results.

    Arguments:
        fn: the function, method or class to compile. Without it, `named_jit` is a decorator.
        axis_resources: the mapping in force inside. By default that in force around the call.
        in_axis_resources: where the arguments go: a placement for all of them, a tuple with one for each positional
            parameter, or a dictionary with some by parameter. By default they stay where they are.
        out_axis_resources: where the results go. By default where `axis_resources` says.
        donate_args: which positional arguments may be overwritten: a tree prefix of booleans for each.
        donate_kwargs: which keyword arguments may be: a dictionary of such prefixes.
        annotation_shardings: where annotated values go: see `axonym.sharding.with_sharding_annotation`.
        **jit_arguments: more arguments of `jax.jit`.

    >>> mesh = axn.make_mesh({"data": -1})
    >>> with axn.set_mesh(mesh):
    ...     y = axn.named_jit(lambda x: x * 2, {"batch": "data"})(axn.ones({"batch": 16}))
    >>> y.array.sharding.spec
    P('data',)
    """
    make = functools.partial(
        NamedJit,
        axis_resources=axis_resources,
        in_axis_resources=in_axis_resources,
        out_axis_resources=out_axis_resources,
        donate_args=donate_args,
        donate_kwargs=donate_kwargs,
        annotation_shardings=annotation_shardings,
        jit_arguments=jit_arguments,
    )
    return make if fn is None else make(fn)


class NamedJit(Generic[P, R]):
    """A function compiled by `named_jit`.

    There are two ways to call into `jax.jit`. Where every leaf of the arguments is an array and nothing is donated,
    they go in whole. Otherwise they are taken apart into what is donated, what is kept, and what is static. To look
    at every leaf takes time, so until there was something that is no array, or may be none, they go in whole unseen.

    Placements are applied inside the compiled function: arguments on the host arrive split, those placed otherwise are
    moved. Only where some lie on other devices than the mesh's, they are moved before, when `jax.jit` has refused them.
    """

    def __init__(
        self,
        fn: Callable[..., R],
        axis_resources: Placement,
        in_axis_resources: Placement,
        out_axis_resources: Placement,
        donate_args: Any,
        donate_kwargs: Any,
        annotation_shardings: Mapping[str, Placement] | None,
        jit_arguments: dict[str, Any],
    ):
        for reserved in ("in_shardings", "out_shardings", "donate_argnums", "donate_argnames"):
            if reserved in jit_arguments:
                instead = "donate_args" if "donate" in reserved else f"{reserved.split('_')[0]}_axis_resources"
                raise TypeError(f"named_jit: `{reserved}` works by position; use `{instead}`.")
        for needless in ("static_argnums", "static_argnames"):
            if needless in jit_arguments:
                raise TypeError(f"named_jit: `{needless}` is not needed: what is not an array is static by itself.")
        self._fn: Callable[..., Any] = fn
        self._settings: _context.Settings | None = None
        self._own_mapping = axis_resources is not None
        self._own_parameters = isinstance(axis_resources, _context.Settings)
        if self._own_parameters:
            self._settings = axis_resources
        elif self._own_mapping:
            if not is_resource_mapping(axis_resources):
                raise TypeError(
                    f"named_jit: `axis_resources` is put in force, so it is a resource mapping, not a "
                    f"{type(axis_resources).__name__}."
                )
            self._settings = _context.intern_settings(normalize_mapping(axis_resources, "named_jit"))
        self._annotations = kept_annotations(annotation_shardings)
        self._in = in_axis_resources
        self._out = out_axis_resources
        self._donate = (
            _checked_donation("donate_args", donate_args),
            _checked_donation("donate_kwargs", donate_kwargs),
        )
        self._jit_arguments = jit_arguments
        self._looks_first = self._donate != (None, None)
        self._whole = jax.jit(self._make_whole(), **jit_arguments)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        outer = _context.settings_in_force()
        settings = self._settings_within(outer)
        place = None if self._in is None else self._placed
        if settings is outer:
            return call_on_mesh(self._call, args, kwargs, place, self._in)
        with _context.in_force(settings):
            return call_on_mesh(self._call, args, kwargs, place, self._in)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lower the function for these arguments, which may be abstract: see `jax.jit(f).lower`.

        What is compiled from it is called like the function; arguments that are not arrays must be the same ones.

        >>> compiled = axn.named_jit(lambda x, n: x * n).lower(axn.ones({"x": 2}), 3).compile()
        >>> compiled(axn.ones({"x": 2}), 3)
        NamedArray(float32[x=2], [3. 3.])
        """
        return self._staged("lower", args, kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function for these arguments, which may be abstract: see `jax.jit(f).trace`.

        >>> axn.named_jit(lambda x: x * 2).trace(axn.ones({"x": 2})).jaxpr is not None
        True
        """
        return self._staged("trace", args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __repr__(self) -> str:
        return f"named_jit({getattr(self._fn, '__qualname__', self._fn)!s})"

    # --- how ---

    def _settings_within(self, outer: _context.Settings | None) -> _context.Settings | None:
        """What is in force inside, given what is around the call.

        It is entered outside of jit, so that another mapping around the call does not compile it again.
        """
        settings = self._settings if self._own_mapping else outer
        annotations = self._annotations if self._annotations is not None else outer.annotations if outer else None
        # Where parameters rest does not change with what is in force while they are used.
        parameters = outer.parameters if outer and not self._own_parameters else None
        if annotations:
            settings = _context.changed(settings, annotations=annotations)
        return _context.changed(settings, parameters=parameters) if parameters else settings

    def _in_force(self) -> contextlib.AbstractContextManager[None]:
        return _context.in_force(self._settings_within(_context.settings_in_force()))

    def _staged(self, stage: str, args: Any, kwargs: Any) -> Any:
        self._looks_first = True
        with self._in_force():
            if self._takes_whole((args, kwargs)):
                return staged(getattr(self._whole, stage)(*args, **kwargs), None)
            arguments = self._taken_apart(args, kwargs)
            return staged(getattr(self._split, stage)(*arguments), self._taken_apart, arguments[-1])

    def _call(self, args: Any, kwargs: Any) -> Any:
        if not self._looks_first:
            try:
                return joined(self._whole(*args, **kwargs))
            except (TypeError, ValueError, OverflowError, _MayBeNumberError):
                if all([_is_surely_array(leaf) for leaf in jax.tree.leaves((args, kwargs))]):
                    raise
            self._looks_first = True
        if self._takes_whole((args, kwargs)):
            return joined(self._whole(*args, **kwargs))
        return joined(self._split(*self._taken_apart(args, kwargs)))

    def _takes_whole(self, arguments: Any) -> bool:
        return self._donate == (None, None) and all([isinstance(leaf, ARRAYS) for leaf in jax.tree.leaves(arguments)])

    def _run(self, args: Any, kwargs: Any) -> Any:
        """The body that is traced."""
        self._check_mesh_axes()
        args, kwargs = self._placed(args, kwargs)
        result = self._fn(*args, **kwargs)
        self._warn_if_misspelt((args, kwargs), result)
        return separated(shard_quietly(result, self._out, "named_jit (results)"))

    def _check_mesh_axes(self) -> None:
        """What is in force inside fits the mesh, also where none of the arguments and results says so."""
        settings, mesh = _context.settings_in_force(), current_mesh()
        if settings is not None and mesh is not None:
            for mapping in (settings.mapping, settings.parameters):
                check_mesh_axes("named_jit", mapping, mesh)

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._in is None:
            return args, kwargs
        return shard_arguments(self._fn, args, kwargs, self._in, "named_jit (arguments)")

    def _warn_if_misspelt(self, arguments: Any, result: Any) -> None:
        """Warn of mappings that apply to nothing that goes in or comes out.

        A mapping at work may well be meant for axes that exist only inside, so it must have a name that is near one
        outside. One for parameters is about what goes in, and each of its keys may be misspelt; but it may be shared by
        several models, so a key must be very near.
        """
        if not self._own_mapping or self._settings is None:
            return
        known = {n for leaf in leaves_of((arguments, result))[0] for n in leaf.names or ()}
        working, resting = self._settings.mapping, self._settings.parameters
        near = {n: _errors.suggestion(n, known) for n in working} if known.isdisjoint(working) else {}
        near |= {n: _errors.suggestion(n, known - resting.keys(), 0.8) for n in resting if n not in known}
        misspelt = [n for n, hint in near.items() if hint or (n in resting and known.isdisjoint(resting))]
        if misspelt:
            _errors.warn(
                f"{self!r}: {', '.join(map(repr, misspelt))} of its mapping names no axis of the arguments or results, "
                f"which have {', '.join(sorted(map(repr, known)))}." + "".join(f"{near[n]}" for n in misspelt)
            )

    def _make_whole(self) -> Callable[..., Any]:
        @functools.wraps(self._fn, updated=())
        def whole(*args, **kwargs):
            if not self._looks_first and not all(_is_surely_array(leaf) for leaf in jax.tree.leaves((args, kwargs))):
                raise _MayBeNumberError
            return self._run(args, kwargs)

        return whole

    @functools.cached_property
    def _split(self) -> Any:
        def split(donated, kept, static):
            return self._run(*static.joined(donated, kept))

        split.__name__ = split.__qualname__ = getattr(self._fn, "__name__", "function")
        return jax.jit(split, static_argnums=2, donate_argnums=0, **self._jit_arguments)

    def _taken_apart(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Any], Form]:
        leaves, structure = jax.tree.flatten((args, kwargs))
        donates = self._donates(args, kwargs, len(leaves))
        donated, kept, roles = [], [], []
        for leaf, donate in zip(leaves, donates, strict=True):
            if isinstance(leaf, ARRAYS):
                (donated if donate else kept).append(leaf)
                roles.append(donate)
            else:
                roles.append(constant(leaf))
        return donated, kept, Form(structure, tuple(roles))

    def _donates(self, args: Any, kwargs: Any, count: int) -> Sequence[bool]:
        """Whether each leaf of the arguments may be overwritten."""
        for_args, for_kwargs = self._donate
        if for_args is None and not for_kwargs:
            return (False,) * count
        if for_args is None or isinstance(for_args, bool) or callable(for_args):
            for_args = (for_args or False,) * len(args)
        if not kwargs and not for_kwargs and len(for_args) <= len(args):
            prefix: Any = ((*for_args, *(False,) * (len(args) - len(for_args))), {})
        else:
            names = parameter_names(self._fn, len(args), kwargs)
            wanted = dict(zip(parameter_names(self._fn, len(for_args)), for_args, strict=True)) | (for_kwargs or {})
            known = [*names, *kwargs]
            if unknown := [name for name in wanted if name not in known]:
                hints = "".join(_errors.suggestion(name, known) for name in unknown)
                raise ValueError(
                    f"named_jit: {', '.join(map(repr, unknown))} is to be donated, but is not an argument of the call, "
                    f"which has {', '.join(known)}.{hints}"
                )
            prefix = tuple([wanted.get(n, False) for n in names]), {n: wanted.get(n, False) for n in kwargs}
        spread = jax.tree.broadcast(prefix, (args, kwargs), is_leaf=callable)
        return [
            bool(d(leaf)) if callable(d) else d
            for d, leaf in zip(jax.tree.leaves(spread), jax.tree.leaves((args, kwargs)), strict=True)
        ]


def _checked_donation(argument: str, donate: Any) -> Any:
    """Tree prefixes that say which arguments may be overwritten, None being no."""

    def checked(may: Any) -> Any:
        if may is None or isinstance(may, bool) or callable(may):
            return may or False
        raise TypeError(
            f"named_jit: `{argument}` says whether each argument may be overwritten, by True and False rather than by "
            f"number, as in `donate_args=(True, False)` or `donate_kwargs={{'state': True}}`; got {donate!r}."
        )

    return None if donate is None else jax.tree.map(checked, donate, is_leaf=lambda x: x is None or callable(x))


class _MayBeNumberError(Exception):
    """Raised when a call is traced whose arguments `jax.jit` would not tell from Python numbers, which are static."""


def _is_surely_array(leaf: Any) -> bool:
    """Whether a leaf is an array, and one that `jax.jit` tells from a Python number."""
    if not isinstance(leaf, ARRAYS):
        return False
    return leaf.ndim > 0 or not (leaf.dtype == bool or getattr(leaf, "weak_type", False))
