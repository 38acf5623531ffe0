"""What devices that each have a part of an axis find together: by candidates, of which each brings its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..array import NamedArray, wrap
from ..manual.collectives import all_gather, axis_offset, axis_size


def best(x: NamedArray, axis: str, k: int) -> tuple[NamedArray, NamedArray]:
    """The largest elements along an axis, the largest first, and where they are in the whole of it.

    Of equal elements the first comes first. A device has no more candidates than its part has elements.

    Arguments:
        x: the part that a device has.
        axis: the axis.
        k: how many to find; all devices together have that many.
    """
    position = x.names.index(axis)
    values, places = jax.lax.top_k(x.array, min(k, x.axis_size(axis)), axis=position)
    places = places + axis_offset(axis, x)
    if axis_size(axis) > 1:
        # Parts are put together in order, so equal candidates stay in order, too.
        values = all_gather(wrap(values, x.names), axis).array
        places = all_gather(wrap(places, x.names), axis).array
        values, among = jax.lax.top_k(values, k, axis=position)
        places = jnp.take_along_axis(places, among, axis=position)
    return wrap(values, x.names), wrap(places, x.names)


def first_largest(x: NamedArray, axis: str) -> NamedArray:
    """Where the largest element along an axis is; the first of equal ones, and the first NaN if there is one.

    Arguments:
        x: the part that a device has.
        axis: the axis.
    """
    position = x.names.index(axis)
    rest = tuple(n for n in x.names if n != axis)
    place = jnp.argmax(x.array, position, keepdims=True)
    if axis_size(axis) > 1:
        value = all_gather(wrap(jnp.take_along_axis(x.array, place, axis=position), x.names), axis)
        places = all_gather(wrap(place + axis_offset(axis, x), x.names), axis)
        winner = jnp.argmax(value.array, position, keepdims=True)
        place = jnp.take_along_axis(places.array, winner, axis=position)
    return wrap(jnp.squeeze(place, position).astype(jnp.int32), rest)
