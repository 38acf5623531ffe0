"""Attention biases: numbers that are added to the scores."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...array import NamedArray, named
from ...axis import Axis
from ...ops._operands import one_axis
from ...ops.contraction import dot
from ...ops.creation import arange
from ...ops.selection import where


def mask_to_bias(mask: NamedArray, mask_value: float = -1e9) -> NamedArray:
    """Convert a mask to a bias: 0 where attention is allowed, a large negative number elsewhere.

    Arguments:
        mask: a mask, true where attention is allowed.
        mask_value: the large negative number.

    >>> from axonym.nn.attention import mask_to_bias
    >>> mask_to_bias(axn.named([True, False], "key_pos"))
    NamedArray(float32[key_pos=2], [ 0.e+00 -1.e+09])
    """
    return where(mask, 0.0, mask_value)


def alibi_attention_bias(Heads: Axis, KPos: Axis, bias_max: float = 8, dtype: Any = jnp.float32) -> NamedArray:
    """Make the bias of attention with linear biases (ALiBi): more distant keys get lower scores, by a slope per head.

    The bias grows with the position of the key. Under a causal mask this is the same as a bias that falls with the
    distance of the key, since softmax ignores a constant that is added to all scores of a query.

    If the number of heads is a power of two, the slopes are a geometric series that ends at `2 ** -bias_max`. Other
    numbers of heads have the slopes of the next lower power of two, then every other slope of the next higher one.

    Arguments:
        Heads: the axis of heads.
        KPos: the axis of key positions.
        bias_max: the negative exponent of the smallest slope.
        dtype: the dtype of the result.

    >>> from axonym.nn.attention import alibi_attention_bias
    >>> alibi_attention_bias(axn.Axis("heads", 2), axn.Axis("key_pos", 3))
    NamedArray(float32[heads=2, key_pos=3], [[0. 0.0625 0.125 ] [0. 0.0039 0.0078]])
    """
    heads = one_axis("alibi_attention_bias", "Heads", Heads)
    known = 2 ** int(math.log2(max(heads.size, 1)))
    exponents = np.concatenate([np.arange(1, known + 1), np.arange(1, 2 * known, 2) / 2])[: heads.size]
    slopes = named(np.exp2(-bias_max * exponents / known).astype(np.float32), heads)
    return dot(slopes, arange(KPos, dtype=jnp.float32), axis=()).astype(dtype)
