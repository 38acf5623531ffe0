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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._per_device import vary_like
from ..state.module import ModuleWithStateDictSerialization

__all__ = ["Int8DotGeneralOp"]

Labels = tuple[int, ...]


class Int8DotGeneralOp(ModuleWithStateDictSerialization):
    """A `jax.lax.dot_general` that rounds its operands to 8-bit integers, also for the gradient of the first operand.

    >>> layer = axn.nn.Linear.init(
    ...     axn.Axis("embed", 3), axn.Axis("mlp", 4), key=jax.random.key(0),
    ...     dot_general=axn.quantization.Int8DotGeneralOp.init(),
    ... )
    >>> print(layer(axn.ones({"batch": 2, "embed": 3})))
    float32[batch=2, mlp=4]
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
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        dtype = jnp.result_type(lhs, rhs)
        lhs, rhs = jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)
        lhs, rhs = vary_like(lhs, rhs), vary_like(rhs, lhs)  # and so their gradients too
        y: Any = _product(_labels(lhs.ndim, rhs.ndim, dimension_numbers), lhs, rhs)
        return y if preferred_element_type is None else y.astype(preferred_element_type)


class _Terms(NamedTuple):
    """An einsum with a number for each axis: axes with one number are matched, and summed if the result lacks them."""

    lhs: Labels
    rhs: Labels
    out: Labels


def _labels(lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> _Terms:
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    matched = dict(zip((*rhs_summed, *rhs_batch), (*lhs_summed, *lhs_batch), strict=True))
    lhs = tuple(range(lhs_ndim))
    rhs = tuple(matched.get(axis, lhs_ndim + axis) for axis in range(rhs_ndim))
    free = [label for label in lhs if label not in rhs], [label for label in rhs if label not in lhs]
    return _Terms(lhs, rhs, (*lhs_batch, *free[0], *free[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(terms: _Terms, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _quantized_product(terms, lhs, rhs)


def _forward(terms: _Terms, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    return _quantized_product(terms, lhs, rhs), (lhs, rhs)


def _backward(terms: _Terms, operands: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = operands
    lhs_gradient = _quantized_product(_Terms(terms.out, terms.rhs, terms.lhs), gradient, rhs)
    rhs_gradient = _dot_general(_Terms(terms.lhs, terms.out, terms.rhs), lhs, gradient)
    return lhs_gradient, rhs_gradient


_product.defvjp(_forward, _backward)


def _quantized_product(terms: _Terms, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Return the product of two arrays, each rounded to integers."""
    summed = set(terms.lhs) - set(terms.out)
    lhs_scale, short_lhs = _rounded(lhs, [i for i, label in enumerate(terms.lhs) if label in summed])
    rhs_scale, short_rhs = _rounded(rhs, [i for i, label in enumerate(terms.rhs) if label in summed])
    y = _dot_general(terms, short_lhs, short_rhs, jnp.int32)
    scale = _scale_in_layout(lhs_scale, terms.lhs, terms.out) * _scale_in_layout(rhs_scale, terms.rhs, terms.out)
    return (y * scale).astype(lhs.dtype)


def _rounded(x: jax.Array, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Round an array to integers, and return its scales, of size one along the summed axes, and the integers."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=tuple(summed), keepdims=True, initial=0)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return scale, jnp.round(x / scale).astype(jnp.int8)


def _dot_general(terms: _Terms, lhs: jax.Array, rhs: jax.Array, dtype: Any = None) -> jax.Array:
    shared = [label for label in terms.lhs if label in terms.rhs]
    batch = [label for label in shared if label in terms.out]
    summed = [label for label in shared if label not in terms.out]
    contracted, batched = (
        (tuple(map(terms.lhs.index, labels)), tuple(map(terms.rhs.index, labels))) for labels in (summed, batch)
    )
    y = jax.lax.dot_general(lhs, rhs, (contracted, batched), preferred_element_type=dtype)
    names = (*batch, *(n for n in terms.lhs if n not in shared), *(n for n in terms.rhs if n not in shared))
    return y if names == terms.out else jax.lax.transpose(y, tuple(map(names.index, terms.out)))


def _scale_in_layout(scale: jax.Array, labels: Labels, out: Labels) -> jax.Array:
    """Transpose and expand a scale to the layout of the result."""
    kept = [i for i, label in enumerate(labels) if label in out]
    scale = jax.lax.squeeze(scale, [i for i in range(len(labels)) if i not in kept])
    own = [labels[i] for i in kept]
    scale = jax.lax.transpose(scale, [own.index(label) for label in out if label in own])
    return jax.lax.expand_dims(scale, [i for i, label in enumerate(out) if label not in own])
