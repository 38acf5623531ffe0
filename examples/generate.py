"""Write text with a model from the Hugging Face Hub: `python examples/generate.py FOLDER --prompt TEXT`.

The folder has a `config.json` of one of the families in `models/families.py`, weights in safetensors files, and the
`tokenizer.json` of the model. The folder of a run of `train_lm.py` works, too, if the run has exported its model. Each
device reads its shard of the weights, one array at a time. With `--mesh data=2,model=4` there are eight devices: texts
are sharded over `data`; heads, hidden features and the vocabulary over `model`. `--simulated-devices 8` makes this work
without accelerators. `--weights int8` keeps the weights in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from models import generation
from models.families import from_huggingface
from models.generation import Sampling, Text
from models.layouts import layout
from models.llama import Llama

import axonym as axn
from axonym import NamedArray
from axonym.quantization import quantize_weights
from axonym.state import from_torch_compatible_state_dict, load_state_dict

try:
    from tokenizers import Tokenizer
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

MAPPING = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def load(folder: Path, dtype: str | None = None) -> Llama:
    """Load the model of a folder, sharded by the active mapping, each array as it is needed."""
    config = from_huggingface(json.loads((folder / "config.json").read_text()))
    entries = load_state_dict(folder)
    dtype = dtype or str(entries["model.norm.weight"].dtype)
    empty = eqx.filter_eval_shape(lambda: Llama.init(config, key=jax.random.key(0)))
    empty = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), empty)
    # Files of models that predict with the table that embeds tokens may have it twice.
    ignore = ("lm_head.weight",) if config.tied else ()
    ignore = (*ignore, "*.rotary_emb.inv_freq")
    return from_torch_compatible_state_dict(empty, entries, ignore=ignore, layout=layout(empty))


def stop_tokens(folder: Path) -> set[int]:
    """The tokens after which a text ends, by the files of a model."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            ends = json.loads((folder / name).read_text()).get("eos_token_id")
            if ends is not None:
                return set(ends) if isinstance(ends, list) else {ends}
    return set()


