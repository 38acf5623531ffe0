"""Products of 8-bit floating-point numbers, with delayed scaling.

8-bit floats have a small range, so an array is divided by a scale before it is rounded. The best scale follows from
the array's largest absolute value, which is known only once the whole array is computed. With *delayed scaling*, the
scale follows from a history of the largest values of earlier steps (see `axonym.quantization.overwriting`).

The operands of a product become `float8_e4m3fn`, the gradient of its result `float8_e5m2`, which has more range and
less precision. The program multiplies 8-bit floats. If it multiplied arrays that are rounded and converted back, as
compilers for such devices once recognized, XLA for GPUs would multiply in the wide dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core.jax_versions import varying_axes
from ._products import ProductAxes, multiply, product_operands
from .overwriting import OverwriteWithGradient

__all__ = ["Fp8DotGeneralOp", "dot_general_with_precision", "in_qdq", "out_qdq"]

_OPERAND_DTYPE: Any = jnp.float8_e4m3fn
_GRADIENT_DTYPE: Any = jnp.float8_e5m2


class Fp8DotGeneralOp(OverwriteWithGradient):
    """A `jax.lax.dot_general` that rounds its operands, and the gradient of its result, to 8-bit floats.

    The first operand is the input, the second the kernel, as in a linear layer. The module's arrays are state: their
    gradients are their values for the next step.

    Arguments:
        input_scale, output_grad_scale, kernel_scale: the last scale of the input, the result's gradient and the kernel.
        input_amax_history, output_grad_amax_history, kernel_amax_history: their largest absolute values in the last
            steps.
        compute_dtype: the dtype to multiply in; None for the dtype of the operands.
        fwd_dtype, rev_dtype: the 8-bit dtypes of the operands, and of the gradient of the result.

    >>> layer = axn.nn.Linear.init(
    ...     axn.Axis("embed", 3), axn.Axis("mlp", 4), key=jax.random.key(0),
    ...     dot_general=axn.quantization.Fp8DotGeneralOp.init(),
    ... )
    >>> layer(axn.ones({"batch": 2, "embed": 3})).shape
    {'batch': 2, 'mlp': 4}
    """

    input_scale: jax.Array
    output_grad_scale: jax.Array
    kernel_scale: jax.Array
    input_amax_history: jax.Array
    output_grad_amax_history: jax.Array
    kernel_amax_history: jax.Array
    compute_dtype: Any = eqx.field(static=True, default=None)
    fwd_dtype: Any = eqx.field(static=True, default=_OPERAND_DTYPE)
    rev_dtype: Any = eqx.field(static=True, default=_GRADIENT_DTYPE)

    @classmethod
    def init(
        cls,
        amax_history_length: int = 1024,
        compute_dtype: DTypeLike | None = None,
        fwd_dtype: DTypeLike = _OPERAND_DTYPE,
        rev_dtype: DTypeLike = _GRADIENT_DTYPE,
    ) -> Self:
        """Make an operation with an empty history of so many steps. The dtypes are fields of the operation.

        >>> axn.quantization.Fp8DotGeneralOp.init(amax_history_length=16).input_amax_history.shape
        (16,)
        """
        # Separate arrays, so that a training step can donate each of them.
        s1, s2, s3 = (jnp.ones(1, jnp.float32) for _ in range(3))
        h1, h2, h3 = (jnp.zeros(amax_history_length, jnp.float32) for _ in range(3))
        return cls(s1, s2, s3, h1, h2, h3, compute_dtype, fwd_dtype, rev_dtype)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        wanted = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type
        axes, lhs, rhs = product_operands(lhs, rhs, dimension_numbers, self.compute_dtype)
        short = jnp.dtype(self.fwd_dtype)
        kind = _ProductKind(axes, jnp.dtype(wanted), short, short, jnp.dtype(self.rev_dtype))
        states: Any = (
            (self.input_scale, self.input_amax_history),
            (self.kernel_scale, self.kernel_amax_history),
            (self.output_grad_scale, self.output_grad_amax_history),
        )
        return _multiply_fp8(kind, lhs, rhs, *states)

    def accumulate(self, other: Self) -> Self:
        """Combine the gradients of two batches: the largest values of both, and the scales, which are the same.

        >>> op = axn.quantization.Fp8DotGeneralOp.init(amax_history_length=2)
        >>> op.accumulate(op).input_scale
        Array([1.], dtype=float32)
        """
        names = ("input_amax_history", "output_grad_amax_history", "kernel_amax_history")
        return dataclasses.replace(other, **{n: jnp.maximum(getattr(self, n), getattr(other, n)) for n in names})


# --- the product ---


class _ProductKind(NamedTuple):
    """A product as static data: its axes, the 8-bit dtypes of its operands and of its gradient, and the result's."""

    axes: ProductAxes
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    rev_dtype: Any
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_fp8(kind: _ProductKind, *operands_and_states: Any) -> jax.Array:
    """Multiply 8-bit floats. The gradients of the scales and histories are their values for the next step."""
    return _multiply_forward(kind, *operands_and_states)[0]


