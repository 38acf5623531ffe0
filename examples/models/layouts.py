"""What other programs call the weights of `llama.py`, and how they arrange them: a table for each.

`layout(model)` is for the Hugging Face Hub, `layout(model, "serving")` for an engine that fuses matrices, with names of
vLLM, and `layout(model, "megatron")` for Megatron-Core. Rows of what a model lacks, such as biases, are left out.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

from axonym.state import WeightLayout

from .llama import Llama

Table: TypeAlias = dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """The rows of a program: those of a block have keys below `layers`, and paths below the stacked blocks."""

    layers: str
    outside: Table
    attention: Table
    norms: Table
    norms_of_outputs: Table
    """In place of `norms`, where the outputs of attention and perceptrons are normalized too."""
    mlp: Table
    mixture: Table


_Q, _K, _V = (f"attention.{name}_proj.weight" for name in "qkv")
_OUTPUTS = {
    "self_attn.o_proj.weight": "attention.o_proj.weight -> embed (kv_heads group head_size)",
    "self_attn.o_proj.bias": "attention.o_proj.bias -> embed",
    "self_attn.q_norm.weight": "attention.q_norm.weight -> head_size",
    "self_attn.k_norm.weight": "attention.k_norm.weight -> head_size",
}

HUB = Tables(
    layers="model.layers",
    outside={
        "model.embed_tokens.weight": "table.weight -> vocab embed",
        "model.norm.weight": "norm.weight -> embed",
        "lm_head.weight": "head.weight -> vocab embed",
    },
    attention={
        "self_attn.q_proj.weight": "attention.q_proj.weight -> (kv_heads group head_size) embed",
        "self_attn.q_proj.bias": "attention.q_proj.bias -> (kv_heads group head_size)",
        "self_attn.k_proj.weight": "attention.k_proj.weight -> (kv_heads head_size) embed",
        "self_attn.k_proj.bias": "attention.k_proj.bias -> (kv_heads head_size)",
        "self_attn.v_proj.weight": "attention.v_proj.weight -> (kv_heads head_size) embed",
        "self_attn.v_proj.bias": "attention.v_proj.bias -> (kv_heads head_size)",
        **_OUTPUTS,
    },
    norms={
        "input_layernorm.weight": "attention_norm.weight -> embed",
        "post_attention_layernorm.weight": "mlp_norm.weight -> embed",
    },
    norms_of_outputs={
        "input_layernorm.weight": "attention_norm.weight -> embed",
        "post_attention_layernorm.weight": "attention_output_norm.weight -> embed",
        "pre_feedforward_layernorm.weight": "mlp_norm.weight -> embed",
        "post_feedforward_layernorm.weight": "mlp_output_norm.weight -> embed",
    },
    mlp={
        "mlp.gate_proj.weight": "mlp.gate_proj.weight -> mlp embed",
        "mlp.up_proj.weight": "mlp.up_proj.weight -> mlp embed",
        "mlp.down_proj.weight": "mlp.down_proj.weight -> embed mlp",
    },
    mixture={
        "mlp.gate.weight": "mlp.router.weight -> scores embed",
        "mlp.experts.{experts}.gate_proj.weight": "mlp.gate_proj.weight -> mlp embed",
        "mlp.experts.{experts}.up_proj.weight": "mlp.up_proj.weight -> mlp embed",
        "mlp.experts.{experts}.down_proj.weight": "mlp.down_proj.weight -> embed mlp",
    },
)

SERVING = dataclasses.replace(
    HUB,
    attention={
        # All queries, then all keys, then all values.
        "self_attn.qkv_proj.weight": f"{_Q} (kv_heads group), {_K} (kv_heads), {_V} (kv_heads) -> (_ head_size) embed",
        "self_attn.qkv_proj.bias": (
            "attention.q_proj.bias (kv_heads group), attention.k_proj.bias (kv_heads), attention.v_proj.bias (kv_heads)"
            " -> (_ head_size)"
        ),
        **_OUTPUTS,
    },
    mlp={
        "mlp.gate_up_proj.weight": "mlp.gate_proj.weight, mlp.up_proj.weight -> (_ mlp) embed",
        "mlp.down_proj.weight": "mlp.down_proj.weight -> embed mlp",
    },
    mixture={
        "mlp.gate.weight": "mlp.router.weight -> scores embed",
        "mlp.experts.w13_weight": "mlp.gate_proj.weight, mlp.up_proj.weight -> experts (_ mlp) embed",
        "mlp.experts.w2_weight": "mlp.down_proj.weight -> experts embed mlp",
    },
)

MEGATRON = Tables(
    layers="decoder.layers",
    outside={
        "embedding.word_embeddings.weight": "table.weight -> vocab embed",
        "decoder.final_layernorm.weight": "norm.weight -> embed",
        "output_layer.weight": "head.weight -> vocab embed",
    },
    attention={
        # For each head of keys its queries, the keys and the values, so that devices can share out heads.
        "self_attention.linear_qkv.weight": f"{_Q} (group), {_K}, {_V} -> (kv_heads _ head_size) embed",
        "self_attention.linear_qkv.bias": (
            "attention.q_proj.bias (group), attention.k_proj.bias, attention.v_proj.bias -> (kv_heads _ head_size)"
        ),
        "self_attention.linear_proj.weight": "attention.o_proj.weight -> embed (kv_heads group head_size)",
        "self_attention.linear_proj.bias": "attention.o_proj.bias -> embed",
        "self_attention.q_layernorm.weight": "attention.q_norm.weight -> head_size",
        "self_attention.k_layernorm.weight": "attention.k_norm.weight -> head_size",
    },
    norms={
        "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight -> embed",
        "pre_mlp_layernorm.weight": "mlp_norm.weight -> embed",
    },
    norms_of_outputs={
        "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight -> embed",
        "post_self_attn_layernorm.weight": "attention_output_norm.weight -> embed",
        "pre_mlp_layernorm.weight": "mlp_norm.weight -> embed",
        "post_mlp_layernorm.weight": "mlp_output_norm.weight -> embed",
    },
    mlp={
        "mlp.linear_fc1.weight": "mlp.gate_proj.weight, mlp.up_proj.weight -> (_ mlp) embed",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight -> embed mlp",
    },
    mixture={
        "mlp.router.weight": "mlp.router.weight -> scores embed",
        "mlp.experts.local_experts.{experts}.linear_fc1.weight": (
            "mlp.gate_proj.weight, mlp.up_proj.weight -> (_ mlp) embed"
        ),
        "mlp.experts.local_experts.{experts}.linear_fc2.weight": "mlp.down_proj.weight -> embed mlp",
    },
)

PROGRAMS = {"hub": HUB, "serving": SERVING, "megatron": MEGATRON}


def table_of(model: Llama, program: str = "hub") -> Table:
    """Return the table of a program for a model, whose arrays can be abstract."""
    tables, block = PROGRAMS[program], model.blocks.stacked
    rows = tables.attention | (tables.norms if block.mlp_output_norm is None else tables.norms_of_outputs)
    rows |= tables.mixture if hasattr(block.mlp, "router") else tables.mlp
    return tables.outside | {
        f"{tables.layers}.{{layers}}.{key}": re.sub(r"[a-z_]+(\.[a-z_]+)+", r"blocks.stacked.\g<0>", row)
        for key, row in rows.items()
    }


def layout(model: Llama, program: str = "hub") -> WeightLayout:
    """Return the layout of a program for a model, whose arrays can be abstract."""
    return WeightLayout(table_of(model, program))
