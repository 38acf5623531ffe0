"""Say which axes a pipeline keeps sharded in code that is written for complete axes: its layers and its loss.

A pipeline is one `shard_map`. Some axes can stay sharded inside. Layers are traced once, for complete axes, and run on
shards: see `on_shards`. A few operations, such as attention along a sequence, exchange what they need with other
devices by themselves, see `exchange`. A loss is traced twice, on complete axes and on shards, and the programs are
compared; there, operations that exchange something run in a scope, by which the comparison finds them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from ..axis import Names
from ..core.tree_spec import flatten_arrays
from ..named_array import NamedArray, wrap
from .active_settings import activate_here, active_settings
from .mesh_axes import Axes, mapped_axes, shard_count
from .on_shards import Layout, ShardExchange, exchange_p


class KeptShards(NamedTuple):
    """The axes that stay sharded in the code that is traced now."""

    names: frozenset[str]
    """The axes that stay sharded, over the mesh axes of the active mapping."""
    complete: frozenset[str] = frozenset()
    """The axes among them that are complete, for comparison."""
    once: bool = False
    """Whether the code is traced once, for complete axes, and its operations run on shards: see `on_shards`."""
    gathered: tuple[tuple[str, str], ...] = ()
    """Other axes that the mapping shards: all of each is on every device here, with the reason."""


def kept_over(name: str) -> Axes | None:
    """Return the mesh axes over which an axis stays sharded here; none while it is complete, None if it never is."""
    kept = _active()
    if kept is None or name not in kept.names:
        return None
    return () if name in kept.complete else mapped_axes(name)


def is_kept(name: str) -> bool:
    """Return whether code is traced for all of an axis here, and its operations run on shards of it."""
    kept = _active()
    return kept is not None and kept.once and name in kept.names


def is_on_shards() -> bool:
    """Return whether a function gets shards here in a pipeline, whose code is traced for complete axes."""
    kept = _active()
    return kept is not None and bool(kept.names) and not kept.complete


def exchange(what: str, fn: Callable[[Any], NamedArray], operands: Any) -> NamedArray:
    """Call a function that exchanges shards of named arrays by itself, in code that is traced for complete axes."""
    kept = _active()
    assert kept is not None
    arrays, spec = flatten_arrays(operands)
    with activate_here(kept=kept._replace(once=False)):
        out = jax.eval_shape(lambda xs: fn(spec.unflatten(xs)), arrays)

    def layout(names: Names) -> Layout:
        found: list[Axes] = []
        for n in names:  # a mesh axis cuts one dimension only
            own = mapped_axes(n) if n in kept.names else ()
            found.append(() if any({*own} & {*other} for other in found) else own)
        return tuple(found)

    def of_shards(here: Sequence[Any]) -> Sequence[Any]:
        with activate_here(kept=kept._replace(once=False, complete=frozenset())):
            y = fn(spec.unflatten(list(here)))
        return [y.rearrange(out.names).array]

    before = [((),) * x.ndim if n is None else layout(n) for n, x in zip(spec.names, arrays, strict=True)]
    found = ShardExchange(what, of_shards, before, [layout(out.names)])
    (y,) = exchange_p.bind(*arrays, exchange=found, avals=(ShapedArray(out.array.shape, out.array.dtype),))
    return wrap(y, out.names)


def reduced_over(name: str, names: Iterable[str]) -> Axes | None:
    """Return the mesh axes over which to reduce an axis of an array with some axes; as `kept_over`.

    Devices with other shards of the axis must have the same shards of all other axes.
    """
    over = kept_over(name)
    if over and any({*over} & {*mapped_axes(n)} for n in names if n != name):
        raise ValueError(f"an array has {name!r} and another axis over the same mesh axes.")
    return over


def is_shard_of(name: str, local: int, size: int) -> bool:
    """Return whether the local size of an axis is the size of a shard of it here."""
    over = kept_over(name)
    return bool(over) and size == local * shard_count(jax.sharding.get_abstract_mesh(), over)


def in_pipeline() -> bool:
    """Return whether code runs in a pipeline, where axes are complete although the active mapping shards them."""
    return _active() is not None


def as_if_complete(name: str) -> contextlib.AbstractContextManager[Any]:
    """Trace code in a pipeline as it would be for all of an axis, for comparison."""
    kept = _active()
    return contextlib.nullcontext() if kept is None else activate_here(kept=kept._replace(complete=kept.names | {name}))


def scope_of_shards(sizes: Mapping[str, int], fixed: str = "") -> contextlib.AbstractContextManager[Any]:
    """Mark operations as right for shards of axes.

    Arguments:
        sizes: the sizes that the axes of the operands have here.
        fixed: what must be the same for shards and for complete axes.
    """
    kept = _active()
    found = [f"{n}={size}" for n, size in sizes.items() if kept is not None and n in kept.names]
    if not found:
        return contextlib.nullcontext()
    return jax.named_scope(f"of_all_shards[{','.join(found)}]{fixed}#{next(_NUMBERS)}")


_NUMBERS = itertools.count()
"""Each scope has a number of its own, or two in a row of the same sizes would look like one."""
_SCOPE = re.compile(r"of_all_shards\[(.*?)\]([^/)#]*)#(\d+)")


def read_scope(scope: str) -> tuple[dict[str, int], str, int] | None:
    """Return the sizes, the fixed part and the number that `scope_of_shards` wrote; None outside of its scopes."""
    found = _SCOPE.search(scope)
    if found is None:
        return None
    sizes = {n: int(size) for n, _, size in (part.rpartition("=") for part in found[1].split(","))}
    return sizes, found[2], int(found[3])


def refuse_gathered(what: str, argument: str, name: str) -> None:
    """Refuse an argument that chooses how shards of an axis are exchanged, if a pipeline does not keep it sharded."""
    kept = _active()
    for other, reason in () if kept is None else kept.gathered:
        if other == name:
            raise ValueError(
                f"{what}: a pipeline around it gathers axis {name!r}, so `{argument}` has nothing to exchange: {reason}"
                f" Leave out `{argument}` to compute with all of {name!r} on each device."
            )


def _active() -> KeptShards | None:
    settings = active_settings()
    return None if settings is None else settings.kept