class Writer:
    """Writes after prompts. What is compiled for one set of prompts serves others of the same lengths."""

    def __init__(self, model: Llama, sampling: Sampling):
        # The model is passed as a list of its arrays: to take it apart at every token costs about as much as the call.
        self._arrays, structure = jax.tree.flatten(model)

        def start(arrays: list[jax.Array], *args: Any) -> Text:
            return generation.start(jax.tree.unflatten(structure, arrays), *args)

        def next_token(arrays: list[jax.Array], text: Text, key: jax.Array) -> tuple[NamedArray, Text]:
            return text.token, generation.step(jax.tree.unflatten(structure, arrays), text, key, sampling)

        self._sampling = sampling
        # One program reads the prompts, and one writes a token at any position, in the memory of the text before it.
        # All arguments of the latter are arrays, so `jax.jit` does; the active mapping is part of its cache key.
        self._start = axn.named_jit(start)
        self._next = jax.jit(next_token, donate_argnums=1)

    def tokens(self, prompts: Sequence[Sequence[int]], length: int, key: jax.Array) -> Iterator[np.ndarray]:
        """Write up to `length` tokens after each prompt, one for each text at a time. Prompts may differ in length."""
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.zeros((len(prompts), counts.max()), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        count = None if counts.min() == counts.max() else axn.named(counts, "batch")
        named = axn.named(padded, ("batch", "pos"))
        text = self._start(self._arrays, named, key, self._sampling, int(counts.max()) + length, count)
        for left in reversed(range(length)):
            token = text.token
            if left:  # the device works on the next token while this one is looked at
                token, text = self._next(self._arrays, text, key)
            yield axn.to_host(token).array


def write(writer: Writer, tokenizer: Tokenizer, prompts: Sequence[str], length: int, stop: set[int], seed: int) -> None:
    """Print each prompt and what follows; a single one as it is written."""
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    if empty := [prompt for prompt, ids in zip(prompts, encoded, strict=True) if not ids]:
        raise SystemExit(f"The prompt {empty[0]!r} has no tokens; give it at least one.")
    # Prompt and text are decoded together, since it depends on what comes before whether a token begins with a space.
    before = [len(tokenizer.decode(ids)) for ids in encoded]
    written: list[list[int]] = [[] for _ in prompts]

    def text_of(i: int) -> str:
        return tokenizer.decode(encoded[i] + written[i])[before[i] :]

    done, shown, started = [False] * len(prompts), "", time.perf_counter()
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    first = None
    for tokens in writer.tokens(encoded, length, jax.random.key(seed)):
        first = first or time.perf_counter()
        for i, token in enumerate(tokens.tolist()):
            done[i] = done[i] or token in stop
            if not done[i]:
                written[i].append(token)
        if len(prompts) == 1:
            text = text_of(0)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the first bytes of a character
                print(text[len(shown) :], end="", flush=True)
                shown = text
        if all(done):
            break
    if len(prompts) == 1:
        print()
    else:
        for i, prompt in enumerate(prompts):
            print(f"{prompt}{text_of(i)}\n")
    count, now = sum(map(len, written)), time.perf_counter()
    if first is not None and count > len(prompts):
        rate = (count - len(prompts)) / (now - first)
        print(f"{first - started:.1f} s to the first token, then {rate:.1f} tokens per second", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    # The description says how it is called. Without the usage, an error is one line.
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with a model, or of a run of train_lm.py")
    parser.add_argument("--prompt", action="append", required=True, help="how a text begins; give several for a batch")
    parser.add_argument("--length", type=int, default=64, help="the most tokens to write after each prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="a token that ends a text, besides the model's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="such as bfloat16; by default that of the weights")
    parser.add_argument("--weights", choices=["int8", "int4", "float8_e4m3fn"], help="in what to keep the weights")
    parser.add_argument("--mesh", default="data=1,model=1", help="the mesh axes and their sizes")
    parser.add_argument("--simulated-devices", type=int, help="how many devices the CPU stands for")
    args = parser.parse_args(arguments)
    if args.simulated_devices:
        jax.config.update("jax_num_cpu_devices", args.simulated_devices)
    if args.length < 1:
        parser.error("--length must be at least 1")
    folder = args.folder
    if (folder / "exported.txt").is_file():  # the folder of a run of train_lm.py, which says where its model is
        folder = Path((folder / "exported.txt").read_text())
    elif (folder / "checkpoints").is_dir():
        parser.error(
            f"{folder} is the folder of a run that has not exported its model; that is done by train_lm.py --resume "
            f"--out {folder} --export exported"
        )
    needed = [folder / name for name in ("config.json", "tokenizer.json")]
    if missing := [path.name for path in needed if not path.is_file()]:
        what = f"has no {' and no '.join(missing)}" if folder.is_dir() else "is not a folder"
        parser.error(f"{folder} {what}")
    if not list(folder.glob("*.safetensors")):
        parser.error(f"{folder} has no weights: no file ends with .safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = stop_tokens(folder)
    for token in args.stop:
        if (number := tokenizer.token_to_id(token)) is None:
            parser.error(f"--stop: {token!r} is no token of the model")
        stop.add(number)
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in args.mesh.split(","))}
    if len(args.prompt) % sizes.get("data", 1):
        parser.error(f"--mesh: data={sizes['data']} shares out prompts, and {len(args.prompt)} cannot be; use data=1")
    try:
        mesh = axn.make_mesh(sizes)
    except ValueError as e:
        parser.error(f"--mesh: {e}; or use --simulated-devices")
    print(f"Loading {folder}.", file=sys.stderr, flush=True)
    with jax.set_mesh(mesh), axn.axis_mapping({n: axis for n, axis in MAPPING.items() if axis in sizes}):
        model = load(folder, args.dtype)
        if args.weights:
            model = quantize_weights(model, args.weights, group=64 if args.weights == "int4" else None)
        writer = Writer(model, sampling)
        write(writer, tokenizer, args.prompt, args.length, stop, args.seed)


if __name__ == "__main__":
    main()
