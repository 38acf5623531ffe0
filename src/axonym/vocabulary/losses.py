"""Cross-entropy over a vocabulary that may be split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import _kernels
from .._mesh import Names
from ..array import NamedArray, resolve, wrap_result
from ..axis import AxisSelector
from ..ops._operands import one_axis, require_named, require_subset


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
    what = "vocabulary.cross_entropy"
    require_named(what, logits)
    require_named(what, targets)
    axis = one_axis(what, "Vocab", resolve(logits.names, jnp.shape(logits.array), Vocab, what))
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{what}: logits are floating point numbers, got {logits}.")
    positions = axis.name not in targets.names
    if positions and not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"{what}: targets without axis {axis.name!r} are positions along it, so they are integers, got {targets}. "
            "Probabilities have that axis."
        )
    require_subset(what, "targets", targets.names, logits.names)
    kernel = _cross_entropy_kernel(what, logits.names, axis.name, targets.names)
    return wrap_result(kernel.call(logits.array, targets.array), kernel.names)


@_kernels.cached
def _cross_entropy_kernel(what: str, names: Names, axis: str, target_names: Names) -> _kernels.Kernel:
    position = names.index(axis)
    rest = tuple(n for n in names if n != axis)

    def positional(logits, targets):
        x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        normalizer = _log_normalizer(position, x)
        targets = _kernels.align(targets, target_names, names)
        if axis in target_names:
            # An alternative that is impossible and should be is as it should be.
            x = jnp.where((targets == 0) & (x == -jnp.inf), 0, x)
            loss = jnp.sum(targets * (normalizer - x), position)
        else:
            if targets.dtype.itemsize < 4:  # which may not count far enough
                targets = targets.astype(jnp.int32)
            places = jax.lax.broadcasted_iota(targets.dtype, x.shape, position)
            # One of the terms is the logit of the target. To look it up would be to gather.
            loss = jnp.squeeze(normalizer, position) - jnp.sum(jnp.where(places == targets, x, 0), position)
            is_position = (targets >= 0) & (targets < x.shape[position])
            loss = jnp.where(jnp.squeeze(is_position, position), loss, jnp.nan)
        return loss, jnp.squeeze(normalizer, position)

    return _kernels.make_kernel(what, positional, (names, target_names), (rest, rest))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_normalizer(position: int, x: jax.Array) -> jax.Array:
    """The logarithm of the sum of exponentials along an axis, which stays, with size one."""
    highest = jnp.max(x, position, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    return jnp.log(jnp.sum(jnp.exp(x - highest), position, keepdims=True)) + highest


@_log_normalizer.defjvp
def _(position: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    # From the result, the softmax takes no further reduction, nor anything kept but the logits themselves.
    normalizer = _log_normalizer(position, x)
    return normalizer, jnp.sum(jnp.exp(x - normalizer) * t, position, keepdims=True)
