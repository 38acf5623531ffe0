"""Write the golden files: tiny random models of `transformers`, and PyTorch's results with them.

Each file has a model's configuration, its weights under the names of its state dict, a batch of tokens, the logits, the
loss of the next token, and the gradient of that loss with respect to every weight. The tests compare with the files, so
only this script needs PyTorch. It comes with the extra `interop`:

    python -m pip install -e '.[test,interop]' && python tests/interop/make_golden.py

Given a folder, it writes there instead of over the files of the repository.
"""

# pyright: reportMissingImports=false
# The packages of the extra are not installed where types are checked.

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import (
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

MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama3": llama3,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
}


def results(model: PreTrainedModel) -> dict[str, Any]:
    """Return the contents of a model's file, with newly drawn weights."""
    # After initialization, logits are nearly equal, biases are zero and scales one, so a test would miss weights that
    # are mixed up. So all weights are drawn, large enough that attention prefers some positions to others.
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        center = 1.0 if "norm" in name or "ln_" in name else 0.0
        weight.data = center + 0.3 * torch.randn(weight.shape, generator=generator)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)

    logits = model(tokens).logits
    loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    loss.backward()

    weights = dict(model.named_parameters())  # a weight that two parts share is stored once, as in files on the hub
    return {
        "config": np.array(json.dumps(model.config.to_diff_dict())),
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        **{f"weights/{name}": weight.detach().numpy() for name, weight in weights.items()},
        **{f"gradients/{name}": weight.grad.numpy() for name, weight in weights.items()},
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    for name, make in MODELS.items():
        path = folder / f"{name}.npz"
        np.savez_compressed(path, **results(make()))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
