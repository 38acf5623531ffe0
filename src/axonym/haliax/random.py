"""Random numbers."""

from typing import Any

import jax
from jax.typing import DTypeLike

from .. import broadcast_to, random as _native
from ..axis import axes_of_spec
from ..named_array import NamedArray
from ..random import *  # noqa: F403  # the same names, but for those below
from ..sharding import current_mesh
from ..typing import AxisSelector, AxisSpec, NamedOrNumeric
from .partitioning import auto_sharded


def categorical(key: Any, logits: NamedArray, axis: AxisSelector, shape: AxisSpec | None = None) -> NamedArray:
    """Draw positions along an axis, with the values that Haliax draws from the same key.

    `axonym.random.categorical` draws other values, since it samples a sharded axis without gathering it.

    >>> logits = hax.named([[0.0, -9.0], [-9.0, 0.0]], ("batch", "vocab"))
    >>> hax.random.categorical(jax.random.key(0), logits, "vocab")
    NamedArray(int32[batch=2], [0 1])
    """
    along = logits.resolve_axis(axis)
    axes = tuple(a for a in logits.axes if a != along) if shape is None else axes_of_spec(shape, "categorical")
    if along.name in [a.name for a in axes]:
        raise ValueError(f"categorical: axis {along.name!r} is drawn from, so it cannot be one of the result {axes}.")
    rest = logits.broadcast_axis(axes)
    # The draws depend on where the axis stands.
    place = rest.names.index(along.name)
    full = rest.rearrange((*axes[:place], along, *axes[place:]))
    drawn = jax.random.categorical(key, full.array, axis=place, shape=tuple(a.size for a in axes))
    return auto_sharded(NamedArray(drawn, axes)) if current_mesh() is not None else NamedArray(drawn, axes)


def uniform(
    key: Any,
    shape: AxisSpec,
    dtype: DTypeLike | None = float,
    minval: NamedOrNumeric = 0.0,
    maxval: NamedOrNumeric = 1.0,
) -> NamedArray:
    """Draw uniformly between bounds, which are broadcast first if they have axes, so that XLA rounds as with Haliax.

    >>> hax.random.uniform(jax.random.key(0), {"x": 2}, maxval=hax.zeros({"x": 2}))
    NamedArray(float32[x=2], [0. 0.])
    """
    bounds = [broadcast_to(b, shape) if isinstance(b, NamedArray) and b.axes else b for b in (minval, maxval)]
    return _native.uniform(key, shape, dtype, *bounds)
