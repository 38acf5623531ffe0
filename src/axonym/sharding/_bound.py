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
    """A compiled method of one object."""

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
