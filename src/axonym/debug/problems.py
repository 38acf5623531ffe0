"""Find common mistakes in a model: arrays that it has twice, arrays in static fields, and names that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax

from ..core.tree_spec import ARRAYS
from ..named_array import NamedArray, describe_array, is_named_array, raw

__all__ = ["IdentityMap", "ModuleProblems", "diagnose_common_issues"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class IdentityMap(MutableMapping[_K, _V], Generic[_K, _V]):
    """A mapping whose keys are compared by identity, so that arrays can be keys.

    >>> x, y = jnp.ones(2), jnp.ones(2)
    >>> found = axn.debug.IdentityMap([(x, "x")])
    >>> found[x], y in found
    ('x', False)
    """

    def __init__(self, iterable: Iterable[tuple[_K, _V]] | None = None):
        self._items: dict[int, tuple[_K, _V]] = {}  # stores the key itself too, so that its id is not reused
        for key, value in iterable or ():
            self[key] = value

    def __getitem__(self, key: _K) -> _V:
        try:
            return self._items[id(key)][1]
        except KeyError:
            raise KeyError(key) from None

    def __setitem__(self, key: _K, value: _V) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: _K) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[_K]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"IdentityMap({list(self._items.values())})"


class ModuleProblems(Exception):
    """The mistakes that `diagnose_common_issues` found.

    >>> problems = axn.debug.ModuleProblems()
    >>> problems.static_arrays.append(".table")
    >>> bool(problems), str(problems)
    (True, 'This module has problems:\\n  an array in the static field .table')
    """

    def __init__(self) -> None:
        super().__init__()
        self.reused_arrays: list[tuple[str, list[str]]] = []
        """Arrays that occur several times: a description, and the paths."""
        self.static_arrays: list[str] = []
        """The paths of static fields that contain arrays."""
        self.wrong_ranks: list[tuple[str, str]] = []
        """Named arrays with more or fewer names than axes: a description, and the path."""

    def __bool__(self) -> bool:
        return bool(self.reused_arrays or self.static_arrays or self.wrong_ranks)

    def __str__(self) -> str:
        found = [f"one array, {what}, at {' and at '.join(paths)}" for what, paths in self.reused_arrays]
        found += [f"an array in the static field {path}" for path in self.static_arrays]
        found += [f"names that do not fit the array, {what}, at {path}" for what, path in self.wrong_ranks]
        return "\n  ".join(["This module has problems:", *found])


def diagnose_common_issues(tree: Any) -> None:
    """Raise `ModuleProblems` if a module, or any other tree, has common mistakes.

    - An array occurs several times. After a training step these are different arrays, so store a tied parameter once,
      and use it from there.
    - An array is in a static field. Transforms do not see it there, it becomes part of the compiled program, and it
      cannot be hashed.
    - A named array has more or fewer names than axes, such as the result of a positional transform like `jax.vmap`.

    >>> import equinox as eqx
    >>> class Tied(eqx.Module):
    ...     embed: axn.NamedArray
    ...     unembed: axn.NamedArray
    >>> w = axn.ones({"vocab": 4})
    >>> axn.debug.diagnose_common_issues(Tied(w, w))
    Traceback (most recent call last):
    ...
    axonym.debug.problems.ModuleProblems: This module has problems:
      one array, float32[vocab=4], at .embed and at .unembed
    """
    problems = ModuleProblems()
    _find_reused_arrays_and_wrong_ranks(problems, tree)
    _find_static_arrays(problems, tree, "")
    if problems:
        raise problems


def _find_reused_arrays_and_wrong_ranks(problems: ModuleProblems, tree: Any) -> None:
    places: IdentityMap[Any, list[tuple[str, Any]]] = IdentityMap()
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_named_array):
        array = raw(leaf)
        if isinstance(array, ARRAYS):
            places.setdefault(array, []).append((jax.tree_util.keystr(path), leaf))
            if isinstance(leaf, NamedArray) and array.ndim != len(leaf.names):
                problems.wrong_ranks.append((describe_array(leaf), jax.tree_util.keystr(path)))
    for found in places.values():
        if len(found) > 1:
            problems.reused_arrays.append((describe_array(found[0][1]), [path for path, _ in found]))


def _find_static_arrays(problems: ModuleProblems, tree: Any, path: str) -> None:
    if not isinstance(tree, eqx.Module):
        children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, eqx.Module))
        for keys, child in children:
            if isinstance(child, eqx.Module):
                _find_static_arrays(problems, child, path + jax.tree_util.keystr(keys))
        return
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        if not field.metadata.get("static", False):
            _find_static_arrays(problems, value, f"{path}.{field.name}")
        elif any(isinstance(x, ARRAYS) for x in jax.tree.leaves(value)):
            problems.static_arrays.append(f"{path}.{field.name}")
