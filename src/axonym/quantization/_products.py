"""Products of short numbers, with a name for each axis: their gradients are products by the same names."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Names
from ..distribution.mesh_axes import explicit_mesh
from ..distribution.per_device import vary_like


class ProductAxes(NamedTuple):
    """The names of the axes of a product. Axes of the same name are matched, and summed if the result lacks it."""

    lhs: Names
    rhs: Names
    out: Names

    def of_lhs_gradient(self) -> ProductAxes:
        """Return the axes of the product of the result's gradient and the second operand."""
        return ProductAxes(self.out, self.rhs, self.lhs)

    def of_rhs_gradient(self) -> ProductAxes:
        """Return the axes of the product of the first operand and the result's gradient."""
        return ProductAxes(self.lhs, self.out, self.rhs)


def product_operands(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, dtype: DTypeLike | None = None
) -> tuple[ProductAxes, jax.Array, jax.Array]:
    """Name the axes of a `jax.lax.dot_general`, and convert its operands to a dtype, by default the one of both."""
    dtype = jnp.result_type(lhs, rhs) if dtype is None else dtype
    lhs, rhs = jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    names = tuple(f"lhs {i}" for i in range(lhs.ndim))
    matched = dict(zip((*rhs_summed, *rhs_batch), (*lhs_summed, *lhs_batch), strict=True))
    rhs_names = tuple(names[matched[i]] if i in matched else f"rhs {i}" for i in range(rhs.ndim))
    free = [n for n in names if n not in rhs_names], [n for n in rhs_names if n not in names]
    axes = ProductAxes(names, rhs_names, (*(names[i] for i in lhs_batch), *free[0], *free[1]))
    return axes, vary_like(lhs, rhs), vary_like(rhs, lhs)  # and so their gradients vary, too


def multiply(
    axes: ProductAxes,
    lhs: jax.Array,
    rhs: jax.Array,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    like: jax.Array | None = None,
) -> jax.Array:
    """Multiply two arrays, such as arrays of 8-bit numbers, and accumulate in a dtype.

    Over Explicit mesh axes, the result is sharded like another array, if one is given.
    """
    if lhs.dtype.itemsize == rhs.dtype.itemsize == 1 and jax.default_backend() == "gpu":
        # XLA for NVIDIA GPUs is wrong for few 8-bit numbers (seen on an H100 with jaxlib 0.11.2): it returns twice the
        # sum of 5 integers, and a layer with 4 outputs had NaN in its gradient. So a multiple of 16 is summed.
        sizes = {n: lhs.shape[i] for i, n in enumerate(axes.lhs) if n not in axes.out}
        if sizes and math.prod(sizes.values()) % 16:
            first, size = next(iter(sizes.items()))
            lhs, rhs = (
                jnp.pad(x, [(0, -size % 16 if n == first else 0) for n in names])
                for x, names in ((lhs, axes.lhs), (rhs, axes.rhs))
            )
    sharding = None if like is None or explicit_mesh((like,)) is None else jax.typeof(like).sharding
    return jnp.einsum(
        lhs, axes.lhs, rhs, axes.rhs, axes.out, precision=precision, preferred_element_type=dtype, out_sharding=sharding
    )
