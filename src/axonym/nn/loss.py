"""Loss functions, and the reduction that they share.

A loss function takes a reduction (`axonym.mean` by default), the axes to reduce (all by default), and a mask of the
losses to include. With `reduction=None`, losses are not reduced, and losses that are masked out are zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..axis import AxisSelection, AxisSelector, Names, name_of
from ..core import errors
from ..named_array import NamedArray, NamedOrNumeric, describe_array
from ..ops import _kernels
from ..ops._operands import (
    as_float,
    at_least_float32,
    at_least_int32,
    dtype_key,
    require_named,
    require_positions,
    require_subset,
)
from ..ops.elementwise import logical_and, not_equal
from ..ops.reductions import mean
from ..ops.selection import where as choose
from ..typing.arguments import ReductionFunction
from .activations import log_sigmoid

__all__ = [
    "UNSPECIFIED",
    "Unspecified",
    "binary_cross_entropy_loss",
    "cross_entropy_loss",
    "cross_entropy_loss_and_log_normalizers",
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

_WAY_OUT = " Say `ignore_index=...` for the target of examples without a label, or give `out_of_range` a loss for them."


@errors.say_how_to_call
def cross_entropy_loss(
    logits: NamedArray,
    Label: AxisSelector,
    targets: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    reduction_axis: AxisSelection | None = None,
    *,
    ignore_index: int | None = None,
    out_of_range: float | None = None,
    dtype: DTypeLike | None = None,
) -> NamedArray:
    """Compute the cross-entropy of labels: minus the logarithm of the probability that the logits give them.

    The axis of the labels can be sharded: each device then computes with its own shard, and three numbers for each
    example are communicated. The gradient communicates nothing more, or one number if targets are probabilities. The
    loss is computed in float32 at least. An example whose logits are all -inf gives NaN.

    Outside jit, where targets are checked, a target that is not a position along `Label` is an error, unless it is
    `ignore_index` or `out_of_range` is given. In jit its loss is `out_of_range`, by default zero.

    Arguments:
        logits: a named array with the axis `Label`.
        Label: the axis of the labels.
        targets: the right labels, integers. Or the probability of each label, with the axis `Label`.
        reduction: the function that reduces the losses; `axonym.mean` by default, None for no reduction.
        where: the losses to include, by name.
        reduction_axis: the axes to reduce; all by default.
        ignore_index: the target of examples without a label, such as -100: the reduction leaves them out, as `where`
            does.
        out_of_range: the loss of any other target that is no position along `Label`; NaN makes such a target show.
        dtype: the dtype of the losses; by default the dtype of the logits.

    >>> logits = axn.named([[0., 0.], [0., 1.]], ("batch", "label"))
    >>> axn.nn.cross_entropy_loss(logits, "label", axn.named([0, 1], "batch"), reduction=None)
    NamedArray(float32[batch=2], [0.6931 0.3133])
    >>> axn.nn.cross_entropy_loss(logits, "label", axn.named([0, -100], "batch"), ignore_index=-100)
    NamedArray(float32[], 0.6931)
    """
    loss, _ = _cross_entropy("cross_entropy_loss", logits, Label, targets, ignore_index, out_of_range, dtype)
    if ignore_index is not None:
        labelled = _labelled_examples(targets, ignore_index)
        where = labelled if where is None else logical_and(where, labelled)
    return reduce_loss(loss, reduction, where, reduction_axis)


def cross_entropy_loss_and_log_normalizers(
    logits: NamedArray,
    Label: AxisSelector,
    targets: NamedArray,
    *,
    ignore_index: int | None = None,
    out_of_range: float | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Compute the losses of `cross_entropy_loss` without reduction, and the logsumexp of the logits.

    The arguments are as for `cross_entropy_loss`. The loss of a target that is `ignore_index` is zero.

    >>> logits = axn.named([[0., 0.], [0., 9.]], ("batch", "label"))
    >>> axn.nn.cross_entropy_loss_and_log_normalizers(logits, "label", axn.named([0, 0], "batch"))
    (NamedArray(float32[batch=2], [0.6931 9.0001]), NamedArray(float32[batch=2], [0.6931 9.0001]))
    """
    what = "cross_entropy_loss_and_log_normalizers"
    loss, normalizers = _cross_entropy(what, logits, Label, targets, ignore_index, out_of_range, dtype)
    if ignore_index is not None:
        loss = choose(_labelled_examples(targets, ignore_index), loss, 0)
    return loss, normalizers


