"""Find the order of the mesh axes over which an axis can be gathered or sharded.

An axis is sharded over the first of its mesh axes, the major one, and each shard over the next. Shards that differ in
the last mesh axis, the minor one, are adjacent; others are not. So an axis is gathered from the minor mesh axis on, and
sharded from the major one on. Any other order would permute the elements of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..named_array import NamedArray, describe_array
from ._axis_environment import Axes, count, declared, describe_axes, possible_shardings, without_trivial


def gather_order(what: str, x: NamedArray, name: str, axes: Axes, chosen: bool) -> Axes:
    """Return the mesh axes to gather an axis over, major first.

    `chosen`: the user asked for these mesh axes, rather than for all that the axis may be sharded over.
    """
    found = possible_shardings(name, x.axis_size(name))
    sharded = [f for f in found if without_trivial(f.now)]
    if count(axes) == 1:
        return axes
    if found and not sharded:
        raise ValueError(
            f"{what}: axis {name!r} of {describe_array(x)} is replicated already: {x.axis_size(name)} is its size "
            f"outside. Gathering it over {describe_axes(axes)} would repeat it {count(axes)} times."
        )
    if not chosen and sharded:
        ways = list(dict.fromkeys(without_trivial(f.now) for f in sharded))
        if len(ways) > 1:
            raise ValueError(
                f"{what}: by its size, axis {name!r} of {describe_array(x)} may be sharded over "
                f"{' or over '.join(map(_all_quoted, ways))}. Say which with `over`."
            )
        return tuple(a for a in ways[0] if a in axes)
    wanted = set(without_trivial(axes))
    for f in sharded:
        if not wanted & set(f.at_most):
            return axes  # the user sharded it in another way
        # Only the last mesh axes can be gathered: their shards are adjacent.
        minor = without_trivial(f.now)[-len(wanted) :]
        if set(minor) == wanted:
            return minor
    if sharded:
        now = without_trivial(sharded[0].now)
        if gone := [a for a in axes if a in wanted - set(now)]:
            why = f"is sharded over {_all_quoted(now)} here, and not over {_all_quoted(gone)}"
        else:
            why = (
                f"is sharded over {_all_quoted(now)}, in this order, and shards are gathered from the minor mesh "
                f"axis on. Gather over {now[-1]!r} first, or over all of these at once"
            )
        raise ValueError(f"{what}: axis {name!r} of {describe_array(x)} {why}.")
    return _all_or_none(what, x, name, axes)


def scatter_order(what: str, x: NamedArray, name: str, axes: Axes) -> Axes:
    """Return the mesh axes, among the ones asked for, to shard an axis over, major first."""
    found, wanted = possible_shardings(name, x.axis_size(name)), set(without_trivial(axes))
    if not found:
        return _all_or_none(what, x, name, axes)
    for f in found:
        left = without_trivial(f.at_most[len(f.now) :])  # the minor mesh axes over which it is gathered here
        if wanted & set(f.now):
            continue
        if wanted > set(left) or not wanted & set(left):
            return axes
        major = left[: len(wanted)]
        if set(major) == wanted:
            return major
    f = found[0]
    if wanted & set(f.now):
        raise ValueError(
            f"{what}: axis {name!r} of {describe_array(x)} is sharded over {describe_axes(f.now)} already: "
            f"{x.axis_size(name)} of {f.size}. Each device has another shard of it."
        )
    left = without_trivial(f.at_most[len(f.now) :])
    raise ValueError(
        f"{what}: axis {name!r} of {describe_array(x)} is to be sharded over {_all_quoted(left)}, in this order. Shard "
        f"it over {left[0]!r} first, or over all of these at once; if it is another axis, rename it."
    )


def _all_or_none(what: str, x: NamedArray, name: str, axes: Axes) -> Axes:
    """Require all mesh axes of an axis at once, if its size does not show which of them shard it."""
    wanted = set(without_trivial(axes))
    ways = [without_trivial(way) for way in declared(name)]
    for way in ways:
        if wanted == set(way):
            return way
        if wanted > set(way) or not wanted & set(way):
            return axes
    if not ways:
        return axes
    raise ValueError(
        f"{what}: axis {name!r} is sharded over {_all_quoted(ways[0])}, in this order, and the size of "
        f"{describe_array(x)} does not tell how it is sharded here. Go over all of these at once; if it is another "
        "axis, rename it."
    )


def _all_quoted(axes: Iterable[str]) -> str:
    return " and ".join(map(repr, axes))
