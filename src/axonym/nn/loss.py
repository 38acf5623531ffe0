"""Loss functions, and the reduction that they share.

A loss function takes a reduction (`axonym.mean` by default), the axes to reduce (all by default), and a mask of the
losses to include. With `reduction=None`, losses are not reduced, and those that are masked out are zero.
"""

from __future__ import annotations

from typing import Any

from ..array import NamedArray, NamedOrNumeric
from ..axis import AxisSelection, AxisSelector
from ..ops.reductions import mean
from ..ops.selection import where as choose
from ..typing.arguments import ReductionFunction
from ..vocabulary.losses import named_cross_entropy
from .activations import log_sigmoid

__all__ = [
    "UNSPECIFIED",
    "Unspecified",
    "binary_cross_entropy_loss",
    "cross_entropy_loss",
    "cross_entropy_loss_and_log_normalizers",
    "maybe_reduce_loss",
    "reduce_loss",
]


class Unspecified:
    """The type of `UNSPECIFIED`, the default of `reduction`; None means no reduction.

    >>> axn.nn.loss.UNSPECIFIED
    UNSPECIFIED
    """

    def __repr__(self) -> str:
        return "UNSPECIFIED"


UNSPECIFIED = Unspecified()


def cross_entropy_loss(
    logits: NamedArray,
    Label: AxisSelector,
    targets: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    reduction_axis: AxisSelection | None = None,
) -> NamedArray:
    """Compute the cross-entropy of labels: minus the logarithm of the probability that the logits give them.

    The axis of the labels can be sharded: each device then computes with its own shard, and only sums are communicated.
    The loss is computed in float32 at least; the result has the dtype of the logits.

    Arguments:
        logits: a named array with the axis `Label`.
        Label: the axis of the labels.
        targets: the right labels, integers; labels that are out of range have a loss of zero. Or the probability of
            each label, with the axis `Label`.
        reduction: the function that reduces the losses; `axonym.mean` by default, None for no reduction.
        where: the losses to include, by name.
        reduction_axis: the axes to reduce; all by default.

    >>> logits = axn.named([[0., 0.], [0., 1.]], ("batch", "label"))
    >>> axn.nn.cross_entropy_loss(logits, "label", axn.named([0, 1], "batch"), reduction=None)
    NamedArray(float32[batch=2], [0.6931 0.3133])
    """
    loss, _ = named_cross_entropy("cross_entropy_loss", logits, Label, targets, others_are_free=True, keep_dtype=True)
    return reduce_loss(loss, reduction, reduction_axis, where)


def cross_entropy_loss_and_log_normalizers(
    pred_y: NamedArray, Label: AxisSelector, target_y: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """Compute the losses of `cross_entropy_loss` without reduction, and the logsumexp of the logits.

    Arguments:
        pred_y: the logits, a named array with the axis `Label`.
        Label: the axis of the labels.
        target_y: the right labels, or the probability of each label, with the axis `Label`.

    >>> logits = axn.named([[0., 0.], [0., 9.]], ("batch", "label"))
    >>> axn.nn.cross_entropy_loss_and_log_normalizers(logits, "label", axn.named([0, 0], "batch"))
    (NamedArray(float32[batch=2], [0.6931 9.0001]), NamedArray(float32[batch=2], [0.6931 9.0001]))
    """
    what = "cross_entropy_loss_and_log_normalizers"
    return named_cross_entropy(what, pred_y, Label, target_y, others_are_free=True, keep_dtype=True)


def binary_cross_entropy_loss(
    logits: NamedArray,
    targets: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    reduction_axis: AxisSelection | None = None,
) -> NamedArray:
    """Compute the cross-entropy of two classes: minus the logarithm of the probability of the right one.

    Arguments:
        logits: a named array; its sigmoid is the probability of the positive class.
        targets: one or true for the positive class, zero or false for the other, or the probability of the positive
            class.
        reduction: the function that reduces the losses; `axonym.mean` by default, None for no reduction.
        where: the losses to include, by name.
        reduction_axis: the axes to reduce; all by default.

    >>> axn.nn.binary_cross_entropy_loss(axn.named([0., 9.], "x"), axn.named([True, False], "x"), reduction=None)
    NamedArray(float32[x=2], [0.6931 9.0001])
    """
    loss = -(targets * log_sigmoid(logits)) - (1 - targets) * log_sigmoid(-logits)
    return reduce_loss(loss, reduction, reduction_axis, where)


def reduce_loss(
    arr: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    reduction_axis: AxisSelection | None = None,
    where: NamedOrNumeric | None = None,
) -> NamedArray:
    """Reduce losses, as the loss functions do.

    Arguments:
        arr: the losses.
        reduction: the function that reduces the losses; `axonym.mean` by default, None for no reduction.
        reduction_axis: the axes to reduce; all by default. `()` is the same as no reduction.
        where: the losses to include, by name.

    >>> losses = axn.named([1., 2., 6.], "x")
    >>> axn.nn.reduce_loss(losses), axn.nn.reduce_loss(losses, axn.sum, where=losses < 5)
    (NamedArray(float32[], 3.), NamedArray(float32[], 3.))
    """
    if reduction is None or reduction_axis == ():
        return arr if where is None else choose(where, arr, 0)
    if not (isinstance(reduction, Unspecified) or callable(reduction)):
        raise TypeError(
            "reduce_loss: `reduction` must be a function such as `axonym.sum`, or None for no reduction; got "
            f"{reduction!r}."
        )
    chosen: Any = mean if isinstance(reduction, Unspecified) else reduction
    return chosen(arr, reduction_axis, where=where)


def maybe_reduce_loss(
    arr: NamedArray,
    reduction: ReductionFunction | Unspecified | None,
    reduction_axis: AxisSelection | None,
    where: NamedOrNumeric | None,
) -> NamedArray:
    """`reduce_loss` under the name that older code knows.

    Arguments:
        arr: the losses.
        reduction: what reduces them, or None.
        reduction_axis: the axes to reduce, or None for all.
        where: which losses count, or None for all.

    >>> axn.nn.loss.maybe_reduce_loss(axn.named([1., 3.], "x"), axn.mean, None, None)
    NamedArray(float32[], 2.)
    """
    return reduce_loss(arr, reduction, reduction_axis, where)
