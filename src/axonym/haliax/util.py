"""Small helpers that have nothing to do with arrays, and questions that do."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

from ..array import is_jax_array_like as is_jax_array_like, is_named_array as is_named_array
from ..nn.loss import UNSPECIFIED as UNSPECIFIED, Unspecified as Unspecified

__all__ = ["StringHolderEnum", "ensure_tuple", "is_jax_or_hax_array_like", "is_named_array"]

_T = TypeVar("_T")


class StringHolderEnum(enum.StrEnum):
    """An enumeration whose members are strings, and can be used wherever a string can.

    >>> import axonym.haliax as hax
    >>> class Mesh(hax.util.StringHolderEnum):
    ...     DATA = "data"
    >>> Mesh.DATA == "data", {"data": 4}[Mesh.DATA]
    (True, 4)
    """


def ensure_tuple(x: Sequence[_T] | _T) -> tuple[_T, ...]:
    """A sequence as a tuple, and anything else, a string too, as a tuple of one.

    Arguments:
        x: a sequence or a single thing.

    >>> import axonym.haliax as hax
    >>> hax.util.ensure_tuple([1, 2]), hax.util.ensure_tuple("batch")
    ((1, 2), ('batch',))
    """
    if isinstance(x, Sequence) and not isinstance(x, str):
        return tuple(x)
    return (x,)  # pyright: ignore[reportReturnType]  # it is no sequence of _T, so it is a _T


def is_jax_or_hax_array_like(x: Any) -> bool:
    """Whether something is a named array, of whatever content, or has a shape and a dtype.

    >>> import axonym.haliax as hax
    >>> hax.util.is_jax_or_hax_array_like(axn.ones({"x": 2})), hax.util.is_jax_or_hax_array_like(3)
    (True, False)
    """
    return is_named_array(x) or is_jax_array_like(x)
