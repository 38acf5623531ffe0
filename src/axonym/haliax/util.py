"""Small helpers, and tests of whether something is an array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx

from ..named_array import is_jax_array_like as is_jax_array_like, is_named_array as is_named_array
from ..nn.loss import UNSPECIFIED as UNSPECIFIED, Unspecified as Unspecified

__all__ = ["StringHolderEnum", "ensure_tuple", "is_jax_or_hax_array_like", "is_named_array"]

_T = TypeVar("_T")


class StringHolderEnum(type):
    """Makes a class of string constants: iterating over the class gives them, and each is a plain string.

    >>> class Mesh(metaclass=hax.util.StringHolderEnum):
    ...     DATA = "data"
    >>> list(Mesh), Mesh.DATA, "data" in Mesh
    (['data'], 'data', True)
    """

    members: list[Any]

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> StringHolderEnum:
        made = super().__new__(cls, name, bases, members)
        made.members = [v for k, v in members.items() if not k.startswith("__") and not callable(v)]
        return made

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.members)


def ensure_tuple(x: Sequence[_T] | _T) -> tuple[_T, ...]:
    """Return a sequence as a tuple, and anything else, a string too, as a tuple of one.

    >>> hax.util.ensure_tuple([1, 2]), hax.util.ensure_tuple("batch")
    ((1, 2), ('batch',))
    """
    if isinstance(x, Sequence) and not isinstance(x, str):
        return tuple(x)
    return (x,)  # pyright: ignore[reportReturnType]  # it is no sequence of _T, so it is a _T


def maybe_untuple(x: Any) -> Any:
    """Return the element of a tuple of one, and anything else as it is.

    >>> hax.util.maybe_untuple((3,)), hax.util.maybe_untuple((1, 2))
    (3, (1, 2))
    """
    return x[0] if isinstance(x, tuple) and len(x) == 1 else x


def index_where(pred: Callable[[_T], bool], xs: Sequence[_T], start: int = 0) -> int:
    """Return the first position, from `start` on, of an element for which a function is true.

    >>> hax.util.index_where(lambda x: x > 1, [0, 2, 4])
    1
    """
    found = next((i for i in range(start, len(xs)) if pred(xs[i])), None)
    if found is None:
        raise ValueError(f"index_where: no element from {start} on is chosen.")
    return found


def safe_wraps(fn: Any) -> Callable[[Any], Any]:
    """Make a decorator that calls `safe_update_wrapper`.

    >>> hax.util.safe_wraps(jnp.sum)(lambda x: x).__name__
    'sum'
    """
    return functools.partial(safe_update_wrapper, wrapped=fn)


def safe_update_wrapper(wrapper: Any, wrapped: Any) -> Any:
    """Give a function, or a module of Equinox, the name and the documentation of the function that it wraps.

    >>> hax.util.safe_update_wrapper(lambda x: x, jnp.sum).__name__
    'sum'
    """
    if isinstance(wrapper, eqx.Module):
        return eqx.module_update_wrapper(wrapper, wrapped)
    return functools.update_wrapper(wrapper, wrapped)


def is_jax_or_hax_array_like(x: Any) -> bool:
    """Return whether something is a named array, of whatever content, or has a shape and a dtype.

    >>> hax.util.is_jax_or_hax_array_like(axn.ones({"x": 2})), hax.util.is_jax_or_hax_array_like(3)
    (True, False)
    """
    return is_named_array(x) or is_jax_array_like(x)
