"""Methods of objects that are compiled functions."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax


class Compiled(Protocol):
    """What `named_jit` and `sjit` make."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...
    def trace(self, *args: Any, **kwargs: Any) -> Any: ...


class BoundMethod:
    """A compiled method of one object.

    It is a tree with the object in it, so that as an argument it is told by its arrays rather than by its identity.
    """

    def __init__(self, compiled: Compiled, instance: Any):
        functools.update_wrapper(self, compiled, updated=())
        self.__func__ = compiled
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.trace(self.__self__, *args, **kwargs)


def _flatten(method: BoundMethod) -> tuple[Any, Any]:
    return ((jax.tree_util.GetAttrKey("__self__"), method.__self__),), method.__func__


def _unflatten(compiled: Compiled, children: Any) -> BoundMethod:
    return BoundMethod(compiled, *children)


jax.tree_util.register_pytree_with_keys(BoundMethod, _flatten, _unflatten)
