"""`named_call`: run a function in a `jax.named_scope`, for profiles and compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax

F = TypeVar("F", bound=Callable[..., Any])


@overload
def named_call(f: F, name: str | None = None) -> F: ...
@overload
def named_call(f: None = None, name: str | None = None) -> Callable[[F], F]: ...
def named_call(f: Any = None, name: str | None = None) -> Any:
    """Decorate a function so that profiles and compiled programs show what it does under its name.

    Arguments:
        name: the name; by default the function's name, for a method with the name of its class in front, and for
            `__call__` only the name of the class.

    >>> from axonym.core.named_scope import named_call
    >>> @named_call(name="squares")
    ... def f(x):
    ...     return x * x
    >>> "squares" in str(jax.jit(f).lower(2.0).as_text(debug_info=True))
    True
    """
    if f is None:
        return functools.partial(named_call, name=name)
    qualified = getattr(f, "__qualname__", type(f).__name__)
    scope = name or qualified.rpartition("<locals>.")[2].removesuffix(".__call__")

    @functools.wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return f(*args, **kwargs)

    return called
