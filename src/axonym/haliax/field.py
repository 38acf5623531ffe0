"""Fields of modules whose raw arrays have axis names."""

from __future__ import annotations

import functools
from typing import Any

from .. import field as _field


@functools.wraps(_field, assigned=("__name__", "__qualname__", "__doc__"))
def field(**options: Any) -> Any:
    try:
        return _field(**options)
    except TypeError as error:
        raise ValueError(str(error)) from None
