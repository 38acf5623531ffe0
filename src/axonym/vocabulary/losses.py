"""Cross-entropy over a vocabulary that may be split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import _errors, _kernels
from ..array import NamedArray, wrap_result
from ..axis import AxisSelector, Names
from ..ops._operands import require_named, require_subset


def cross_entropy(logits: NamedArray, Vocab: AxisSelector, targets: NamedArray) -> NamedArray:
    """The cross-entropy of the softmax of logits with targets, for each example; the axis may be split.

    Logits are not gathered. Devices tell each other three numbers for each example, and for the gradient none more, or
    one where targets are probabilities. It is computed in float32 at least.

    A target that is no position along the axis gives NaN, and so does an example whose logits are all -inf.

    Arguments:
        logits: the logarithms of the probabilities, up to a constant.
        Vocab: the axis of `logits` that has the alternatives.
        targets: positions along that axis, as integers; or probabilities, which have that axis themselves.

    >>> logits = axn.named([[0.0, 0.0], [0.0, jnp.log(3.0)]], ("batch", "vocab"))
    >>> axn.exp(axn.vocabulary.cross_entropy(logits, "vocab", axn.named([0, 1], "batch")))
    NamedArray(float32[batch=2], [2. 1.3333])
    """
    return cross_entropy_and_log_normalizers(logits, Vocab, targets)[0]


def cross_entropy_and_log_normalizers(
    logits: NamedArray, Vocab: AxisSelector, targets: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """The `cross_entropy` for each example, and the logarithm of the sum of the exponentials of its logits.

    Arguments:
        logits: the logarithms of the probabilities, up to a constant.
        Vocab: the axis of `logits` that has the alternatives.
        targets: positions along that axis, as integers; or probabilities, which have that axis themselves.

    >>> logits = axn.named([0.0, 0.0, 0.0, 0.0], "vocab")
    >>> loss, log_normalizer = axn.vocabulary.cross_entropy_and_log_normalizers(logits, "vocab", axn.named(2, ()))
    >>> print(axn.exp(loss).array, axn.exp(log_normalizer).array)
    4.0 4.0
    """
    return named_cross_entropy("vocabulary.cross_entropy", logits, Vocab, targets)


def named_cross_entropy(
    what: str,
    logits: NamedArray,
    axis: AxisSelector,
    targets: NamedArray,
    *,
    others_are_free: bool = False,
    keep_dtype: bool = False,
) -> tuple[NamedArray, NamedArray]:
    """Losses and logarithms of normalizers, for every function that computes them.

    Arguments:
        what: the name of that function, for errors.
        logits: the logarithms of the probabilities, up to a constant.
        axis: the axis of the alternatives.
        targets: positions along that axis, or probabilities.
        others_are_free: whether a target that is no position costs nothing, rather than giving NaN.
        keep_dtype: whether the results have the dtype of the logits, also where they were computed in a wider one.
    """
    require_named(what, logits), require_named(what, targets)
    kernel = _cross_entropy_kernel(what, logits.names, targets.names, axis, others_are_free, keep_dtype)
    return wrap_result(kernel.call(logits.array, targets.array), kernel.names)


@_kernels.cached
def _cross_entropy_kernel(
    what: str, names: Names, target_names: Names, axis: AxisSelector, others_are_free: bool, keep_dtype: bool
) -> _kernels.Kernel:
    chosen = _kernels.select_one(what, names, axis)
    position = names.index(chosen)
    rest = tuple(n for n in names if n != chosen)
    require_subset(what, "targets", target_names, names, " Give the logits these axes with `broadcast_axis`.")

    def positional(logits, targets):
        if not jnp.issubdtype(logits.dtype, jnp.floating):
            described = _errors.describe_axes(names, logits.shape)
            raise TypeError(f"{what}: logits are floating point numbers, got {logits.dtype} {described}.")
        x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        largest, remainder = _log_normalizer(position, x)
        if chosen in target_names:
            loss = of_probabilities(x - largest, remainder, _kernels.align(targets, target_names, names))
        else:
            loss = of_positions(x, largest, remainder, targets)
        results = jax.lax.squeeze(loss, (position,)), jax.lax.squeeze(largest + remainder, (position,))
        return tuple(r.astype(logits.dtype) for r in results) if keep_dtype else results

    def of_probabilities(x, remainder, targets):
        # An alternative that is impossible and should be is as it should be.
        x = jnp.where((targets == 0) & (x == -jnp.inf), 0, x)
        return jnp.sum(targets * (remainder - x), position, keepdims=True)

    def of_positions(x, largest, remainder, targets):
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            described = _errors.describe_axes(target_names, targets.shape)
            raise TypeError(
                f"{what}: targets without axis {chosen!r} are positions along it, so they are integers, got "
                f"{targets.dtype} {described}. Probabilities have that axis."
            )
        if targets.dtype.itemsize < 4:  # which may not count far enough
            targets = targets.astype(jnp.int32)
        targets = _kernels.align(targets, target_names, names)
        # Comparing every position with the right one, rather than looking that up, needs no more memory, since it
        # becomes part of the sum; and where the axis is split, each device does it alone, in the gradient too.
        right = targets == jax.lax.broadcasted_iota(targets.dtype, x.shape, position)
        found = jnp.sum(jnp.where(right, x, 0), position, keepdims=True)
        is_position = (targets >= 0) & (targets < x.shape[position])
        return jnp.where(is_position, remainder - (found - largest), 0 if others_are_free else jnp.nan)

    return _kernels.make_kernel(what, positional, (names, target_names), (rest, rest), selection=axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_normalizer(position: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithm of the sum of exponentials along an axis, which stays with size one, in two parts.

    They are the largest logit, and the remainder. Added, that would lose digits; apart, the loss of a good prediction
    is exact however large the logits are.
    """
    largest = jnp.max(x, position, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return largest, jnp.log(jnp.sum(jnp.exp(x - largest), position, keepdims=True))


@_log_normalizer.defjvp
def _(position: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    # How the sum is cut in two does not change it, so all of its derivative is counted as that of the remainder. The
    # exponentials are those of the sum itself, so the compiler has them already.
    largest, remainder = _log_normalizer(position, x)
    change = jnp.sum(jnp.exp(x - largest) * t, position, keepdims=True) * jnp.exp(-remainder)
    return (largest, remainder), (jnp.zeros_like(largest), change)
