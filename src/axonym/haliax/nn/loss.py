"""Loss functions, with Haliax's parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ... import broadcast_axis, mean, sum as _sum, where as _where
from ...named_array import NamedArray
from ...nn import loss as _loss
from ...nn.loss import UNSPECIFIED as UNSPECIFIED, Unspecified as Unspecified
from ...typing import AxisSelection, AxisSelector, NamedOrNumeric, ReductionFunction
from .._signatures import with_parameters

cross_entropy_loss_and_log_normalizers = with_parameters(
    _loss.cross_entropy_loss_and_log_normalizers, logits="pred_y", targets="target_y"
)


def cross_entropy_loss(
    logits: NamedArray,
    Label: AxisSelector,
    targets: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    weight: NamedArray | None = None,
    reduction_axis: AxisSelection | None = None,
    **options: Any,
) -> NamedArray:
    """Compute the cross-entropy of labels as `axonym.nn.cross_entropy_loss` does, with `reduce_loss` of this module.

    >>> logits, targets = hax.zeros({"batch": 2, "label": 2}), hax.named([0, 1], "batch")
    >>> hax.nn.cross_entropy_loss(logits, "label", targets, weight=hax.named([1.0, 3.0], "batch"))
    NamedArray(float32[], 0.6931)
    """
    if weight is None:
        return _loss.cross_entropy_loss(logits, Label, targets, reduction, _mask(where), reduction_axis, **options)
    losses = _loss.cross_entropy_loss(logits, Label, targets, None, **options)
    return reduce_loss(losses, reduction, reduction_axis, where, weight)


def binary_cross_entropy_loss(
    logits: NamedArray,
    targets: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    weight: NamedArray | None = None,
    reduction_axis: AxisSelection | None = None,
) -> NamedArray:
    """Compute the cross-entropy of two classes as `axonym.nn.binary_cross_entropy_loss` does, with weights.

    >>> logits, targets = hax.zeros({"batch": 2}), hax.named([0.0, 1.0], "batch")
    >>> hax.nn.binary_cross_entropy_loss(logits, targets, hax.sum, weight=hax.named([1.0, 3.0], "batch"))
    NamedArray(float32[], 2.7726)
    """
    return reduce_loss(_loss.binary_cross_entropy_loss(logits, targets, None), reduction, reduction_axis, where, weight)


def reduce_loss(
    arr: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    reduction_axis: AxisSelection | None = None,
    where: NamedOrNumeric | None = None,
    weight: NamedArray | None = None,
) -> NamedArray:
    """Reduce losses as `axonym.nn.reduce_loss` does, each multiplied by its weight.

    A mean is divided by the sum of the weights, and is zero if that is zero. Weights are zero where `where` is False.

    >>> hax.nn.reduce_loss(hax.named([1.0, 5.0], "x"), weight=hax.named([3.0, 1.0], "x"))
    NamedArray(float32[], 2.)
    """
    if weight is None:
        return _loss.reduce_loss(arr, reduction, _mask(where), reduction_axis)
    weight = broadcast_axis(weight if where is None else weight * where, arr.axes).astype(arr.dtype)
    if reduction is None or reduction_axis == ():
        return arr * weight
    if isinstance(reduction, Unspecified) or reduction in (mean, jnp.mean):
        total = _sum(weight, reduction_axis)
        return _sum(arr * weight, reduction_axis) / _where(total == 0, 1, total)
    return reduction(arr * weight, axis=reduction_axis)


def _mask(where: NamedOrNumeric | None) -> NamedOrNumeric | None:
    """Return a mask of numbers as one of booleans, which newer versions of JAX require."""
    return where != 0 if isinstance(where, NamedArray) and where.dtype != bool else where


maybe_reduce_loss = reduce_loss
