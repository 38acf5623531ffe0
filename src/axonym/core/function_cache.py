"""Keep compiled code for each user function.

JAX identifies a traced loop by the function object of its body. A transform that wraps the user's function in a new one
on every call would trace and, outside of jit, compile every time. So the compiled code of a function is kept as long as
the function lives, and used again if everything else that is static is equal.

A function can hold arrays, as a method of a module or a `functools.partial` does. They are operands of the compiled
code, so that another module of the same spec uses it too, and so that they may be traced or sharded.

Operations have a cache of their own, `axonym.ops._kernels.cached`, and so has each function of `named_jit`.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax

from ..named_array import is_named_array
from .jax_versions import INLINE
from .tree_spec import StaticLeaf, TreeSpec, WeakLeaf, flatten_arrays, is_known_by_identity

R = TypeVar("R")

HeldArrays: TypeAlias = list[Any]
"""The arrays that a transform's functions hold."""
WithArrays: TypeAlias = Callable[[HeldArrays], tuple[Callable[..., Any], ...]]
"""Makes the functions from these arrays, which may be traced."""

_LIMIT = 256
"""The maximum number of entries for one function; the oldest is dropped. Only changing static leaves reach it."""


class FunctionCache(dict[Any, Any]):
    """The cached values for one function, by everything static that they depend on."""

    __slots__ = ("__weakref__",)

    def find(self, key: Any, specs: Iterable[TreeSpec], make: Callable[[], R]) -> R:
        """Return the value for a key, and build it first if there is none; without a hash, nothing is kept.

        The value is dropped when any weak leaf of `specs`, which the key has, dies.
        """
        try:
            found = self.get(key)
        except TypeError:  # something has no hash
            return make()
        if found is None:
            known = weakref.ref(self)

            def forget(_: Any) -> None:
                cache = known()
                if cache is not None:
                    cache.pop(key, None)

            weak = [leaf.value for spec in specs for leaf in spec.static_leaves if isinstance(leaf, WeakLeaf)]
            # The references are kept with the value: one that is collected itself calls nothing.
            found = make(), [weakref.ref(value, forget) for value in weak]
            for oldest in list(self)[: max(0, len(self) - _LIMIT + 1)]:
                self.pop(oldest, None)
            self[key] = found
        return found[0]


_CACHES: weakref.WeakKeyDictionary[Any, FunctionCache] = weakref.WeakKeyDictionary()

_PLAIN = {types.FunctionType, type(jax.jit(lambda: None))}
"""The types of functions that hold no arrays visible from outside. The common case, handled fast."""


class Functions:
    """The functions of a transform, apart from the arrays that they hold."""

    def __init__(self, *functions: Callable[..., Any], own: FunctionCache | None = None):
        """Find the cache; `own` is for functions without a stable identity, for which nothing is kept by default."""
        self._functions = functions  # the leaves of the spec are weak
        self._plain = all(type(f) in _PLAIN for f in functions)
        self.arrays: HeldArrays = []
        if self._plain:
            self._spec = TreeSpec(jax.tree.structure(functions), map(WeakLeaf, functions))
        else:
            self.arrays, spec = flatten_arrays(opened(functions))
            self._spec = spec.weak()
        self._own = own
        # The cache for the functions, and their part of the key. As in JAX, a method of a mutable object is not the
        # same function later on.
        self._cache, self._key = FunctionCache() if own is None else own, None
        if not any(isinstance(s, StaticLeaf) and isinstance(s.value, types.MethodType) for s in self._spec.slots):
            with contextlib.suppress(TypeError):  # something has no hash
                hash(self._spec)
                anchor = functions[0] if self._plain else _cache_anchor(functions[0])
                self._cache, self._key = _CACHES.setdefault(anchor, FunctionCache()), self._spec

    def now(self) -> Functions:
        """Return the same functions with the arrays that they currently hold."""
        return self if self._plain else Functions(*self._functions, own=self._own)

    def compiled(self, build: Callable[..., R], plan: Any, *specs: TreeSpec) -> R:
        """Return the result of `build(functions, plan, *specs)`, from the cache if possible.

        It keeps neither the functions nor the arrays alive, nor the leaves of the specs of the caller's arguments. The
        plan is everything else that is static; if it has no hash, nothing is kept.
        """
        weak = tuple([spec.weak() for spec in specs])
        key, spec = (build, plan, self._key, *weak), self._spec

        def with_arrays(held: HeldArrays) -> tuple[Callable[..., Any], ...]:
            return closed(spec.unflatten(held))

        return self._cache.find(key, (spec, *weak), lambda: build(with_arrays, plan, *weak))


