"""Taking arguments and results apart into arrays and what is part of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._static import Static

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
"""What goes into a compiled function as an array; everything else is part of the program."""


def constant(leaf: Any) -> Static:
    """A leaf that is part of the program."""
    return Static(leaf, "named_jit: an argument or result that is not an array")


class Form:
    """What of the arguments is part of the program: their structure, and every leaf that is not an array."""

    __slots__ = ("_hash", "roles", "structure")

    def __init__(self, structure: Any, roles: tuple[Any, ...]):
        self.structure = structure
        self.roles = roles
        """For each leaf: whether it is donated, or the constant it is."""
        self._hash = hash((structure, roles))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.structure == other.structure and self.roles == other.roles

    def joined(self, donated: Sequence[Any], kept: Sequence[Any]) -> Any:
        """The arguments again."""
        sources = {True: iter(donated), False: iter(kept)}
        leaves = [r.value if isinstance(r, Static) else next(sources[r]) for r in self.roles]
        return jax.tree.unflatten(self.structure, leaves)


class Separated:
    """A result that is not made of arrays alone: the arrays, and the rest as part of the structure."""

    __slots__ = ("arrays", "static")

    def __init__(self, arrays: list[Any], static: Form):
        self.arrays = arrays
        self.static = static


jax.tree_util.register_dataclass(Separated, data_fields=["arrays"], meta_fields=["static"])


def separated(result: Any) -> Any:
    """A result as a compiled function can give it."""
    leaves, structure = jax.tree.flatten(result)
    roles = tuple([False if isinstance(leaf, ARRAYS) else constant(leaf) for leaf in leaves])
    if not any(roles):
        return result
    return Separated([leaf for leaf, role in zip(leaves, roles, strict=True) if not role], Form(structure, roles))


def joined(result: Any) -> Any:
    """A result as the function that was compiled gives it."""
    return result.static.joined((), result.arrays) if isinstance(result, Separated) else result
