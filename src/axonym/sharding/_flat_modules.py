"""Give Equinox modules to `jax.jit` as flat trees, which are remembered.

Equinox flattens a module in Python, which for a model of hundreds of modules takes longer than the rest of a call. But
a module does not change. So its arrays and its spec are found once, and those of a module that a compiled function
returns are known from the start. Modules of a class that has something in it that can change, such as a list, go in as
they are.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._tree_spec import FlatTree, TreeSpec, flatten_arrays, same_static_fields

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
"""The types of arrays of a compiled function whose other leaves are static."""

_MODULE, _TUPLE, _OTHER = range(3)
_kinds: dict[type, int] = {}
UNCHANGED: set[type] = set()
"""The types that go in as they are. To ask that is cheaper than a call."""
_known: dict[int, tuple[weakref.ref[Any], FlatTree]] = {}
"""The flat trees of modules, by the identity of these."""
_specs: dict[Any, TreeSpec] = {}
"""One spec for all modules that are equal but for their arrays, as to compare two takes long."""


def flattened(x: Any) -> Any:
    """Replace a module, or those in tuples, by flat trees."""
    kind = _kind(type(x))
    if kind == _MODULE:
        known = _known.get(id(x))
        if known is not None and known[0]() is x:
            return known[1]
        arrays, spec = flatten_arrays(x, ARRAYS, named=False)
        flat = FlatTree(arrays, _shared(spec))
        if not flat.spec.is_immutable:
            _keep_unchanged(type(x))
            return x
        _remember(x, flat)
        return flat
    return _each(flattened, x) if kind == _TUPLE else x


def unflattened(x: Any) -> Any:
    """Replace a flat tree, or those in tuples, by what it is of; modules are remembered."""
    if type(x) is FlatTree:
        tree = x.tree()
        if _kind(type(tree)) == _MODULE:
            _remember(tree, x)
            return tree
        x = tree
    return _each(unflattened, x) if _kind(type(x)) == _TUPLE else x


def _each(fn: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the elements of a tuple."""
    parts = [part if type(part) in UNCHANGED else fn(part) for part in x]
    if all(map(operator.is_, parts, x)):
        return x
    return x._make(parts) if hasattr(x, "_make") else tuple(parts)


def _kind(of: type) -> int:
    kind = _kinds.get(of)
    if kind is None:
        equinox = sys.modules.get("equinox")  # where nobody has imported it, nothing is a module
        if equinox is not None and issubclass(of, equinox.Module) and of.__weakrefoffset__:
            kind = _kinds[of] = _MODULE
        elif of is tuple or (issubclass(of, tuple) and hasattr(of, "_make")):
            kind = _kinds[of] = _TUPLE
        else:
            kind = _keep_unchanged(of)
    return kind


def _keep_unchanged(of: type) -> int:
    if len(_kinds) >= 4096:
        _kinds.clear()
        UNCHANGED.clear()
    UNCHANGED.add(of)
    _kinds[of] = _OTHER
    return _OTHER


def _shared(spec: TreeSpec) -> TreeSpec:
    """Return the spec that equal ones share."""
    key = spec.structure, spec.slots
    try:
        known = _specs.get(key)
    except TypeError:  # a static leaf has no hash, which is said where it is compiled
        return spec
    if known is not None and same_static_fields(spec.structure, known):
        return known
    if len(_specs) >= 64:
        _specs.clear()
    _specs[key] = spec
    return spec


def _remember(module: Any, flat: FlatTree) -> None:
    key = id(module)

    def forget(reference: weakref.ref[Any]) -> None:
        if (known := _known.get(key)) is not None and known[0] is reference:
            del _known[key]

    _known[key] = weakref.ref(module, forget), flat
