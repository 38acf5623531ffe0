"""The families of models on the Hugging Face Hub that are variants of `llama.py`, from their files `config.json`.

These are read as `transformers` reads them, in the form of its version 5 and in older ones, with its values for what is
missing. It is an error if they ask for what `llama.py` does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from axonym import Axis, NamedArray, nn
from axonym.nn.attention import Rotary

from .llama import Config


def from_huggingface(config: Mapping[str, Any]) -> Config:
    """Read a `config.json`, as a dictionary."""
    family = config.get("model_type", "llama")
    if family not in FAMILIES:
        raise ValueError(f"Llama: the configuration is of a {family!r}; this model can be {', '.join(FAMILIES)}.")
    _refuse_what_is_missing(family, config)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or HEAD_SIZES.get(family, config["hidden_size"] // heads)
    own = FAMILIES[family](config)
    if "rotary" not in own:
        entry = config.get("rope_scaling") or config.get("rope_parameters")
        own["rotary"] = _rotary(config, entry, config.get("rope_theta"))
    return Config(
        Vocab=Axis("vocab", config["vocab_size"]),
        Embed=Axis("embed", config["hidden_size"]),
        Layers=Axis("layers", config["num_hidden_layers"]),
        KVHeads=Axis("kv_heads", kv_heads),
        Group=Axis("group", heads // kv_heads),
        HeadSize=Axis("head_size", head_size),
        Mlp=Axis("mlp", config[family.endswith("_moe") * "moe_" + "intermediate_size"]),
        norm_eps=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", family.startswith("gemma")),
        **own,
    )


def to_huggingface(config: Config) -> dict[str, Any]:
    """The `config.json` of a model of ours that is a Llama, as a dictionary."""
    if config.Experts is not None:
        raise ValueError("Llama: a mixture of experts is in no family of the Hub as it is here.")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.Vocab.size,
        "hidden_size": config.Embed.size,
        "num_hidden_layers": config.Layers.size,
        "num_attention_heads": config.KVHeads.size * config.Group.size,
        "num_key_value_heads": config.KVHeads.size,
        "head_dim": config.HeadSize.size,
        "intermediate_size": config.Mlp.size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.theta,
        "tie_word_embeddings": config.tied,
    }


def _refuse_what_is_missing(family: str, config: Mapping[str, Any]) -> None:
    """Raise an error if a configuration asks for what this model does not have."""
    asked = [name for name in ("mlp_bias", "use_bidirectional_attention") if config.get(name)]
    asked += ["attention_bias"] if family == "mistral" and config.get("attention_bias") else []
    if family.endswith("_moe") and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        asked.append("layers without a mixture")
    known = ("gelu", "gelu_pytorch_tanh") if family.startswith("gemma") else ("silu", "swish")
    activations = [config.get(name) for name in ("hidden_act", "hidden_activation")]
    asked += [
        f"the activation {name!r}, not {' or '.join(known)}" for name in activations if name not in (None, *known)
    ]
    if asked:
        raise ValueError(f"Llama: the configuration of a {family!r} asks for what is not there: {', '.join(asked)}.")


def _rotary(config: Mapping[str, Any], entry: Mapping[str, Any] | None, theta: float | None) -> Rotary:
    """Read how positions are rotated from an entry of a configuration; older files have its base outside of it."""
    context = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    rotary = Rotary.from_config(entry, theta=theta, max_position_embeddings=context)
    rotated = config.get("partial_rotary_factor") or rotary.partial_rotary_factor
    if rotated != 1:
        raise ValueError(
            f"Llama: the configuration has partial_rotary_factor={rotated}, but this model rotates all features of a "
            "head, as these families do."
        )
    return rotary


# --- what differs from Llama ---


class ShiftedRmsNorm(nn.RmsNorm):
    """Root-mean-square normalization whose weight is the scale less one."""

    def __call__(self, x: NamedArray) -> NamedArray:
        assert self.weight is not None
        scale = self.weight.astype("float32") + 1
        return nn.RmsNorm(self.axis, scale, None, self.eps)(x.astype("float32")).astype(x.dtype)


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("bias", "output_bias"), bool(config.get("attention_bias")))


def _windows(config: Mapping[str, Any], older: Callable[[int], bool]) -> dict[str, Any]:
    """A window in the layers that `layer_types` lists or, in files that have no such list, those that are given."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    kinds = config.get("layer_types") or ["sliding_attention" if older(i) else "full_attention" for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"Llama: layer_types must have full_attention or sliding_attention for each of {layers} layers; it has "
            f"{len(kinds)} of {', '.join(sorted(set(kinds)))}."
        )
    slides = tuple(kind == "sliding_attention" for kind in kinds)
    if window is None or not any(slides):
        return {}
    return {"window": window} if all(slides) else {"window": window, "slides": slides}


def _qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("use_sliding_window"):
        return {}
    return _windows(config, lambda layer: layer >= config.get("max_window_layers", 28))


def _qwen_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None  # in all layers
    return _biases(config) | {
        "window": window,
        "norm_heads": True,
        "Experts": Axis("experts", config.get("num_experts") or config.get("num_local_experts", 128)),
        "choices": config.get("num_experts_per_tok", 8),
        "rescales": config.get("norm_topk_prob", False),
    }


def _gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    return _biases(config) | {
        "activation": nn.gelu,  # by tanh, also where the configuration says "gelu"
        "norm": ShiftedRmsNorm,
        "embedding_scale": config["hidden_size"] ** 0.5,
    }


def _gemma_2_or_3(config: Mapping[str, Any], caps: tuple[float | None, float | None]) -> dict[str, Any]:
    return _gemma(config) | {
        "norm_outputs": True,
        "scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": config.get("attn_logit_softcapping", caps[0]),
        "logit_cap": config.get("final_logit_softcapping", caps[1]),
    }


def _gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma_2_or_3(config, (50.0, 30.0)) | _windows(config, lambda layer: layer % 2 == 0)


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every sixth layer attends to all tokens, and rotates them more slowly."""
    every = config.get("sliding_window_pattern", 6)
    settings = _gemma_2_or_3(config, (None, None)) | _windows(config, lambda layer: (layer + 1) % every != 0)
    entries = config.get("rope_parameters") or {}
    of_all = {**(entries.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    rotary = _rotary(config, of_all, config.get("rope_theta", 1e6))
    local = _rotary(config, entries.get("sliding_attention"), config.get("rope_local_base_freq", 1e4))
    if "slides" in settings:
        rotaries = {"rotary": rotary, "local_rotary": local}
    else:
        rotaries = {"rotary": local if "window" in settings else rotary}
    return settings | rotaries | {"norm_heads": True}


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _biases,
    "mistral": lambda config: {"window": config.get("sliding_window", 4096)},
    "qwen2": lambda config: _qwen(config) | {"bias": True},
    "qwen3": lambda config: _qwen(config) | _biases(config) | {"norm_heads": True},
    "qwen3_moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""The settings that differ, by the `model_type` of a configuration.

Keys that a family does not have are ignored, as in `transformers`: such as `sliding_window` in that of a Llama.
"""

HEAD_SIZES = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
"""The features of a head where a configuration does not say; in other families, its share of the residual stream's."""
