"""How the programs here are written down: a function, and the names of the axes of its arguments.

`"batch pos=6 _"` is an array with three axes: one of a size that is chosen, one of size 6, and one without a name.
`"int: batch"` is an array of integers, and `""` a scalar. A name that occurs twice is passed on as `pos pos'`.
Arguments can be trees of such strings. In the names of results, `?` is an axis that has no proper name, and `time?` one
that need not have any, like the windows of a moving average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DISTINCT = (3, 5, 7, 9, 11, 13, 2, 15, 17, 19, 21)
"""Sizes of names, in the order in which a program mentions them."""


class Program(NamedTuple):
    """A function with the names of its arguments, and the names that an author would give its results."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    returns: Any = None
    square_only: bool = False

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def names(self) -> tuple[Any, ...]:
        """Return what is passed as `names=`."""
        return jax.tree.map(_names, self.arguments)

    def example(self, square: bool) -> tuple[Any, ...]:
        """Return arguments, with sizes that are all 4 or, unless the program asks for a square, all different."""
        sizes: dict[str, int] = {}

        def make(text: str) -> jax.Array:
            kind, _, axes = text.rpartition(":")
            shape = []
            for axis in axes.split():
                name, _, size = axis.partition("=")
                if size:
                    sizes[name] = int(size)
                elif name not in sizes:
                    sizes[name] = 4 if square or self.square_only else DISTINCT[len(sizes)]
                shape.append(sizes[name])
            return jnp.zeros(shape, {"": jnp.float32, "int": jnp.int32, "bool": bool}[kind])

        return jax.tree.map(make, self.arguments)


def _names(text: str) -> str:
    found: list[str] = []
    for axis in text.rpartition(":")[2].split():
        name = axis.partition("=")[0]
        found.append(name + "'" * (found.count(name) if name != "_" else 0))
    return " ".join(found)


class Pair(NamedTuple):
    """A correct program, and a twin with one mistake that JAX accepts if sizes are equal."""

    clean: Program
    buggy: Program
