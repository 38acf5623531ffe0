"""Small helpers, and tests of whether something is an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

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


def is_jax_or_hax_array_like(x: Any) -> bool:
    """Return whether something is a named array, of whatever content, or has a shape and a dtype.

    >>> hax.util.is_jax_or_hax_array_like(axn.ones({"x": 2})), hax.util.is_jax_or_hax_array_like(3)
    (True, False)
    """
    return is_named_array(x) or is_jax_array_like(x)
