"""Compute convolutions with right values and gradients on meshes.

XLA partitions products rightly, but not all convolutions (see `docs/compiler_bugs.md`). Where it would be wrong, a
convolution is computed as a sum of products, one for each position in the kernel: along sharded axes; with groups,
unless all mesh axes shard the batch and the shards of channels are whole groups; where it is mapped over, which makes
it a grouped one with other axes; and where XLA would take the gradient of a strided and dilated one for a product. A
kernel that is sharded along an axis of the convolution gives wrong values too, so there it is always replicated.

Shardings over Explicit mesh axes are in the types of the arrays. Shardings over Auto axes come from the active mapping,
and outside of jit from the arrays: see `known_shardings`. Inside jit, on Auto mesh axes that the mapping says nothing
about, the batch of a grouped convolution counts as sharded. Without an active mesh, nothing is known there.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from ..axis import Names
from ..core.jax_versions import followed_by
from ..distribution.active_settings import active_mapping, is_mapped
from ..distribution.axis_rules import AxisRule
from ..distribution.mesh_axes import (
    Axes,
    axes_of_type,
    entries_of,
    mapped_axes,
    mesh_around,
    mesh_axes,
    padded,
    replicate_along,
    restricted,
    sharded_over,
    storage_axes,
)
from ..distribution.output_sharding import call_with_output_sharding
from ..ops._operands import private
from ..ops._prefixes import pad_with_gaps, strided_slice
from ._window_arguments import Padding


class Parameters(NamedTuple):
    """The static arguments of `jax.lax.conv_general_dilated`, except for the order of axes."""

    strides: tuple[int, ...]
    input_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Padding
    groups: int


class Known(NamedTuple):
    """The shardings of the operands of a convolution, as far as they are known before it is compiled."""

    mapped: bool
    """True if `jax.vmap` maps over the operands."""
    sizes: tuple[tuple[str, int], ...] | None = None
    """The Auto mesh axes over which the operands may be sharded, and their sizes; None inside jit."""
    x: tuple[Axes, ...] = ()
    """The mesh axes over which each axis of the input is sharded; empty if `jax.vmap` maps over the operands."""
    weight: tuple[Axes, ...] = ()
    """The same for the weight."""

    @property
    def large(self) -> set[str]:
        """The mesh axes of more than one device."""
        return {a for a, size in self.sizes or () if size > 1}


def known_shardings(x: Any, weight: Any) -> Known:
    """Return the shardings of the operands of a convolution, as far as they are known outside of jit.

    `jax.grad` and `jax.vmap` outside of jit follow arrays, whose shardings are known.
    """
    arrays = [followed_by(a) if isinstance(a, Tracer) else a for a in (x, weight)]
    mapped = any(a is not None and a.shape != b.shape for a, b in zip(arrays, (x, weight), strict=True))
    if any(a is None or isinstance(a, Tracer) for a in arrays):
        return Known(mapped)
    shardings = [getattr(a, "sharding", None) for a in arrays]
    if any(s is not None and not isinstance(s, NamedSharding) and len(s.device_set) > 1 for s in shardings):
        return Known(mapped)  # not in terms of mesh axes
    named = [s if isinstance(s, NamedSharding) and s.mesh.size > 1 else None for s in shardings]
    auto = {a: s.mesh.shape[a] for s in named if s is not None for a in axes_of_type(s.mesh, AxisType.Auto)}
    over = (
        () if s is None or mapped else tuple(map(mesh_axes, padded(restricted(s.spec, auto), len(a.shape))))
        for s, a in zip(named, arrays, strict=True)
    )
    return Known(mapped, tuple(auto.items()), *over)


def apply_convolution(
    what: str,
    fn: Callable[..., jax.Array],
    in_names: tuple[Names, Names],
    out_names: Names,
    channels: str,
    spatial: Names,
    groups: int,
    known: Known,
    x: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """Call `fn(x, weight, convolve)` with the function for one convolution that XLA partitions rightly.

    `x` and `weight` have the axes `in_names`; of these, the input channels of `x`, and the axes of the convolution.
    """
    mesh = mesh_around([x, weight])
    convolve = convolve_at_once
    on_mesh = {a for a in axes_of_type(mesh, AxisType.Auto, AxisType.Explicit) if mesh.shape[a] > 1}
    large = on_mesh | known.large
    if large:  # on one device, XLA is right
        convolve = _convolve_on_mesh
        names, weight_names = in_names
        placed = sharded_over(what, names, x, mesh, AxisType.Auto)
        over = {n: {*a, *b} for n, a, b in itertools.zip_longest(names, placed, known.x, fillvalue=())}
        sharded = [i for i, n in enumerate(spatial) if over[n]]
        kernel = [n in private("the weight", spatial) for n in weight_names]
        if on_mesh:
            weight = replicate_along(weight, kernel, mesh)
            if not sharded:
                x = replicate_along(x, [n in spatial for n in names], mesh)  # on Auto mesh axes, however it was sharded
        # Outside of jit, without a mesh around, the kernel stays as it was.
        kernel_sharded = any(axes and k for axes, k in zip(known.weight, kernel, strict=False))
        wrong = bool(sharded) or kernel_sharded or is_mapped() or known.mapped
        if groups > 1 and not wrong:
            auto = AxisType.Auto in mesh.axis_types
            # The mesh axes over which the channels of operand, weight and result may be sharded.
            channels_over = [mapped_axes(n) for n in (channels, *out_names) if n == channels or n not in names]
            channels_over += [mesh_axes(e) for n, e in zip(names, entries_of(x), strict=True) if n == channels]
            channels_over += [axes for n, axes in zip(names, known.x, strict=False) if n == channels]
            channels_over += [*map(storage_axes, weight_names), *map(mesh_axes, entries_of(weight)), *known.weight]
            batch = {n: over[n] for n in names if n not in (channels, *spatial)}
            # If devices along some mesh axes have the same part of a batch that is sharded, or may be, each adds to the
            # gradient of the weight. Several batch axes are merged, and XLA keeps the sharding of the first.
            used = {a for n in [*batch][:1] for a in batch[n]}
            unknown = auto and known.sizes is None and len(large) > 1 and not batch.keys() <= active_mapping().keys()
            repeated = not large <= used and (unknown or any(batch.values()))
            # Shards of the channels may be no whole groups, and operands and result may have other shards of them.
            over_which = {frozenset(large.intersection(axes)) for axes in channels_over} - {frozenset()}
            sizes = {**mesh.shape, **dict(known.sizes or ())}
            cut = any(groups % math.prod(sizes[a] for a in axes) for axes in over_which)
            wrong = repeated or cut or len(over_which) > 1
        if wrong:
            convolve = functools.partial(convolve_by_products, sharded)
    fn = functools.partial(fn, convolve=convolve)
    return call_with_output_sharding(what, fn, AxisRule(in_names, out_names), (x, weight))


def convolve_at_once(
    x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers
) -> jax.Array:
    """Apply a convolution as one operation."""
    return jax.lax.conv_general_dilated(
        x, weight, of.strides, of.padding, of.input_dilation, of.dilation, numbers, of.groups
    )


def _convolve_on_mesh(
    x: jax.Array, weight: jax.Array, of: Parameters, numbers: jax.lax.ConvDimensionNumbers
) -> jax.Array:
    """Apply a convolution as one operation, unless XLA may take it, or its gradient, for a batch of products.

    With one position in the kernel it is a single product, whose gradient XLA partitions rightly also if the input is
    sharded in a way that is not known here.
    """
    gaps = zip(of.strides, of.input_dilation, of.dilation, strict=True)
    if all(weight.shape[i] == 1 for i in numbers.rhs_spec[2:]) or any(d > 1 and (s > 1 or g > 1) for s, g, d in gaps):
        return convolve_by_products((), x, weight, of, numbers)
    return convolve_at_once(x, weight, of, numbers)


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
    gaps = [d - 1 for d in of.input_dilation]
    padded_x = pad_with_gaps(x, [(0, 0, 0)] * 2 + [(*pair, gap) for pair, gap in zip(pads, gaps, strict=True)])
    weight = weight.reshape(of.groups, weight.shape[0] // of.groups, *weight.shape[1:])
    # Like a convolution, sum small floating-point numbers in float32.
    small = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
    dtype = jnp.float32 if small else None
    inputs: dict[tuple[int, ...], jax.Array] = {(0,) * len(kernel): padded_x}  # what each position meets
    for i in [*sharded, *(i for i in range(len(kernel)) if i not in sharded)]:
        windows = padded_x.shape[2 + i] - span[i] + 1
        met = {}
        for position, part in inputs.items():
            starts, limits, strides = [0] * part.ndim, list(part.shape), [1] * part.ndim
            strides[2 + i] = of.strides[i]
            for p in range(kernel[i]):
                starts[2 + i], limits[2 + i] = p * of.dilation[i], p * of.dilation[i] + windows
                met[*position[:i], p, *position[i + 1 :]] = strided_slice(part, starts, limits, strides)
        inputs = met
    positions = itertools.product(*map(range, kernel))
    products = (_product_of_position(inputs[p], weight[(..., *p)], dtype) for p in positions)
    total = functools.reduce(operator.add, products).astype(x.dtype)
    return jnp.transpose(total, [numbers.out_spec.index(i) for i in range(total.ndim)])


def _product_of_position(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """Multiply (batch, in, ...) by the weight (group, out, in) of one position, to (batch, out, ...)."""
    multiply = functools.partial(jax.lax.dot_general, preferred_element_type=dtype)
    groups = weight.shape[0]
    if groups == 1:
        return jnp.moveaxis(multiply(x, weight[0], (((1,), (1,)), ((), ()))), -1, 1)
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    found = multiply(x, weight, (((2,), (2,)), ((1,), (0,))))  # (group, batch, ..., out)
    found = jnp.moveaxis(found, (0, -1), (1, 2))
    return found.reshape(found.shape[0], math.prod(found.shape[1:3]), *found.shape[3:])
