"""Convolutions, also of inputs that are sharded, but not over all mesh axes.

Of a convolution along a sharded axis, and of one in groups whose batch is sharded, XLA adds up what the devices along
all mesh axes have, also along those over which they have equal shards, or other channels. So its results or their
gradients are several times too large, unless all mesh axes shard the batch and the axes of the convolution. Products
are partitioned rightly, so otherwise the convolution is a sum of products, one for each position in the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._mesh_axes import mesh_around, sharded_over
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


def convolve(x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers) -> jax.Array:
    """Apply a convolution as one operation."""
    return jax.lax.conv_general_dilated(
        x, weight, of.strides, of.padding, of.input_dilation, of.dilation, numbers, of.groups
    )


def needs_products(what: str, names: Names, batch: Names, spatial: Names, x: jax.Array, groups: int) -> bool:
    """Return whether the input of a convolution is sharded so that XLA partitions it wrongly."""
    mesh = mesh_around([x])
    over = dict(zip(names, sharded_over(what, names, x, mesh, AxisType.Auto), strict=True))
    if not any(over[n] for n in (spatial if groups == 1 else (*spatial, *batch))):
        return False
    # Of several batch axes, which are merged, XLA keeps the sharding of the first.
    used = {a for n in (*spatial, *batch[:1]) for a in over[n]}
    return any(size > 1 and a not in used for a, size in mesh.shape.items())


def convolve_by_products(
    x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers
) -> jax.Array:
    """Apply a convolution as a sum of products, one for each position in the kernel."""
    x, weight = jnp.transpose(x, numbers.lhs_spec), jnp.transpose(weight, numbers.rhs_spec)
    kernel = weight.shape[2:]
    size = [(n - 1) * d + 1 for n, d in zip(x.shape[2:], of.input_dilation, strict=True)]
    span = [(k - 1) * d + 1 for k, d in zip(kernel, of.dilation, strict=True)]
    pads = jax.lax.padtype_to_pads(size, span, of.strides, of.padding) if isinstance(of.padding, str) else of.padding
    widths = [(before, after, d - 1) for (before, after), d in zip(pads, of.input_dilation, strict=True)]
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *widths])
    weight = weight.reshape(of.groups, weight.shape[0] // of.groups, *weight.shape[1:])
    total = None
    for position in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(position, of.dilation, strict=True)]
        ends = [n - s + 1 + start for n, s, start in zip(padded.shape[2:], span, starts, strict=True)]
        product = _product(_cut(padded, starts, ends, of.strides), weight[(..., *position)])
        total = product if total is None else total + product
    assert total is not None  # a kernel has a position at least
    return jnp.transpose(total, [numbers.out_spec.index(i) for i in range(total.ndim)])


def _cut(padded: jax.Array, starts: Sequence[int], ends: Sequence[int], strides: Sequence[int]) -> jax.Array:
    """Return the elements that one position in the kernel meets, one for each window."""

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *strides))

    return cut(padded) if set(strides) == {1} else strided_slice(cut, padded)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply (batch, in, ...) by the weight (group, out, in) of one position, to (batch, out, ...)."""
    groups = weight.shape[0]
    if groups == 1:
        return jnp.moveaxis(jax.lax.dot_general(x, weight[0], (((1,), (1,)), ((), ()))), -1, 1)
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    found = jax.lax.dot_general(x, weight, (((2,), (2,)), ((1,), (0,))))  # (group, batch, ..., out)
    found = jnp.moveaxis(found, (0, -1), (1, 2))
    return found.reshape(found.shape[0], math.prod(found.shape[1:3]), *found.shape[3:])
