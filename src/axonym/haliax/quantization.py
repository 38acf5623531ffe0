"""Quantized products, also of groups of rows."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from ..quantization import *  # noqa: F403  # the same names, and those below
from ..quantization import Fp8DotGeneralOp, OverwriteWithGradient, in_qdq, out_qdq
from .nn.ragged_dot import ragged_dot

CustomGradientAccumulation = OverwriteWithGradient  # its name in the newest version


class RaggedDotOp(Protocol):
    """The `op` of `nn.ragged_dot`: a function of the rows, a matrix for each group, and the sizes of the groups."""

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array: ...


class Fp8RaggedDotOp(Fp8DotGeneralOp):
    """A `nn.ragged_dot` that rounds its operands, and the gradient of its result, to 8-bit floats.

    It has the state of `Fp8DotGeneralOp`, and no kernel of its own: rounded numbers are multiplied in the wide dtype.

    >>> op = hax.quantization.Fp8RaggedDotOp.init(amax_history_length=4)
    >>> op(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])).shape
    (3, 4)
    """

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = rhs.dtype if self.compute_dtype is None else self.compute_dtype
        lhs = in_qdq(dtype, jnp.asarray(lhs, dtype), self.input_scale, self.input_amax_history, self.fwd_dtype)
        rhs = in_qdq(dtype, jnp.asarray(rhs, dtype), self.kernel_scale, self.kernel_amax_history, self.fwd_dtype)
        out = ragged_dot(lhs, rhs, group_sizes)
        return out_qdq(dtype, out, self.output_grad_scale, self.output_grad_amax_history, self.rev_dtype)