def _cache_anchor(function: Any) -> Any:
    """Return an object that lives as long as the cached values for a function can be used."""
    if isinstance(function, functools.partial):
        return _cache_anchor(function.func)
    if isinstance(function, types.MethodType):
        return _cache_anchor(function.__func__)
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    return function if is_leaf and is_known_by_identity(function) else type(function)


def jitted_as(name: str, run: Callable[..., Any]) -> Any:
    """Return a function of raw arrays compiled under a name, which must not show in a program that calls it."""
    run.__name__ = run.__qualname__ = name
    return jax.jit(run, inline=INLINE)


# --- functions as trees ---


@jax.tree_util.register_pytree_node_class
class _OpenedFunction:
    """A callable that JAX treats as a leaf, as a tree of its parts."""

    def __init__(self, make: Callable[..., Any], parts: Any):
        self.make, self.parts = make, parts

    def tree_flatten(self) -> tuple[tuple[Any], Callable[..., Any]]:
        return (self.parts,), self.make

    @classmethod
    def tree_unflatten(cls, make: Callable[..., Any], parts: tuple[Any]) -> _OpenedFunction:
        return cls(make, *parts)


def opened(tree: Any, closures: bool = False, _within: tuple[Any, ...] = ()) -> Any:
    """Open the partial functions in a tree, the methods of trees and, if asked, what functions refer to outside."""

    def is_made(x: Any) -> bool:
        return isinstance(x, functools.partial) or is_named_array(x)

    def open_leaf(x: Any) -> Any:
        if isinstance(x, functools.partial):
            return _OpenedFunction(type(x), opened((x.func, x.args, x.keywords), closures, _within))
        # An object without mutable state: a tree, or a value with a hash.
        if isinstance(x, types.MethodType) and (
            not jax.tree_util.treedef_is_leaf(jax.tree.structure(x.__self__))
            or type(x.__self__).__eq__ is not object.__eq__
        ):
            return _OpenedFunction(types.MethodType, (x.__func__, opened(x.__self__, closures, _within)))
        if closures and type(x) is types.FunctionType and x.__closure__ and x not in _within:
            with contextlib.suppress(ValueError):  # a variable without a value yet
                held = [cell.cell_contents for cell in x.__closure__]
                return _OpenedFunction(types.FunctionType, (x, opened(held, closures, (*_within, x))))
        return x

    return jax.tree.map(open_leaf, tree, is_leaf=is_made)


def _same_leaves(a: Any, b: Any) -> bool:
    before, after = (jax.tree.flatten(x, is_leaf=is_named_array) for x in (a, b))
    return before[1] == after[1] and all(x is y for x, y in zip(before[0], after[0], strict=True))


def closed(tree: Any) -> Any:
    """Return the tree that was opened."""

    def close(x: Any) -> Any:
        if not isinstance(x, _OpenedFunction):
            return x
        parts = closed(x.parts)
        if x.make is types.MethodType:
            return types.MethodType(*parts)
        if x.make is types.FunctionType:
            f, held = parts
            # A variable in which nothing was replaced stays the same one, so that the function can write to it.
            cells = [
                cell if _same_leaves(cell.cell_contents, x) else types.CellType(x)
                for cell, x in zip(f.__closure__, held, strict=True)
            ]
            made = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(cells))
            made.__kwdefaults__ = f.__kwdefaults__
            return functools.update_wrapper(made, f, updated=("__dict__",))
        function, args, keywords = parts
        return x.make(function, *args, **keywords)

    return jax.tree.map(close, tree, is_leaf=lambda x: isinstance(x, _OpenedFunction) or is_named_array(x))
