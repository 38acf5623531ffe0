"""Finding again what was compiled for a user's function.

JAX knows a traced loop by the function object that is its body. A transform that wraps the user's function in a new one
on every call would trace and, outside of jit, compile every time. So what was made for a function is kept for as long
as that lives, and used again when everything else that is static is equal too.

A function can hold arrays: those of a module whose method it is, or of a `functools.partial`. They are operands of what
is compiled, so that another module of the same form finds it too, and so that they may be traced, or lie on a mesh.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax

from .._static import Static
from ..array import is_named_array
from ._forms import Form, Lent, by_identity, split

R = TypeVar("R")

Held: TypeAlias = list[Any]
"""The arrays that the functions of a transform hold."""
Getter: TypeAlias = Callable[[Held], tuple[Callable[..., Any], ...]]
"""From these arrays, which may be traced, to the functions."""

_LIMIT = 256
"""How much is kept for one function; then the oldest goes. Only a static leaf that keeps changing gets there."""


class Kept(dict[Any, Any]):
    """What was made for one function, by everything static that it depends on."""

    __slots__ = ("__weakref__",)


_KNOWN: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()

_PLAIN = {types.FunctionType, type(jax.jit(lambda: None))}
"""The types of functions that hold nothing that could be seen from outside. The common case, and soon done."""


class Functions:
    """The functions of a transform, apart from the arrays that they hold."""

    def __init__(self, *functions: Callable[..., Any], own: Kept | None = None):
        """`own` is for what is made for functions that cannot be known again. By default nothing is kept for them."""
        self._functions = functions  # the form has only lent them
        self._plain = all(type(f) in _PLAIN for f in functions)
        self.arrays: Held = []
        if self._plain:
            self._form = Form(jax.tree.structure(functions), tuple(map(Lent, functions)))
        else:
            self.arrays, form = split(_opened(functions), numbers=False)
            self._form = form.lent()
        self._own = own
        self._kept, self._key = self._where_kept()

    def now(self) -> Functions:
        """The same functions with the arrays that they hold now."""
        return self if self._plain else Functions(*self._functions, own=self._own)

    def compiled(self, build: Callable[..., R], plan: Any, *forms: Form) -> R:
        """What `build` made of these functions before, or makes of them now.

        Arguments:
            build: called as `build(getter, plan, *forms)`. What it makes keeps neither the functions nor the arrays.
            plan: everything static that the result depends on. Where it has no hash, nothing is kept.
            *forms: more of that, the forms of the caller's arguments. They come lent: what they hold is not kept alive.
        """
        lent = tuple(form.lent() for form in forms)
        kept = self._kept
        key = build, plan, self._key, *lent
        try:
            found = kept.get(key)
        except TypeError:  # there is something without a hash
            return build(self._getter(), plan, *lent)
        if found is None:
            found = build(self._getter(), plan, *lent), _forgotten_with(kept, key, (self._form, *lent))
            for oldest in list(kept)[: max(0, len(kept) - _LIMIT + 1)]:
                kept.pop(oldest, None)
            kept[key] = found
        return found[0]

    def _where_kept(self) -> tuple[Kept, Form | None]:
        """Where to keep what is made for the functions, and under what besides the plan."""
        if self._plain:
            return _KNOWN.setdefault(self._functions[0], Kept()), self._form
        # A method of an object that can change is not the same function later on. JAX sees it that way, too.
        if not any(isinstance(c, Static) and isinstance(c.value, types.MethodType) for c in self._form.slots):
            with contextlib.suppress(TypeError):  # where there is no hash
                hash(self._form)
                return _KNOWN.setdefault(_anchor(self._functions[0]), Kept()), self._form
        return Kept() if self._own is None else self._own, None

    def _getter(self) -> Getter:
        form = self._form
        return lambda held: _closed(form.join(held))


def _forgotten_with(kept: Kept, key: Any, forms: Iterable[Form]) -> list[weakref.ref[Any]]:
    """References that take out what was kept under a key when something lent to it is gone."""
    known = weakref.ref(kept)

    def forget(_: Any) -> None:
        kept = known()
        if kept is not None:
            kept.pop(key, None)

    return [weakref.ref(c.value, forget) for form in forms for c in form.constants if isinstance(c, Lent)]


def _anchor(function: Any) -> Any:
    """What lives as long as what was made for a function can be of use."""
    if isinstance(function, functools.partial):
        return _anchor(function.func)
    if isinstance(function, types.MethodType):
        return _anchor(function.__func__)
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    return function if is_leaf and by_identity(function) else type(function)


# --- functions as trees ---


@jax.tree_util.register_pytree_node_class
class _Opened:
    """A callable that JAX takes for a leaf, as a tree of what it is made of."""

    def __init__(self, make: Callable[..., Any], parts: Any):
        self.make, self.parts = make, parts

    def tree_flatten(self) -> tuple[tuple[Any], Callable[..., Any]]:
        return (self.parts,), self.make

    @classmethod
    def tree_unflatten(cls, make: Callable[..., Any], parts: tuple[Any]) -> _Opened:
        return cls(make, *parts)


def _opened(tree: Any) -> Any:
    """A tree with its partial functions, and with the methods of what is a tree itself, opened."""

    def is_made(x: Any) -> bool:
        return isinstance(x, functools.partial) or is_named_array(x)

    def open_leaf(x: Any) -> Any:
        if isinstance(x, functools.partial):
            return _Opened(type(x), _opened((x.func, x.args, x.keywords)))
        if isinstance(x, types.MethodType) and _is_immutable(x.__self__):
            return _Opened(types.MethodType, (x.__func__, _opened(x.__self__)))
        return x

    return jax.tree.map(open_leaf, tree, is_leaf=is_made)


def _is_immutable(x: Any) -> bool:
    """Whether something has no state of its own: a tree, or a value with a hash."""
    return not jax.tree_util.treedef_is_leaf(jax.tree.structure(x)) or type(x).__eq__ is not object.__eq__


def _closed(tree: Any) -> Any:
    """The tree that was opened."""

    def close(x: Any) -> Any:
        if not isinstance(x, _Opened):
            return x
        parts = _closed(x.parts)
        if x.make is types.MethodType:
            return types.MethodType(*parts)
        function, args, keywords = parts
        return x.make(function, *args, **keywords)

    return jax.tree.map(close, tree, is_leaf=lambda x: isinstance(x, _Opened) or is_named_array(x))
