"""Find the largest elements along an axis that can be sharded."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ..axis import Axis, AxisSelector, Names, name_of
from ..distribution import output_sharding
from ..distribution.active_settings import active_mapping
from ..distribution.axis_rules import AxisRule
from ..distribution.kept_shards import in_pipeline
from ..distribution.mesh_axes import axes_of_type, current_mesh
from ..manual.collectives import all_gather, axis_offset, axis_size
from ..named_array import NamedArray, NamedOrNumeric, resolve_axes, wrap
from ..ops import _kernels
from ..ops._operands import check_new_axis, extreme, one_axis, operand, private, replaced, require_named, require_subset
from .decorator import Partitioned, partitioned

_WHAT = "top_k"


def top_k(
    array: NamedArray,
    axis: AxisSelector,
    k: NamedOrNumeric,
    new_axis: AxisSelector | None = None,
    *,
    max_k: int | None = None,
    replacement: NamedOrNumeric | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Find the largest elements along an axis, the largest first, and their positions.

    The axis may be sharded: each device finds `k` candidates in its shard, and only these, with their positions, move.
    Other axes keep their sharding. Equal elements come in the order of their positions. NaN is larger than all numbers
    if its sign bit is not set.

    With `max_k`, `k` need not be known when the program is compiled, and each example can have one of its own. The
    result then has `max_k` elements, and elements beyond `k` have the value `replacement`. Their positions are the
    positions of the next elements, so that they are valid.

    Arguments:
        axis: the axis to search.
        k: how many elements to find; with `max_k`, also an array or a traced number.
        new_axis: the axis in the result; by default it keeps its name.
        max_k: the upper bound of `k`.
        replacement: the value of elements beyond `k`; by default the lowest of the dtype, which is -inf for floats.

    >>> axn.top_k(axn.named([3, 1, 2], "token"), "token", 2, "beam")
    (NamedArray(int32[beam=2], [3 2]), NamedArray(int32[beam=2], [0 2]))
    >>> x = axn.named([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]], ("batch", "vocab"))
    >>> values, places = axn.top_k(x, "vocab", axn.named([2, 1], "batch"), max_k=2, replacement=0.0)
    >>> print(values.array, places.array)
    [[3. 2.]
     [5. 0.]] [[0 2]
     [1 2]]
    """
    require_named(_WHAT, array)
    along = one_axis(_WHAT, "axis", resolve_axes(array.names, jnp.shape(array.array), axis, _WHAT))
    count = number_of_candidates(_WHAT, "k", k, max_k, along)
    new = along.name if new_axis is None else new_axis
    check_new_axis(_WHAT, new, count)
    if max_k is None:
        if replacement is not None:
            raise TypeError(f"{_WHAT}: `replacement` is the value of elements beyond `k`, so it needs `max_k`.")
        return _top_k_kernel(array.names, along.name, count, name_of(new)).apply(array.array)
    if replacement is None:
        replacement = extreme(array.dtype, largest=False)
    (k_array, k_names), (r_array, r_names) = operand(k), operand(replacement)
    batch = tuple(n for n in array.names if n != along.name)
    for argument, names in (("k", k_names), ("replacement", r_names)):
        require_subset(_WHAT, argument, names, batch, " There is one for all examples, or one for each.")
    kernel = _top_k_kernel(array.names, along.name, count, name_of(new), k_names, r_names)
    return kernel.apply(array.array, k_array, r_array)


def number_of_candidates(what: str, argument: str, k: Any, max_k: int | None, axis: Axis) -> int:
    """Return the largest possible `k`; the argument, called `name` in messages, must be known at compile time."""
    count, asked = max_k, f"max_k={max_k}"
    if count is None:
        if isinstance(k, (NamedArray, jax.Array, np.ndarray)):
            raise TypeError(
                f"{what}: `{argument}` is an array, so how many candidates there are is not known when the program is "
                "compiled. Say with `max_k` how many there are at most."
            )
        if isinstance(k, Axis):
            raise TypeError(f"{what}: `{argument}` is a number of elements, got {k}: pass its size, {k.size}.")
        count, asked = operator.index(k), f"{argument}={k}"
    if not 0 <= count <= axis.size:
        raise ValueError(f"{what}: {asked}, but axis {axis.name!r} has {axis.size} elements.")
    return count