def _labelled_examples(targets: NamedArray, ignore_index: int) -> NamedArray:
    """Return which examples have a label."""
    return not_equal(at_least_int32(targets), ignore_index)  # a small dtype would wrap a number that it cannot hold


def _cross_entropy(
    what: str,
    logits: NamedArray,
    axis: AxisSelector,
    targets: NamedArray,
    ignore_index: int | None,
    out_of_range: float | None,
    dtype: Any,
) -> tuple[NamedArray, NamedArray]:
    require_named(what, logits), require_named(what, targets)
    axis = _kernels.one_selector(what, axis)
    name = name_of(axis)
    if ignore_index is not None and name in targets.names:
        raise ValueError(
            f"{what}: `ignore_index` is for targets that are positions along {name!r}, and these are probabilities, "
            f"{describe_array(targets)}. Leave examples out with `where`."
        )
    if name in logits.names and not set(targets.names) <= set(logits.names):
        require_subset(what, "targets", targets.names, logits.names, _how_to_match(targets, logits, name))
    checked, out_of_range = out_of_range is None, out_of_range or 0.0
    # NaN is not equal to itself, so a cache would not find it again: it is replaced by None.
    other = None if out_of_range != out_of_range else float(out_of_range)
    kernel = _cross_entropy_kernel(what, logits.names, targets.names, axis, other, dtype_key(dtype))
    result = kernel.apply(logits.array, targets.array)
    if checked and name in logits.names and name not in targets.names:
        require_positions(what, "a target", targets, logits.resolve_axis(name), ignore_index, _WAY_OUT)
    return result


