"""`examples/generate.py` writes the model's text, however it is distributed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import axonym as axn
from axonym.state import save_state_dict
from examples import generate, small_weights
from examples.models.llama import Llama
from tests.examples.runs import EXAMPLES, SMALL, train_lm

write: Any = generate.generation.generate

GOLDEN = EXAMPLES.parent / "tests" / "interop" / "golden" / "llama.npz"
STOP = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model as on the hub, in two files, whose words are the numbers of its tokens."""
    folder = tmp_path_factory.mktemp("llama")
    with np.load(GOLDEN) as kept:
        weights = {name.removeprefix("weights/"): kept[name] for name in kept if name.startswith("weights/")}
        config = json.loads(str(kept["config"]))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": STOP}))
    names, index = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_state_dict({name: weights[name] for name in part}, folder / f"part-{i}.safetensors")
        index |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(config["vocab_size"])}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return generate.load(folder)


def greedy(model: Llama, prompt: list[int], length: int) -> list[int]:
    """Return the likeliest tokens, from the model without a cache."""
    tokens = list(prompt)
    logits = jax.jit(lambda tokens: model(tokens))
    for _ in range(length):
        padded = np.array(tokens + [0] * (len(prompt) + length - len(tokens)))  # what comes later does not matter
        tokens.append(int(logits(axn.named(padded, "pos"))["pos", len(tokens) - 1].argmax("vocab").item()))
    return tokens[len(prompt) :]


PROMPTS = [[3, 14, 15, 9, 2, 6], [31, 41]]
LENGTH = 8


