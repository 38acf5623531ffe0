"""Generate text with weights of 8 and 4 bits: `python examples/small_weights.py`.

A small Llama learns a rhyme by heart, letter by letter. Then its weights are stored in fewer bits, and it continues
the rhyme from its first letters. The script prints the memory of a parameter, the loss on the rhyme, and the generated
text. On a CPU, JAX 0.10 stores int4 in whole bytes, so the last two lines are 1.07 and 1.24 there. `--out FOLDER` saves
the model in files like those on the Hugging Face Hub, which `generate.py` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from models.layouts import layout
from models.llama import Config, Llama

import axonym as axn
from axonym.quantization import quantize_weights
from axonym.state import save_state_dict, to_torch_compatible_state_dict

try:
    import optax
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

RHYME = "The rain in Spain stays mainly in the plain. "
LETTERS = sorted(set(RHYME))
PROMPT = 9
"""How many letters the model is given."""
STORED: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
    "int4": {"dtype": "int4"},
    "int4 in groups of 16": {"dtype": "int4", "group": 16},
}

CONFIG = Config(
    Vocab=axn.Axis("vocab", len(LETTERS)),
    Embed=axn.Axis("embed", 64),
    Layers=axn.Axis("layers", 2),
    KVHeads=axn.Axis("kv_heads", 2),
    Group=axn.Axis("group", 2),
    HeadSize=axn.Axis("head_size", 16),
    Mlp=axn.Axis("mlp", 128),
)


def trained(tokens: axn.NamedArray, steps: int) -> Llama:
    """A model that knows the tokens by heart."""
    model = Llama.init(CONFIG, key=jax.random.key(0))
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(model: Llama, state: Any) -> tuple[Llama, Any]:
        updates, state = optimizer.update(jax.grad(Llama.loss)(model, tokens), state)
        return optax.apply_updates(model, updates), state

    state = optimizer.init(model)
    for _ in range(steps):
        model, state = jax.block_until_ready(step(model, state))
    return model


@jax.jit
def written(model: Llama, prompt: axn.NamedArray) -> axn.NamedArray:
    """The likeliest letters after a prompt, one by one, with a cache of keys and values."""
    More = axn.Axis("more", len(RHYME) - PROMPT)
    cache = model.empty_cache(prompt.resolve_axis("batch"), axn.Axis("key_pos", len(RHYME)))
    logits, cache = model.extend(prompt, cache)

    def step(carry: Any, _: Any) -> tuple[Any, axn.NamedArray]:
        letter, cache = carry
        logits, cache = model.extend(letter.broadcast_axis(axn.Axis("pos", 1)), cache)
        return (logits.argmax("vocab"), cache), letter

    first = logits.argmax("vocab")
    return axn.scan(step, More)((first, cache), axn.arange(More))[1]


def save(model: Llama, folder: Path) -> None:
    """Write a model's configuration, its weights, and a tokenizer whose tokens are the letters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "vocab_size": CONFIG.Vocab.size,
        "hidden_size": CONFIG.Embed.size,
        "intermediate_size": CONFIG.Mlp.size,
        "num_hidden_layers": CONFIG.Layers.size,
        "num_attention_heads": CONFIG.KVHeads.size * CONFIG.Group.size,
        "num_key_value_heads": CONFIG.KVHeads.size,
        "head_dim": CONFIG.HeadSize.size,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_theta": CONFIG.rotary.theta,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_state_dict(to_torch_compatible_state_dict(model, layout=layout(model)), folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where to keep the model")
    args = parser.parse_args()
    print(f"training for {args.steps} steps", file=sys.stderr)
    tokens = axn.named(np.array([[LETTERS.index(c) for c in RHYME]], np.int32), ("batch", "pos"))
    model = trained(tokens, args.steps)
    if args.out:
        save(model, args.out)
    count = sum(x.size for x in jax.tree.leaves(model))
    loss = jax.jit(Llama.loss)
    small = {name: quantize_weights(model, **options) for name, options in STORED.items()}
    print(f"{'weights':22}{'bytes of each':>14}{'surprise':>10}  text")
    for name, m in {"float32": model, **small}.items():
        size = sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(m)) / count
        letters = written(m, tokens["pos", :PROMPT])["batch", 0].tolist()
        text = RHYME[:PROMPT] + "".join(LETTERS[i] for i in letters)
        print(f"{name:22}{size:14.2f}{float(loss(m, tokens)):10.4f}  {text}")


if __name__ == "__main__":
    main()
