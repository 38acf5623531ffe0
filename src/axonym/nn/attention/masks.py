"""Attention masks, the keys that each query can attend to, and biases, numbers that are added to the scores.

A mask is a boolean named array, true where attention is allowed, with any of the axes of the scores: the axes of
queries and keys, and batch axes. Masks are combined by name. `None` is no mask.

A mask array takes as much memory as the scores of one head. `Causal` describes a causal mask without an array. Fused
kernels take this form, and skip the keys that a query cannot attend to.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...axis import Axis, AxisSelector, Names, name_of
from ...distribution.active_settings import active_mapping
from ...distribution.mesh_axes import current_mesh, entries_by_name, fits, mapped_axes
from ...named_array import NamedArray, NamedOrNumeric, describe_array, named
from ...ops import _kernels
from ...ops._new_array import sharded_kernel
from ...ops._operands import distinct, one_axis, operand
from ...ops.broadcasting import broadcast_arrays
from ...ops.contraction import dot
from ...ops.creation import arange
from ...ops.elementwise import equal, logical_and, logical_or, not_equal
from ...ops.selection import where
from ...random import bernoulli, uniform
from ...sharding.mapping import axis_mapping

# --- by position ---


def causal_mask(QPos: Axis, KPos: Axis, q_start: NamedOrNumeric = 0, k_start: NamedOrNumeric = 0) -> NamedArray:
    """Make a mask with which each query attends to the keys at its own position and before.

    Arguments:
        q_start: the position of the first query: a number, or a named array with one for each example of a batch.
        k_start: the position of the first key, likewise.

    >>> axn.nn.attention.causal_mask(axn.Axis("pos", 2), axn.Axis("key_pos", 3), q_start=1)
    NamedArray(bool[pos=2, key_pos=3], [[ True True False] [ True True True]])
    """
    return _by_position("causal_mask", jnp.greater_equal, QPos, KPos, q_start, k_start)


def sliding_window_mask(
    QPos: Axis, KPos: Axis, window: NamedOrNumeric, q_start: NamedOrNumeric = 0, k_start: NamedOrNumeric = 0
) -> NamedArray:
    """Make a `causal_mask` with which each query attends to its own and the `window - 1` positions before.

    Arguments:
        window: the largest number of keys that a query attends to; like a start, one for all examples or for each.

    >>> axn.nn.attention.sliding_window_mask(axn.Axis("pos", 3), axn.Axis("key_pos", 3), 2)
    NamedArray(bool[pos=3, key_pos=3], [[ True False False] [ True True False] [False True True]])
    """
    return _by_position("sliding_window_mask", _is_in_window, QPos, KPos, q_start, k_start, window)


def prefix_lm_mask(
    QSeqLen: Axis, KSeqLen: Axis, prefix_len: NamedOrNumeric, q_start: NamedOrNumeric = 0, k_start: NamedOrNumeric = 0
) -> NamedArray:
    """Make a `causal_mask` with a prefix that every query attends to.

    Arguments:
        prefix_len: the length of the prefix, from position 0; like a start, one for all examples or for each.

    >>> axn.nn.attention.prefix_lm_mask(axn.Axis("pos", 3), axn.Axis("key_pos", 3), 2)
    NamedArray(bool[pos=3, key_pos=3], [[ True True False] [ True True False] [ True True True]])
    """
    return _by_position("prefix_lm_mask", _with_prefix, QSeqLen, KSeqLen, q_start, k_start, prefix_len)


def _is_in_window(q: jax.Array, k: jax.Array, window: jax.Array) -> jax.Array:
    return (k <= q) & (k > q - window)


def _with_prefix(q: jax.Array, k: jax.Array, prefix_len: jax.Array) -> jax.Array:
    return (k <= q) | (k < prefix_len)


def _by_position(what: str, rule: Callable[..., jax.Array], QPos: Axis, KPos: Axis, *numbers: Any) -> NamedArray:
    """Make a mask from a rule on the positions of query and key; the first two numbers are their starts.

    It is sharded by the active mapping. Attention along a sequence, where the positions of queries and keys go to the
    same mesh axes, needs more of the mask than a shard on each device, so there they are replicated.
    """
    operands = [operand(x) for x in numbers]
    axes = one_axis(what, "QPos", QPos), one_axis(what, "KPos", KPos)
    along_sequence = active_mapping() and not {*mapped_axes(axes[0].name)}.isdisjoint(mapped_axes(axes[1].name))
    placed = _replicated_along(axes if along_sequence else ())
    if any(names for _, names in operands):
        batch = {n: size for x, names in operands for n, size in zip(names, jnp.shape(x), strict=False)}
        axes = *map(Axis, batch, batch.values()), *axes
    kernel = _position_kernel(what, rule, axes, tuple(names for _, names in operands))
    with placed:
        return kernel.apply(*(x for x, _ in operands))


def _replicated_along(axes: Sequence[Axis]) -> contextlib.AbstractContextManager[Any]:
    """Replicate new arrays along some axes, if there are any, in a with-block."""
    return axis_mapping(dict.fromkeys(axes), merge=True) if axes else contextlib.nullcontext()


@_kernels.shared("axes", "in_names")
def _position_kernel(
    what: str, rule: Callable[..., jax.Array], axes: tuple[Axis, ...], in_names: tuple[Names, ...]
) -> _kernels.Kernel:
    names = distinct(what, tuple(a.name for a in axes))

    def positional(*numbers):
        _kernels.check_operands(what, in_names, numbers)
        q_start, k_start, *further = (
            _kernels.align(x, own, names) if own else x for x, own in zip(numbers, in_names, strict=True)
        )
        q, k = (_kernels.align(jnp.arange(a.size), (a.name,), names) for a in axes[-2:])
        return rule(q + q_start, k + k_start, *further)

    return sharded_kernel(what, positional, in_names, axes)


class Causal(eqx.Module):
    """A causal mask without an array, for `dot_product_attention`.

    Both queries and keys start at position 0. For other positions, as in decoding, use an array: `causal_mask`, or the
    mask of a `KVCache`.

    Arguments:
        window: the largest number of keys that a query attends to, including its own position; all by default.
        also: a further mask, true where attention is allowed.
        segments: the number of the segment that each position is in, if sequences are packed: queries attend only to
            keys of their own segment. Integers with the axis `QPos`, and maybe batch axes.

    >>> mask = axn.nn.attention.Causal("pos", window=2)
    >>> mask.written_out(axn.Axis("pos", 3), axn.Axis("key_pos", 3))
    NamedArray(bool[pos=3, key_pos=3], [[ True False False] [ True True False] [False True True]])
    """

    QPos: str = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    also: NamedArray | None
    segments: NamedArray | None

    def __init__(
        self,
        QPos: AxisSelector,
        window: int | None = None,
        also: NamedArray | None = None,
        segments: NamedArray | None = None,
    ):
        if window is not None and window < 1:
            raise ValueError(f"Causal: the window must be at least 1, got {window}.")
        self.QPos = name_of(QPos)
        if segments is not None and not (segments.has_axis(self.QPos) and jnp.issubdtype(segments.dtype, jnp.integer)):
            raise ValueError(f"Causal: segments must be integers with the axis {self.QPos!r}, got {segments}.")
        self.window = window
        self.also = also
        self.segments = segments

    def written_out(self, QPos: Axis, KPos: Axis) -> NamedArray:
        """Return the mask as an array.

        >>> axn.nn.attention.Causal("pos").written_out(axn.Axis("pos", 2), axn.Axis("key_pos", 2))
        NamedArray(bool[pos=2, key_pos=2], [[ True False] [ True True]])
        """
        # Queries of any number can attend, such as a single new one, also if it does not fit the mesh.
        mesh = current_mesh() if active_mapping() else None
        uneven = [a for a in (QPos, KPos) if mesh is not None and not fits(entries_by_name([a.name]), [a.size], mesh)]
        with _replicated_along(uneven):
            mask = causal_mask(QPos, KPos) if self.window is None else sliding_window_mask(QPos, KPos, self.window)
        further = self.further(KPos.name)
        return mask if further is None else _combined_masks(logical_and, mask, further)

    def further(self, KPos: AxisSelector) -> NamedArray | None:
        """Return the mask of `also` and `segments`, without the causal part, as an array.

        >>> segments = axn.named([0, 0, 1], "pos")
        >>> axn.nn.attention.Causal("pos", segments=segments).further("key_pos")
        NamedArray(bool[pos=3, key_pos=3], [[ True True False] [ True True False] [False False True]])
        """
        if self.segments is None:
            return self.also
        of_keys = self.segments.rename({self.QPos: name_of(KPos)})
        same = equal(*broadcast_arrays(of_keys, self.segments, require_subset=False))
        return same if self.also is None else _combined_masks(logical_and, same, self.also)


Mask: TypeAlias = NamedArray | Causal | None
"""A mask of any form."""


def as_truth_values(what: str, mask: Mask) -> Mask:
    """Convert a mask of integers to booleans, and raise an error for other numbers."""
    if isinstance(mask, Causal):
        also: Any = as_truth_values(what, mask.also)
        return mask if also is mask.also else Causal(mask.QPos, mask.window, also, mask.segments)
    if mask is None:
        return None
    if not isinstance(mask, NamedArray):
        way_out = "Name its axes with axonym.named(mask, ('pos', 'key_pos'))."
        if np.ndim(mask) == 0:
            way_out = "Causal attention is `mask=axonym.nn.attention.Causal('pos')`."
        raise TypeError(f"{what}: `mask` is a NamedArray, a Causal or None, got {type(mask).__name__}. {way_out}")
    if mask.dtype == jnp.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.integer):
        return not_equal(mask, 0)
    raise TypeError(
        f"{what}: a mask must be boolean, true where attention is allowed, got {describe_array(mask)}. To add numbers "
        "to scores, pass `bias`."
    )


# --- random masks ---


def forgetful_causal_mask(KPos: Axis, mask_prob: float, sample_prob: bool = True, *, key: jax.Array) -> NamedArray:
    """Make a mask that hides random keys, the same for every query, but never the first key.

    Use this mask in training, instead of dropout of attention weights, and combine it with a causal mask (Forgetful
    Causal Masking, arXiv:2210.13432).

    Arguments:
        mask_prob: the probability that a key is hidden.
        sample_prob: whether to draw that probability itself, uniformly from 0 to `mask_prob`.

    >>> mask = axn.nn.attention.forgetful_causal_mask(axn.Axis("key_pos", 8), 0.5, key=jax.random.key(0))
    >>> mask.shape, mask["key_pos", 0].item()
    ({'key_pos': 8}, True)
    """
    probability: Any = mask_prob
    if sample_prob:
        key, of_probability = jax.random.split(key)
        probability = uniform(of_probability, (), maxval=mask_prob)
    return logical_or(bernoulli(key, KPos, 1.0 - probability), arange(KPos) == 0)


# --- combining ---


def combine_masks_and(mask1: Mask, mask2: Mask) -> Any:
    """Combine two masks into one that allows what both allow, with the axes of both. If one is None, return the other.

    >>> from axonym.nn.attention import causal_mask, combine_masks_and
    >>> padding = axn.named([[True, True], [False, True]], ("batch", "key_pos"))
    >>> combine_masks_and(causal_mask(*axn.make_axes(pos=2, key_pos=2)), padding).shape
    {'batch': 2, 'pos': 2, 'key_pos': 2}
    """
    if mask1 is None or mask2 is None:
        return mask2 if mask1 is None else mask1
    # A Causal mask stays one, so that fused kernels still take it, and skip keys.
    if not isinstance(mask1, Causal):
        if not isinstance(mask2, Causal):
            return _combined_masks(logical_and, mask1, mask2)
        return Causal(mask2.QPos, mask2.window, combine_masks_and(mask1, mask2.also), mask2.segments)
    if not isinstance(mask2, Causal):
        return Causal(mask1.QPos, mask1.window, combine_masks_and(mask1.also, mask2), mask1.segments)
    if mask1.QPos != mask2.QPos:
        raise ValueError(
            f"combine_masks_and: one mask is causal in {mask1.QPos!r}, the other in {mask2.QPos!r}. Convert one of "
            "them to an array first, with `written_out`."
        )
    if mask1.segments is not None and mask2.segments is not None:
        raise ValueError(
            "combine_masks_and: both masks have segments. Convert one of them to an array first, with `written_out`."
        )
    windows = [m.window for m in (mask1, mask2) if m.window is not None]
    segments = mask2.segments if mask1.segments is None else mask1.segments
    return Causal(mask1.QPos, min(windows, default=None), combine_masks_and(mask1.also, mask2.also), segments)


def combine_masks_or(mask1: NamedArray | None, mask2: NamedArray | None) -> NamedArray | None:
    """Combine two masks as `combine_masks_and` does, into one that allows what either allows.

    >>> axn.nn.attention.combine_masks_or(axn.named([True, False], "key_pos"), axn.named([False, False], "key_pos"))
    NamedArray(bool[key_pos=2], [ True False])
    """
    if mask1 is None or mask2 is None:
        return mask2 if mask1 is None else mask1
    if isinstance(mask1, Causal) or isinstance(mask2, Causal):
        raise TypeError(
            "combine_masks_or: a Causal mask cannot be combined by or. Convert it to an array first: "
            "`written_out(QPos, KPos)`."
        )
    return _combined_masks(logical_or, mask1, mask2)


def _combined_masks(how: Callable[..., Any], mask1: NamedArray, mask2: NamedArray) -> NamedArray:
    return how(*broadcast_arrays(mask1, mask2, require_subset=False))


# --- biases ---


def mask_to_bias(mask: NamedArray, mask_value: float = -1e9) -> NamedArray:
    """Convert a mask to a bias: 0 where attention is allowed, a large negative number elsewhere.

    >>> axn.nn.attention.mask_to_bias(axn.named([True, False], "key_pos"))
    NamedArray(float32[key_pos=2], [ 0.e+00 -1.e+09])
    """
    return where(mask, 0.0, mask_value)


def alibi_attention_bias(Heads: Axis, KPos: Axis, bias_max: float = 8, dtype: DTypeLike = jnp.float32) -> NamedArray:
    """Make the bias of attention with linear biases (ALiBi): more distant keys get lower scores, by a slope per head.

    The bias grows with the position of the key. Under a causal mask this is the same as a bias that falls with the
    distance of the key, since softmax ignores a constant that is added to all scores of a query.

    If the number of heads is a power of two, the slopes are a geometric series that ends at `2 ** -bias_max`. Other
    numbers of heads have the slopes of the next lower power of two, then every other slope of the next higher one.

    Arguments:
        bias_max: the negative exponent of the smallest slope.

    >>> axn.nn.attention.alibi_attention_bias(axn.Axis("heads", 2), axn.Axis("key_pos", 3))
    NamedArray(float32[heads=2, key_pos=3], [[0. 0.0625 0.125 ] [0. 0.0039 0.0078]])
    """
    heads = one_axis("alibi_attention_bias", "Heads", Heads)
    known = 2 ** int(math.log2(max(heads.size, 1)))
    exponents = np.concatenate([np.arange(1, known + 1), np.arange(1, 2 * known, 2) / 2])[: heads.size]
    slopes = named(np.exp2(-bias_max * exponents / known).astype(np.float32), heads)
    return dot(slopes, arange(KPos, dtype=jnp.float32), axis=()).astype(dtype)