@pytest.fixture(scope="module")
def expected(model: Llama) -> list[list[int]]:
    return [greedy(model, prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded_and_of_different_lengths(folder: Path, expected: list[list[int]], explicit: bool) -> None:
    mesh = axn.make_mesh({"data": 2, "model": 2}, explicit=explicit)
    with jax.set_mesh(mesh), axn.axis_mapping(generate.MAPPING):
        model = generate.load(folder)
        assert model.blocks.stacked.mlp.up_proj.weight.array.sharding.shard_shape((2, 32, 16)) == (2, 16, 16)
        writer = generate.Writer(model, generate.Sampling(temperature=0))
        written = np.stack(list(writer.tokens(PROMPTS, LENGTH, jax.random.key(0))), axis=1)
    assert written.tolist() == expected


def test_the_cache_is_donated(model: Llama) -> None:
    """One program for all positions writes its results over its arguments."""
    sampling = generate.Sampling(temperature=0)
    prompts = axn.named(np.array([PROMPTS[0]]), ("batch", "pos"))
    text = jax.eval_shape(lambda: generate.generation.start(model, prompts, jax.random.key(0), sampling, 20))
    step = generate.Writer(model, sampling)._next
    memory: Any = step.lower(jax.tree.leaves(model), text, jax.random.key(0)).compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(text))
    assert memory.alias_size_in_bytes == held


def test_command(folder: Path, expected: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    """It writes until a token that ends the text, a single prompt as it comes."""
    ends = str(expected[0][4])
    arguments = [str(folder), "--length", str(LENGTH), "--temperature", "0"]
    one = " ".join(map(str, PROMPTS[0]))
    generate.main([*arguments, "--prompt", one, "--stop", ends])
    written = expected[0][: expected[0].index(int(ends))]
    assert capsys.readouterr().out == " ".join([one, *map(str, written)]) + "\n"
    two = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    generate.main([*arguments, "--prompt", two[0], "--prompt", two[1]])
    printed = capsys.readouterr().out
    for prompt, tokens in zip(two, expected, strict=True):
        kept = tokens[: tokens.index(STOP)] if STOP in tokens else tokens
        assert " ".join([prompt, *map(str, kept)]) + "\n" in printed


def test_folders_without_a_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    empty = tmp_path / "empty"
    empty.mkdir()
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for checkpoint, message in (
        ("nowhere", "nowhere is not a folder"),
        (empty, "empty has no config.json and no tokenizer.json"),
        (run, "--resume --out"),
        (tmp_path, "has no weights: no file ends with .safetensors"),
    ):
        with pytest.raises(SystemExit):
            generate.main([str(checkpoint), "--prompt", "1"])
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_small_weights(folder: Path, expected: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    """Sharded over two devices. The first token is as without them; this model's random weights are large."""
    one = " ".join(map(str, PROMPTS[0]))
    arguments = [str(folder), "--length", "2", "--temperature", "0", "--prompt", one]
    generate.main([*arguments, "--weights", "int8", "--mesh", "model=2"])
    assert capsys.readouterr().out.removeprefix(one).split()[0] == str(expected[0][0])


def test_a_folder_of_our_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads what `small_weights.py` keeps, and the tokenizer puts letters side by side."""
    model = Llama.init(small_weights.CONFIG, key=jax.random.key(0))
    small_weights.save(model, tmp_path)
    with jax.set_mesh(axn.make_mesh({"data": 1, "model": 1})):
        assert all(map(np.array_equal, jax.tree.leaves(generate.load(tmp_path)), jax.tree.leaves(model)))
    generate.main([str(tmp_path), "--prompt", "The rain", "--length", "2"])
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed.startswith("The rain") and len(printed) == 10 and set(printed) <= set(small_weights.LETTERS)


def test_what_was_just_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training script exports the configuration and a tokenizer, too, whose tokens are bytes."""
    config = train_lm.steps.model_config(train_lm.settings.parse(SMALL).model)
    trained = Llama.init(config, key=jax.random.key(0))
    folder = tmp_path / "exported"
    assert train_lm.checkpoints.problem_of_export(folder, config) is None
    for _ in range(2):  # again to the same folder
        train_lm.checkpoints.export(trained, folder, config)
        assert train_lm.checkpoints.problem_of_export(folder, config) is None
    with jax.set_mesh(axn.make_mesh({"data": 1, "model": 1}, devices=jax.devices()[:1])):
        for a, b in zip(*map(jax.tree.leaves, (generate.load(folder), trained)), strict=True):
            np.testing.assert_array_equal(a, b)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f(x):\n\treturn 'caf\u00e9 \u2603'\x00"
    assert tokenizer.encode(text).ids == [*text.encode()] and tokenizer.decode([*text.encode()]) == text
    generate.main([str(folder), "--prompt", "def ", "--length", "3"])
    assert capsys.readouterr().out.startswith("def ")
    (tmp_path / "exported.txt").write_text(str(folder))  # as a run that has exported it
    generate.main([str(tmp_path), "--prompt", "def ", "--length", "3"])
    assert capsys.readouterr().out.startswith("def ")
    (folder / "notes.txt").touch()
    assert "with other files" in str(train_lm.checkpoints.problem_of_export(folder, config))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=2,model=4", "--mesh: data=2 shares out prompts, and 1 cannot be; use data=1"),
        ("data=1,model=64", "needs 64 devices; there are 8"),
    ],
)
def test_meshes_that_do_not_fit(folder: Path, mesh: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main([str(folder), "--prompt", "a", "--mesh", mesh])
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


def test_sampling(model: Llama) -> None:
    """Draws are of the tokens that the filters leave, and a penalty keeps tokens from coming again."""
    prompts = axn.named(np.array([PROMPTS[0]] * 4), ("batch", "pos"))

    @functools.cache
    def writer(**options: Any) -> Any:
        return jax.jit(lambda key: write(model, prompts, 8, key, generate.Sampling(**options)))

    def drawn(seed: int, **options: Any) -> np.ndarray:
        written = writer(**options)(jax.random.key(seed))
        return np.asarray(written.rearrange(("batch", "pos")).array)

    assert not np.array_equal(drawn(0), drawn(1)) and np.array_equal(drawn(0), drawn(0))
    likeliest = drawn(0, temperature=0)
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        np.testing.assert_array_equal(drawn(1, **filters), likeliest)
    for row in drawn(0, temperature=0, repetition_penalty=1e6):
        assert len({*row, *PROMPTS[0]}) == len(row) + len(set(PROMPTS[0]))


def test_a_penalty_and_prompts_of_different_lengths(model: Llama) -> None:
    """Padding counts as no token of a text: each is written as on its own."""
    writer = generate.Writer(model, generate.Sampling(temperature=0, repetition_penalty=1.5))

    def written(prompts: list[list[int]]) -> list[list[int]]:
        return np.stack(list(writer.tokens(prompts, LENGTH, jax.random.key(0))), axis=1).tolist()

    assert written(PROMPTS) == [*written(PROMPTS[:1]), *written(PROMPTS[1:])]


@pytest.mark.parametrize("together", [False, True])
def test_spaces_that_are_part_of_tokens(
    model: Llama, expected: list[list[int]], capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    """As in the tokenizers of Llama 2, Mistral and Gemma, which drop the space of the first token."""
    words = {f"\u2581{i}": i for i in range(model.table.Vocab.size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u25810"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    writer = generate.Writer(model, generate.Sampling(temperature=0))
    texts = [(prompt, tokens[:3]) for prompt, tokens in zip(PROMPTS, expected, strict=True)][: 1 + together]
    generate.write(writer, tokenizer, [" ".join(map(str, prompt)) for prompt, _ in texts], 3, set(), 0)
    printed = [line for line in capsys.readouterr().out.split("\n") if line]
    assert printed == [" ".join(map(str, [*prompt, *tokens])) for prompt, tokens in texts]


def test_families_that_are_not_there(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_act"], config["rope_parameters"]
    for change, message in (
        ({"model_type": "gemma3"}, "of a 'gemma3'; this model can be llama, mistral, .*, gemma2, gemma3_text"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "for each of 2 layers; it has 1 of full_attention",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "linear_attention"]},
            "it has 2 of full_attention, linear_attention",
        ),
        ({"hidden_act": "relu"}, "activation 'relu', not silu or swish"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "activation 'relu', not gelu or gelu_pytorch_tanh"),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "activation 'silu', not gelu or gelu_pytorch_tanh"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, but this model rotates all features"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "unknown kind 'dynamic'"),
    ):
        with pytest.raises(ValueError, match=message):
            generate.from_huggingface(config | change)


def test_what_files_do_not_say(folder: Path) -> None:
    """It is what `transformers` takes."""
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_act"], config["rope_parameters"]

    def read(family: str, **changes: Any) -> Any:
        return generate.from_huggingface(config | {"model_type": family} | changes)

    assert read("llama", sliding_window=3).window is read("gemma", sliding_window=3).window is None
    assert (read("mistral").window, read("mistral", sliding_window=None).window) == (4096, None)
    assert read("qwen2", sliding_window=3).window is None
    for first, expected in ((0, (3, None)), (1, (3, (False, True))), (2, (None, None)), (28, (None, None))):
        found = read("qwen3", sliding_window=3, use_sliding_window=True, max_window_layers=first)
        assert (found.window, found.slides) == expected
    sizes = {
        family: read(family, head_dim=None).HeadSize.size for family in ("llama", "mistral", "qwen2", "qwen3", "gemma")
    }
    assert sizes == {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 128, "gemma": 256}
    # Versions of transformers differ in what "gelu" is for this family; its models were trained with this one.
    assert read("gemma", hidden_act="gelu").activation is axn.nn.gelu
    assert read("gemma2").slides == (True, False)
    alike = read("gemma3_text")  # of six layers and more, one attends to everything
    assert (alike.window, alike.slides, alike.rotary.theta, alike.local_rotary) == (4096, None, 1e4, None)
    assert read("gemma3_text", num_hidden_layers=7).slides == (True,) * 5 + (False, True)