def _multiply_forward(
    kind: _ProductKind, lhs: jax.Array, rhs: jax.Array, of_lhs: Any, of_rhs: Any, of_gradient: Any
) -> tuple[jax.Array, Any]:
    new_lhs = _next_scale_and_history(kind.lhs_dtype, lhs, *of_lhs)
    new_rhs = _next_scale_and_history(kind.rhs_dtype, rhs, *of_rhs)
    y: Any = _rounded_product(kind, lhs, rhs, new_lhs[0], new_rhs[0])
    # The operands are kept, and not the 8-bit floats: a policy that saves these would turn the largest into NaN.
    return y, (lhs, rhs, new_lhs, new_rhs, of_gradient)


def _multiply_backward(kind: _ProductKind, state: Any, gradient: jax.Array) -> Any:
    """Multiply with the exact accumulation, which the precision selects; the forward product accumulates fast."""
    lhs, rhs, new_lhs, new_rhs, of_gradient = state
    new_gradient, exact = _next_scale_and_history(kind.rev_dtype, gradient, *of_gradient), jax.lax.Precision.HIGHEST
    of_lhs = _ProductKind(kind.axes.of_lhs_gradient(), lhs.dtype, kind.rev_dtype, kind.rhs_dtype, kind.rev_dtype, exact)
    of_rhs = _ProductKind(kind.axes.of_rhs_gradient(), rhs.dtype, kind.lhs_dtype, kind.rev_dtype, kind.rev_dtype, exact)
    gradient = gradient.astype(lhs.dtype)
    return (
        _rounded_product(of_lhs, gradient, rhs, new_gradient[0], new_rhs[0], lhs),
        _rounded_product(of_rhs, lhs, gradient, new_lhs[0], new_gradient[0], rhs),
        new_lhs,
        new_rhs,
        new_gradient,
    )


_multiply_fp8.defvjp(_multiply_forward, _multiply_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_product(
    kind: _ProductKind,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    like: jax.Array | None = None,
) -> jax.Array:
    """Multiply two arrays, rounded by these scales. Derivatives pass through the rounding."""
    short_lhs, lhs_factor = _rounded_fp8(lhs.dtype, kind.lhs_dtype, lhs, lhs_scale)
    short_rhs, rhs_factor = _rounded_fp8(rhs.dtype, kind.rhs_dtype, rhs, rhs_scale)
    # float16 cannot hold a product of numbers that are not scaled. In float32, a GPU writes twice the bytes.
    accumulator = kind.dtype if kind.dtype == jnp.bfloat16 else np.promote_types(kind.dtype, np.float32)
    y = multiply(kind.axes, short_lhs, short_rhs, accumulator, kind.precision, like)
    wide = np.promote_types(kind.dtype, np.float32)
    return (y.astype(wide) * (lhs_factor.astype(wide) * rhs_factor.astype(wide))).astype(kind.dtype)


def _rounded_product_backward(kind: _ProductKind, operands: Any, gradient: jax.Array) -> Any:
    """Differentiate once more, as gradient penalties do: in the dtype of the operands."""
    lhs, rhs, *scales_and_like = operands
    gradient = gradient.astype(lhs.dtype)
    of_lhs = multiply(kind.axes.of_lhs_gradient(), gradient, rhs, like=lhs)
    of_rhs = multiply(kind.axes.of_rhs_gradient(), lhs, gradient, like=rhs)
    return of_lhs, of_rhs, *jax.tree.map(jnp.zeros_like, scales_and_like)


_rounded_product.defvjp(lambda kind, *xs: (_rounded_product(kind, *xs), xs), _rounded_product_backward)


# --- rounding ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def in_qdq(
    compute_dtype: DTypeLike,
    inp: jax.Array,
    scale: jax.Array,
    amax_history: jax.Array,
    dtype: DTypeLike = _OPERAND_DTYPE,
) -> jax.Array:
    """Round an operand to 8-bit floats, with the scale that follows from its history.

    The operand's gradient is passed through unchanged. The gradients of the scale and the history are their values for
    the next step.

    Arguments:
        scale: the last scale, used while the history is empty.
        amax_history: the largest absolute values of the last steps.

    >>> axn.quantization.in_qdq(jnp.float32, jnp.array([1.0, 1000.0]), jnp.ones(1), jnp.zeros(4))
    Array([  1., 448.], dtype=float32)
    """
    return _round_and_restore(compute_dtype, dtype, inp, _new_scale(dtype, scale, amax_history))


