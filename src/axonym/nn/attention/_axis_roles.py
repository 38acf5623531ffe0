"""Find the role of each axis of attention, and merge the axes of one role, as kernels without names need them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...axis import Names
from ...core import errors
from ...distribution.mesh_axes import Axes
from ...named_array import NamedArray
from ...ops import _kernels
from .masks import Causal, Mask


class AxisRoles(NamedTuple):
    """The roles of the axes, and the static part of the mask."""

    batch: Names
    """The axes that query, key and value share, except the last if there are several."""
    heads: Names
    """The last of several axes that query, key and value share."""
    group: Names
    """The axes of the query alone, except its positions."""
    positions: Names
    """The query's positions: the axis of a causal mask, or else one of the query alone."""
    keys: Names
    """The positions of keys and values."""
    features: Names
    """The features of queries and keys."""
    values: Names
    """The features of values."""
    out: Names
    """The axes of the result."""
    causal: bool
    """Whether queries attend to no later positions than their own."""
    window: int | None
    """The largest number of positions that a query attends to; None for no limit."""

    @property
    def of_queries(self) -> tuple[Names, ...]:
        return self.batch, self.heads, self.group, self.positions

    @property
    def of_keys(self) -> tuple[Names, ...]:
        return self.batch, self.heads, self.keys

    @property
    def of_scores(self) -> Names:
        """The axes that masks and biases can have."""
        return tuple(n for role in (*self.of_queries, self.keys) for n in role)


class AttentionOperands(NamedTuple):
    """The arguments of `dot_product_attention` that decide its value."""

    query: NamedArray
    key: NamedArray
    value: NamedArray
    KPos: Names
    Key: str
    mask: Mask
    bias: NamedArray | None = None
    scaling_factor: Any = None

    def scaled(self) -> tuple[NamedArray, float]:
        """Return the query, and the factor of scores as a number: a traced one multiplies the query."""
        scale = self.query.axis_size(self.Key) ** -0.5 if self.scaling_factor is None else self.scaling_factor
        return (self.query, scale) if isinstance(scale, (int, float)) else (self.query * scale, 1.0)


def find_roles(
    of: AttentionOperands, problems: list[str], sharded: Mapping[str, Axes] = MappingProxyType({})
) -> AxisRoles:
    """Return the roles of the axes, and append descriptions of unclear roles to the problems.

    Without a causal mask, any axis of the query alone can be its positions: the first that is sharded as the keys are
    according to `sharded`, or else the longest, for which kernels are fastest.
    """
    query, key, value, KPos, Key, mask, *_ = of
    causal = mask if isinstance(mask, Causal) else None
    shared = tuple(n for n in key.names if n not in KPos and n != Key)
    values = tuple(n for n in value.names if n not in KPos and n not in shared)
    own = tuple(n for n in query.names if n not in shared and n != Key)
    for label, x in {"query": query, "value": value}.items():
        if missing := [n for n in shared if n not in x.names]:
            problems.append(f"the {label} lacks {errors.describe_axes(missing)} of the key")
    if both := [n for n in values if n in own]:
        problems.append(f"query and value have {errors.describe_axes(both)}, which the key lacks")
    if causal is not None:
        if causal.QPos not in own:
            problems.append(f"the mask is causal in {causal.QPos!r}, which is not an axis of the query alone")
        if len(KPos) != 1:
            problems.append(f"a causal mask needs one axis of key positions, not {errors.describe_axes(KPos)}")
        positions, window = (causal.QPos,), causal.window
    else:
        of_keys = sharded.get(KPos[0]) if KPos else None
        alike = tuple(n for n in own if of_keys and sharded.get(n) == of_keys)
        positions, window = alike[:1] or ((max(own, key=query.axis_size),) if own else ()), None
    batch, heads = (shared[:-1], shared[-1:]) if len(shared) > 1 else (shared, ())
    group = tuple(n for n in own if n not in positions)
    kept = query.names if Key in values else tuple(n for n in query.names if n != Key)
    out = (*kept, *(n for n in values if n not in kept))
    return AxisRoles(batch, heads, group, positions, KPos, (Key,), values, out, causal is not None, window)


def merge_axes(x: jax.Array, names: Names, parts: Sequence[Names], sizes: Mapping[str, int] | None = None) -> jax.Array:
    """Merge axes into one dimension for each part, which is a group of several axes or none.

    With `sizes`, the array can lack axes: a part without any of its axes gets size one, other parts are broadcast.
    """
    order = tuple(n for part in parts for n in part)
    x = _kernels.align(x, names, order)
    if sizes is not None:
        full = [[sizes[n] if set(part) & set(names) else 1 for n in part] for part in parts]
        x = jnp.broadcast_to(x, [s for part in full for s in part])
    position, shape = 0, []
    for part in parts:
        shape.append(math.prod(x.shape[position : position + len(part)]))
        position += len(part)
    return jnp.reshape(x, shape)


def split_axes(x: jax.Array, parts: Sequence[Names], sizes: Mapping[str, int], names: Names) -> jax.Array:
    """Undo `merge_axes`."""
    order = tuple(n for part in parts for n in part)
    return _kernels.transpose_to(jnp.reshape(x, [sizes[n] for n in order]), order, names)
