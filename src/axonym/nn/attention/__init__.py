"""Attention by axis names: products, masks, biases, rotary embeddings, and a cache for decoding."""

from .cache import KVCache as KVCache
from .dot_product import (
    dot_product_attention as dot_product_attention,
    dot_product_attention_weights as dot_product_attention_weights,
)
from .masks import (
    Causal as Causal,
    alibi_attention_bias as alibi_attention_bias,
    causal_mask as causal_mask,
    combine_masks_and as combine_masks_and,
    combine_masks_or as combine_masks_or,
    forgetful_causal_mask as forgetful_causal_mask,
    mask_to_bias as mask_to_bias,
    prefix_lm_mask as prefix_lm_mask,
    sliding_window_mask as sliding_window_mask,
)
from .rotary import (
    LinearRotary as LinearRotary,
    Llama3Rotary as Llama3Rotary,
    Rotary as Rotary,
    YarnRotary as YarnRotary,
    apply_rotary as apply_rotary,
)