@_kernels.shared("names", "axis", "new", "limit_names")
def _top_k_kernel(names: Names, axis: str, k: int, new: str, *limit_names: Names) -> _kernels.Kernel:
    out_names = replaced(_WHAT, names, axis, (new,))
    in_names, position = (names, *limit_names), names.index(axis)
    # In results, the name of the axis must differ from the axis of the operands.
    found_names = replaced(_WHAT, names, axis, private("the result", (axis,)))

    def positional(x, *limits):
        if limits:
            limit, replacement = limits
            limits = limit, jnp.asarray(replacement, x.dtype)
        mesh = current_mesh()
        if mesh is None:
            return candidates(x, *limits)
        # If JAX cannot run the operation or its derivative per device, the partitioner does.
        auto = [a for a in axes_of_type(mesh, AxisType.Auto) if mesh.shape[a] > 1]
        open_ = bool(auto) and not active_mapping()
        manual = axes_of_type(mesh, AxisType.Manual)
        # JAX cannot differentiate a `shard_map` inside a pipeline, which is one itself.
        nested = in_pipeline() and len(manual) < len(mesh.axis_names)
        if nested or (open_ and (manual or axes_of_type(mesh, AxisType.Explicit))):
            rule = AxisRule(in_names, (found_names,) * 2)
            return output_sharding.call_with_output_sharding(_WHAT, unsharded, rule, (x, *limits))
        if not open_ and len(manual) in (0, len(mesh.axis_names)):
            return candidates(x, *limits)
        values, places = candidates(*map(jax.lax.stop_gradient, (x, *limits)))
        return differentiable(values, places, x, *limits), places

    def candidates(*arrays):
        operands = (wrap(a, n) for a, n in zip(arrays, in_names, strict=True))
        return tuple(found.array for found in _make_top_k_operation(axis)(*operands, k=k))

    def unsharded(x, *limits):
        values, places = jax.lax.top_k(x, k, axis=position)
        return _limited_values(values, found_names, position, limits, limit_names), places

    def at(places, x, *limits):
        return _limited_values(jnp.take_along_axis(x, places, position), found_names, position, limits, limit_names)

    @jax.custom_jvp
    def differentiable(values, places, *arrays):
        return values

    @differentiable.defjvp
    def _(arrays, tangents):
        values, places, given = arrays[0], arrays[1], arrays[2:]

        def values_at(*given):
            rule = AxisRule((found_names, *in_names), found_names)
            return output_sharding.call_with_output_sharding(_WHAT, at, rule, (places, *given))

        return values, jax.jvp(values_at, given, tangents[2:])[1]

    return _kernels.make_kernel(_WHAT, positional, in_names, (out_names,) * 2, mesh_aware=True)


@functools.lru_cache(maxsize=256)
def _make_top_k_operation(axis: str) -> Partitioned:
    """Make the operation for an axis of this name."""
    (found,) = private("the result", (axis,))

    def top_k(array: NamedArray, *limits: NamedArray, k: int) -> tuple[NamedArray, NamedArray]:
        values, places = best(array, axis, k)
        names, position = values.names, values.names.index(axis)
        limited = _limited_values(values.array, names, position, [x.array for x in limits], [x.names for x in limits])
        return wrap(limited, names).rename({axis: found}), places.rename({axis: found})

    return partitioned(reduced=axis)(top_k)


def _limited_values(
    values: jax.Array, names: Names, position: int, limits: Sequence[jax.Array], limit_names: Sequence[Names]
) -> jax.Array:
    """Replace the values beyond `k`, if `k` is an operand."""
    if not limits:
        return values
    limit, replacement = (_kernels.align(x, n, names) for x, n in zip(limits, limit_names, strict=True))
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, values.shape, position) < limit, values, replacement)


def best(x: NamedArray, axis: str, k: int) -> tuple[NamedArray, NamedArray]:
    """Find the `k` largest elements along an axis from the shard of each device, and their positions in the axis.

    The largest comes first, and equal elements keep their order. All devices together return `k` elements.
    """
    position = x.names.index(axis)
    values, places = jax.lax.top_k(x.array, min(k, x.axis_size(axis)), axis=position)
    places = places + axis_offset(axis, x=x)
    if axis_size(axis) > 1:
        # Shards are gathered in order, so that equal candidates stay in order.
        values = all_gather(wrap(values, x.names), axis).array
        places = all_gather(wrap(places, x.names), axis).array
        values, among = jax.lax.top_k(values, k, axis=position)
        places = jnp.take_along_axis(places, among, axis=position)
    return wrap(values, x.names), wrap(places, x.names)
