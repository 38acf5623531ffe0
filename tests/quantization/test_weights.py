"""Weights stored in few bits: their size, their accuracy, and the same results on several devices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

import axonym as axn
from axonym.nn import Embedding, Linear
from axonym.precision import Policy
from axonym.quantization import SmallEmbedding, SmallLinear, quantize_weights
from axonym.state import from_torch_compatible_state_dict
from examples.models.families import from_huggingface
from examples.models.layouts import layout
from examples.models.llama import Llama
from tests.helpers import assert_named, spec

Batch, Embed, Mlp, Vocab = axn.make_axes(batch=8, embed=16, mlp=8, vocab=10)
GOLDEN = Path(__file__).parent.parent / "interop" / "golden" / "llama.npz"


def linear(**options: Any) -> Linear:
    return Linear.init(Embed, Mlp, key=jax.random.key(0), **options)


def restored(layer: Any) -> axn.NamedArray:
    """Return the weight used in computations."""
    scale = layer.scale
    for name in layer.weight.names:
        if name not in scale.names:
            scale = scale.broadcast_axis(layer.weight.resolve_axis(name))
        elif times := layer.weight.axis_size(name) // scale.axis_size(name):
            scale = axn.repeat(scale, times, name)
    return layer.weight.astype("float32") * scale


# --- the layers ---


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_and_scales_are_those_of_qwix(dtype: str, group: int | None) -> None:
    layer = linear()
    found = quantize_weights(layer, dtype, group=group)
    assert isinstance(found, SmallLinear)
    tiles = {1: group} if group else {}
    theirs: Any = qwix.quantize(layer.weight.array, jnp.dtype(dtype), channelwise_axes=(0,), tiled_axes=tiles)
    assert found.weight.dtype == theirs.qvalue.dtype
    assert jnp.all(found.weight.array == theirs.qvalue)
    np.testing.assert_array_equal(found.scale.array.reshape(theirs.scale.shape), theirs.scale)
    np.testing.assert_allclose(restored(found).array, qwix.dequantize(theirs), rtol=1e-6)


@pytest.mark.parametrize("group", [None, 4])
def test_a_layer_computes_with_what_is_stored(group: int | None) -> None:
    layer, x = linear(), axn.random.normal(jax.random.key(1), (Batch, Embed))
    small = quantize_weights(layer, "int4", group=group)
    exact = dataclasses.replace(layer, weight=restored(small))
    assert_named(small(x), exact(x), rtol=1e-5, atol=1e-6)


def test_groups_are_more_accurate() -> None:
    layer = Linear.init({"embed": 512}, Mlp, key=jax.random.key(0), use_bias=False)

    def error(group: int | None) -> float:
        small = quantize_weights(layer, "int4", group=group)
        return float(axn.square(restored(small) - layer.weight).mean().scalar())

    assert error(8) < 0.8 * error(None)


def test_names_that_input_and_output_share_and_several_axes() -> None:
    Heads, Size = axn.make_axes(heads=2, size=4)
    x = axn.random.normal(jax.random.key(1), (Batch, Embed, Heads))
    for In, Out in ((Embed, Embed), ((Heads, Embed), Size), (Embed, (Heads, Size)), (Embed, ())):
        layer = Linear.init(In, Out, key=jax.random.key(0))
        found, expected = quantize_weights(layer, "int8", group=4)(x), layer(x)
        assert found.axes == expected.axes
        np.testing.assert_allclose(found.array, expected.array, atol=0.1)


def test_an_embedding() -> None:
    layer = Embedding.init(Vocab, Embed, key=jax.random.key(0))
    small = quantize_weights(layer, "int8")
    assert isinstance(small, SmallEmbedding)
    tokens = axn.named([3, -1, 10], "pos")
    found = jax.jit(lambda tokens: small(tokens))(tokens)  # where tokens are not known, so one out of range is no error
    np.testing.assert_allclose(found["pos", :2].array, layer(tokens["pos", :2]).array, atol=1e-3)
    assert axn.isnan(found["pos", 2]).all().item()
    x = axn.random.normal(jax.random.key(1), (Batch, Embed))
    np.testing.assert_allclose(small.unembed(x).array, layer.unembed(x).array, atol=0.02)


def test_zeros_and_abstract_arrays() -> None:
    layer = jax.tree.map(jnp.zeros_like, linear())
    assert axn.array_equal(quantize_weights(layer, "int4")(axn.ones({"embed": 16})), axn.zeros({"mlp": 8}))
    abstract = jax.eval_shape(lambda layer: quantize_weights(layer, "int8", group=4), layer)
    assert str(abstract.weight) == "int8[mlp=8, embed=16]" and str(abstract.scale) == "float32[mlp=8, embed=4]"


@pytest.mark.parametrize("group", [None, 4])
def test_weights_that_are_not_finite_show(group: int | None) -> None:
    layer = linear()
    layer = dataclasses.replace(layer, weight=layer.weight.at["mlp", 1, "embed", 2].set(jnp.nan))
    found = quantize_weights(layer, group=group)(axn.ones(Embed))
    np.testing.assert_array_equal(jnp.isnan(found.array), np.arange(8) == 1)


def test_rounding_of_half_precision() -> None:
    """Half a step at most, as that of float32: quotients are not rounded before they are rounded to integers."""
    weight = axn.random.normal(jax.random.key(0), (Embed, Mlp)).astype(jnp.bfloat16)
    small: Any = quantize_weights(dataclasses.replace(linear(use_bias=False), weight=weight))
    assert small.scale.dtype == jnp.bfloat16
    steps = axn.abs(restored(small) - weight.astype(jnp.float32)) / small.scale.astype(jnp.float32)
    assert steps.max().item() < 0.51


def test_chosen_layers() -> None:
    model = {"up": linear(), "down": Linear.init(Mlp, Embed, key=jax.random.key(0))}
    small = quantize_weights(model, targets=["up"])
    assert isinstance(small["up"], SmallLinear) and small["down"] is model["down"]


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"weights are stored in at most 8 bits, as int8 or float8_e4m3fn, not bfloat16"
    ):
        quantize_weights(linear(), "bfloat16")
    with pytest.raises(ValueError, match="not float8_e8m0fnu"):  # it has no negative numbers
        quantize_weights(linear(), "float8_e8m0fnu")
    with pytest.raises(ValueError, match=r"axis 'embed' of up, of size 16, cannot be cut into groups of 5"):
        quantize_weights({"up": linear()}, group=5)
    with pytest.raises(ValueError, match=r"no linear layer or embedding matches targets 'down'; the layers are up"):
        quantize_weights({"up": linear()}, targets="down")
    with pytest.raises(ValueError, match=r"SmallLinear: no axis 'embed'.*The layer maps"):
        quantize_weights(linear())(axn.ones({"batch": 2}))


def test_policies_leave_small_numbers_alone() -> None:
    small: Any = Policy.parse("c=bf16").cast_to_compute(quantize_weights(linear(), "float8_e4m3fn"))
    assert (small.weight.dtype, small.scale.dtype) == (jnp.float8_e4m3fn, jnp.bfloat16)
    assert small(axn.ones({"embed": 16}, "bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("group", [None, 4])
def test_a_mapping_shards_numbers_and_scales_alike(group: int | None, mesh: jax.sharding.Mesh) -> None:
    layer, x = linear(), axn.random.normal(jax.random.key(1), (Batch, Embed))
    small: Any = quantize_weights(layer, "int4", group=group)
    mapping = {"batch": "model", "embed": "data"} if group else {"batch": "data", "mlp": "model"}
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        sharded = axn.shard(small)
        assert spec(sharded.weight) == tuple(mapping.get(n) for n in sharded.weight.names)
        assert spec(sharded.scale) == tuple(mapping.get(n) for n in sharded.scale.names)
        found = axn.named_jit(lambda layer, x: layer(x))(sharded, axn.shard(x))
    assert_named(axn.to_host(found), small(x), rtol=1e-5, atol=1e-5)


# --- a model ---


@pytest.fixture(scope="module")
def golden() -> tuple[Llama, axn.NamedArray]:
    """Make a model of large random weights, which amplifies the rounding errors of each block."""
    with np.load(GOLDEN) as kept:
        found = dict(kept)
    weights = {name.removeprefix("weights/"): x for name, x in found.items() if name.startswith("weights/")}
    config = from_huggingface(json.loads(str(found["config"])))
    empty = jax.eval_shape(lambda key: Llama.init(config, key=key), jax.random.key(0))
    model = jax.tree.map(jnp.asarray, from_torch_compatible_state_dict(empty, weights, layout=layout(empty)))
    return model, axn.named(found["tokens"], ("batch", "pos"))


def stored_bytes(tree: Any) -> int:
    return sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(tree))


# The relative error of the logits, of a model that amplifies errors; float8 has 3 bits after the point, int4 none.
ERRORS = {"int8": 0.04, "float8_e4m3fn": 0.2, "int4": 0.8}


@pytest.mark.parametrize(("dtype", "error"), ERRORS.items())
def test_accuracy_against_float(dtype: str, error: float, golden: tuple[Llama, axn.NamedArray]) -> None:
    model, tokens = golden
    logits: Callable[[Any], jax.Array] = jax.jit(lambda model: model(tokens).array)
    exact, found = logits(model), logits(quantize_weights(model, dtype))
    assert 0 < jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact) < error
    if dtype == "int8":
        assert jnp.mean(jnp.argmax(found, -1) == jnp.argmax(exact, -1)) > 0.9


def test_bytes_of_a_parameter(golden: tuple[Llama, axn.NamedArray]) -> None:
    """One byte each, or half of one, and the scales."""
    layer = Linear.init(axn.Axis("embed", 256), axn.Axis("mlp", 64), key=jax.random.key(0), use_bias=False)
    count = layer.weight.size
    assert stored_bytes(layer) == 4 * count
    assert stored_bytes(quantize_weights(layer, "int8")) == count + 4 * 64
    assert stored_bytes(quantize_weights(layer, "float8_e4m3fn")) == count + 4 * 64
    # CPUs stored an int4 in a byte before jax 0.12.
    half = count // 2 if jax.__version_info__ >= (0, 12) else count
    assert stored_bytes(quantize_weights(layer, "int4", group=64)) == half + 4 * 64 * 4
    model, _ = golden
    assert stored_bytes(quantize_weights(model)) < 0.35 * stored_bytes(model)


def test_few_bits_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear.init(axn.Axis("embed", 8), axn.Axis("mlp", 4), key=jax.random.key(0))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(UserWarning, match=r"^quantize_weights: a model with int4 weights gave wrong results on a GPU"):
        quantize_weights(layer, "int4")
    quantize_weights(layer, "int8")


def test_text_is_written_with_small_weights(golden: tuple[Llama, axn.NamedArray]) -> None:
    """A cache of keys and values has the dtype that is computed in, and gives what the model gives without one."""
    model, tokens = golden
    small = quantize_weights(model)
    cache = small.empty_cache(tokens.resolve_axis("batch"), axn.Axis("key_pos", 24))
    assert cache.keys.dtype == jnp.float32
    logits, _ = jax.jit(Llama.extend)(small, tokens, cache)
    assert_named(logits, small(tokens)["pos", -1].rearrange(logits.names), atol=1e-3)


def test_checkpoints(golden: tuple[Llama, axn.NamedArray], tmp_path: Path) -> None:
    small = quantize_weights(golden[0], "int8", group=8)
    axn.state.save_checkpoint(tmp_path / "small", small)
    found = axn.state.restore_checkpoint(tmp_path / "small", small)
    assert jax.tree.structure(found) == jax.tree.structure(small)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(small), strict=True):
        assert a.dtype == b.dtype and jnp.all(a == b)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_groups_lie_on_one_device(explicit: bool) -> None:
    """Of 4 shards of 4 inputs; a scale could not be sharded like the weight if its group had inputs of two."""
    layer = linear()
    expected: Any = quantize_weights(layer, "int4", group=4)
    with jax.set_mesh(axn.make_mesh({"a": 4, "b": 2}, explicit=explicit)), axn.axis_mapping({"embed": "a"}):
        placed = axn.shard(layer)
        for call in (lambda f: f, axn.named_jit):
            small = call(lambda layer: quantize_weights(layer, "int4", group=4))(placed)
            assert spec(small.weight) == spec(small.scale) == (None, "a")
            assert_named(small.scale, expected.scale)
            text = r"2 groups of 8 along axis 'embed'.*\(a=4\).*Write `group=4`"
            with pytest.raises(ValueError, match=text):
                call(lambda layer: quantize_weights(layer, "int4", group=8))(placed)
        with pytest.raises(ValueError, match=r"Write `group=4`"):
            axn.fsdp(lambda layer: quantize_weights(layer, "int4", group=8), {"embed": "a"}, {})(placed)