@errors.say_how_to_call
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
        reduction, where, reduction_axis: as in `cross_entropy_loss`.

    >>> axn.nn.binary_cross_entropy_loss(axn.named([0., 9.], "x"), axn.named([True, False], "x"), reduction=None)
    NamedArray(float32[x=2], [0.6931 9.0001])
    """
    if not hasattr(logits, "dtype"):
        require_named("binary_cross_entropy_loss", logits, "logits")
    logits = as_float(logits)  # unsigned integers have no negatives
    if isinstance(targets, NamedArray) and not jnp.issubdtype(targets.dtype, jnp.floating):
        targets = targets.astype(logits.dtype)  # strict promotion refuses the product
    loss = -(targets * log_sigmoid(logits)) - (1 - targets) * log_sigmoid(-logits)
    return reduce_loss(loss, reduction, where, reduction_axis)


def reduce_loss(
    array: NamedArray,
    reduction: ReductionFunction | Unspecified | None = UNSPECIFIED,
    where: NamedOrNumeric | None = None,
    reduction_axis: AxisSelection | None = None,
) -> NamedArray:
    """Reduce losses, as the loss functions do.

    Arguments:
        reduction: the function that reduces the losses; `axonym.mean` by default, None for no reduction.
        where: the losses to include, by name.
        reduction_axis: the axes to reduce; all by default. `()` is the same as no reduction.

    >>> losses = axn.named([1., 2., 6.], "x")
    >>> axn.nn.reduce_loss(losses), axn.nn.reduce_loss(losses, axn.sum, where=losses < 5)
    (NamedArray(float32[], 3.), NamedArray(float32[], 3.))
    """
    if reduction is None or reduction_axis == ():
        return array if where is None else choose(where, array, 0)
    if not (isinstance(reduction, Unspecified) or callable(reduction)):
        raise TypeError(
            "reduce_loss: `reduction` must be a function such as `axonym.sum`, or None for no reduction; got "
            f"{reduction!r}."
        )
    chosen: Any = mean if isinstance(reduction, Unspecified) else reduction
    return chosen(array, reduction_axis, where=where)


# --- cross-entropy ---


def _how_to_match(targets: NamedArray, logits: NamedArray, label: str) -> str:
    """Return advice for targets with axes that the logits lack."""
    extra = {n: size for n, size in targets.shape.items() if n not in logits.names}
    left = {n: size for n, size in logits.shape.items() if n not in (label, *targets.names)}
    if list(extra.values()) == list(left.values()):
        return f" If they match axes of the logits, pass `targets.rename({dict(zip(extra, left, strict=True))})`."
    if set(extra.values()) <= set(left.values()):
        return f" If they are among {errors.describe_shape(left)} of the logits, rename them, with `targets.rename`."
    axes = [f"targets.resolve_axis({n!r})" for n in extra]
    each = axes[0] if len(axes) == 1 else f"({', '.join(axes)})"
    return f" If the logits are the same along them, pass `axonym.broadcast_axis(logits, {each})`."


@_kernels.shared("names", "target_names", "axis")
def _cross_entropy_kernel(
    what: str,
    names: Names,
    target_names: Names,
    axis: AxisSelector,
    out_of_range: float | None,
    dtype: Any,
) -> _kernels.Kernel:
    chosen = _kernels.select_one(what, names, axis)
    position = names.index(chosen)
    rest = tuple(n for n in names if n != chosen)

    def positional(logits, targets):
        if not jnp.issubdtype(logits.dtype, jnp.floating):
            described = errors.describe_axes(names, logits.shape)
            raise TypeError(f"{what}: logits are floating point numbers, got {logits.dtype} {described}.")
        x = at_least_float32(logits)
        largest, remainder = _log_normalizer(position, x)
        if chosen in target_names:
            targets = _kernels.align(targets, target_names, names)
            # A label with logit -inf and probability zero adds nothing to the loss.
            relative = x - largest
            relative = jnp.where((targets == 0) & (relative == -jnp.inf), 0, relative)
            loss = jnp.sum(targets * (remainder - relative), position, keepdims=True)
        else:
            loss = of_positions(x, largest, remainder, targets)
        results = jax.lax.squeeze(loss, (position,)), jax.lax.squeeze(largest + remainder, (position,))
        return tuple(r.astype(logits.dtype if dtype is None else dtype) for r in results)

    def of_positions(x, largest, remainder, targets):
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            described = errors.describe_axes(target_names, targets.shape)
            raise TypeError(
                f"{what}: targets without axis {chosen!r} are positions along it, so they are integers, got "
                f"{targets.dtype} {described}. Probabilities have that axis."
            )
        targets = _kernels.align(at_least_int32(targets), target_names, names)
        # Comparing every position with the label, rather than a look-up, needs no more memory, since it becomes part
        # of the sum; and where the axis is sharded, devices need not communicate, in the gradient either.
        own = jax.lax.broadcasted_iota(targets.dtype, x.shape, position)
        found = jnp.sum(jnp.where(targets == own, x, 0), position, keepdims=True)
        is_position = (targets >= 0) & (targets < x.shape[position])
        return jnp.where(is_position, remainder - (found - largest), jnp.nan if out_of_range is None else out_of_range)

    return _kernels.make_kernel(what, positional, (names, target_names), (rest, rest), selection=axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_normalizer(position: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the logarithm of the sum of exponentials along an axis, which keeps size one, as two terms.

    These are the largest logit and the remainder. Their sum would lose digits; with both, the loss of a good prediction
    is exact however large the logits are.
    """
    largest = jnp.max(x, position, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return largest, jnp.log(jnp.sum(jnp.exp(x - largest), position, keepdims=True))


@_log_normalizer.defjvp
def _(position: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    # The sum is the same for any first term, so only the remainder is differentiated. The sum itself has the
    # same exponentials, so the compiler has them already.
    largest, remainder = _log_normalizer(position, x)
    change = jnp.sum(jnp.exp(x - largest) * t, position, keepdims=True) * jnp.exp(-remainder)
    return (largest, remainder), (jnp.zeros_like(largest), change)
