"""Products of 8-bit integers.

Each row of the first operand, and each column of the second, is divided by its own scale, which maps its largest value
to 127, and rounded. The integers are multiplied and accumulated as integers. Scales are computed on every call, so
there is no state. Per device, as under `axonym.fsdp` and in `shard_map`, each shard of a row or column has a scale of
its own, which is no less accurate, and sends nothing.

The gradient of the first operand, which has the size of a batch of inputs, is computed with 8-bit integers too. The
gradient of the second, the weight of a linear layer, is a sum over the batch in which rounding errors would accumulate,
so it is computed without rounding.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Names
from ..ops import _kernels
from ..state.module import ModuleWithStateDictSerialization
from ._products import ProductAxes, multiply, product_operands

__all__ = ["Int8DotGeneralOp"]


class Int8DotGeneralOp(ModuleWithStateDictSerialization):
    """A `jax.lax.dot_general` that rounds its operands to 8-bit integers, also for the gradient of the first operand.

    >>> layer = axn.nn.Linear.init(
    ...     axn.Axis("embed", 3), axn.Axis("mlp", 4), key=jax.random.key(0),
    ...     dot_general=axn.quantization.Int8DotGeneralOp.init(),
    ... )
    >>> layer(axn.ones({"batch": 2, "embed": 3})).shape
    {'batch': 2, 'mlp': 4}
    """

    @classmethod
    def init(cls) -> Int8DotGeneralOp:
        """Make the operation.

        >>> axn.quantization.Int8DotGeneralOp.init()
        Int8DotGeneralOp()
        """
        return cls()

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        y: Any = _product(*product_operands(lhs, rhs, dimension_numbers))
        return y if preferred_element_type is None else y.astype(preferred_element_type)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(axes: ProductAxes, lhs: jax.Array, rhs: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """Return the product of two arrays, each rounded to integers. Derivatives of any order ignore the rounding."""
    lhs_scale, short_lhs = _rounded_int8(lhs, axes.lhs, axes.out)
    rhs_scale, short_rhs = _rounded_int8(rhs, axes.rhs, axes.out)
    y = multiply(axes, short_lhs, short_rhs, jnp.int32, like=like)
    scale = lhs_scale * rhs_scale
    return (y.astype(scale.dtype) * scale).astype(lhs.dtype)


def _backward(axes: ProductAxes, operands: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs = operands
    of_lhs: Any = _product(axes.of_lhs_gradient(), gradient, rhs, lhs)
    return of_lhs, multiply(axes.of_rhs_gradient(), lhs, gradient, like=rhs), None


_product.defvjp(lambda axes, lhs, rhs, like=None: (_product(axes, lhs, rhs, like), (lhs, rhs)), _backward)


def _rounded_int8(x: jax.Array, names: Names, out: Names) -> tuple[jax.Array, jax.Array]:
    """Round an array to integers; return its scales, in the layout of the result, and the integers."""
    x = x.astype(jnp.float32)
    summed = tuple(i for i, n in enumerate(names) if n not in out)
    largest = jnp.max(jnp.abs(x), axis=summed, keepdims=True, initial=0)
    scale = jnp.where(largest == 0, 1, largest / 127)  # the scale of NaN is NaN, and so are all products with it
    kept = tuple(n for n in names if n in out)
    return _kernels.align(jax.lax.squeeze(scale, summed), kept, out), jnp.round(x / scale).astype(jnp.int8)
