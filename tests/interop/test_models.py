"""The models of `examples/models` are those of `transformers`, and learn the same however they are distributed.

PyTorch's results are stored in `golden`: see `make_golden.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.state import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from examples.models import families, gpt2, layouts, llama
from examples.models.mappings import COMPUTE, STORAGE, distributed_step
from tests.helpers import spec

FOLDER = Path(__file__).parent / "golden"
RELATIVES = (
    *("llama", "llama3", "llama_linear", "llama_yarn", "mistral", "qwen2", "qwen2_window", "qwen2_yarn"),
    *("qwen3", "qwen3_window", "qwen3_moe", "gemma", "gemma_file", "gemma2", "gemma3", "gemma3_new"),
)
WITH_A_CACHE = ("llama_yarn", "mistral", "qwen2_window", "qwen3_moe", "gemma2", "gemma3")
"""A model for each way to rotate, to mask and to mix; the others differ in their weights."""
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2.Gpt2, gpt2.Config.from_huggingface),
    **dict.fromkeys(RELATIVES, (llama.Llama, families.from_huggingface)),
}

# --- the same as in PyTorch ---


@dataclasses.dataclass
class Golden:
    """A model with the weights of a file, and PyTorch's results with them."""

    model: Any
    layout: axn.state.WeightLayout | None
    tokens: axn.NamedArray
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    logits: np.ndarray
    loss: np.ndarray


@pytest.fixture(scope="module", params=MODELS)
def golden(request: pytest.FixtureRequest) -> Golden:
    model, read = MODELS[request.param]
    with np.load(FOLDER / f"{request.param}.npz") as kept:
        found = dict(kept)
    weights, gradients = (
        {name.removeprefix(f"{kind}/"): x for name, x in found.items() if name.startswith(kind)}
        for kind in ("weights", "gradients")
    )
    config = read(json.loads(str(found["config"])))
    empty = jax.eval_shape(lambda key: model.init(config, key=key), jax.random.key(0))
    layout = layouts.layout(empty) if model is llama.Llama else None
    loaded = from_torch_compatible_state_dict(empty, weights, layout=layout)
    tokens = axn.named(found["tokens"], ("batch", "pos"))
    return Golden(loaded, layout, tokens, weights, gradients, found["logits"], found["loss"])


def test_logits_loss_and_gradients(golden: Golden) -> None:
    def loss_and_logits(model: Any) -> tuple[jax.Array, axn.NamedArray]:
        return model.loss(golden.tokens), model(golden.tokens)

    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(golden.model)
    assert logits.names == ("batch", "pos", "vocab")
    np.testing.assert_allclose(logits.array, golden.logits, atol=1e-4)
    np.testing.assert_allclose(loss, golden.loss, rtol=1e-5)
    found = to_torch_compatible_state_dict(gradients, layout=golden.layout)
    assert found.keys() == golden.gradients.keys()
    for name, expected in golden.gradients.items():
        atol = 1e-5 * max(1, 2 * np.abs(expected).max())
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("golden", WITH_A_CACHE, indirect=True)
def test_token_by_token(golden: Golden) -> None:
    """With a cache, after a prompt, as texts are written."""
    prompt, tokens = 10, golden.tokens
    extend = jax.jit(llama.Llama.extend)
    cache = golden.model.empty_cache(tokens.resolve_axis("batch"), axn.Axis("key_pos", tokens.axis_size("pos")))
    logits, cache = extend(golden.model, tokens["pos", :prompt], cache)
    for i in range(prompt, tokens.axis_size("pos") + 1):
        np.testing.assert_allclose(logits.array, golden.logits[:, i - 1], atol=1e-4)
        if i < tokens.axis_size("pos"):
            logits, cache = extend(golden.model, tokens["pos", i : i + 1], cache)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("golden", ["gemma2", "gemma3"], indirect=True)
