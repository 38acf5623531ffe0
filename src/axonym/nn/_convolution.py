"""Convolutions of raw arrays, with values and gradients that are right along sharded axes.

On a mesh of several axes, XLA partitions two convolutions wrongly. Where operands are replicated over one of them, the
gradient of a weight is summed over that one too: it is so many times too large. And values are wrong if a weight is
sharded along a spatial axis. So there a weight is replicated along these, and its gradient is computed by a product for
each position in the kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, PartitionSpec

from .._jax_versions import set_apart
from .._mesh_axes import entries_of, mesh_around, reshard, types_of
from .._strided_slices import strided_slice
from ._window_arguments import Pair


class ConvolutionArguments(NamedTuple):
    """The static arguments of `jax.lax.conv_general_dilated`."""

    strides: tuple[int, ...]
    padding: str | tuple[Pair, ...]
    input_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    numbers: jax.lax.ConvDimensionNumbers
    groups: int


def convolve(how: ConvolutionArguments, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply a convolution."""
    mesh = mesh_around((x, weight))
    left = [a for a, kind in types_of(mesh).items() if kind != AxisType.Manual and mesh.shape[a] > 1]
    differentiable = jnp.issubdtype(weight.dtype, jnp.inexact)
    return _with_right_gradient(how, x, weight) if len(left) > 1 and differentiable else _plain(how, x, weight)


def _plain(how: ConvolutionArguments, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, weight, *how)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_right_gradient(how: ConvolutionArguments, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _plain(how, x, _replicated(weight, how.numbers.rhs_spec[2:]))


def _tangent(how: ConvolutionArguments, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    (x, weight), (dx, dweight) = primals, tangents
    y = _with_right_gradient(how, x, weight)
    parts = [] if isinstance(dx, SymbolicZero) else [_with_right_gradient(how, dx, weight)]
    if not isinstance(dweight, SymbolicZero):
        by_positions: Any = functools.partial(_by_positions, how)
        if explicit := AxisType.Explicit in types_of(mesh_around((x, weight))).values():
            by_positions = jax.sharding.auto_axes(by_positions, out_sharding=jax.typeof(y).sharding)
        # Only the input is kept for the gradient, and not what is cut of it for each position.
        parts.append(by_positions(x, dweight) if explicit else jax.checkpoint(by_positions)(x, dweight))
    return y, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(y)


_with_right_gradient.defjvp(_tangent, symbolic_zeros=True)


def _replicated(weight: jax.Array, axes: Collection[int]) -> jax.Array:
    """Replicate a weight along some axes, and leave its other axes as they are."""
    mesh = mesh_around((weight,))
    if AxisType.Explicit in mesh.axis_types:
        return reshard(weight, (None if i in axes else e for i, e in enumerate(entries_of(weight))), mesh)
    spec = PartitionSpec(*(None if i in axes else PartitionSpec.UNCONSTRAINED for i in range(weight.ndim)))
    return jax.lax.with_sharding_constraint(weight, spec)


def _by_positions(how: ConvolutionArguments, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute a convolution as a sum of products, one for each position in the kernel."""
    of_x, of_weight, of_result = how.numbers
    x = x.transpose((of_x[0], *of_x[2:], of_x[1]))
    weight = weight.transpose((*of_weight[2:], *of_weight[:2]))
    kernel, sizes = weight.shape[:-2], x.shape[1:-1]
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, how.dilation, strict=True)]
    pads = how.padding
    if isinstance(pads, str):
        pads = jax.lax.padtype_to_pads(sizes, spans, how.strides, pads)
    gaps = [step - 1 for step in how.input_dilation]
    inside = [(*pad, gap) for pad, gap in zip(pads, gaps, strict=True)]
    padded = jax.lax.pad(set_apart(x), np.zeros((), x.dtype), [(0, 0, 0), *inside, (0, 0, 0)])
    result: Any = 0
    for offsets in itertools.product(*map(range, kernel)):
        starts = [offset * step for offset, step in zip(offsets, how.dilation, strict=True)]
        ends = [size - span + start + 1 for size, span, start in zip(padded.shape[1:-1], spans, starts, strict=True)]
        cut = functools.partial(
            jax.lax.slice,
            start_indices=(0, *starts, 0),
            limit_indices=(x.shape[0], *ends, x.shape[-1]),
            strides=(1, *how.strides, 1),
        )
        part = cut(padded) if set(how.strides) == {1} else strided_slice(cut, padded)
        result = result + _product(part, weight[offsets], how.groups)
    order = (of_result[0], *of_result[2:], of_result[1])
    return result.transpose([order.index(i) for i in range(len(order))])


def _product(x: jax.Array, weight: jax.Array, groups: int) -> jax.Array:
    """Multiply the channels of the input, its last axis, by a matrix from output channels to those of a group."""
    if groups == 1:
        return jnp.einsum("...i,oi->...o", x, weight)
    own = x.reshape(*x.shape[:-1], groups, -1), weight.reshape(groups, -1, weight.shape[-1])
    return jnp.einsum("...gi,goi->...go", *own).reshape(*x.shape[:-1], -1)
