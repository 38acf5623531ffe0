"""Attention, with Haliax's order of arguments: the axes come first."""

from typing import Any as _Any

from ...named_array import NamedArray as _NamedArray
from ...nn import attention as _attention
from ...nn.attention import (
    alibi_attention_bias as alibi_attention_bias,
    combine_masks_and as combine_masks_and,
    combine_masks_or as combine_masks_or,
    forgetful_causal_mask as forgetful_causal_mask,
    mask_to_bias as mask_to_bias,
)
from ...random import bernoulli as _bernoulli
from ...typing import AxisSpec as _AxisSpec
from .._signatures import with_parameters as _with_parameters
from ..ops import unsharded as _unsharded

causal_mask, prefix_lm_mask = _unsharded(_attention.causal_mask), _unsharded(_attention.prefix_lm_mask)
dot_product_attention = _with_parameters(_attention.dot_product_attention, "KPos", "Key", pdrop="dropout")
dot_product_attention_weights = _with_parameters(_attention.dot_product_attention_weights, "Key", "KPos")


def dropout_mask(axes: _AxisSpec, dropout_rate: float, *, key: _Any) -> _NamedArray:
    """Make a mask with random elements, each false with probability `dropout_rate`.

    >>> hax.nn.attention.dropout_mask(hax.Axis("key_pos", 4), 0.0, key=jax.random.key(0))
    NamedArray(bool[key_pos=4], [ True True True True])
    """
    return _bernoulli(key, axes, 1.0 - dropout_rate)
