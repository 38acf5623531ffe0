"""`named_jit`: `jax.jit` that places arguments and results by name."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np

from .. import _context, _errors
from .._static import Static
from ._bound import BoundMethod
from .annotations import kept_annotations
from .mapping import is_resource_mapping, normalize_mapping
from .placement import Placement, leaves_of
from .shard import lies_elsewhere, shard_arguments, shard_quietly

P = ParamSpec("P")
R = TypeVar("R")

_CONSTANT = "named_jit: an argument or result that is not an array"
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


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
    at every leaf takes time, so until `jax.jit` has refused arguments once, they go in whole unseen.

    Placements are applied inside the compiled function: arguments on the host arrive split, those placed otherwise are
    moved. Only those that lie on other devices than the mesh's are moved before, when `jax.jit` has refused them.
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
        if isinstance(axis_resources, _context.Settings):
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
        self._donate = (donate_args, donate_kwargs)
        self._jit_arguments = jit_arguments
        self._looks_first = self._donate != (None, None)
        self._whole = jax.jit(self._make_whole(), **jit_arguments)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        outer = _context.settings_in_force()
        settings = self._settings_within(outer)
        if settings is outer:
            return self._call(args, kwargs)
        with _context.in_force(settings):
            return self._call(args, kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lower the function for these arguments, which may be abstract: see `jax.jit(f).lower`.

        >>> axn.named_jit(lambda x: x * 2).lower(axn.ones({"x": 2})).compile() is not None
        True
        """
        with self._in_force():
            if self._takes_whole((args, kwargs)):
                return self._whole.lower(*args, **kwargs)
            return self._split.lower(*self._taken_apart(args, kwargs))

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function for these arguments, which may be abstract: see `jax.jit(f).trace`.

        >>> axn.named_jit(lambda x: x * 2).trace(axn.ones({"x": 2})).jaxpr is not None
        True
        """
        with self._in_force():
            if self._takes_whole((args, kwargs)):
                return self._whole.trace(*args, **kwargs)
            return self._split.trace(*self._taken_apart(args, kwargs))

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
        return _context.changed(settings, annotations=annotations) if annotations else settings

    def _in_force(self) -> contextlib.AbstractContextManager[None]:
        return _context.in_force(self._settings_within(_context.settings_in_force()))

    def _call(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._called(args, kwargs)
        except ValueError:
            if self._in is None or not lies_elsewhere((args, kwargs)):
                raise
            return self._called(*self._placed(args, kwargs))

    def _called(self, args: Any, kwargs: Any) -> Any:
        if not self._looks_first:
            try:
                return _joined(self._whole(*args, **kwargs))
            except (TypeError, ValueError, _MayBeNumberError):
                if self._takes_whole((args, kwargs)):
                    raise
            self._looks_first = True
        if self._takes_whole((args, kwargs)):
            return _joined(self._whole(*args, **kwargs))
        return _joined(self._split(*self._taken_apart(args, kwargs)))

    def _takes_whole(self, arguments: Any) -> bool:
        return self._donate == (None, None) and all([_is_surely_array(leaf) for leaf in jax.tree.leaves(arguments)])

    def _run(self, args: Any, kwargs: Any) -> Any:
        """The body that is traced."""
        args, kwargs = self._placed(args, kwargs)
        result = self._fn(*args, **kwargs)
        self._warn_if_misspelt((args, kwargs), result)
        return _separated(shard_quietly(result, self._out, "named_jit (results)"))

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._in is None:
            return args, kwargs
        return shard_arguments(self._fn, args, kwargs, self._in, "named_jit (arguments)")

    def _warn_if_misspelt(self, arguments: Any, result: Any) -> None:
        """Warn of a mapping that applies to nothing that goes in or comes out, if a near name would.

        A mapping may well be meant for axes that exist only inside; then no name is near.
        """
        keys = self._settings.mapping if self._own_mapping and self._settings is not None else ()
        known = {n for leaf in leaves_of((arguments, result))[0] for n in leaf.names or ()}
        if known.intersection(keys):
            return
        hints = "".join(f" {key!r}:{hint}" for key in keys if (hint := _errors.suggestion(key, known)))
        if hints:
            warnings.warn(
                f"{self!r}: no key of its mapping names an axis of the arguments or results, which have "
                f"{', '.join(sorted(map(repr, known)))}.{hints}",
                stacklevel=2,
            )

    def _make_whole(self) -> Callable[..., Any]:
        @functools.wraps(self._fn, updated=())
        def whole(*args, **kwargs):
            if not self._takes_whole((args, kwargs)):
                raise _MayBeNumberError
            return self._run(args, kwargs)

        return whole

    @functools.cached_property
    def _split(self) -> Any:
        def split(donated, kept, static):
            return self._run(*static.joined(donated, kept))

        split.__name__ = split.__qualname__ = getattr(self._fn, "__name__", "function")
        return jax.jit(split, static_argnums=2, donate_argnums=0, **self._jit_arguments)

    def _taken_apart(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Any], _Form]:
        leaves, structure = jax.tree.flatten((args, kwargs))
        donates = self._donates(args, kwargs, len(leaves))
        donated, kept, roles = [], [], []
        for leaf, donate in zip(leaves, donates, strict=True):
            if isinstance(leaf, _ARRAYS):
                (donated if donate else kept).append(leaf)
                roles.append(donate)
            else:
                roles.append(Static(leaf, _CONSTANT))
        return donated, kept, _Form(structure, tuple(roles))

    def _donates(self, args: Any, kwargs: Any, count: int) -> Sequence[bool]:
        if self._donate == (None, None):
            return (False,) * count
        for_args, for_kwargs = self._donate
        if isinstance(for_args, bool) or for_args is None:
            for_args = (bool(for_args),) * len(args)
        if len(for_args) > len(args):
            raise ValueError(f"named_jit: `donate_args` speaks of {len(for_args)} arguments; the call has {len(args)}.")
        unknown = [name for name in for_kwargs or () if name not in kwargs]
        if unknown:
            listed = ", ".join(repr(name) for name in unknown)
            hints = "".join(_errors.suggestion(name, kwargs) for name in unknown)
            raise ValueError(f"named_jit: `donate_kwargs` names {listed}, which the call does not have.{hints}")
        for_args = (*for_args, *(False,) * (len(args) - len(for_args)))
        for_kwargs = {name: (for_kwargs or {}).get(name, False) for name in kwargs}
        prefix = (tuple(for_args), for_kwargs)
        spread = jax.tree.broadcast(prefix, (args, kwargs), is_leaf=lambda x: isinstance(x, bool) or callable(x))
        return [
            bool(d(leaf)) if callable(d) else bool(d)
            for d, leaf in zip(jax.tree.leaves(spread), jax.tree.leaves((args, kwargs)), strict=True)
        ]


class _Form:
    """What of the arguments is part of the program: their structure, and every leaf that is not an array."""

    __slots__ = ("_hash", "roles", "structure")

    def __init__(self, structure: Any, roles: tuple[Any, ...]):
        self.structure = structure
        self.roles = roles
        """For each leaf: whether it is donated, or the constant it is."""
        self._hash = hash((structure, roles))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self.structure == other.structure and self.roles == other.roles

    def joined(self, donated: Sequence[Any], kept: Sequence[Any]) -> Any:
        """The arguments again."""
        sources = {True: iter(donated), False: iter(kept)}
        leaves = [r.value if isinstance(r, Static) else next(sources[r]) for r in self.roles]
        return jax.tree.unflatten(self.structure, leaves)


class _MayBeNumberError(Exception):
    """Raised when a call is traced whose arguments `jax.jit` would not tell from Python numbers, which are static."""


def _is_surely_array(leaf: Any) -> bool:
    """Whether a leaf is an array, and one that `jax.jit` tells from a Python number."""
    if not isinstance(leaf, _ARRAYS):
        return False
    return leaf.ndim > 0 or not (leaf.dtype == bool or getattr(leaf, "weak_type", False))


# --- results ---


class _Separated:
    """A result that is not made of arrays alone: the arrays, and the rest as part of the structure."""

    __slots__ = ("arrays", "static")

    def __init__(self, arrays: list[Any], static: _Form):
        self.arrays = arrays
        self.static = static


jax.tree_util.register_dataclass(_Separated, data_fields=["arrays"], meta_fields=["static"])


def _separated(result: Any) -> Any:
    leaves, structure = jax.tree.flatten(result)
    roles = tuple([False if isinstance(leaf, _ARRAYS) else Static(leaf, _CONSTANT) for leaf in leaves])
    if not any(roles):
        return result
    return _Separated([leaf for leaf, role in zip(leaves, roles, strict=True) if not role], _Form(structure, roles))


def _joined(result: Any) -> Any:
    return result.static.joined((), result.arrays) if isinstance(result, _Separated) else result
