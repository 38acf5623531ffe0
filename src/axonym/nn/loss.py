"""Losses, and how they are reduced.

A loss takes a reduction, `axonym.mean` where none is given, the axes to reduce, all where none are given, and a mask of
what counts. With `reduction=None` it stays as it is, and what is masked out is zero.
"""

from __future__ import annotations

from typing import Any

from ..array import NamedArray, NamedOrNumeric
from ..axis import AxisSelection, AxisSelector
from ..ops.reductions import ReductionFunction, mean
from ..ops.selection import where as choose
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
    """The type of `UNSPECIFIED`, which stands for a reduction that was not given; None is one that was.

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
    """How badly logits predict labels: minus the logarithm of the probability that they give them.

    The labels can be split over a mesh: each device then looks at its own, and only sums are exchanged. It is computed
    in float32 at least; the result has the dtype of the logits.

    Arguments:
        logits: a named array with the axis `Label`.
        Label: the axis of the labels.
        targets: the right labels, integers; one that is not in `Label` counts as a loss of zero. Or, with the axis
            `Label`, the probability of each.
        reduction: what reduces the losses; `axonym.mean` by default, and None leaves them.
        where: which losses count, by name.
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
    """The losses of `cross_entropy_loss`, not reduced, and the logarithms of what normalises the probabilities.

    Arguments:
        pred_y: the logits, a named array with the axis `Label`.
        Label: the axis of the labels.
        target_y: the right labels, or with the axis `Label`, the probability of each.

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
    """How badly logits predict yes or no: minus the logarithm of the probability that they give to what is right.

    Arguments:
        logits: a named array; the probability of yes is its sigmoid.
        targets: one or true for yes, zero or false for no, or the probability of yes.
        reduction: what reduces the losses; `axonym.mean` by default, and None leaves them.
        where: which losses count, by name.
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
    """Losses reduced, as the losses here do it.

    Arguments:
        arr: the losses.
        reduction: what reduces them; `axonym.mean` by default, and None leaves them.
        reduction_axis: the axes to reduce; all by default. With none, losses stay as with no reduction.
        where: which losses count, by name.

    >>> losses = axn.named([1., 2., 6.], "x")
    >>> axn.nn.reduce_loss(losses), axn.nn.reduce_loss(losses, axn.sum, where=losses < 5)
    (NamedArray(float32[], 3.), NamedArray(float32[], 3.))
    """
    if reduction is None or reduction_axis == ():
        return arr if where is None else choose(where, arr, 0)
    if not (isinstance(reduction, Unspecified) or callable(reduction)):
        raise TypeError(
            "reduce_loss: `reduction` is a function such as `axonym.sum`, or None to leave the losses; got "
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
