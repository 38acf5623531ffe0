"""Values that are part of a program, as keys under which what was compiled for them is found again."""

from __future__ import annotations

from typing import Any

from .array import NamedArray


class Static:
    """A value that is not an array. Equal ones are of one type: 1, 1.0 and True are three different programs.

    So are 0.0 and -0.0, which Python calls equal.
    """

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any, what: str | None = None):
        """`what` says what the value is, at the start of the message if it cannot be hashed.

        Without it, the message comes when it is hashed.
        """
        self.value = value
        self._key = _typed(value)
        try:
            self._hash = hash(self._key)
        except TypeError:
            self._hash = None
            if what is None:
                return
            raise TypeError(
                f"{what} is part of the program, so it must be hashable, which this {type(value).__name__} is not. "
                "Numbers that change go into arrays; a list can be a tuple."
            ) from None

    def __hash__(self) -> int:
        if self._hash is None:
            raise TypeError(f"{type(self.value).__name__} cannot be hashed.")
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and (self.value is other.value or bool(self._key == other._key))

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


def _typed(value: Any) -> Any:
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # tells 0.0 from -0.0, and finds NaN again
    if type(value) is tuple:
        return tuple, tuple(map(_typed, value))
    if isinstance(value, NamedArray):  # a placeholder, such as None, for an array
        return NamedArray, value.names, value.array
    return type(value), value
