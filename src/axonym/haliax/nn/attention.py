"""Attention, with Haliax's order of arguments: the axes come first."""

from ...nn import attention as _attention
from ...nn.attention import (
    alibi_attention_bias as alibi_attention_bias,
    combine_masks_and as combine_masks_and,
    combine_masks_or as combine_masks_or,
    dropout_mask as dropout_mask,
    forgetful_causal_mask as forgetful_causal_mask,
    mask_to_bias as mask_to_bias,
)
from .._signatures import with_parameters as _with_parameters
from ..ops import unsharded as _unsharded

causal_mask, prefix_lm_mask = _unsharded(_attention.causal_mask), _unsharded(_attention.prefix_lm_mask)
dot_product_attention = _with_parameters(_attention.dot_product_attention, "KPos", "Key")
dot_product_attention_weights = _with_parameters(_attention.dot_product_attention_weights, "Key", "KPos")
