"""The keys of a state dict: the path of each leaf in the tree, joined with dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

StateDict: TypeAlias = dict[str, Any]
"""Arrays by key, as in `{"layers.0.weight": ...}`."""

KeyMap: TypeAlias = Mapping[str, str | None]
"""The key in a state dict of each field that is renamed. A field that is mapped to None adds nothing to the keys."""


@overload
def with_prefix(prefix: str | None, leaf: str) -> str: ...
@overload
def with_prefix(prefix: str, leaf: None) -> str: ...
@overload
def with_prefix(prefix: str | None, leaf: str | None) -> str | None: ...
def with_prefix(prefix: str | None, leaf: str | None) -> str | None:
    """Join two parts of a key, either of which can be None.

    >>> axn.state.with_prefix("layers.0", "weight"), axn.state.with_prefix(None, "weight")
    ('layers.0.weight', 'weight')
    """
    if prefix is None or leaf is None:
        return leaf if prefix is None else prefix
    return f"{prefix}.{leaf}"


def children(node: Any) -> tuple[list[tuple[str | None, Any]], Any]:
    """Return the children of a node with their keys, and the structure to rebuild the node."""
    found, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    key_map: KeyMap = node._state_dict_key_map() if hasattr(node, "_state_dict_key_map") else {}
    steps = [jax.tree_util.keystr(path, simple=True) for path, _ in found]
    if isinstance(node, eqx.Module) and (unknown := [name for name in key_map if not hasattr(node, name)]):
        raise ValueError(
            f"{type(node).__name__}._state_dict_key_map: the module has no field {', '.join(map(repr, unknown))}."
        )
    return [(key_map.get(step, step), child) for step, (_, child) in zip(steps, found, strict=True)], structure


def is_number(x: object) -> bool:
    """Return whether a leaf is a Python number, which has its own entry in a state dict."""
    return isinstance(x, (bool, int, float, complex))


def converted_number(kind: type, value: Any) -> Any:
    """Convert a stored number to the type of one in a tree; None if that type cannot represent it."""
    try:
        found = kind(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return found if found == value or found != found else None  # equal, or NaN


def same_kind(a: DTypeLike, b: DTypeLike) -> bool:
    """Return whether two dtypes are equal or both boolean, integer, floating-point or complex."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return a == b or any(jnp.issubdtype(a, kind) and jnp.issubdtype(b, kind) for kind in kinds)


def require_representable(what: str, x: Any, dtype: DTypeLike) -> None:
    """Raise an error if an array of integers has values that another integer dtype, or JAX's form of it, lacks."""
    if not (jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer)):
        return
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    own, limits = jnp.iinfo(x.dtype), jnp.iinfo(dtype)
    if x.size == 0 or (limits.min <= own.min and own.max <= limits.max):
        return
    least, most = int(x.min()), int(x.max())
    if least < limits.min or most > limits.max:
        wider = " JAX has 64-bit integers with `jax_enable_x64`." if own.bits == 64 else ""
        raise ValueError(f"{what} has values from {least} to {most}, which {dtype} cannot represent.{wider}")
