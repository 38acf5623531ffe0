"""Say which axes a pipeline keeps sharded in code that is written for complete axes: its layers and its loss.

A pipeline is one `shard_map`. Some axes can stay sharded inside. Its code is traced once, for complete axes, and run on
shards: see `on_shards`. A few operations, such as attention along a sequence, exchange what they need with other
devices by themselves: see `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from ..axis import Names
from ..core.tree_spec import flatten_arrays
from ..named_array import NamedArray, wrap
from .active_settings import activate_here, active_settings
from .mesh_axes import Axes, mapped_axes
from .on_shards import ShardExchange, exchange_p
from .operations_on_shards import MICROBATCHES, Layout


class KeptShards(NamedTuple):
    """The axes that stay sharded in the code that is traced now."""

    names: frozenset[str] = frozenset()
    """The axes that stay sharded, over the mesh axes of the active mapping."""
    complete: bool = False
    """True while code is traced for complete axes, whose operations then run on shards: see `on_shards`."""
    gathered: tuple[tuple[str, str], ...] = ()
    """Other axes that the mapping shards: all of each is on every device here, with the reason."""
    batch: str = ""
    """The axis of the batch, in code that is traced for all of it, and run on a microbatch."""

    def over(self, name: str) -> Axes:
        """Return what an axis is cut over, where code is traced for complete axes."""
        if name == self.batch:
            return (*mapped_axes(name), MICROBATCHES)
        return mapped_axes(name) if name in self.names else ()


def kept_over(name: str) -> Axes | None:
    """Return the mesh axes over which an axis is sharded here in a pipeline; None if it is not."""
    kept = _active_settings()
    return None if kept is None or kept.complete or name not in kept.names else mapped_axes(name)


def is_kept(name: str) -> bool:
    """Return whether code is traced for all of an axis here, and its operations run on shards of it."""
    kept = _active_settings()
    return kept is not None and kept.complete and name in (*kept.names, kept.batch)


def exchange(
    what: str, fn: Callable[[Any], NamedArray], operands: Any, along: Collection[str] | None = None
) -> NamedArray:
    """Call a function that exchanges shards of named arrays by itself, in code that is traced for complete axes.

    Arguments:
        along: the axes of which it takes shards; by default all that are kept.
    """
    kept = _active_settings()
    assert kept is not None
    arrays, spec = flatten_arrays(operands)
    with activate_here(kept=kept._replace(names=frozenset(), batch="")):
        out = jax.eval_shape(lambda xs: fn(spec.unflatten(xs)), arrays)

    def layout(names: Names) -> Layout:
        found: list[Axes] = []
        for n in names:  # a mesh axis cuts one dimension only
            own = kept.over(n) if along is None or n in along else ()
            found.append(() if any({*own} & {*other} for other in found) else own)
        return tuple(found)

    def of_shards(here: Sequence[Any]) -> Sequence[Any]:
        with activate_here(kept=kept._replace(complete=False, batch="")):
            y = fn(spec.unflatten(list(here)))
        return [y.rearrange(out.names).array]

    before = [((),) * x.ndim if n is None else layout(n) for n, x in zip(spec.names, arrays, strict=True)]
    found = ShardExchange(what, of_shards, before, [layout(out.names)])
    (y,) = exchange_p.bind(*arrays, exchange=found, avals=(ShapedArray(out.array.shape, out.array.dtype),))
    return wrap(y, out.names)


def in_pipeline() -> bool:
    """Return whether code runs in a pipeline, where axes are complete although the active mapping shards them."""
    return _active_settings() is not None


def refuse_gathered(what: str, argument: str, name: str) -> None:
    """Refuse an argument that chooses how shards of an axis are exchanged, if a pipeline does not keep it sharded."""
    kept = _active_settings()
    for other, reason in () if kept is None else kept.gathered:
        if other == name:
            raise ValueError(
                f"{what}: a pipeline around it gathers axis {name!r}, so `{argument}` has nothing to exchange: {reason}"
                f" Leave out `{argument}` to compute with all of {name!r} on each device."
            )


def _active_settings() -> KeptShards | None:
    settings = active_settings()
    return None if settings is None else settings.kept
