"""Collectives by name, for use inside `shard_map`.

A collective communicates over a mesh axis, or over the mesh axes of a logical axis, which follow from the arguments of
the `shard_map` and the active mapping. It changes the sizes of the axes of an array:

| collective                      | what it does                                               | size of the axis    |
|---------------------------------|------------------------------------------------------------|---------------------|
| `psum`, `pmean`, `pmax`, `pmin` | reduces over devices, element by element                   |                     |
| `all_gather(x, axis)`           | gathers the shards of an axis                              | multiplied          |
| `psum_scatter(x, axis, over)`   | sums over devices; each keeps a shard of an axis           | divided             |
| `all_to_all(x, split, gather)`  | shards one axis and gathers another                        | divided, multiplied |
| `ppermute`, `shift`             | sends the array to another device, or around a ring        |                     |
| `axis_index`, `axis_size`       | the index of the device, and the number of devices         |                     |
| `axis_offset`                   | the index at which the shard of this device starts         |                     |
| `pvary`                         | makes a value device-varying                               |                     |

With `check_vma`, JAX keeps track of the mesh axes over which a value is *device-varying*. Gathering or reducing a value
over a mesh axis over which it is invariant is a mistake, and an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelector, name_of
from ..core import errors
from ..core.jax_versions import varying_axes
from ..distribution.per_device import permute
from ..named_array import NamedArray, describe_array, raw, wrap, wrap_like
from ..ops._op_types import map_tree, publish
from ..ops._operands import require_named
from ._axis_environment import (
    AnyAxis,
    Axes,
    MeshAxis as MeshAxis,
    active_environment,
    axes_meant,
    axes_of_sharded,
    count,
    declared,
    describe_axes,
    possible_shardings,
    quoted_with_and,
    require_varying,
    without_trivial,
)

T = TypeVar("T")


class _Reduction(Protocol):
    def __call__(self, x: T, axis: AnyAxis) -> T: ...


def _make_reduction(
    name: str, fn: Callable[..., Any], summary: str, consequence: str, local: str, shown: str
) -> _Reduction:
    def op(x, axis):
        axes = axes_meant(name, axis)

        def reduce(leaf):
            hint = _COUNTED if isinstance(leaf, (int, float)) else ""
            require_varying(name, leaf, axes, consequence.format(count=count(axes)) + hint)
            return wrap_like(fn(raw(leaf), axes), leaf)

        return map_tree(reduce, x) if axes else x

    doc = f"""{summary}

    The result is the same on all of them and has the axes of `x`. To reduce a logical axis, first reduce the shard of
    each device, as with `axonym.sum(x, axis)`.

    Arguments:
        x: a named array, a raw array, or a tree of them.
        axis: the logical axis or mesh axis to reduce over, or several.

    >>> mesh, mapping = axn.make_mesh({{"data": 2}}), {{"batch": "data"}}
    >>> step = axn.shard_map(lambda x: axn.{name}(axn.{local}(x, "batch"), "batch"), mesh=mesh, mapping=mapping)
    >>> step(axn.named([1.0, 5.0, 2.0, 4.0], "batch"))
    NamedArray(float32[], {shown})
    """
    return publish(op, name, __name__, doc)


_COUNTED = " (The number of devices is `axonym.manual.collectives.axis_size`.)"
_NO_NEED = "it is the result already."
_ADDED = (
    "the sum would be {count} times it. (Differentiation already sums the gradient of a value that is the same on all "
    "devices.)"
)
_AVERAGED = (
    "it is the mean already. (Differentiation already sums the gradient of a value that is the same on all devices; to "
    "average it, take the gradient of a loss that is averaged.)"
)

psum = _make_reduction("psum", jax.lax.psum, "Sum over devices.", _ADDED, "sum", "12.")
pmean = _make_reduction("pmean", jax.lax.pmean, "Average over devices.", _AVERAGED, "mean", "3.")
pmax = _make_reduction("pmax", jax.lax.pmax, "Take the largest value over devices.", _NO_NEED, "max", "5.")
pmin = _make_reduction("pmin", jax.lax.pmin, "Take the smallest value over devices.", _NO_NEED, "min", "1.")


def all_gather(
    x: NamedArray, axis: AxisSelector, over: AnyAxis | None = None, *, invariant: bool = False
) -> NamedArray:
    """All-gather an axis, so that it is replicated.

    Arguments:
        over: the mesh axes that it is sharded over, if neither the arguments nor the mapping tell.
        invariant: whether the type of the result is invariant, so that it can be returned replicated. For
            differentiation it is then one value, rather than one for each device.

    >>> gather = axn.shard_map(lambda x: axn.all_gather(x, "batch", invariant=True), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     gather(axn.arange(axn.Axis("batch", 4)))
    NamedArray(int32[batch=4], [0 1 2 3])
    """
    what = "all_gather"
    position, name, axes = _axis_and_devices(what, x, axis, over)
    axes = axes and _gather_order(what, x, name, axes, over is not None)
    if not axes:
        return x
    require_varying(what, x, axes, f"axis {name!r} would be repeated.")
    # Without `check_vma`, every value counts as device-varying: JAX would treat the gradient of an invariant value as a
    # share of it.
    varies = "invarying" if invariant and {*axes} <= varying_axes(x.array) else "varying"
    return wrap(jax.lax.all_gather(x.array, axes, axis=position, tiled=True, to=varies), x.names)


def psum_scatter(x: NamedArray, axis: AxisSelector, over: AnyAxis | None = None) -> NamedArray:
    """Reduce-scatter: sum over devices, and leave each its shard of an axis, at half the traffic of `psum`.

    This is the transpose of `all_gather`.

    Arguments:
        axis: the logical axis of the result that is sharded.
        over: the logical axis or mesh axis to sum over, or several; by default the mesh axes that `axis` is mapped to.

    >>> mesh, mapping = axn.make_mesh({"data": 2}), {"batch": "data"}
    >>> scattered = axn.shard_map(
    ...     lambda x: axn.psum_scatter(axn.sum(x, "batch"), "embed", over="batch"),
    ...     mesh=mesh, mapping=mapping, out_specs={"embed": "data"},
    ... )(axn.ones({"batch": 6, "embed": 4}))
    >>> scattered, scattered.array.sharding.spec
    (NamedArray(float32[embed=4], [6. 6. 6. 6.]), P('data',))
    """
    what = "psum_scatter"
    position, name, axes = _axis_and_devices(what, x, axis, over)
    if not axes:
        return x
    axes = _scatter_order(what, x, name, axes)
    _check_divides(what, x, position, axes)
    require_varying(what, x, axes, _ADDED.format(count=count(axes)))
    return wrap(jax.lax.psum_scatter(x.array, axes, scatter_dimension=position, tiled=True), x.names)


def all_to_all(x: NamedArray, split: AxisSelector, gather: AxisSelector, over: AnyAxis | None = None) -> NamedArray:
    """Shard one axis and gather another: each device sends a block to every other device.

    Arguments:
        gather: the logical axis to gather. If it is `split`, blocks are transposed over devices.
        over: the mesh axes to exchange over; by default the mesh axes that shard `gather`, or else that `split` is
            mapped to.

    >>> mesh, mapping = axn.make_mesh({"seq": 2}), {"pos": "seq"}
    >>> by_heads = axn.shard_map(
    ...     lambda x: axn.all_to_all(x, split="heads", gather="pos"),
    ...     mesh=mesh, mapping=mapping, out_specs={"heads": "seq"},
    ... )(axn.ones({"pos": 6, "heads": 4}))
    >>> by_heads.shape, by_heads.array.sharding.spec
    ({'pos': 6, 'heads': 4}, P(None, 'seq'))
    """
    what = "all_to_all"
    if over is None:
        over = _exchanged_over(what, require_named(what, x), name_of(split), name_of(gather))
    split_position, _, axes = _axis_and_devices(what, x, split, over)
    position, _, _ = _axis_and_devices(what, x, gather, over)
    if not axes:
        return x
    if split_position != position:  # the order of mesh axes suits both axes
        axes = _gather_order(what, x, name_of(gather), _scatter_order(what, x, name_of(split), axes), chosen=True)
        if _scatter_order(what, x, name_of(split), axes) != axes:
            raise ValueError(
                f"{what}: {describe_axes(axes)}: axes {name_of(split)!r} and {name_of(gather)!r} are sharded over "
                "these in different orders. Use one order for both, or exchange over one mesh axis at a time."
            )
    _check_divides(what, x, split_position, axes)
    require_varying(what, x, axes, f"axis {name_of(gather)!r} would be repeated.")
    result = jax.lax.all_to_all(x.array, axes, split_position, position, tiled=True)
    return wrap(result, x.names)


def ppermute(x: T, axis: AnyAxis, perm: Sequence[tuple[int, int]]) -> T:
    """Send values between devices: each pair is a source and a destination. Devices that receive nothing get zeros.

    Arguments:
        x: a named array, a raw array, or a tree of them.
        axis: the logical axis or mesh axis along which devices are counted.
        perm: pairs of a source and a destination; each device is at most once a source and once a destination.

    >>> swap = axn.shard_map(lambda x: axn.ppermute(x, "batch", [(0, 1), (1, 0)]), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     swap(axn.arange(axn.Axis("batch", 4)))
    NamedArray(int32[batch=4], [2 3 0 1])
    """
    axes = axes_meant("ppermute", axis)
    pairs = [(int(source), int(destination)) for source, destination in perm]
    devices = count(axes)
    outside = [pair for pair in pairs if not all(0 <= i < devices for i in pair)]
    if outside:
        raise ValueError(
            f"ppermute: {errors.quoted(outside)} names a device outside of 0..{devices - 1}: {describe_axes(axes)} "
            f"has {devices}."
        )
    for role, ends in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        if twice := sorted({i for i in ends if ends.count(i) > 1}):
            raise ValueError(f"ppermute: device {errors.quoted(twice)} is the {role} of more than one pair.")
    if not axes:  # one device, which keeps its value or gets zeros
        return x if pairs else jax.tree.map(jnp.zeros_like, x)
    return jax.tree.map(lambda array: permute(array, axes, pairs), x)


def shift(x: T, axis: AnyAxis, offset: int = 1, *, wrap: bool = True) -> T:
    """Shift values along a ring of devices: each device gets the value of the device `offset` places before.

    Arguments:
        x: a named array, a raw array, or a tree of them.
        axis: the logical axis or mesh axis that forms the ring.
        offset: the number of places to move; negative to move back.
        wrap: whether to close the ring. If not, values that leave at one end are lost, and zeros enter at the other.

    >>> on = axn.shard_map(lambda x: axn.shift(x, "batch"), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     on(axn.arange(axn.Axis("batch", 4)))
    NamedArray(int32[batch=4], [2 3 0 1])
    """
    devices = count(axes_meant("shift", axis))
    pairs = [(i, i + offset) for i in range(devices)]
    if wrap:
        pairs = [(i, j % devices) for i, j in pairs]
    return ppermute(x, axis, [(i, j) for i, j in pairs if 0 <= j < devices])


def pvary(x: T, axis: AnyAxis) -> T:
    """Make a value device-varying, without changing it.

    Use it where JAX must know this in advance: the carry of a scan may be the same on all devices only at the start.
    For differentiation, this makes a copy for each device, and the gradients of the copies are summed.

    Arguments:
        x: a named array, a raw array, or a tree of them.
        axis: the logical axis or mesh axis along which the value may differ, or several.

    >>> copies = axn.shard_map(lambda x: axn.pvary(axn.zeros({"batch": 1}), "batch"), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     copies(axn.ones({"batch": 4})).shape
    {'batch': 2}
    """
    axes = axes_meant("pvary", axis)

    def vary(array):
        new = tuple(a for a in axes if a not in varying_axes(array))
        return jax.lax.pcast(array, new, to="varying") if new and active_environment().checked else array

    return jax.tree.map(vary, x)


def axis_index(axis: AnyAxis) -> jax.Array:
    """Return the index of this device along an axis, counted from 0.

    Arguments:
        axis: a logical axis or mesh axis; several are counted as one, the last one fastest.

    >>> where = axn.shard_map(lambda x: x * 0 + axn.axis_index("batch"), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     where(axn.arange(axn.Axis("batch", 4)))
    NamedArray(int32[batch=4], [0 0 1 1])
    """
    axes = axes_meant("axis_index", axis)
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def axis_size(axis: AnyAxis) -> int:
    """Return the number of devices along an axis.

    >>> from axonym.manual.collectives import axis_size
    >>> devices = axn.shard_map(lambda x: x * axis_size("batch"), mapping={"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": 2})):
    ...     devices(axn.ones({"batch": 4}))
    NamedArray(float32[batch=4], [2. 2. 2. 2.])
    """
    return count(axes_meant("axis_size", axis))


def axis_offset(axis: AxisSelector, *, x: NamedArray | None = None) -> jax.Array | np.int32:
    """Return the index at which the shard of this device starts in an axis: 0 for a replicated axis.

    Arguments:
        x: an array with the axis; needed if the arguments of the `shard_map` do not tell the size of a shard.

    >>> def positions(x):
    ...     return axn.arange(x.resolve_axis("pos")) + axn.axis_offset("pos")
    >>> with axn.set_mesh(axn.make_mesh({"seq": 2})):
    ...     axn.shard_map(positions, mapping={"pos": "seq"})(axn.zeros({"pos": 6}))
    NamedArray(int32[pos=6], [0 1 2 3 4 5])
    """
    what, name = "axis_offset", name_of(axis)
    known = active_environment().found(name)
    if x is None:
        if known and not any(p.axes for p in known):
            return np.int32(0)
        axes = axes_meant(what, axis)
        sizes = sorted({p.local for p in known if p.axes})
        if len(sizes) != 1:
            found = f"have shards of {' and of '.join(map(str, sizes))}" if sizes else "do not have it"
            raise ValueError(
                f"{what}: how large is a shard of axis {name!r}? The arguments {found}. Pass an array that has it: "
                f"`axonym.axis_offset({name!r}, x=x)`."
            )
        return jax.lax.axis_index(axes) * sizes[0]
    axes = sharded_over(what, require_named(what, x), axis)
    return jax.lax.axis_index(axes) * x.axis_size(name) if axes else np.int32(0)


def sharded_over(what: str, x: NamedArray, axis: AxisSelector) -> Axes:
    """Return the mesh axes that an axis of an array is sharded over here, as its size tells, or else its name."""
    name = name_of(axis)
    known = active_environment().found(name)
    ways = list(dict.fromkeys(without_trivial(f.now) for f in possible_shardings(name, x.axis_size(name))))
    if len(ways) > 1:
        listed = " or ".join(f"sharded over {describe_axes(w)}" if w else "replicated" for w in ways)
        raise ValueError(
            f"{what}: by its size, axis {name!r} of {describe_array(x)} may be {listed}. Rename one of the axes."
        )
    if not ways and not (known and not declared(name)):  # its size says nothing: it was resized, or is new
        ways = [axes_meant(what, axis)]
    return ways[0] if ways else ()


# --- shared checks ---


def _axis_and_devices(what: str, x: Any, axis: AxisSelector, over: AnyAxis | None) -> tuple[int, str, Axes]:
    """Return the position and name of an axis of an array, and the mesh axes to communicate over."""
    x, name = require_named(what, x), name_of(axis)
    sizes = x.shape
    if name not in sizes:
        raise ValueError(errors.missing_axes(what, [name], x.names, x.array.shape))
    if over is not None:
        axes = axes_meant(what, over)
    else:
        axes = axes_of_sharded(what, name)
        if axes is None:
            raise ValueError(
                f"{what}: nothing shards axis {name!r} of {describe_array(x)} here: neither the arguments nor the "
                "mapping. Say with `over` which mesh axis is meant."
            )
    if isinstance(axis, Axis) and axis.size not in (sizes[name], *(p.size for p in active_environment().found(name))):
        places = [("the array", sizes[name]), ("the argument", axis.size)]
        raise ValueError(errors.size_mismatch(what, name, places))
    return x.names.index(name), name, axes


def _exchanged_over(what: str, x: NamedArray, split: str, gather: str) -> AnyAxis | None:
    """Return the mesh axes of an `all_to_all`, from the shardings of its axes."""
    of_gather, of_split = axes_of_sharded(what, gather), axes_of_sharded(what, split)
    # An axis that is sharded in the arguments is still sharded so, or over the first of these mesh axes.
    now = (
        {f.now for f in possible_shardings(gather, x.shape.get(gather, 0))} - {()}
        if active_environment().sharded_over(gather)
        else set()
    )
    if len(now) == 1:
        (of_gather,) = now
    if of_gather and of_split and of_gather != of_split and not now:
        raise ValueError(
            f"{what}: the axes are sharded over {describe_axes(of_gather)} and over {describe_axes(of_split)}. Choose "
            "one with `over`."
        )
    found = of_gather or of_split
    return [MeshAxis(a) for a in found] if found else None


def _check_divides(what: str, x: NamedArray, position: int, axes: Axes) -> None:
    size, parts = x.array.shape[position], count(axes)
    if size % parts:
        raise ValueError(
            f"{what}: axis {x.names[position]!r} of {describe_array(x)} cannot be sharded over {describe_axes(axes)}: "
            f"{size} is not a multiple of {parts}."
        )


# --- the order of mesh axes ---
#
# An axis is sharded over the first of its mesh axes, the major one, and each shard over the next. Shards that differ in
# the last mesh axis, the minor one, are adjacent; others are not. So an axis is gathered from the minor mesh axis on,
# and sharded from the major one on. Any other order would permute the elements of the axis.


def _gather_order(what: str, x: NamedArray, name: str, axes: Axes, chosen: bool) -> Axes:
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
                f"{' or over '.join(map(quoted_with_and, ways))}. Say which with `over`."
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
            why = f"is sharded over {quoted_with_and(now)} here, and not over {quoted_with_and(gone)}"
        else:
            why = (
                f"is sharded over {quoted_with_and(now)}, in this order, and shards are gathered from the minor mesh "
                f"axis on. Gather over {now[-1]!r} first, or over all of these at once"
            )
        raise ValueError(f"{what}: axis {name!r} of {describe_array(x)} {why}.")
    return _all_or_none(what, x, name, axes)


def _scatter_order(what: str, x: NamedArray, name: str, axes: Axes) -> Axes:
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
        f"{what}: axis {name!r} of {describe_array(x)} is to be sharded over {quoted_with_and(left)}, in this "
        f"order. Shard it over {left[0]!r} first, or over all of these at once; if it is another axis, rename it."
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
        f"{what}: axis {name!r} is sharded over {quoted_with_and(ways[0])}, in this order, and the size of "
        f"{describe_array(x)} does not tell how it is sharded here. Go over all of these at once; if it is another "
        "axis, rename it."
    )