def _with_next_state(compute_dtype: Any, x: jax.Array, scale: jax.Array, history: jax.Array, dtype: Any) -> Any:
    """Return a rounded array, and the scale and the history for the next step."""
    new = _next_scale_and_history(dtype, x, scale, history)
    return _round_and_restore(compute_dtype, dtype, x, new[0]), new


in_qdq.defvjp(_with_next_state, lambda compute_dtype, dtype, state, gradient: (gradient, *state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def out_qdq(
    compute_dtype: DTypeLike,
    out: jax.Array,
    scale: jax.Array,
    amax_history: jax.Array,
    dtype: DTypeLike = _GRADIENT_DTYPE,
) -> jax.Array:
    """Return a result unchanged, and round its gradient to 8-bit floats, with the scale that follows from its history.

    The gradients of the scale and the history are their values for the next step.

    Arguments:
        compute_dtype: the dtype that the gradient is rounded in.
        scale, amax_history, dtype: as in `in_qdq`.

    >>> f = lambda x: 1.1 * axn.quantization.out_qdq(jnp.float32, x, jnp.ones(1), jnp.zeros(4)).sum()
    >>> jax.grad(f)(jnp.ones(2))
    Array([1., 1.], dtype=float32)
    """
    return out


def _out_backward(compute_dtype: Any, dtype: Any, state: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
    scale, history = state
    rounded, new = _with_next_state(compute_dtype, gradient, scale, history, dtype)
    return rounded.astype(gradient.dtype), *new


out_qdq.defvjp(lambda compute_dtype, out, scale, history, dtype: (out, (scale, history)), _out_backward)


def _round_and_restore(compute_dtype: Any, dtype: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    short, factor = _rounded_fp8(compute_dtype, dtype, x, scale)
    # XLA for GPUs leaves out a conversion and the one back, and with them the rounding.
    return jax.lax.optimization_barrier(short).astype(compute_dtype) * factor


def _rounded_fp8(compute_dtype: Any, dtype: Any, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an array of 8-bit floats, and the factor that was divided out."""
    factor = jnp.reshape(scale, ()).astype(compute_dtype)
    factor = jnp.maximum(factor, jnp.finfo(compute_dtype).tiny)  # the scale of small gradients would be zero in float16
    largest = jnp.finfo(dtype).max.astype(compute_dtype)
    return jnp.clip(x.astype(compute_dtype) / factor, -largest, largest).astype(dtype), factor


def _next_scale_and_history(
    dtype: Any, x: jax.Array, scale: jax.Array, history: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the scale that follows from the history, and the history with this array in place of its oldest entry."""
    largest = jnp.max(jnp.abs(x), initial=0).astype(history.dtype)
    axes = tuple(varying_axes(largest) - varying_axes(history))
    if axes:  # device-varying inside `shard_map`: take the largest value of all devices
        largest = jax.lax.pmax(jax.lax.stop_gradient(largest), axes)  # JAX cannot differentiate it
    # Not by a scatter, which JAX cannot batch inside `shard_map`.
    new = jnp.concatenate([jnp.reshape(largest, 1), history[2:], history[:1]])[: history.size]
    return _new_scale(dtype, scale, history), new


def _new_scale(dtype: Any, scale: jax.Array, history: jax.Array) -> jax.Array:
    """Return the scale that maps the largest value of the history to the largest value of the dtype."""
    largest = jnp.max(history)
    usable = (largest > 0) & jnp.isfinite(largest)
    return jnp.where(usable, largest / jnp.finfo(dtype).max.astype(scale.dtype), scale)


# --- products of rounded numbers ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Call `jax.lax.dot_general` at default precision, with gradients at the highest precision.

    With 8-bit floats, the precision selects the accumulation: fast in the forward pass, exact in the backward pass. The
    argument `precision` is not used.

    >>> axn.quantization.dot_general_with_precision(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
    Array([[2.]], dtype=float32)
    """
    return jax.lax.dot_general(
        lhs, rhs, dimension_numbers, jax.lax.Precision.DEFAULT, preferred_element_type=preferred_element_type
    )


@dot_general_with_precision.defjvp
def _product_jvp(
    dimension_numbers: Any, precision: Any, preferred_element_type: Any, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs), (lhs_tangent, rhs_tangent) = primals, tangents
    exact = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=preferred_element_type,
    )
    y = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    return y, exact(lhs, rhs_tangent) + exact(lhs_tangent, rhs)
