"""Fields of Equinox modules whose raw arrays have axis names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["field"]


def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    axis_names: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Make an `equinox.field` for a raw array with axis names, so that `axonym.shard` can shard it by a mapping.

    `axis_names` has the name of each axis in order. The other arguments are as for `equinox.field`.

    >>> import equinox as eqx
    >>> class Table(eqx.Module):
    ...     weight: jax.Array = axn.field(axis_names=("vocab", "embed"))
    >>> axn.sharding.pspec_for(Table(jnp.ones((4, 2))), {"vocab": "model"}).weight
    P('model', None)
    """
    if axis_names is not None and static:
        raise TypeError("field: a static field is not an array of the tree, so its axes cannot be placed.")
    if axis_names is not None:
        metadata = {**(metadata or {}), "axis_names": tuple(axis_names)}
    if converter is not None:
        kwargs["converter"] = converter
    import equinox as eqx  # slow to import, but programs with their own modules have imported it already

    return eqx.field(static=static, metadata=metadata, **kwargs)
