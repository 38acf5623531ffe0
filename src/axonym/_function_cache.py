"""Finding again what was compiled for a user's function.

JAX knows a traced loop by the function object that is its body. A transform that wraps the user's function in a new one
on every call would trace and, outside of jit, compile every time. So what was made for a function is kept for as long
as that lives, and used again when everything else that is static is equal too.

A function can hold arrays: those of a module whose method it is, or of a `functools.partial`. They are operands of what
is compiled, so that another module of the same spec finds it too, and so that they may be traced, or lie on a mesh.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax

from ._tree_spec import StaticLeaf, TreeSpec, WeakLeaf, flatten, is_known_by_identity
from .array import is_named_array

R = TypeVar("R")

HeldArrays: TypeAlias = list[Any]
"""The arrays that the functions of a transform hold."""
WithArrays: TypeAlias = Callable[[HeldArrays], tuple[Callable[..., Any], ...]]
"""From these arrays, which may be traced, to the functions."""

_LIMIT = 256
"""How much is kept for one function; then the oldest goes. Only a static leaf that keeps changing gets there."""


class FunctionCache(dict[Any, Any]):
    """What was made for one function, by everything static that it depends on."""

    __slots__ = ("__weakref__",)

    def find(self, key: Any, specs: Iterable[TreeSpec], make: Callable[[], R]) -> R:
        """What was made for a key before, or is made now.

        Arguments:
            key: everything static that the result depends on. Where it has no hash, nothing is kept.
            specs: the specs in the key. What was made goes when one of their weak leaves goes.
            make: makes it.
        """
        try:
            found = self.get(key)
        except TypeError:  # there is something without a hash
            return make()
        if found is None:
            found = make(), self._forgotten_with(key, specs)
            for oldest in list(self)[: max(0, len(self) - _LIMIT + 1)]:
                self.pop(oldest, None)
            self[key] = found
        return found[0]

    def _forgotten_with(self, key: Any, specs: Iterable[TreeSpec]) -> list[weakref.ref[Any]]:
        """References that take out what is kept under a key when one of the weak leaves is gone."""
        known = weakref.ref(self)

        def forget(_: Any) -> None:
            cache = known()
            if cache is not None:
                cache.pop(key, None)

        return [weakref.ref(s.value, forget) for spec in specs for s in spec.static_leaves if isinstance(s, WeakLeaf)]


_CACHES: weakref.WeakKeyDictionary[Any, FunctionCache] = weakref.WeakKeyDictionary()

_PLAIN = {types.FunctionType, type(jax.jit(lambda: None))}
"""The types of functions that hold nothing that could be seen from outside. The common case, and soon done."""


class Functions:
    """The functions of a transform, apart from the arrays that they hold."""

    def __init__(self, *functions: Callable[..., Any], own: FunctionCache | None = None):
        """`own` is for what is made for functions that cannot be known again. By default nothing is kept for them."""
        self._functions = functions  # the leaves of the spec are weak
        self._plain = all(type(f) in _PLAIN for f in functions)
        self.arrays: HeldArrays = []
        if self._plain:
            self._spec = TreeSpec(jax.tree.structure(functions), map(WeakLeaf, functions))
        else:
            self.arrays, spec = flatten(_opened(functions))
            self._spec = spec.weak()
        self._own = own
        self._cache, self._key = self._where_kept()

    def now(self) -> Functions:
        """The same functions with the arrays that they hold now."""
        return self if self._plain else Functions(*self._functions, own=self._own)

    def compiled(self, build: Callable[..., R], plan: Any, *specs: TreeSpec) -> R:
        """What `build` made of these functions before, or makes of them now.

        Arguments:
            build: called as `build(functions, plan, *specs)`. What it makes keeps neither the functions nor the arrays.
            plan: everything static that the result depends on. Where it has no hash, nothing is kept.
            *specs: more of that, the specs of the caller's arguments. They come weak: their leaves are not kept alive.
        """
        weak = tuple([spec.weak() for spec in specs])
        key = build, plan, self._key, *weak
        return self._cache.find(key, (self._spec, *weak), lambda: build(self._with_arrays(), plan, *weak))

    def _where_kept(self) -> tuple[FunctionCache, TreeSpec | None]:
        """Where to keep what is made for the functions, and under what besides the plan."""
        if self._plain:
            return _CACHES.setdefault(self._functions[0], FunctionCache()), self._spec
        # A method of an object that can change is not the same function later on. JAX sees it that way, too.
        if not any(isinstance(s, StaticLeaf) and isinstance(s.value, types.MethodType) for s in self._spec.slots):
            with contextlib.suppress(TypeError):  # where there is no hash
                hash(self._spec)
                return _CACHES.setdefault(_anchor(self._functions[0]), FunctionCache()), self._spec
        return FunctionCache() if self._own is None else self._own, None

    def _with_arrays(self) -> WithArrays:
        spec = self._spec
        return lambda held: _closed(spec.unflatten(held))


def _anchor(function: Any) -> Any:
    """What lives as long as what was made for a function can be of use."""
    if isinstance(function, functools.partial):
        return _anchor(function.func)
    if isinstance(function, types.MethodType):
        return _anchor(function.__func__)
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    return function if is_leaf and is_known_by_identity(function) else type(function)


# --- functions as trees ---


@jax.tree_util.register_pytree_node_class
class _OpenedFunction:
    """A callable that JAX takes for a leaf, as a tree of what it is made of."""

    def __init__(self, make: Callable[..., Any], parts: Any):
        self.make, self.parts = make, parts

    def tree_flatten(self) -> tuple[tuple[Any], Callable[..., Any]]:
        return (self.parts,), self.make

    @classmethod
    def tree_unflatten(cls, make: Callable[..., Any], parts: tuple[Any]) -> _OpenedFunction:
        return cls(make, *parts)


def _opened(tree: Any) -> Any:
    """A tree with its partial functions, and with the methods of what is a tree itself, opened."""

    def is_made(x: Any) -> bool:
        return isinstance(x, functools.partial) or is_named_array(x)

    def open_leaf(x: Any) -> Any:
        if isinstance(x, functools.partial):
            return _OpenedFunction(type(x), _opened((x.func, x.args, x.keywords)))
        if isinstance(x, types.MethodType) and _is_immutable(x.__self__):
            return _OpenedFunction(types.MethodType, (x.__func__, _opened(x.__self__)))
        return x

    return jax.tree.map(open_leaf, tree, is_leaf=is_made)


def _is_immutable(x: Any) -> bool:
    """Whether something has no state of its own: a tree, or a value with a hash."""
    return not jax.tree_util.treedef_is_leaf(jax.tree.structure(x)) or type(x).__eq__ is not object.__eq__


def _closed(tree: Any) -> Any:
    """The tree that was opened."""

    def close(x: Any) -> Any:
        if not isinstance(x, _OpenedFunction):
            return x
        parts = _closed(x.parts)
        if x.make is types.MethodType:
            return types.MethodType(*parts)
        function, args, keywords = parts
        return x.make(function, *args, **keywords)

    return jax.tree.map(close, tree, is_leaf=lambda x: isinstance(x, _OpenedFunction) or is_named_array(x))
