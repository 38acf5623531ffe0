"""Products of 8-bit integers.

Each row of the first operand, and each column of the second, is divided by its own scale, which maps its largest value
to 127, and rounded. The integers are multiplied and accumulated as integers. Scales are computed on every call, so
there is no state.

The gradient of the first operand, which has the size of a batch of inputs, is computed with 8-bit integers too. The
gradient of the second, the weight of a linear layer, is a sum over the batch in which rounding errors would accumulate,
so it is computed without rounding.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import Names
from ..distribution.per_device import vary_like
from ..ops import _kernels
from ..state.module import ModuleWithStateDictSerialization

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
        dtype = jnp.result_type(lhs, rhs)
        lhs, rhs = jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)
        lhs, rhs = vary_like(lhs, rhs), vary_like(rhs, lhs)  # and so their gradients too
        y: Any = _product(_terms(lhs.ndim, rhs.ndim, dimension_numbers), lhs, rhs)
        return y if preferred_element_type is None else y.astype(preferred_element_type)


class _ProductAxes(NamedTuple):
    """An einsum with a name for each axis. Axes of the same name are matched, and summed if the result lacks it."""

    lhs: Names
    rhs: Names
    out: Names


def _terms(lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> _ProductAxes:
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = tuple(f"lhs {i}" for i in range(lhs_ndim))
    matched = dict(zip((*rhs_summed, *rhs_batch), (*lhs_summed, *lhs_batch), strict=True))
    rhs = tuple(lhs[matched[i]] if i in matched else f"rhs {i}" for i in range(rhs_ndim))
    free = [n for n in lhs if n not in rhs], [n for n in rhs if n not in lhs]
    return _ProductAxes(lhs, rhs, (*(lhs[i] for i in lhs_batch), *free[0], *free[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(terms: _ProductAxes, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _quantized_product(terms, lhs, rhs)


def _forward(terms: _ProductAxes, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    return _quantized_product(terms, lhs, rhs), (lhs, rhs)


def _backward(terms: _ProductAxes, operands: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = operands
    lhs_gradient = _quantized_product(_ProductAxes(terms.out, terms.rhs, terms.lhs), gradient, rhs)
    rhs_gradient = _dot_general(_ProductAxes(terms.lhs, terms.out, terms.rhs), lhs, gradient)
    return lhs_gradient, rhs_gradient


_product.defvjp(_forward, _backward)


def _quantized_product(terms: _ProductAxes, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Return the product of two arrays, each rounded to integers."""
    lhs_scale, short_lhs = _rounded(lhs, terms.lhs, terms.out)
    rhs_scale, short_rhs = _rounded(rhs, terms.rhs, terms.out)
    y = _dot_general(terms, short_lhs, short_rhs, jnp.int32)
    return (y * (lhs_scale * rhs_scale)).astype(lhs.dtype)


def _rounded(x: jax.Array, names: Names, out: Names) -> tuple[jax.Array, jax.Array]:
    """Round an array to integers; return its scales, in the layout of the result, and the integers."""
    x = x.astype(jnp.float32)
    summed = tuple(i for i, n in enumerate(names) if n not in out)
    largest = jnp.max(jnp.abs(x), axis=summed, keepdims=True, initial=0)
    scale = jnp.where(largest == 0, 1, largest / 127)  # the scale of NaN is NaN, and so are all products with it
    kept = tuple(n for n in names if n in out)
    return _kernels.align(jax.lax.squeeze(scale, summed), kept, out), jnp.round(x / scale).astype(jnp.int8)


def _dot_general(terms: _ProductAxes, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    return jnp.einsum(lhs, terms.lhs, rhs, terms.rhs, terms.out, preferred_element_type=dtype)
