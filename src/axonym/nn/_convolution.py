"""Convolutions, with right values and gradients on meshes.

XLA partitions products rightly, but not all convolutions. A convolution is a sum of products, one for each position in
the kernel, where XLA would be wrong:

- Along a sharded axis, XLA adds up what the devices along all mesh axes have, also those along which they have equal
  shards or other channels. With one mesh axis, second derivatives are wrong, and XLA fails if the kernel is dilated.
- The gradient of the weight of a grouped convolution is added up in the same way, unless all mesh axes shard the batch.
- A convolution that is mapped over becomes a grouped one with other axes, and JAX cannot shard it over Explicit mesh
  axes.
- XLA ends the process if channels are sharded over a number of devices that does not divide that of the groups.

Values are wrong, too, where the kernel is sharded along an axis of the convolution, so it never is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._context import is_mapped
from .._mesh_axes import (
    Axes,
    entries_of,
    mapped_axes,
    mesh_around,
    mesh_axes,
    replicate_along,
    sharded_over,
    storage_axes,
    types_of,
)
from .._output_sharding import call_with_output_sharding
from .._strided_slices import strided_slice
from ..axis import Names
from ._window_arguments import Padding


class Parameters(NamedTuple):
    """The static arguments of `jax.lax.conv_general_dilated`, but for the order of axes."""

    strides: tuple[int, ...]
    input_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Padding
    groups: int


def apply_convolution(
    what: str,
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    channels: str,
    spatial: Names,
    groups: int,
    x: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """Call `fn(x, weight, convolve)` with the function for one convolution that XLA partitions rightly.

    Arguments:
        in_names: the axes of `x` and `weight`, and `out_names` those of the result.
        channels: the axis of `x` with the input channels.
        spatial: the axes of the convolution.
    """
    mesh = mesh_around([x, weight])
    convolve = convolve_at_once
    large = {a for a, kind in types_of(mesh).items() if kind != AxisType.Manual and mesh.shape[a] > 1}
    if large:
        names, weight_names = in_names
        over = dict(zip(names, sharded_over(what, names, x, mesh, AxisType.Auto), strict=True))
        along_sharded = any(over[n] for n in spatial)
        weight = replicate_along(weight, [n in spatial for n in weight_names], mesh)
        if not along_sharded:
            x = replicate_along(x, [n in spatial for n in names], mesh)  # on Auto mesh axes, however it was sharded
        batch = [n for n in names if n != channels and n not in spatial]
        # Several batch axes are merged, of which XLA keeps the sharding of the first.
        used = {a for n in batch[:1] for a in over[n]}
        repeated = groups > 1 and any(over[n] for n in batch) and not large <= used
        channels_over = _sharded_channels(channels, in_names, out_names, x, weight) if groups > 1 else ()
        cut = any(groups % math.prod(mesh.shape[a] for a in axes if a in large) for axes in channels_over)
        if along_sharded or repeated or cut or is_mapped():
            convolve = functools.partial(convolve_by_products, [i for i, n in enumerate(spatial) if over[n]])
    fn = functools.partial(fn, convolve=convolve)
    return call_with_output_sharding(what, fn, in_names, out_names, (x, weight))


def _sharded_channels(
    channels: str, in_names: tuple[Names, Names], out_names: Names, x: jax.Array, weight: jax.Array
) -> list[Axes]:
    """Return the mesh axes over which the channels of operand, weight and result may be sharded."""
    names, weight_names = in_names
    found = [mapped_axes(n) for n in (channels, *out_names) if n == channels or n not in names]
    found += [mesh_axes(entry) for n, entry in zip(names, entries_of(x), strict=True) if n == channels]
    return [*found, *map(storage_axes, weight_names), *map(mesh_axes, entries_of(weight))]


def convolve_at_once(
    x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers
) -> jax.Array:
    """Apply a convolution as one operation."""
    return jax.lax.conv_general_dilated(
        x, weight, of.strides, of.padding, of.input_dilation, of.dilation, numbers, of.groups
    )


def convolve_by_products(
    sharded: Sequence[int], x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers
) -> jax.Array:
    """Apply a convolution as a sum of products, one for each position in the kernel.

    Arguments:
        sharded: which axes of the convolution are sharded. The input is cut along these first: the cuts along the
            others share the rows that came from other devices.
    """
    x, weight = jnp.transpose(x, numbers.lhs_spec), jnp.transpose(weight, numbers.rhs_spec)
    kernel = weight.shape[2:]
    size = [(n - 1) * d + 1 for n, d in zip(x.shape[2:], of.input_dilation, strict=True)]
    span = [(k - 1) * d + 1 for k, d in zip(kernel, of.dilation, strict=True)]
    pads = jax.lax.padtype_to_pads(size, span, of.strides, of.padding) if isinstance(of.padding, str) else of.padding
    padded = _padded(x, pads, of.input_dilation)
    weight = weight.reshape(of.groups, weight.shape[0] // of.groups, *weight.shape[1:])
    # Like a convolution, sum small floating-point numbers in float32.
    small = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
    dtype = jnp.float32 if small else None
    inputs: dict[tuple[int, ...], jax.Array] = {(0,) * len(kernel): padded}  # what each position meets
    for i in [*sharded, *(i for i in range(len(kernel)) if i not in sharded)]:
        windows = padded.shape[2 + i] - span[i] + 1
        inputs = {
            (*position[:i], p, *position[i + 1 :]): _cut(part, 2 + i, p * of.dilation[i], windows, of.strides[i])
            for position, part in inputs.items()
            for p in range(kernel[i])
        }
    total = None
    for position in itertools.product(*map(range, kernel)):
        product = _product(inputs[position], weight[(..., *position)], dtype)
        total = product if total is None else total + product
    assert total is not None  # a kernel has a position at least
    total = total.astype(x.dtype)
    return jnp.transpose(total, [numbers.out_spec.index(i) for i in range(total.ndim)])


def _padded(x: jax.Array, pads: Sequence[tuple[int, int]], dilation: Sequence[int]) -> jax.Array:
    """Insert zeros between the elements along the axes of the convolution, and pad or crop both ends."""
    zero, same = jnp.zeros((), x.dtype), [(0, 0, 0)] * 2
    x = jax.lax.pad(x, zero, same + [(max(a, 0), max(b, 0), d - 1) for (a, b), d in zip(pads, dilation, strict=True)])
    if all(min(pair) >= 0 for pair in pads):
        return x
    # XLA fails to partition a pad that crops and dilates.
    starts = [0, 0, *(max(-a, 0) for a, _ in pads)]
    return jax.lax.slice(
        x, starts, [n - c for n, c in zip(x.shape, (0, 0, *(max(-b, 0) for _, b in pads)), strict=True)]
    )


def _cut(x: jax.Array, axis: int, start: int, windows: int, stride: int) -> jax.Array:
    """Return the elements along one axis that one position in the kernel meets, one for each window."""

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(x, start, start + windows, stride, axis)

    return cut(x) if stride == 1 else strided_slice(cut, x)


def _product(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """Multiply (batch, in, ...) by the weight (group, out, in) of one position, to (batch, out, ...)."""
    multiply = functools.partial(jax.lax.dot_general, preferred_element_type=dtype)
    groups = weight.shape[0]
    if groups == 1:
        return jnp.moveaxis(multiply(x, weight[0], (((1,), (1,)), ((), ()))), -1, 1)
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    found = multiply(x, weight, (((2,), (2,)), ((1,), (0,))))  # (group, batch, ..., out)
    found = jnp.moveaxis(found, (0, -1), (1, 2))
    return found.reshape(found.shape[0], math.prod(found.shape[1:3]), *found.shape[3:])
