"""Write the golden files: tiny random models of `transformers`, and PyTorch's results with them.

Some are made from classes of configurations, and some from what a file `config.json` on the Hugging Face Hub has: as
version 5 of `transformers` writes them, and older ones, which have other keys and fewer of them.

Each file has a model's configuration, its weights under the names of its state dict, a batch of tokens, the logits, the
loss of the next token, and the gradient of that loss with respect to every weight. The tests compare with the files, so
only this script needs PyTorch. It comes with the extra `interop`:

    python -m pip install -e '.[test,interop]' && python tests/interop/make_golden.py

Given a folder, it writes there instead of over the files of the repository.
"""

# pyright: reportMissingImports=false
# The packages of the extra are not installed where types are checked.

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

GOLDEN = Path(__file__).parent / "golden"
VOCAB, BATCH, LENGTH = 64, 2, 24


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_LLAMA, tie_word_embeddings=False))


def llama3() -> PreTrainedModel:
    """Configure a model like small Llama 3 models: the head is the table, and slow rotations are slowed down further.

    With rotations of 4 frequencies, wavelengths of 6 to 6283 positions, one is kept, one is between, two are slowed.
    """
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**_LLAMA, tie_word_embeddings=True, rope_parameters=rope))


def mistral() -> PreTrainedModel:
    """Configure a model with a window shorter than the texts."""
    return MistralForCausalLM(MistralConfig(**_LLAMA, tie_word_embeddings=False, sliding_window=5))


def qwen2() -> PreTrainedModel:
    """Configure a model with a head for each 4 features, which is the only choice, and the table as the head."""
    sizes = {name: size for name, size in _LLAMA.items() if name != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_LLAMA, tie_word_embeddings=False))


def gemma() -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**_LLAMA, pad_token_id=None))  # else one row of the table has no gradient


_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}

_FILE = {name: size for name, size in _LLAMA.items() if name != "attn_implementation"} | {"rms_norm_eps": 1e-6}
_YARN = {"type": "yarn", "factor": 4.0}

FILES: dict[str, dict[str, Any]] = {
    # YaRN without the training context, which is the longest one then; and a window, which a Llama does not have.
    "llama_yarn": {
        "model_type": "llama",
        "rope_theta": 1e4,
        "rope_scaling": _YARN | {"finetuned": True},
        "sliding_window": 4,
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "attention_bias": True,
        "pretraining_tp": 1,
    },
    # No window, since it is not used by default; and YaRN with the training context.
    "qwen2_yarn": {
        "model_type": "qwen2",
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_theta": 1e6,
        "rope_scaling": _YARN | {"original_max_position_embeddings": 32},
    },
    # A window from the second layer on.
    "qwen2_window": {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    # As version 5 writes it.
    "qwen3_window": {
        "model_type": "qwen3",
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 28,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 40,  # of layers without a mixture, which there are none of
        "moe_intermediate_size": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    },
    "gemma_file": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e4},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "sliding_window": 5,
        "query_pre_attn_scalar": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_new": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
"""What is in files, besides sizes."""


def from_file(content: dict[str, Any]) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(content))
        config = AutoConfig.from_pretrained(folder)
    if "gemma" in content["model_type"]:
        config.pad_token_id = None  # else one row of the table has no gradient
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama3": llama3,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    **{name: functools.partial(from_file, _FILE | content) for name, content in FILES.items()},
}


def results(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """Return the contents of a model's file, with newly drawn weights."""
    config = _FILE | FILES[name] if name in FILES else model.config.to_diff_dict()
    # After initialization, logits are nearly equal, biases are zero and scales one, so a test would miss weights that
    # are mixed up. So all weights are drawn, large enough that attention prefers some positions to others.
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        center = 1.0 if "norm" in key or "ln_" in key else 0.0
        weight.data = center + 0.3 * torch.randn(weight.shape, generator=generator)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)

    logits = model(tokens).logits
    loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    loss.backward()

    weights = entries(model)
    for _, weight in model.named_parameters():
        weight.data = weight.grad
    return {
        "config": np.array(json.dumps(config)),
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        **{f"weights/{key}": weight for key, weight in weights.items()},
        **{f"gradients/{key}": gradient for key, gradient in entries(model).items()},
    }


def entries(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the weights as files on the hub have them: shared ones once, and with a key for each expert."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    for name, make in MODELS.items():
        path = folder / f"{name}.npz"
        np.savez_compressed(path, **results(name, make()))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
