"""Find the argument of a step that each array in its program belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.parameter_names import parameter_names
from ..core.tree_spec import PROGRAM_ARRAYS
from ..sharding._compiled_function import BoundCompiledFunction, Stage


def step_name(step: Any) -> str:
    """Return the name of a step in reports."""
    return getattr(step, "__name__", None) or type(step).__name__


def names_of_arrays(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return, for each array in the arguments of a step, the name of its argument."""
    if isinstance(step, BoundCompiledFunction):
        step, args = step.__func__, (step.__self__, *args)
    given = [*zip(parameter_names(step, len(args), kwargs), args, strict=True), *sorted(kwargs.items())]
    return [
        name
        for name, tree in given
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, PROGRAM_ARRAYS) and not isinstance(leaf, np.character)
    ]


class ArgumentNames:
    """The names of a lowered step's arguments, by the names that JAX gives their arrays in the program."""

    def __init__(self, lowered: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        names = names_of_arrays(step, args, kwargs)
        self._known = frozenset(names)
        self._lists = lowered.by_parameter(names) if isinstance(lowered, Stage) else {}

    def added_up(self, sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Return the bytes of each argument, from the scopes and the bytes of arrays."""
        return added_up((self._name(scope), size) for scope, size in sizes)

    def _name(self, scope: str) -> str:
        """Return the argument that contains an array such as `state[0].count`, `rest[1]` or `options['scale']`."""
        found = re.match(r"(\w+)(?:\[(\d+)\]|\[\\?'(\w+)\\?'\])?", scope)
        if found is None:
            return "not known"
        name, place, key = found.groups()
        if name in self._lists and place is not None:
            return self._lists[name][int(place)]
        return next((n for n in (name, f"{name}[{place}]", key) if n in self._known), name)


def added_up(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add up the values with the same name."""
    total: dict[str, int] = {}
    for name, size in sizes:
        total[name] = total.get(name, 0) + size
    return total
