"""The keys of a state dict: where an array stands in a tree, with dots between the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from ..array import NamedArray
from ..axis import Names
from ..jax_utils import is_jax_array_like

StateDict: TypeAlias = dict[str, Any]
"""Arrays by key, as in `{"layers.0.weight": ...}`."""

KeyMap: TypeAlias = Mapping[str, str | None]
"""What fields are called in a state dict. One that is mapped to None has no step of its own in the keys."""


@overload
def with_prefix(prefix: str | None, leaf: str) -> str: ...
@overload
def with_prefix(prefix: str, leaf: None) -> str: ...
@overload
def with_prefix(prefix: str | None, leaf: str | None) -> str | None: ...
def with_prefix(prefix: str | None, leaf: str | None) -> str | None:
    """Two parts of a key as one; either can be missing.

    Arguments:
        prefix: the first part.
        leaf: the second part.

    >>> from axonym.state import with_prefix
    >>> with_prefix("layers.0", "weight"), with_prefix(None, "weight"), with_prefix("layers", None)
    ('layers.0.weight', 'weight', 'layers')
    """
    if prefix is None or leaf is None:
        return leaf if prefix is None else prefix
    return f"{prefix}.{leaf}"


def children(node: Any) -> tuple[list[tuple[str | None, Any]], Any]:
    """What stands one step below a node of a tree, with the name of the step, and the structure to rebuild the node.

    Arguments:
        node: a module, a list, a dictionary, or any other node that JAX knows.
    """
    found, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    key_map: KeyMap = node._state_dict_key_map() if hasattr(node, "_state_dict_key_map") else {}
    steps = [jax.tree_util.keystr(path, simple=True) for path, _ in found]
    if isinstance(node, eqx.Module) and (unknown := [name for name in key_map if not hasattr(node, name)]):
        raise ValueError(
            f"{type(node).__name__}._state_dict_key_map: {', '.join(map(repr, unknown))} is no field of the module."
        )
    return [(key_map.get(step, step), child) for step, (_, child) in zip(steps, found, strict=True)], structure


def is_number(x: Any) -> bool:
    """Whether something is one of Python's numbers, which have entries where they stand in a tree themselves."""
    return isinstance(x, (bool, int, float, complex))


def described(x: Any) -> str:
    """The dtype and the axes of an array, or its shape where they have no names."""
    return str(x) if isinstance(x, NamedArray) else f"{x.dtype}{list(x.shape)}"


def same_kind(a: Any, b: Any) -> bool:
    """Whether values of one dtype can be had in another without changing their nature, as integers become numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return a == b or any(jnp.issubdtype(a, kind) and jnp.issubdtype(b, kind) for kind in kinds)


def layers_at(x: Any, name: str) -> int | None:
    """Where a leaf of a stack of layers has the axis that counts them; None if it is shared by all of them.

    Arguments:
        x: a named array, which may have the axis; a raw array, which has it first; or something else.
        name: the name of the axis.
    """
    if not is_jax_array_like(x):
        return None
    if isinstance(x, NamedArray):
        return x.names.index(name) if name in x.names else None
    return 0 if x.shape else None


def without(names: Names, name: str) -> Names:
    """The names except one."""
    return tuple(n for n in names if n != name)