def test_layers_that_differ_are_sharded(golden: Golden, explicit: bool) -> None:
    """Windows, rotations and bounds of scores, with the texts and the heads sharded, at once and with a cache."""
    mesh = axn.make_mesh({"data": 2, "model": 2}, explicit=explicit)
    mapping = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        model, tokens = axn.shard(golden.model), axn.shard(golden.tokens)
        np.testing.assert_allclose(
            axn.to_host(axn.named_jit(llama.Llama.__call__)(model, tokens)).array, golden.logits, atol=1e-4
        )
        cache = model.empty_cache(tokens.resolve_axis("batch"), axn.Axis("key_pos", tokens.axis_size("pos")))
        logits, _ = axn.named_jit(llama.Llama.extend)(model, tokens, cache)
        np.testing.assert_allclose(axn.to_host(logits).array, golden.logits[:, -1], atol=1e-4)


def test_state_dict_comes_back(golden: Golden) -> None:
    found = to_torch_compatible_state_dict(golden.model, layout=golden.layout)
    assert found.keys() == golden.weights.keys()
    for name, expected in golden.weights.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


# --- the same on eight devices ---

STEPS = 3
Batch, Pos, Vocab, Embed, Layers, HeadSize, Mlp = axn.make_axes(
    batch=8, pos=16, vocab=32, embed=32, layers=2, head_size=4, mlp=32
)
CONFIGS: dict[Any, Any] = {
    gpt2.Gpt2: gpt2.Config(
        Vocab=Vocab,
        Context=axn.Axis("context", 24),
        Embed=Embed,
        Layers=Layers,
        Heads=axn.Axis("heads", 8),
        HeadSize=HeadSize,
        Mlp=Mlp,
    ),
    llama.Llama: llama.Config(
        Vocab=Vocab,
        Embed=Embed,
        Layers=Layers,
        KVHeads=axn.Axis("kv_heads", 8),
        Group=axn.Axis("group", 2),
        HeadSize=HeadSize,
        Mlp=Mlp,
    ),
}
RATE = 0.5


def step(model: Any, tokens: axn.NamedArray) -> tuple[jax.Array, Any]:
    loss, gradients = jax.value_and_grad(type(model).loss)(model, tokens)
    return loss, jax.tree.map(lambda p, g: p - RATE * g, model, gradients)


def initial(kind: Any) -> Any:
    """Make a model of random weights; drawing them with JAX would take as long as training."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: kind.init(CONFIGS[kind], key=key), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), shapes)


def trained(compiled: Any, model: Any) -> tuple[list[float], Any]:
    """Return the losses of a few steps on the same texts, and the model after them."""
    losses, tokens = [], np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))
    for _ in range(STEPS):
        loss, model = jax.block_until_ready(compiled(model, axn.named(tokens, (Batch, Pos))))
        losses.append(float(loss))
    return losses, model


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda kind: kind.__name__)
def on_one_device(request: pytest.FixtureRequest) -> tuple[Any, list[float]]:
    losses, _ = trained(jax.jit(step), initial(request.param))
    assert losses[-1] < losses[0]
    return request.param, losses


@pytest.mark.parametrize(
    ("on_one_device", "strategy"),
    [*((llama.Llama, name) for name in COMPUTE), (gpt2.Gpt2, "sequence"), (gpt2.Gpt2, "mixed")],
    indirect=["on_one_device"],
)
def test_learns_the_same_on_auto_axes(strategy: str, on_one_device: Any, auto_mesh: Any) -> None:
    kind, losses = on_one_device
    check(strategy, kind, losses, auto_mesh)


def test_learns_the_same_on_explicit_axes(on_one_device: Any, explicit_mesh: Any) -> None:
    kind, losses = on_one_device
    check({gpt2.Gpt2: "sequence", llama.Llama: "mixed"}[kind], kind, losses, explicit_mesh)


def check(strategy: str, kind: Any, expected: list[float], mesh: Any) -> None:
    storage, compiled = STORAGE[strategy], distributed_step(step, strategy)
    with jax.set_mesh(mesh):
        with axn.axis_mapping(storage):
            model = axn.shard(initial(kind))
        losses, model = trained(compiled, model)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for x in axn.tree.leaves(model):
        assert spec(x) == tuple(storage.get(name) for name in x.names), x
